"""Rebuilds ``tokenizer.json`` from the tokenizer fields of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dagserve.errors import CheckpointError

CONTROL, USER_DEFINED = 3, 4
"""Values of ``tokenizer.ggml.token_type`` whose tokens are found in text before byte-pair encoding."""

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
PRE_TOKENIZERS: Mapping[str, Mapping[str, Any]] = {
    "gpt-2": _BYTE_LEVEL,
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTE_LEVEL]},
}
"""``tokenizer.ggml.pre`` and the Hugging Face pre-tokenizer it stands for."""


def tokenizer_json_from_gguf(fields: Mapping[str, Any]) -> bytes:
    """The ``tokenizer.json`` that a GGUF file's metadata describes, as UTF-8.

    Args:
        fields: GGUF fields by name, with Python values.

    Raises:
        CheckpointError: a field is missing, or describes a tokenizer other than byte-level BPE of a known kind.
    """
    pre_tokenizer = _pre_tokenizer(fields)
    tokens, types = _field(fields, "tokens"), _field(fields, "token_type")
    if len(types) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.tokens has {len(tokens) - len(vocab)} tokens that stand in it twice")
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(i, tokens[i], kind) for i, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED)],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {**_BYTE_LEVEL, "add_prefix_space": True},
        "model": _model(vocab, _field(fields, "merges")),
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _field(fields: Mapping[str, Any], name: str) -> Any:
    key = f"tokenizer.ggml.{name}"
    if key not in fields:
        raise CheckpointError(f"the GGUF file lacks the field {key}: its tokenizer cannot be rebuilt")
    return fields[key]


def _pre_tokenizer(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    model, pre = _field(fields, "model"), fields.get("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2":
        raise CheckpointError(f"tokenizer.ggml.model {model!r} is not supported: only gpt2 (byte-level BPE) is")
    if pre not in PRE_TOKENIZERS:
        raise CheckpointError(f"tokenizer.ggml.pre {pre!r} is not supported: use one of {', '.join(PRE_TOKENIZERS)}")
    for name in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if fields.get(f"tokenizer.ggml.{name}"):
            raise CheckpointError(f"tokenizer.ggml.{name} is not supported: write what it adds in the template")
    return PRE_TOKENIZERS[pre]


def _added(index: int, content: str, kind: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": kind == CONTROL}
    return {"id": index, "content": content, **flags}


def _model(vocab: Mapping[str, int], merges: list[str]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": [_merge(line) for line in merges],
    }


def _merge(line: str) -> list[str]:
    pair = line.split(" ")
    if len(pair) != 2 or not all(pair):
        raise CheckpointError(f"tokenizer.ggml.merges has {line!r}, which is not two tokens with a space between them")
    return pair
