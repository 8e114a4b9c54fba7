"""Writes ``dagserve/tokenizer/unicode.txt``: characters as Hugging Face ``tokenizers`` sees them.

Everything comes from asking the installed ``tokenizers`` about every code point, because its regex engine, its
``Digits`` pre-tokenizer, its normalizer and its added tokens follow Unicode versions of their own.
"""

from __future__ import annotations

import argparse
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

CATEGORIES = [
    "Lu",
    "Ll",
    "Lt",
    "Lm",
    "Lo",
    "Mn",
    "Mc",
    "Me",
    "Nd",
    "Nl",
    "No",
    "Pc",
    "Pd",
    "Ps",
    "Pe",
    "Pi",
    "Pf",
    "Po",
    "Sm",
    "Sc",
    "Sk",
    "So",
    "Zs",
    "Zl",
    "Zp",
    "Cc",
    "Cf",
    "Co",
    "Cn",
]
SCRIPTS = [
    "Han",
    "Hiragana",
    "Katakana",
    "Hangul",
    "Latin",
    "Cyrillic",
    "Greek",
    "Arabic",
    "Hebrew",
    "Devanagari",
    "Thai",
]
CHARS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
PART = 1 << 12
HANGUL = range(0xAC00, 0xD7A4)
TEXT = "".join(map(chr, CHARS))
NFC, NFD = normalizers.NFC(), normalizers.NFD()


def matching(pattern: str) -> list[int]:
    """The code points that a one-character regex matches."""
    splitter = pre_tokenizers.Split(Regex(pattern), behavior="removed")
    found: list[int] = []
    for begin in range(0, len(TEXT), PART):
        part = TEXT[begin : begin + PART]
        kept = {i for _, (start, end) in splitter.pre_tokenize_str(part) for i in range(start, end)}
        found += [ord(c) for i, c in enumerate(part) if i not in kept]
    return found


def numeric() -> list[int]:
    """The code points that ``Digits`` splits off."""
    text = "".join(f"x{chr(c)}" for c in CHARS) + "x"
    pieces = pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str(text)
    return [CHARS[start // 2] for _, (start, end) in pieces if start % 2 and end == start + 1]


def beside_added_token(**flags: bool) -> Iterator[tuple[int, tuple[int, int] | None]]:
    """Each code point with where an added token was found after it, in ``(code point, token, newline)``, or None."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.add_tokens([AddedToken("<t>", normalized=False, **flags)])
    index = tokenizer.token_to_id("<t>")
    text = "".join(f"{chr(c)}<t>\x00" for c in CHARS)
    encoding = tokenizer.encode(text)
    found = {
        (end - 1) // 5: (start % 5, end % 5)
        for i, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
        if i == index
    }
    for i, c in enumerate(CHARS):
        yield c, found.get(i)


def sets() -> Iterator[tuple[str, list[int]]]:
    """Every set of characters that patterns and added tokens use."""
    for name in (*CATEGORIES, *SCRIPTS):
        yield name, matching(rf"\p{{{name}}}")
    for name in "sdw":
        yield name, matching(rf"\{name}")
    yield "class_w", matching(r"[\w]")
    for letter in "abcdefghijklmnopqrstuvwxyz":
        yield f"fold:{letter}", matching(f"(?i:{letter})")
    yield "numeric", numeric()
    yield "rust_space", [c for c, found in beside_added_token(lstrip=True) if found == (0, 4)]
    yield "rust_word", [c for c, found in beside_added_token(single_word=True) if found is None]


def decompositions() -> dict[int, str]:
    """The full canonical decomposition of each code point that has one, Hangul syllables left out."""
    parts = NFD.normalize_str("\n".join(map(chr, CHARS))).split("\n")
    # Two empty parts are the line feed itself.
    at = CHARS.index(ord("\n"))
    parts[at : at + 2] = ["\n"]
    return {c: part for c, part in zip(CHARS, parts, strict=True) if part != chr(c) and c not in HANGUL}


def compositions(decomposed: dict[int, str]) -> dict[tuple[int, int], int]:
    """Which character two become."""
    pairs = {}
    for c, parts in decomposed.items():
        first, last = NFC.normalize_str(parts[:-1]), parts[-1]
        if len(first) == 1 and NFC.normalize_str(first + last) == chr(c):
            pairs[ord(first), ord(last)] = c
    return pairs


def combining_classes(decomposed: dict[int, str]) -> dict[int, list[int]]:
    """The code points of each canonical combining class but 0, by how they are ordered among marks of known class."""
    lowest, highest = "\u0334", "\u0345"  # classes 1 and 240
    simple = [c for c in CHARS if c >= 0x300 and c not in decomposed and c not in HANGUL]
    moving = [chr(c) for c in simple if _swapped(highest, chr(c)) or _swapped(chr(c), lowest)]
    marks: dict[int, str] = {}
    for one in moving:
        marks.setdefault(unicodedata.combining(one), one)
    classes: dict[int, list[int]] = {}
    for one in moving:
        value = max(v for v, mark in marks.items() if not _swapped(mark, one))
        classes.setdefault(value, []).append(ord(one))
    return classes


def _swapped(first: str, second: str) -> bool:
    return bool(NFD.normalize_str(first + second) != first + second)


def ranges(chars: Iterable[int]) -> str:
    """``41-5A,61``: code points in hexadecimal, runs joined."""
    runs: list[list[int]] = []
    for c in sorted(chars):
        if runs and c == runs[-1][1] + 1:
            runs[-1][1] = c
        else:
            runs.append([c, c])
    return ",".join(f"{a:X}" if a == b else f"{a:X}-{b:X}" for a, b in runs)


def lines() -> Iterator[str]:
    """The text of the table."""
    yield f"Generated by tools/generate_unicode.py from tokenizers {tokenizers.__version__}; do not edit."
    for name, chars in sets():
        yield f"set {name} {ranges(chars)}"
    decomposed = decompositions()
    for c, parts in decomposed.items():
        yield f"decomposed {c:X} {' '.join(f'{ord(p):X}' for p in parts)}"
    for value, chars in sorted(combining_classes(decomposed).items()):
        yield f"combining {value} {ranges(chars)}"
    for (first, last), c in compositions(decomposed).items():
        yield f"composed {first:X} {last:X} {c:X}"


def generate() -> str:
    """The whole table."""
    return "\n".join(lines()) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parent.parent / "dagserve" / "tokenizer" / "unicode.txt"
    parser.add_argument("--output", type=Path, default=default)
    parser.parse_args().output.write_text(generate())
    return 0


if __name__ == "__main__":
    sys.exit(main())
