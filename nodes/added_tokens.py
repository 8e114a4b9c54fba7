"""Added tokens in the parts of a text where they may stand; the rest as Hugging Face encodes it without them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dagserve.tokenizer import parse_tokenizer
from dagserve.tokenizer.decoding import Decoding, decoding
from dagserve.tokenizer.document import AddedToken
from dagserve.tokenizer.unicode import character_set

Open = tuple[int, int]
"""A part of a text in which added tokens are looked for: where it begins and ends, in characters."""

_MARK = "\x00before\x00"


def plain_tokenizer(path: Path) -> Any:
    """The Hugging Face tokenizer of a ``tokenizer.json`` without its added tokens: text never turns into one."""
    from tokenizers import Tokenizer  # slow to import, and declarations do not need it

    return Tokenizer.from_str(json.dumps(json.loads(path.read_bytes()) | {"added_tokens": []}))


class TextEncoder:
    """The readable form of the native tokenizer.

    Where all of a text is open the answer is Hugging Face's own. Where only parts are, added tokens are found in those
    first and Hugging Face encodes what is left, told by a mark of its own what does not stand at the start.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import AddedToken as HuggingFaceToken
        from tokenizers import Tokenizer

        self.spec = parse_tokenizer(path.read_bytes())
        self._full = Tokenizer.from_file(str(path))
        self._plain = plain_tokenizer(path)
        self._later = plain_tokenizer(path)
        self._later.add_special_tokens([HuggingFaceToken(_MARK, normalized=False)])
        self._raw = _Finder([t for t in self.spec.added if not t.normalized])
        # A tokenizer that normalizes has its normalized tokens found only where all of the text is open.
        self._normalized = _Finder([t for t in self.spec.added if t.normalized and not self.spec.normalizers])

    @cached_property
    def decoding(self) -> Decoding:
        """How tokens become text again."""
        return decoding(self.spec)

    def encode(self, text: str, opened: Sequence[Open]) -> list[int]:
        """Token ids without those of the post-processor."""
        if list(opened) == [(0, len(text))]:
            return list(self._full.encode(text, add_special_tokens=False).ids)
        ids: list[int] = []
        for token, begin, end in self._raw.split(text, opened):
            if token is not None:
                ids.append(token)
                continue
            parts = [(max(a, begin) - begin, min(b, end) - begin) for a, b in opened if b > begin and a < end]
            for inner, first, last in self._normalized.split(text[begin:end], parts):
                ids += (
                    [inner]
                    if inner is not None
                    else self._encode_plain(text[begin + first : begin + last], begin + first)
                )
        return ids

    def _encode_plain(self, text: str, begin: int) -> list[int]:
        if begin == 0:
            return list(self._plain.encode(text, add_special_tokens=False).ids)
        ids: list[int] = self._later.encode(_MARK + text, add_special_tokens=False).ids
        return ids[1:]


class _Finder:
    """Finds added tokens: leftmost start, then longest."""

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        self._tokens: Mapping[str, AddedToken] = {t.content: t for t in reversed(tokens)}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if tokens else None
        self._is_space = _member_of("rust_space")
        self._is_word = _member_of("rust_word")

    def split(self, text: str, opened: Sequence[Open]) -> Iterator[tuple[int | None, int, int]]:
        """``(id, begin, end)`` of the tokens in order and ``(None, begin, end)`` of what lies between them."""
        taken = 0
        for token, begin, end in self._found(text, opened):
            while token.lstrip and begin > taken and self._is_space(text[begin - 1]):
                begin -= 1
            while token.rstrip and end < len(text) and self._is_space(text[end]):
                end += 1
            if begin > taken:
                yield None, taken, begin
            yield token.id, begin, end
            taken = end
        if taken < len(text):
            yield None, taken, len(text)

    def _found(self, text: str, opened: Sequence[Open]) -> Iterator[tuple[AddedToken, int, int]]:
        if self._pattern is None:
            return
        for begin, end in opened:
            for match in self._pattern.finditer(text, begin, end):
                token = self._tokens[match[0]]
                before, after = text[: match.start()][-1:], text[match.end() :][:1]
                if not token.single_word or not (self._is_word(before) or self._is_word(after)):
                    yield token, match.start(), match.end()


def _member_of(name: str) -> Callable[[str], bool]:
    chars = character_set(name)
    return lambda c: c != "" and bool(chars[ord(c)])
