"""A manifest's text, positions in it, and diagnostics that point there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dagserve.errors import Diagnostic, ManifestError

MAX_BYTES = 1 << 20
"""Largest manifest that is read, in bytes."""


@dataclass(frozen=True, order=True)
class Position:
    """A place in a manifest. Line and column count from 1; columns are Unicode characters."""

    line: int
    column: int


START = Position(1, 1)


@dataclass(frozen=True)
class Source:
    """A manifest's path, as the user wrote it, and its text."""

    file: str
    text: str

    def position(self, index: int) -> Position:
        """The place of character ``index``, which is brought into the text."""
        index = min(max(index, 0), len(self.text))
        return Position(self.text.count("\n", 0, index) + 1, index - self.text.rfind("\n", 0, index))

    def diagnostic(self, at: Position, message: str, fix: str = "", code: str = "") -> Diagnostic:
        """A mistake at a place in this file, told in one printable line whatever text it quotes."""
        return Diagnostic(self.file, at.line, at.column, _printable(message), _printable(fix), code)


def read_source(path: str | Path) -> Source:
    """Reads a manifest as UTF-8, with or without a byte order mark.

    Raises:
        ManifestError: the file is missing, unreadable, larger than ``MAX_BYTES`` or not UTF-8.
    """
    file = str(path)
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _unreadable(file, f"cannot read the manifest: {reason}", "give the path of a manifest file") from error
    if len(data) > MAX_BYTES:
        raise _unreadable(file, f"the manifest is larger than {MAX_BYTES} bytes", "keep data out of the manifest")
    try:
        return Source(file, data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        before = Source(file, data[: error.start].decode("utf-8", errors="replace"))
        at = before.position(len(before.text))
        message = f"byte 0x{data[error.start]:02x} is not UTF-8"
        raise ManifestError([before.diagnostic(at, message, "save the file as UTF-8")]) from error


def _unreadable(file: str, message: str, fix: str) -> ManifestError:
    return ManifestError([Diagnostic(file, START.line, START.column, message, fix)])


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``did you mean `tokens`?`` for the closest known word, or nothing when none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else ""


def sentence(*parts: str) -> str:
    """Joins the parts that are not empty with semicolons."""
    return "; ".join(part for part in parts if part)
