"""What Hugging Face ``tokenizers`` knows of characters, from the table that ``tools/generate_unicode.py`` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

CODE_POINTS = 0x110000
TABLE = Path(__file__).parent / "unicode.txt"

Chars = npt.NDArray[np.bool_]
"""A set of characters: ``bool[CODE_POINTS]``."""


@dataclass(frozen=True)
class Normalization:
    """The canonical mappings that ``NFC`` uses; Hangul syllables are not in them, they follow from arithmetic.

    Attributes:
        decomposed: the full canonical decomposition of each character that has one.
        combining: the canonical combining class of each character where it is not 0.
        composed: which character two characters become.
    """

    decomposed: Mapping[int, tuple[int, ...]]
    combining: Mapping[int, int]
    composed: Mapping[tuple[int, int], int]


def character_set(name: str) -> Chars:
    """A set by name: a general category (``L``, ``Lu``), a script (``Han``), ``s``, ``d`` or ``w`` as in ``\\s``.

    ``fold:x`` is what the letter ``x`` matches where case is ignored. ``numeric``, ``rust_space`` and ``rust_word`` are
    what the ``Digits`` pre-tokenizer, ``lstrip``/``rstrip`` and ``single_word`` of added tokens go by.

    Raises:
        KeyError: there is no such set.
    """
    sets = _sets()
    parts = [name] if name in sets else [n for n in sets if len(name) == 1 and len(n) == 2 and n[0] == name]
    if not parts:
        raise KeyError(name)
    chars = np.zeros(CODE_POINTS, dtype=np.bool_)
    for part in parts:
        for first, last in _ranges(sets[part]):
            chars[first : last + 1] = True
    return chars


def table_version() -> str:
    """The version of ``tokenizers`` that the table was made from."""
    return _lines()[0].rpartition(" ")[2].rstrip(";")


@cache
def normalization() -> Normalization:
    """The mappings of ``NFC``."""
    decomposed: dict[int, tuple[int, ...]] = {}
    combining: dict[int, int] = {}
    composed: dict[tuple[int, int], int] = {}
    for kind, _, rest in (line.partition(" ") for line in _lines()):
        if kind == "decomposed":
            first, *others = (int(c, 16) for c in rest.split())
            decomposed[first] = tuple(others)
        elif kind == "combining":
            number, _, ranges = rest.partition(" ")
            combining |= {c: int(number) for a, b in _ranges(ranges) for c in range(a, b + 1)}
        elif kind == "composed":
            one, two, result = (int(c, 16) for c in rest.split())
            composed[one, two] = result
    return Normalization(decomposed, combining, composed)


@cache
def _lines() -> list[str]:
    return TABLE.read_text().splitlines()


@cache
def _sets() -> dict[str, str]:
    return {line.split(" ", 2)[1]: line.split(" ", 2)[2] for line in _lines() if line.startswith("set ")}


def _ranges(text: str) -> list[tuple[int, int]]:
    pairs = (part.partition("-") for part in text.split(",") if part)
    return [(int(first, 16), int(last or first, 16)) for first, _, last in pairs]
