"""Tokens and merges as tables: what byte-pair encoding looks up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dagserve.tokenizer import whole
from dagserve.tokenizer.document import TokenizerSpec, fallback_token, unsupported
from dagserve.tokenizer.hashing import EMPTY, place, spread, table
from dagserve.tokenizer.unicode import CODE_POINTS

SHORT, LONG = 12, 15
"""Pieces up to so many bytes are compared inside their slot; longer ones by their text, and marked as long."""

FLAG_SHIFT = 30
"""Where the flags of a character are in its entry."""

ID_BITS = 21
"""Bits of a token's id, and of a rank, in a slot of :func:`packed`."""

_MIX = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
_MASK = (1 << 64) - 1


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary.

    >>> byte_alphabet()[ord(" ")]
    'Ġ'
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def byte_tokens(spec: TokenizerSpec) -> npt.NDArray[np.uint32]:
    """The token of each byte, ``u4[256]``: of the byte level, or to fall back to; all ones where there is none."""
    if spec.byte_level:
        names = byte_alphabet()
    elif spec.byte_fallback:
        names = [fallback_token(byte) for byte in range(256)]
    else:
        return np.full(256, EMPTY, dtype="<u4")
    return np.array([spec.vocab.get(name, EMPTY) for name in names], dtype="<u4")


def characters(spec: TokenizerSpec) -> npt.NDArray[np.uint32]:
    """The token that merging may start from for each character, ``u4[CODE_POINTS]``; all ones where there is none.

    At the byte level these are the characters of :func:`~dagserve.tokenizer.whole.whole_characters`, their flags in the
    two highest bits; else all that are a token.
    """
    if spec.byte_level:
        found = whole.whole_characters(_texts(spec), spec)
    else:
        found = {ord(t): (i, 0) for t, i in spec.vocab.items() if len(t) == 1}
    tokens = np.full(CODE_POINTS, EMPTY, dtype="<u4")
    for character, (index, flags) in found.items():
        tokens[character] = index | flags << FLAG_SHIFT
    return tokens


def partial_joins(spec: TokenizerSpec) -> bytes:
    """Bits for bytes around a place that a token spans without all of the characters of several bytes beside it.

    ``u8[64, 8]``, then ``u8[64, 64, 8]``: the last byte of one such character, the first of the next and, in the second
    table, the second of the next, the low six bits of each. ``u8[128, 8]``: an ASCII byte and the first byte after it;
    again: an ASCII byte and the last byte before it.
    """
    found = np.zeros((64, 64, 64), dtype=np.uint8)
    beside = np.zeros((2, 128, 64), dtype=np.uint8)
    made = {spec.vocab[left + right] for left, right in spec.merges}
    texts = [text for text, index in _texts(spec).items() if index in made] if spec.byte_level else []
    for around in whole.partial_joins(texts):
        found[tuple(byte & 63 for byte in around)] = 1
    for left, right in whole.ascii_joins(texts):
        beside[(0, left, right & 63) if left < 0x80 else (1, right, left & 63)] = 1
    tables = (found.max(axis=2), found, beside)
    return b"".join(np.packbits(table, axis=-1, bitorder="little").tobytes() for table in tables)


def merges(spec: TokenizerSpec) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
    """All merges, :func:`packed` with their ranks, and the token that each rank makes.

    Where ranks are in the order of ids, ids stand for them, and no list is needed. The last rank counts where a pair
    stands twice.

    Raises:
        CheckpointError: there are more than 2 ** 21 merges.
    """
    if len(spec.merges) >= 1 << ID_BITS:
        raise unsupported(f"{len(spec.merges)} merges, more than {(1 << ID_BITS) - 1},")
    vocab, by_id = spec.vocab, ranked_by_id(spec)
    made = [vocab[left + right] for left, right in spec.merges]
    values = {(vocab[a], vocab[b]): made[rank] if by_id else rank for rank, (a, b) in enumerate(spec.merges)}
    return packed(values), np.array([] if by_id else made, dtype="<u4")


def packed(values: Mapping[tuple[int, int], int]) -> npt.NDArray[np.uint64]:
    """Slots of ``left << 42 | right << 21 | value``, all ones where free, laid out by what is above the value."""
    keys = np.array([left << ID_BITS | right for left, right in values], dtype=np.uint64)
    slots = place(keys)
    laid = np.full(len(slots), (1 << 64) - 1, dtype="<u8")
    rows = keys << np.uint64(ID_BITS) | np.array([*values.values()], dtype=np.uint64)
    laid[slots >= 0] = rows[slots[slots >= 0]]
    return laid


def merge_filter(spec: TokenizerSpec) -> bytes:
    """One bit for the top bits of each merge's spread key, a power of two of bits, at least eight times the merges.

    Most pairs of tokens do not merge; a bit of a table that stays in a near cache says so for most of them.
    """
    keys = [spec.vocab[a] << ID_BITS | spec.vocab[b] for a, b in spec.merges]
    return _filter(np.array(keys, dtype=np.uint64), 3)


def _filter(keys: npt.NDArray[np.uint64], least_bits: int) -> bytes:
    """One bit for the top bits of each spread key, a power of two of bits, at least eight times the keys."""
    bits = max(least_bits, (8 * len(keys)).bit_length())
    filled = np.zeros(1 << bits, dtype=np.uint8)
    filled[spread(keys, bits)] = 1
    return np.packbits(filled, bitorder="little").tobytes()


def _starts(spec: TokenizerSpec, known: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """The token that merging may start from for each character, all ones where there is none: ``known`` and, at the
    byte level, the bytes of ASCII."""
    starts = np.where(known == EMPTY, known, known & ((1 << FLAG_SHIFT) - 1))
    if spec.byte_level:
        starts[:0x80] = byte_tokens(spec)[:0x80]
    return starts


def neighbor_filter(spec: TokenizerSpec, known: npt.NDArray[np.uint32]) -> bytes:
    """A bit for every pair of characters, not both ASCII, that stand side by side in some token, by the pair's hash.

    Merging starts from ``known``, the :func:`characters`, and ASCII bytes. Where two of them stand side by side in no
    token that a merge makes, no merge can ever join what is left of them with what is right of them, and each side
    merges alone. The filter is of 1/8 its bits full at most, so that it stays in the nearest cache.
    """
    made = {spec.vocab[left + right] for left, right in spec.merges}
    starts = _starts(spec, known)
    beside = {
        pair
        for text, index in _texts(spec).items()
        if index in made and not text.isascii()
        for pair in pairwise(text.decode("utf-8", "surrogateescape"))
        if not "".join(pair).isascii()
    }
    ids = starts[np.array([[ord(c) for c in pair] for pair in beside], dtype=np.int64).reshape(-1, 2)].astype(np.uint64)
    ids = ids[(ids != EMPTY).all(axis=1)]
    return _filter(np.unique(ids[:, 0] << np.uint64(32) | ids[:, 1]), 9)


def _wide(text: bytes, known: npt.NDArray[np.uint32]) -> list[int]:
    """For each character of a text the token that merging may start from, all ones where it has not several bytes."""
    entries = [int(known[ord(c)]) if ord(c) > 0x7F else EMPTY for c in text.decode("utf-8", "surrogateescape")]
    return [EMPTY if entry == EMPTY else entry & ((1 << FLAG_SHIFT) - 1) for entry in entries]


def pairs(spec: TokenizerSpec, known: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """The merges of two characters of several bytes, :func:`packed` with the tokens that they make.

    ``known`` are the :func:`characters`.

    Raises:
        CheckpointError: the vocabulary has more than 2 ** 21 tokens.
    """
    if spec.vocab_size >= 1 << ID_BITS:
        raise unsupported(f"a vocabulary of {spec.vocab_size} tokens, more than {(1 << ID_BITS) - 1},")
    entries = known[0x80:]
    wide = {int(i) & ((1 << FLAG_SHIFT) - 1) for i in entries[entries != EMPTY]}
    made = {(spec.vocab[a], spec.vocab[b]): spec.vocab[a + b] for a, b in spec.merges}
    return packed({pair: index for pair, index in made.items() if wide.issuperset(pair)})


def triples(spec: TokenizerSpec, known: npt.NDArray[np.uint32], own: Set[int]) -> npt.NDArray[np.uint32]:
    """Slots of ``(first, second, third, id)`` for the tokens of three characters of several bytes.

    ``known`` are the :func:`characters`; ``own`` are the tokens that the merges make of their own text.
    """
    wide = ((_wide(text, known), index) for text, index in _texts(spec).items() if index in own)
    rows = [[*ids, index] for ids, index in wide if len(ids) == 3 and EMPTY not in ids]
    laid = np.array(rows, dtype="<u4").reshape(-1, 4)
    return table(triple_keys(laid), laid)


def triple_keys(rows: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """What is spread for three ids; native code computes the same."""
    wide = rows.astype(np.uint64)
    return wide[:, 0] << np.uint64(2 * ID_BITS) | wide[:, 1] << np.uint64(ID_BITS) | wide[:, 2]


def ranked_by_id(spec: TokenizerSpec) -> bool:
    """Whether merges in the order of their ranks are in the order of the tokens they make, each made by one merge."""
    made = [spec.vocab[left + right] for left, right in spec.merges]
    return all(a < b for a, b in pairwise(made))


def pieces(spec: TokenizerSpec, own: Set[int]) -> tuple[npt.NDArray[np.uint32], bytes]:
    """Whole pieces that are one token: slots of ``(text or hash: 2 words, word, id << 4 | bytes)``.

    A token is among them where the merges make just it of its text, or where the tokenizer ignores merges. The key of a
    piece of up to :data:`SHORT` bytes is its text, padded with zeros; of a longer one :func:`hash_text` and where its
    text is in the second value, behind its bytes. ``own`` are the tokens that the merges make of their own text.
    """
    found = {text: index for text, index in _texts(spec).items() if text}
    if not spec.ignore_merges:
        found = {text: index for text, index in found.items() if index in own}
    rows, keys, long = [], [], bytearray()
    for text, index in found.items():
        if len(text) <= SHORT:
            size, low, high = len(text), *_words(text)
        else:
            size, low, high = LONG, hash_text(text), len(long)
            long += len(text).to_bytes(4, "little") + text
        rows.append((low & 0xFFFFFFFF, low >> 32, high, index << 4 | size))
        keys.append(piece_key(low, 0 if size == LONG else high, size))
    laid = np.array(rows, dtype="<u4").reshape(-1, 4)
    return table(np.array(keys, dtype=np.uint64), laid), bytes(long)


def piece_key(low: int, high: int, size: int) -> int:
    """What :func:`~dagserve.tokenizer.hashing.spread` spreads for a piece; native code computes the same."""
    mixed = (low * _MIX[0] ^ high * _MIX[1] ^ size * _MIX[2]) & _MASK
    return mixed ^ mixed >> 32


def hash_text(text: bytes) -> int:
    """A hash of a long text, eight bytes at a time, the last padded with zeros."""
    value = 0
    for i in range(0, len(text), 8):
        value = (value ^ int.from_bytes(text[i : i + 8], "little")) * _MIX[0] & _MASK
        value ^= value >> 29
    return value


def _words(text: bytes) -> tuple[int, int]:
    return int.from_bytes(text[:8], "little"), int.from_bytes(text[8:16], "little")


def _texts(spec: TokenizerSpec) -> dict[bytes, int]:
    """The bytes of text that each token stands for, tokens of other characters left out."""
    if not spec.byte_level:
        return {token.encode(): index for token, index in spec.vocab.items()}
    alphabet = {c: byte for byte, c in enumerate(byte_alphabet())}
    known = alphabet.keys()
    return {bytes(alphabet[c] for c in token): index for token, index in spec.vocab.items() if known >= set(token)}


def made_whole(tokenizer_json: bytes, spec: TokenizerSpec) -> set[int]:
    """The tokens that the merges make of their own text, as Hugging Face finds them."""
    from tokenizers import Tokenizer  # slow to import

    document: Mapping[str, Any] = json.loads(tokenizer_json)
    bare = {"version": "1.0", "added_tokens": [], "model": document["model"]}
    others = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    tokenizer = Tokenizer.from_str(json.dumps(bare | dict.fromkeys(others)))
    names = list(spec.vocab)
    encodings = tokenizer.encode_batch_fast(names, add_special_tokens=False)
    return {spec.vocab[name] for name, e in zip(names, encodings, strict=True) if e.ids == [spec.vocab[name]]}
