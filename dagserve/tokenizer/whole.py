"""Characters of several bytes that byte-pair encoding may take as one token from the start, with the same result.

Merges run in the order of their ranks. That a character's own bytes merge first changes nothing where

1. its bytes on their own become one token, by merges of rank ``r`` at most,
2. no merge of a rank below ``r`` makes a token of a part of it together with a byte beside it, and
3. every merge that uses the character's token has a rank above ``r``.

Then nothing else can touch its bytes before it is whole, and nothing waits for it with a lower rank. The second
condition depends on the bytes beside it. For ASCII it is stated for each character, on the left and on the right, and
:func:`ascii_joins` has the bytes for which it may be so. For other bytes it is a fact about places between two
characters: :func:`partial_joins` has the bytes around such a place in every token that spans it with only a part of a
character on one side. They are few; a character beside such a place is read as bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from dagserve.tokenizer.document import TokenizerSpec

LEFT_ASCII, RIGHT_ASCII = 1, 2
"""Flags: the character must not stand right after, right before, an ASCII byte of :func:`ascii_joins`."""

_NEVER = 1 << 32
_Beside = dict[bytes, int]
"""The lowest rank of a merge that joins a part of a character with an ASCII byte beside it."""


def whole_characters(texts: Mapping[bytes, int], spec: TokenizerSpec) -> dict[int, tuple[int, int]]:
    """The token and the flags of each such character, by its code point. ``texts`` has the token of each text."""
    of = {index: text for text, index in texts.items()}
    ranks: dict[tuple[bytes, bytes], int] = {}
    used: dict[bytes, int] = {}
    for rank, (left, right) in enumerate(spec.merges):
        first, second = of.get(spec.vocab[left]), of.get(spec.vocab[right])
        if first is None or second is None:
            continue
        ranks[first, second] = rank
        for text in (first, second):
            used[text] = min(used.get(text, _NEVER), rank)
    left_of, right_of = _beside(ranks)
    found = {}
    for text, index in texts.items():
        if not 2 <= len(text) <= 4 or text[0] < 0xC2 or not _is_character(text):
            continue
        made = _highest_rank(text, ranks)
        if made is None or used.get(text, _NEVER) < made:
            continue
        found[ord(text.decode())] = index, _flags(text, made, left_of, right_of)
    return found


def partial_joins(texts: Iterable[bytes]) -> set[tuple[int, int, int]]:
    """The byte left and the two right of each place between characters where a text has not all of both.

    Characters of several bytes only. Where the text ends after one byte, every second one that may follow counts.
    """
    return {
        (text[i - 1], text[i], second)
        for text in texts
        for i in range(1, len(text))
        if text[i] >= 0xC2 and 0x80 <= text[i - 1] < 0xC0 and not (_ends_whole(text[:i]) and _begins_whole(text[i:]))
        for second in (text[i + 1 : i + 2] or range(0x80, 0xC0))
    }


def ascii_joins(texts: Iterable[bytes]) -> set[tuple[int, int]]:
    """The bytes left and right of each place between ASCII and a character of several bytes that a text has not all
    of."""
    return {
        (text[i - 1], text[i])
        for text in texts
        for i in range(1, len(text))
        if (text[i - 1] < 0x80 and text[i] >= 0xC2 and not _begins_whole(text[i:]))
        or (text[i] < 0x80 <= text[i - 1] < 0xC0 and not _ends_whole(text[:i]))
    }


def _ends_whole(text: bytes) -> bool:
    return any(_is_character(text[-size:]) for size in (2, 3, 4) if size <= len(text))


def _begins_whole(text: bytes) -> bool:
    return any(_is_character(text[:size]) for size in (2, 3, 4) if size <= len(text))


def _is_character(text: bytes) -> bool:
    try:
        return len(text.decode()) == 1
    except UnicodeDecodeError:
        return False


def _beside(ranks: Mapping[tuple[bytes, bytes], int]) -> tuple[_Beside, _Beside]:
    left_of: _Beside = {}
    right_of: _Beside = {}
    for (left, right), rank in ranks.items():
        text = left + right
        for part, byte in _beginnings(text):
            if byte < 0x80:
                left_of[part] = min(rank, left_of.get(part, _NEVER))
        for part, byte in _endings(text):
            if byte < 0x80:
                right_of[part] = min(rank, right_of.get(part, _NEVER))
    return left_of, right_of


def _beginnings(text: bytes) -> Iterator[tuple[bytes, int]]:
    """The beginning of a character that a token ends with, and the byte before it."""
    for size in (1, 2, 3):
        part = text[-size:]
        if size < len(text) and part[0] >= 0xC2:
            needed = 2 if part[0] < 0xE0 else 3 if part[0] < 0xF0 else 4
            if size < needed:
                yield part, text[-size - 1]
            return


def _endings(text: bytes) -> Iterator[tuple[bytes, int]]:
    """The end of a character that a token begins with, and the byte after it."""
    size = 0
    while size < len(text) and 0x80 <= text[size] < 0xC0:
        size += 1
    if 0 < size < len(text):
        yield text[:size], text[size]


def _highest_rank(text: bytes, ranks: Mapping[tuple[bytes, bytes], int]) -> int | None:
    parts = [text[i : i + 1] for i in range(len(text))]
    highest = -1
    while len(parts) > 1:
        rank, at = min((ranks.get((parts[i], parts[i + 1]), _NEVER), i) for i in range(len(parts) - 1))
        if rank == _NEVER:
            return None
        highest = max(highest, rank)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return highest


def _flags(text: bytes, made: int, left_of: _Beside, right_of: _Beside) -> int:
    """On which sides ASCII may not stand."""
    left = any(left_of.get(text[:i], _NEVER) <= made for i in range(1, len(text)))
    right = any(right_of.get(text[i:], _NEVER) <= made for i in range(1, len(text)))
    return (LEFT_ASCII if left else 0) | (RIGHT_ASCII if right else 0)
