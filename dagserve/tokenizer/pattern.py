"""A pre-tokenizer's regular expression as a scanner: a deterministic automaton over classes of characters.

Matching is that of a backtracking engine: alternatives in order, repetition greedy. A state is the ordered list of
places in the expression where such an engine could be, the preferred one first; a match cuts what is less preferred (R.
Cox, "Regular Expression Matching: the Virtual Machine Approach", 2009). A look ahead of one character is decided by the
next class.

What is not part of this dialect is refused by name.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dagserve.tokenizer.unicode import CODE_POINTS, character_set

Chars = npt.NDArray[np.bool_]
"""A set of characters: ``bool[CODE_POINTS]``."""

MATCHED = 0x8000
"""Flag of a transition: a match ends before the character that is read."""

_MOST_STATES, _MOST_SETS, _MOST_CLASSES = 0x7FFF, 255, 255
_ESCAPES = {"r": "\r", "n": "\n", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}
_WIDE_FOLDS = ("ss", "ff", "fi", "fl", "st")
"""Letters that one character may stand for where case is ignored (``ß``, ``ﬁ``)."""


class PatternError(ValueError):
    """The expression uses a feature that scanners do not have; the message names it."""


@dataclass(frozen=True)
class Scanner:
    """An automaton.

    Attributes:
        classes: the class of every code point, ``u1[CODE_POINTS]``.
        transitions: ``u2[states, classes + 1]``: the next state, with :data:`MATCHED` where a match ends before the
            character; the last column is the end of the text. State 0 has no way on, state 1 is the start.
    """

    classes: npt.NDArray[np.uint8]
    transitions: npt.NDArray[np.uint16]

    def match(self, text: str, start: int) -> int | None:
        """Where the match that begins at ``start`` ends, in characters: the readable form of the native loop."""
        state, end, last = 1, None, self.transitions.shape[1] - 1
        for position in range(start, len(text) + 1):
            column = self.classes[ord(text[position])] if position < len(text) else last
            step = int(self.transitions[state, column])
            end = position if step & MATCHED else end
            state = step & ~MATCHED
            if state == 0:
                return end
        return end


class _Split(NamedTuple):
    preferred: int
    other: int


class _Take(NamedTuple):
    chars: int  # index of a set


class _Look(NamedTuple):
    chars: int
    at_end: bool


class _Match(NamedTuple):
    pass


_Instruction = _Split | _Take | _Look | _Match


def compile_pattern(pattern: str) -> Scanner:
    """The scanner of a regular expression in Oniguruma's syntax, as ``tokenizers`` uses it.

    >>> scanner = compile_pattern(r"\\p{L}+|\\s+(?!\\S)|\\s+")
    >>> scanner.match("two  words", 3)
    4

    Raises:
        PatternError: it has a feature that scanners do not have, or may match nothing.
    """
    program = _Compiler(pattern)
    return _automaton(program.instructions, program.sets)


def literal_pattern(text: str) -> str:
    """The expression that matches just ``text``."""
    return "".join("\\" + c if c in string.punctuation else c for c in text)


class _Compiler:
    """Parses an expression and lays it out as instructions, the start at 0."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.instructions: list[_Instruction] = []
        self.sets: list[Chars] = []
        self._at = 0
        self._ignore_case = False
        self._alternatives()
        if self._at < len(pattern):
            raise PatternError("a closing parenthesis without an opening one")
        self.instructions.append(_Match())

    # --- reading

    def _peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self._at)

    def _skip(self, text: str) -> bool:
        found = self._peek(text)
        self._at += len(text) if found else 0
        return found

    def _next(self) -> str:
        if self._at >= len(self.pattern):
            raise PatternError("an expression that ends too early")
        self._at += 1
        return self.pattern[self._at - 1]

    # --- laying out

    def _alternatives(self) -> None:
        self._either(self._sequence)

    def _either(self, branch: Callable[[], None]) -> None:
        start = len(self.instructions)
        branch()
        if not self._skip("|"):
            return
        self.instructions.insert(start, _Split(start + 1, 0))
        self._move(start + 1, 1, start)
        jump = len(self.instructions)
        self.instructions.append(_Split(0, 0))
        self.instructions[start] = _Split(start + 1, jump + 1)
        self._either(branch)
        end = len(self.instructions)
        self.instructions[jump] = _Split(end, end)

    def _move(self, begin: int, by: int, start: int) -> None:
        """Corrects the targets of the instructions from ``begin`` on that were written ``by`` places earlier."""
        for i in range(begin, len(self.instructions)):
            one = self.instructions[i]
            if isinstance(one, _Split):
                self.instructions[i] = _Split(*(t + by if t >= start else t for t in one))

    def _sequence(self) -> None:
        letters = ""
        while self._at < len(self.pattern) and self.pattern[self._at] not in "|)":
            begin, at = len(self.instructions), self._at
            self._atom()
            one = self.pattern[at : self._at]
            letters = letters + one.lower() if self._ignore_case and len(one) == 1 else ""
            if any(letters.endswith(wide) for wide in _WIDE_FOLDS):
                raise PatternError(f"{letters[-2:]!r} where case is ignored")
            self._repeat(begin)

    def _repeat(self, begin: int) -> None:
        least, most = self._quantifier()
        if (least, most) == (1, 1):
            return
        body = self.instructions[begin:]
        if _may_be_empty(body, begin):
            raise PatternError("repetition of what may match nothing")
        del self.instructions[begin:]
        for _ in range(least):
            self._copy(body, begin)
        if most is None:
            loop = len(self.instructions)
            self.instructions.append(_Split(loop + 1, loop + 2 + len(body)))
            self._copy(body, begin)
            self.instructions.append(_Split(loop, loop))
        for left in range((most or least) - least, 0, -1):
            end = len(self.instructions) + left * (len(body) + 1)
            self.instructions.append(_Split(len(self.instructions) + 1, end))
            self._copy(body, begin)

    def _copy(self, body: Sequence[_Instruction], begin: int) -> None:
        by = len(self.instructions) - begin
        self.instructions += [_Split(*(t + by for t in i)) if isinstance(i, _Split) else i for i in body]

    def _quantifier(self) -> tuple[int, int | None]:
        simple = {"?": (0, 1), "*": (0, None), "+": (1, None)}
        if self._at >= len(self.pattern) or self.pattern[self._at] not in "?*+{":
            return 1, 1
        sign = self._next()
        limits = simple[sign] if sign != "{" else self._count()
        for other, name in (("?", "lazy"), ("+", "possessive"), ("*", "nested"), ("{", "nested")):
            if self._peek(other):
                raise PatternError(f"{name} repetition")
        return limits

    def _count(self) -> tuple[int, int | None]:
        low, comma, high = self._until("}").partition(",")
        if not (low + high).isascii() or not low.isdigit() or (high and not high.isdigit()):
            raise PatternError("a brace that is not {m}, {m,} or {m,n}")
        least = int(low)
        most = least if not comma else int(high) if high else None
        if most is not None and (most < least or most > 1000):
            raise PatternError(f"repetition {{{low},{high}}}")
        return least, most

    def _atom(self) -> None:
        c = self._next()
        if c == "(":
            self._group()
        elif c == "$":
            self._add_look(_chars("\n"), at_end=True)
        elif c in "^.*+?{":
            raise PatternError(f"{c!r} here")
        else:
            self._take(self._class() if c == "[" else self._escape() if c == "\\" else self._literal(c))

    def _group(self) -> None:
        outer = self._ignore_case
        if self._skip("?!") or self._skip("?="):
            return self._look(negative=self.pattern[self._at - 1] == "!")
        if self._skip("?i:"):
            self._ignore_case = True
        elif self._peek("?") and not self._skip("?:"):
            raise PatternError(f"the group ({self.pattern[self._at : self._at + 3]}")
        self._alternatives()
        self._close()
        self._ignore_case = outer
        return None

    def _close(self) -> None:
        if not self._skip(")"):
            raise PatternError("an opening parenthesis without a closing one")

    def _look(self, *, negative: bool) -> None:
        c = self._next()
        if c in "(|)^$.*+?{":
            raise PatternError("a look ahead of more than one character")
        chars = self._class() if c == "[" else self._escape() if c == "\\" else self._literal(c)
        if not self._skip(")"):
            raise PatternError("a look ahead of more than one character")
        self._add_look(~chars if negative else chars, at_end=negative)

    def _add_look(self, chars: Chars, *, at_end: bool) -> None:
        self.instructions.append(_Look(self._set(chars), at_end))

    def _take(self, chars: Chars) -> None:
        self.instructions.append(_Take(self._set(chars)))

    def _set(self, chars: Chars) -> int:
        for i, known in enumerate(self.sets):
            if np.array_equal(known, chars):
                return i
        if len(self.sets) == _MOST_SETS:
            raise PatternError(f"more than {_MOST_SETS} sets of characters")
        self.sets.append(chars)
        return len(self.sets) - 1

    # --- sets of characters

    def _literal(self, c: str) -> Chars:
        if not self._ignore_case or not c.isalpha():
            return _chars(c)
        if not c.isascii():
            raise PatternError(f"{c!r} where case is ignored")
        return character_set(f"fold:{c.lower()}")

    def _escape(self, *, in_class: bool = False) -> Chars:
        c = self._next()
        if c in "pP":
            return self._property(negative=c == "P")
        if c.lower() in "sdw":
            # The engine's \w holds some numbers that its [\w] does not.
            chars = character_set("class_w" if in_class and c.lower() == "w" else c.lower())
            return ~chars if c.isupper() else chars
        if c in _ESCAPES:
            return _chars(_ESCAPES[c])
        if c.isalnum():
            return self._numbered(c)
        return _chars(c)

    def _numbered(self, kind: str) -> Chars:
        """``\\x{263A}``, ``\\x41`` and ``\\u263A``."""
        if kind == "x" and self._skip("{"):
            digits = self._until("}")
        elif kind in "xu":
            size = 4 if kind == "u" else 2
            digits = self.pattern[self._at : self._at + size]
            self._at += size
            if len(digits) < size or (kind == "x" and digits > "7F"):
                raise PatternError(f"\\{kind}{digits}")
        else:
            raise PatternError(f"\\{kind}")
        if not digits or any(d not in string.hexdigits for d in digits) or int(digits, 16) >= CODE_POINTS:
            raise PatternError(f"\\{kind}{{{digits}}}")
        return _chars(chr(int(digits, 16)))

    def _until(self, end: str) -> str:
        at = self.pattern.find(end, self._at)
        if at < 0:
            raise PatternError(f"an opening brace without {end!r}")
        begin, self._at = self._at, at + 1
        return self.pattern[begin:at]

    def _property(self, *, negative: bool) -> Chars:
        if not self._skip("{"):
            raise PatternError("\\p without braces")
        name = self._until("}")
        negative ^= name.startswith("^")
        plain = name.removeprefix("^")
        if not plain[:1].isupper() and plain != "numeric":  # what Digits splits off; no property of Oniguruma's
            raise PatternError(f"the property \\p{{{name}}}")
        try:
            chars = character_set(plain)
        except KeyError as error:
            raise PatternError(f"the property \\p{{{name}}}") from error
        return ~chars if negative else chars

    def _class(self) -> Chars:
        negative = self._skip("^")
        chars = np.zeros(CODE_POINTS, dtype=np.bool_)
        first = True
        while first or not self._peek("]"):
            first = False
            if self._peek("[") or self._peek("&&") or self._peek("]"):
                raise PatternError(f"{self.pattern[self._at : self._at + 2]!r} inside [...]")
            chars |= self._member()
        self._next()
        return ~chars if negative else chars

    def _member(self) -> Chars:
        c = self._next()
        single = self._escape(in_class=True) if c == "\\" else self._literal(c)
        following = self.pattern[self._at + 1 : self._at + 2]
        if not self._peek("-") or following in ("]", ""):
            return single
        if self._ignore_case:
            raise PatternError("a range where case is ignored")
        self._next()
        c = self._next()
        if c == "[":
            raise PatternError("'-[' inside [...]")
        return _between(single, self._escape() if c == "\\" else _chars(c))


def _chars(text: str) -> Chars:
    chars = np.zeros(CODE_POINTS, dtype=np.bool_)
    chars[[ord(c) for c in text]] = True
    return chars


def _between(low: Chars, high: Chars) -> Chars:
    if low.sum() != 1 or high.sum() != 1:
        raise PatternError("a range that is not between two characters")
    first, last = int(low.argmax()), int(high.argmax())
    if first > last:
        raise PatternError(f"the range {chr(first)!r} to {chr(last)!r}")
    chars = np.zeros(CODE_POINTS, dtype=np.bool_)
    chars[first : last + 1] = True
    return chars


def _may_be_empty(body: Sequence[_Instruction], begin: int) -> bool:
    seen, waiting = set(), [begin]
    while waiting:
        at = waiting.pop()
        if at == begin + len(body):
            return True
        if at in seen:
            continue
        seen.add(at)
        one = body[at - begin]
        waiting += list(one) if isinstance(one, _Split) else [at + 1] if isinstance(one, _Look) else []
    return False


def _automaton(program: Sequence[_Instruction], sets: Sequence[Chars]) -> Scanner:
    classes, members = _classes(sets)
    numbers: dict[tuple[int, ...], int] = {(): 0, (0,): 1}
    rows: list[list[int]] = []
    waiting = list(numbers)
    for kernel in waiting:
        if len(numbers) > _MOST_STATES:
            raise PatternError("too many states")
        row = []
        for column in range(len(members[0]) + 1):
            following, matched = _step(program, kernel, members, column)
            if following not in numbers:
                numbers[following] = len(numbers)
                waiting.append(following)
            row.append(numbers[following] | (MATCHED if matched else 0))
        rows.append(row)
    transitions = np.array(rows, dtype="<u2")
    if (transitions[1] & MATCHED).any():
        raise PatternError("an empty match")
    return Scanner(classes, transitions)


def _classes(sets: Sequence[Chars]) -> tuple[npt.NDArray[np.uint8], list[list[bool]]]:
    """The class of each code point, and for each set whether it holds each class."""
    classes = np.zeros(CODE_POINTS, dtype=np.uint16)
    members: list[list[bool]] = []
    for chars in sets:
        halves = classes * 2 + chars  # each class in two: outside and inside the set
        used = np.flatnonzero(np.bincount(halves))
        numbers = np.zeros(used[-1] + 1, dtype=np.uint16)
        numbers[used] = np.arange(len(used))
        classes = numbers[halves]
        members = [[known[half // 2] for half in used] for known in members] + [[bool(half % 2) for half in used]]
        if len(used) > _MOST_CLASSES:
            raise PatternError(f"more than {_MOST_CLASSES} classes of characters")
    return classes.astype(np.uint8), members or [[False]]


def _step(
    program: Sequence[_Instruction], kernel: Sequence[int], members: Sequence[Sequence[bool]], column: int
) -> tuple[tuple[int, ...], bool]:
    """Reads one class, or the end of the text as the column after the last: where to go on, and whether it matched."""
    at_end = column == len(members[0])
    following: dict[int, None] = {}
    for at in _reachable(program, kernel, members, column):
        one = program[at]
        if isinstance(one, _Match):
            return tuple(following), True
        if isinstance(one, _Take) and not at_end and members[one.chars][column]:
            following[at + 1] = None
    return tuple(following), False


def _reachable(
    program: Sequence[_Instruction], kernel: Sequence[int], members: Sequence[Sequence[bool]], column: int
) -> Iterator[int]:
    at_end = column == len(members[0])
    seen = set()
    waiting = list(reversed(kernel))
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        one = program[at]
        if isinstance(one, _Split):
            waiting += [one.other, one.preferred]
        elif isinstance(one, _Look):
            if one.at_end if at_end else members[one.chars][column]:
                waiting.append(at + 1)
        else:
            yield at
