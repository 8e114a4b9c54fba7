"""A model's ``tokenizer.json`` as the native tokenizer's tables, at compile time.

What the native tokenizer would do otherwise than Hugging Face ``tokenizers`` is refused by name, never approximated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dagserve.errors import CheckpointError
from dagserve.tokenizer.decoding import decoding
from dagserve.tokenizer.document import TokenizerSpec, parse_tokenizer
from dagserve.tokenizer.tables import VERSION, table_file

__all__ = ["VERSION", "TokenizerSpec", "encode_label", "encode_texts", "parse_tokenizer", "text_error", "write_tables"]


def write_tables(tokenizer_json: bytes, path: Path) -> TokenizerSpec:
    """Writes the tables of a ``tokenizer.json`` to ``path``. Returns what it says.

    Raises:
        CheckpointError: the tokenizer uses a feature that the native tokenizer does not have, by name.
    """
    spec = parse_tokenizer(tokenizer_json)
    path.write_bytes(table_file(spec, tokenizer_json))
    return spec


def text_error(spec: TokenizerSpec) -> str | None:
    """Why the tokenizer's tokens cannot become text; None where they can."""
    try:
        decoding(spec)
    except CheckpointError as error:
        return str(error)
    return None


def encode_label(tokenizer_json: bytes, text: str) -> int:
    """The id of a label text that is exactly one token; special tokens are never looked for.

    Raises:
        CheckpointError: the text is no token or several; the message shows them.
    """
    parse_tokenizer(tokenizer_json)
    encoding = _plain_tokenizer(tokenizer_json).encode(text, add_special_tokens=False)
    if len(encoding.ids) != 1:
        raise CheckpointError(
            f"label {text!r} is {len(encoding.ids)} tokens, {encoding.tokens}: a label must be exactly one token "
            "(most words are one token only with the space before them)"
        )
    return int(encoding.ids[0])


def encode_texts(tokenizer_json: bytes, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of texts, without those a template puts around them; added tokens are looked for."""
    from tokenizers import Tokenizer

    parse_tokenizer(tokenizer_json)
    return [e.ids for e in Tokenizer.from_buffer(tokenizer_json).encode_batch(list(texts), add_special_tokens=False)]


def _plain_tokenizer(tokenizer_json: bytes) -> Any:
    from tokenizers import Tokenizer  # slow to import, and only labels need it

    document = json.loads(tokenizer_json)
    return Tokenizer.from_str(json.dumps(document | {"added_tokens": []}))
