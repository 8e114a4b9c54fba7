"""A model's ``tokenizer.json`` as the native tokenizer's tables, at compile time.

What the native tokenizer would do otherwise than Hugging Face ``tokenizers`` is refused by name, never approximated.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dagserve.errors import CheckpointError

MAGIC, VERSION = b"DAGTOKEN", 1
SCANNERS = ("byte_level", "digits_byte_level")
"""Kinds of pre-tokenizer, in the order of the native ``ScannerKind``."""

_NO_TOKEN = 0xFFFFFFFF
_HASH = np.uint64(0x9E3779B97F4A7C15)
_HEADER = struct.Struct("<QIIIIIII12x")


@dataclass(frozen=True)
class AddedToken:
    """A token found in literal text before byte-pair encoding; ``normalized`` ones where the others leave text."""

    content: str
    id: int
    normalized: bool


@dataclass(frozen=True)
class ByteLevelBpe:
    """What a supported ``tokenizer.json`` says.

    Attributes:
        scanner: one of :data:`SCANNERS`.
        vocab: id of each token, written in the byte-level alphabet.
        merges: pairs of tokens in rank order.
        unknown: id for bytes without a token, None where they are dropped.
        fuse_unknown: whether a run of such bytes is one token.
    """

    scanner: str
    vocab: Mapping[str, int]
    merges: Sequence[tuple[str, str]]
    unknown: int | None
    fuse_unknown: bool
    added: tuple[AddedToken, ...]

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return 1 + max((*self.vocab.values(), *(token.id for token in self.added)), default=-1)


def write_tables(tokenizer_json: bytes, path: Path) -> int:
    """Writes the tables of a ``tokenizer.json`` to ``path``.

    Returns:
        The vocabulary size: one more than the largest id, added tokens included.

    Raises:
        CheckpointError: the tokenizer uses a feature that the native tokenizer does not have, by name.
    """
    bpe = parse_tokenizer(tokenizer_json)
    slots = _merge_table(_merge_rows(bpe))
    texts = [token.content.encode() for token in bpe.added]
    ends = np.cumsum([0, *map(len, texts)])
    added = np.array(
        [(ends[i], len(texts[i]), token.id, token.normalized) for i, token in enumerate(bpe.added)], dtype="<u4"
    )
    parts = (byte_tokens(bpe).tobytes(), slots.tobytes(), added.tobytes(), b"".join(texts))
    size = 16 + _HEADER.size + sum(map(len, parts))
    unknown = _NO_TOKEN if bpe.unknown is None else bpe.unknown
    counts = (len(slots), len(texts), len(parts[-1]))
    header = _HEADER.pack(size, SCANNERS.index(bpe.scanner), bpe.vocab_size, unknown, bpe.fuse_unknown, *counts)
    body = b"".join((header, *parts))
    path.write_bytes(MAGIC + struct.pack("<II", VERSION, zlib.crc32(body)) + body)
    return bpe.vocab_size


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


def _plain_tokenizer(tokenizer_json: bytes) -> Any:
    from tokenizers import Tokenizer  # slow to import, and only labels need it

    document = json.loads(tokenizer_json)
    return Tokenizer.from_str(json.dumps(document | {"added_tokens": []}))


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary.

    >>> byte_alphabet()[ord(" ")]
    'Ġ'
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def byte_tokens(bpe: ByteLevelBpe) -> npt.NDArray[np.uint32]:
    """The token of each byte: ``u4[256]``, 0xFFFFFFFF where there is none."""
    return np.array([bpe.vocab.get(c, _NO_TOKEN) for c in byte_alphabet()], dtype="<u4")


def _merge_rows(bpe: ByteLevelBpe) -> npt.NDArray[np.uint32]:
    """``u4[merges, 4]``: left, right, rank, id; the last rank where a pair stands twice."""
    ranks = {pair: rank for rank, pair in enumerate(bpe.merges)}
    vocab = bpe.vocab
    try:
        rows = [(vocab[a], vocab[b], rank, vocab[a + b]) for (a, b), rank in ranks.items()]
    except KeyError as error:
        raise CheckpointError(f"tokenizer.json: merges make or use {error}, which is not in the vocabulary") from error
    return np.array(rows, dtype="<u4").reshape(-1, 4)


def _merge_table(rows: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """An open-addressing table ``u4[slots, 4]`` with linear probing; ``slots`` is a power of two, at most 2/3 full."""
    bits = max(1, (len(rows) * 3 // 2).bit_length())
    slots = np.full((1 << bits, 4), _NO_TOKEN, dtype="<u4")
    keys = rows[:, 0].astype(np.uint64) << np.uint64(32) | rows[:, 1]
    places = (keys * _HASH >> np.uint64(64 - bits)).astype(np.int64)
    waiting = np.arange(len(rows))
    while len(waiting):
        free = slots[places[waiting], 0] == _NO_TOKEN
        _, first = np.unique(places[waiting[free]], return_index=True)
        placed = waiting[free][first]
        slots[places[placed]] = rows[placed]
        waiting = np.setdiff1d(waiting, placed, assume_unique=True)
        places[waiting] = (places[waiting] + 1) & ((1 << bits) - 1)
    return slots


def parse_tokenizer(tokenizer_json: bytes) -> ByteLevelBpe:
    """Reads a ``tokenizer.json``.

    Raises:
        CheckpointError: it is not one, or uses a feature that is not supported; the message names it.
    """
    try:
        document = json.loads(tokenizer_json)
        model = document["model"]
        scanner = _scanner(document.get("pre_tokenizer"))
        _refuse_other_parts(document)
        _refuse_model_features(model)
        return _bpe(document, model, scanner)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"tokenizer.json cannot be read: {type(error).__name__}: {error}") from error


def _bpe(document: Mapping[str, Any], model: Mapping[str, Any], scanner: str) -> ByteLevelBpe:
    vocab: dict[str, int] = model["vocab"]
    if len(set(vocab.values())) != len(vocab):
        raise _unsupported("two tokens with one id in model.vocab")
    bpe = ByteLevelBpe(
        scanner=scanner,
        vocab=vocab,
        merges=[_pair(merge) for merge in model["merges"] if not _is_comment(merge)],
        unknown=vocab.get(model["unk_token"]) if model.get("unk_token") is not None else None,
        fuse_unknown=bool(model.get("fuse_unk", False)),
        added=_added_tokens(document.get("added_tokens") or [], vocab),
    )
    if model.get("unk_token") is not None and bpe.unknown is None and _NO_TOKEN in byte_tokens(bpe):
        raise _unsupported(f"model.unk_token {model['unk_token']!r}, which is not in the vocabulary")
    return bpe


def _is_comment(merge: str | Sequence[str]) -> bool:
    return isinstance(merge, str) and merge.startswith("#version")


def _pair(merge: str | Sequence[str]) -> tuple[str, str]:
    pair = merge.split(" ") if isinstance(merge, str) else merge
    if len(pair) != 2 or not all(pair):
        raise CheckpointError(f"tokenizer.json: merge {merge!r} is not a pair of tokens")
    return pair[0], pair[1]


def _unsupported(what: str) -> CheckpointError:
    return CheckpointError(f"tokenizer.json is not supported: it has {what}; byte-level BPE without it is")


def _scanner(pre_tokenizer: Mapping[str, Any] | None) -> str:
    if pre_tokenizer is None:
        raise _unsupported("no pre_tokenizer")
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    kinds = [_step(step) for step in steps]
    scanners = {("ByteLevel",): "byte_level", ("Digits", "ByteLevel"): "digits_byte_level"}
    if tuple(kinds) not in scanners:
        raise _unsupported(f"pre_tokenizer {' + '.join(kinds)}")
    return scanners[tuple(kinds)]


def _step(step: Mapping[str, Any]) -> str:
    needed = {
        "ByteLevel": {"add_prefix_space": (False, True), "use_regex": (True, True)},
        "Digits": {"individual_digits": (True, False)},
    }
    kind: str = step["type"]
    for option, (value, default) in needed.get(kind, {}).items():
        if step.get(option, default) is not value:
            raise _unsupported(f"pre_tokenizer {kind} with {option}={str(not value).lower()}")
    return kind


def _refuse_other_parts(document: Mapping[str, Any]) -> None:
    for part in ("normalizer", "truncation", "padding"):
        if document.get(part) is not None:
            kind = document[part].get("type") if part == "normalizer" else "set"
            raise _unsupported(f"{part} {kind}")
    known = {"version", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model"}
    if other := sorted(document.keys() - known - {"truncation", "padding"}):
        raise _unsupported(f"unknown part {other[0]!r}")
    _refuse_post_processor(document.get("post_processor"))


def _refuse_post_processor(processor: Mapping[str, Any] | None) -> None:
    if processor is None or processor["type"] == "ByteLevel":
        return
    if processor["type"] == "Sequence":
        for step in processor["processors"]:
            _refuse_post_processor(step)
        return
    if processor["type"] == "TemplateProcessing":
        if all("Sequence" in piece for piece in processor["single"]):
            return
        raise _unsupported("post_processor TemplateProcessing that adds tokens (write them in the template)")
    raise _unsupported(f"post_processor {processor['type']}")


def _refuse_model_features(model: Mapping[str, Any]) -> None:
    if model.get("type", "BPE") != "BPE":
        raise _unsupported(f"model {model['type']}")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges"):
        if model.get(option):
            raise _unsupported(f"model.{option} {model[option]!r}")
    known = {"type", "vocab", "merges", "unk_token", "fuse_unk", "dropout", "byte_fallback", "ignore_merges"}
    if other := sorted(model.keys() - known - {"continuing_subword_prefix", "end_of_word_suffix"}):
        raise _unsupported(f"model.{other[0]}")


def _added_tokens(entries: Sequence[Mapping[str, Any]], vocab: Mapping[str, int]) -> tuple[AddedToken, ...]:
    tokens = []
    following = len(vocab)  # the id that Hugging Face gives to the next token that the vocabulary lacks
    for entry in entries:
        content, index = entry["content"], entry["id"]
        for option in ("single_word", "lstrip", "rstrip"):
            if entry.get(option):
                raise _unsupported(f"added token {content!r} with {option}")
        if index != vocab.get(content, following):
            raise _unsupported(f"added token {content!r} with id {index}, which would become another")
        following += content not in vocab
        tokens.append(AddedToken(content, index, bool(entry.get("normalized", not entry.get("special", False)))))
    return tuple(tokens)
