"""The table file of a tokenizer: sections that native code maps into memory and reads as they are.

``docs/text.md`` describes the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dagserve.errors import CheckpointError
from dagserve.sections import section_file
from dagserve.tokenizer import vocabulary
from dagserve.tokenizer.added import trie
from dagserve.tokenizer.decoding import Decoding, decoding
from dagserve.tokenizer.document import BEHAVIORS, AddedToken, Nfc, Prefix, Replace, Split, TokenizerSpec, unsupported
from dagserve.tokenizer.hashing import EMPTY, table
from dagserve.tokenizer.pattern import PatternError, Scanner, compile_pattern
from dagserve.tokenizer.unicode import CODE_POINTS, character_set, normalization

MAGIC, VERSION = b"DAGTOKEN", 7
BLOCK = 128
"""Code points a block of a two-level table."""


class Section(IntEnum):
    """What stands where; the native ``Section`` is the same."""

    OPTIONS = 0
    BYTE_TOKENS = 1
    CHARACTERS = 2
    MERGES = 3
    PIECES = 4
    LONG_PIECES = 5
    STEPS = 6
    STEP_TEXTS = 7
    ADDED = 8
    RAW_TRIE = 9
    NORMALIZED_TRIE = 10
    AROUND = 11
    SPACES = 12
    WORDS = 13
    NFC = 14
    DECODING = 15
    TOKEN_ENDS = 16
    TOKEN_TEXTS = 17
    TOKEN_FLAGS = 18
    MERGE_FILTER = 19
    NEIGHBOR_FILTER = 20
    PAIRS = 21
    TRIPLES = 22
    PARTIAL_JOINS = 23
    MERGED = 24
    SCANNERS = 25
    """The first of as many as there are."""


class Step(IntEnum):
    """Kinds of step; the native ``StepKind`` is the same."""

    NFC = 0
    REPLACE = 1
    PREFIX = 2
    SPLIT = 3


def table_file(spec: TokenizerSpec, tokenizer_json: bytes) -> bytes:
    """The whole file.

    Raises:
        CheckpointError: the tokenizer uses a feature that the native tokenizer does not have, by name.
    """
    steps = (*spec.normalizers, *spec.transforms, *spec.splits)
    records, texts, scanners = _steps(steps)
    known = vocabulary.characters(spec)
    merges, made = vocabulary.merges(spec)
    own = vocabulary.made_whole(tokenizer_json, spec)
    short, long = vocabulary.pieces(spec, own)
    normalized = _normalized_texts(spec, tokenizer_json)
    sections: dict[int, bytes] = {
        Section.OPTIONS: _options(spec),
        Section.BYTE_TOKENS: vocabulary.byte_tokens(spec).tobytes(),
        Section.CHARACTERS: two_level(known)[0],
        Section.MERGES: merges.tobytes(),
        Section.PIECES: short.tobytes(),
        Section.LONG_PIECES: long,
        Section.STEPS: records.tobytes(),
        Section.STEP_TEXTS: texts,
        Section.ADDED: _added(spec.added),
        Section.RAW_TRIE: trie([b"" if t.normalized else t.content.encode() for t in spec.added]),
        Section.NORMALIZED_TRIE: trie([normalized.get(i, b"") for i in range(len(spec.added))]),
        Section.AROUND: _around(spec),
        Section.SPACES: _members("rust_space"),
        Section.WORDS: _members("rust_word"),
        Section.NFC: _nfc() if any(isinstance(step, Nfc) for step in steps) else b"",
        **_decoding(spec),
        Section.MERGE_FILTER: vocabulary.merge_filter(spec),
        Section.NEIGHBOR_FILTER: vocabulary.neighbor_filter(spec, known),
        Section.PAIRS: vocabulary.pairs(spec, known).tobytes(),
        Section.TRIPLES: vocabulary.triples(spec, known, own).tobytes(),
        Section.PARTIAL_JOINS: vocabulary.partial_joins(spec),
        Section.MERGED: made.tobytes(),
    }
    sections |= {Section.SCANNERS + i: _scanner(scanner) for i, scanner in enumerate(scanners)}
    return section_file(MAGIC, VERSION, [sections[i] for i in range(len(sections))])


def _words(*values: int) -> bytes:
    return np.array(values, dtype="<u4").tobytes()


def _options(spec: TokenizerSpec) -> bytes:
    ratio, extra = _growth((*spec.normalizers, *spec.transforms))
    flags = (spec.byte_level, spec.fuse_unknown, spec.byte_fallback, spec.ignore_merges)
    unknown = EMPTY if spec.unknown is None else spec.unknown
    counts = (len(spec.normalizers), len(spec.transforms), len(spec.splits))
    return _words(*flags, unknown, spec.vocab_size, *counts, ratio, extra, vocabulary.ranked_by_id(spec))


def _growth(steps: Sequence[Nfc | Replace | Prefix]) -> tuple[int, int]:
    """``n`` bytes of text become at most ``ratio * n + extra`` before byte-pair encoding."""
    ratio, extra = 1, 0
    for step in steps:
        if isinstance(step, Prefix):
            extra += len(step.text.encode())
        else:
            most = 3 if isinstance(step, Nfc) else max(1, len(step.content.encode()))
            ratio, extra = ratio * most, extra * most
    return ratio, extra


def _steps(
    steps: Sequence[Nfc | Replace | Prefix | Split],
) -> tuple[npt.NDArray[np.uint32], bytes, list[Scanner]]:
    """Records of ``(kind, scanner, behavior, invert, text offset, text bytes, unless, first only)``."""
    records: list[list[int]] = []
    texts = b""
    scanners: list[Scanner] = []
    for step in steps:
        record = [0] * 8
        if isinstance(step, Nfc):
            record[0] = Step.NFC
        elif isinstance(step, Prefix):
            text = step.text.encode()
            record[0], record[4:] = Step.PREFIX, [len(texts), len(text), bool(step.unless), step.first_only]
            texts += text
        else:
            record[0] = Step.SPLIT if isinstance(step, Split) else Step.REPLACE
            record[1] = len(scanners)
            scanners.append(_compiled(step.pattern))
            if isinstance(step, Split):
                record[2:4] = BEHAVIORS.index(step.behavior), step.invert
            else:
                record[4:6] = len(texts), len(step.content.encode())
                texts += step.content.encode()
        records.append(record)
    return np.array(records, dtype="<u4").reshape(-1, 8), texts, scanners


@cache
def _compiled(pattern: str) -> Scanner:
    try:
        return compile_pattern(pattern)
    except PatternError as error:
        raise unsupported(f"a pattern with {error}: {pattern}") from error


def two_level(values: npt.NDArray[Any]) -> tuple[bytes, int]:
    """A table over all code points: ``u2[8704]`` block numbers, then the distinct blocks of 128 values; and their
    number."""
    blocks = [block.tobytes() for block in values.reshape(-1, BLOCK)]
    numbers = {block: i for i, block in enumerate(dict.fromkeys(blocks))}
    return np.array([numbers[block] for block in blocks], dtype="<u2").tobytes() + b"".join(numbers), len(numbers)


@cache
def _members(name: str) -> bytes:
    return two_level(character_set(name).astype(np.uint8))[0]


def _scanner(scanner: Scanner) -> bytes:
    """States and columns, the transitions filled up to a multiple of four bytes, and the classes of the code points."""
    transitions = scanner.transitions.tobytes()
    filled = transitions + bytes(-len(transitions) % 4)
    return _words(*scanner.transitions.shape) + filled + two_level(scanner.classes)[0]


def _added(tokens: Sequence[AddedToken]) -> bytes:
    """Records of ``(id, lstrip, rstrip, single_word)``."""
    return _words(*(v for t in tokens for v in (t.id, t.lstrip, t.rstrip, t.single_word)))


def _normalized_texts(spec: TokenizerSpec, tokenizer_json: bytes) -> dict[int, bytes]:
    """What the content of each normalized added token becomes, as Hugging Face normalizes it, by its index."""
    chosen = {i: token.content for i, token in enumerate(spec.added) if token.normalized}
    if spec.normalizers and chosen:
        from tokenizers import Tokenizer  # slow to import

        normalizer = Tokenizer.from_str(tokenizer_json.decode()).normalizer
        chosen = {i: normalizer.normalize_str(content) for i, content in chosen.items()}
    texts = {i: content.encode() for i, content in chosen.items()}
    if len(set(texts.values())) != len(texts) or b"" in texts.values():
        raise unsupported("normalized added tokens that become one, or nothing, when normalized")
    return texts


def _around(spec: TokenizerSpec) -> bytes:
    return _words(len(spec.before), *spec.before, len(spec.after), *spec.after)


def _decoding(spec: TokenizerSpec) -> dict[int, bytes]:
    """Whether tokens can become text, at the byte level or not, spaces to strip, the longest text; then each token."""
    try:
        said = decoding(spec)
    except CheckpointError:
        said = Decoding([], [], byte_level=False, strip=0)
    return {
        Section.DECODING: _words(bool(said.texts), said.byte_level, said.strip, max(map(len, said.texts), default=0)),
        Section.TOKEN_ENDS: np.cumsum([0, *map(len, said.texts)]).astype("<u4").tobytes(),
        Section.TOKEN_TEXTS: b"".join(said.texts),
        Section.TOKEN_FLAGS: bytes(said.flags),
    }


@cache
def _nfc() -> bytes:
    """How characters compose.

    Counts of records, of characters in decompositions and of slots; a ``u2`` two-level table of record numbers; records
    of ``(first character of the decomposition, characters, combining class, flags)``; the decompositions; slots of
    ``(first, second, composed, 0)``. Flags: 1 the character may join the one before; 2 it never stays as it is. Record
    0 is a character that stays and joins nothing before it.
    """
    data = normalization()
    joins = {second for _, second in data.composed} | {*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)}
    whole = set(data.composed.values())
    records: dict[tuple[tuple[int, ...], int, int], int] = {((), 0, 0): 0}
    numbers = np.zeros(CODE_POINTS, dtype="<u2")
    for c in sorted({*data.decomposed, *data.combining, *joins}):
        parts = data.decomposed.get(c, ())
        flags = (c in joins) | (2 if parts and c not in whole else 0)
        numbers[c] = records.setdefault((parts, data.combining.get(c, 0), flags), len(records))
    rows: list[tuple[int, int, int, int]] = []
    decompositions: list[int] = []
    for parts, combining, flags in records:
        rows.append((len(decompositions), len(parts), combining, flags))
        decompositions += parts
    pairs = np.array([(a, b, c, 0) for (a, b), c in data.composed.items()], dtype="<u4")
    slots = table(pairs[:, 0].astype(np.uint64) << np.uint64(32) | pairs[:, 1], pairs)
    levels, blocks = two_level(numbers)
    counts = _words(len(rows), len(decompositions), len(slots), blocks)
    return counts + levels + _words(*(v for row in rows for v in row), *decompositions) + slots.tobytes()
