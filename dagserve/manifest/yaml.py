"""YAML 1.2 text -> tree, with every mistake of syntax as a diagnostic.

Scalars follow the YAML 1.2 core schema: ``yes`` and ``on`` are text. Aliases and tags are refused, so the tree is never
larger than the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.reader import ReaderError

from dagserve.errors import Diagnostic, ManifestError
from dagserve.manifest.source import START, Position, Source
from dagserve.manifest.tree import Atom, Entry, Items, Scalar, Table, Tree

MAX_DEPTH = 32

_NULL = ("", "~", "null", "Null", "NULL")
_TRUE = ("true", "True", "TRUE")
_FALSE = ("false", "False", "FALSE")
_DECIMAL = re.compile(r"[-+]?[0-9]{1,400}")
_BASED = re.compile(r"0o[0-7]{1,400}|0x[0-9a-fA-F]{1,400}")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")


def resolve_plain(text: str) -> Atom:
    """The value of an unquoted scalar. Infinities and NaN stay text: no field of a manifest takes them."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _DECIMAL.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


def read_tree(source: Source) -> tuple[Table, list[Diagnostic]]:
    """The top-level mapping, and the mistakes after which reading could go on (duplicate keys, tags).

    Raises:
        ManifestError: the text is not YAML, or not one mapping.
    """
    reader = _Reader(source)
    tree = reader.document()
    if isinstance(tree, Table):
        return tree, reader.diagnostics
    what = "the file is empty" if tree is None else "the top level is not a mapping"
    at = tree.position if tree else START
    raise ManifestError([source.diagnostic(at, what, "start with `apiVersion: dagserve/v1`, then `name:`")])


class _Reader:
    """Builds the tree from the parser's events."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.diagnostics: list[Diagnostic] = []
        self._events = self._parse()

    def _parse(self) -> Iterator[Any]:
        last = 0
        try:
            for event in YAML(typ="safe", pure=True).parse(self.source.text):
                last = event.end_mark.index
                yield event
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            raise self._refuse(mark.index if mark else last, _syntax(error)) from error
        except ReaderError as error:
            code = f"U+{ord(error.character):04X}" if isinstance(error.character, str) else f"{error.character!r}"
            raise self._refuse(error.position, f"character {code} is not allowed in YAML", "remove it") from error
        except (ValueError, OverflowError, TypeError, IndexError, AttributeError, AssertionError) as error:
            # The parser lets these out for some malformed escapes and tags.
            raise self._refuse(last, f"not valid YAML: {error}") from error

    def _refuse(self, at: int | Position, message: str, fix: str = "correct the YAML here") -> ManifestError:
        position = at if isinstance(at, Position) else self.source.position(at)
        return ManifestError([*self.diagnostics, self.source.diagnostic(position, message, fix, "syntax")])

    def _report(self, at: Position, message: str, fix: str) -> None:
        self.diagnostics.append(self.source.diagnostic(at, message, fix, "syntax"))

    def document(self) -> Tree | None:
        """The only document of the stream, or nothing when it has none."""
        tree: Tree | None = None
        for event in self._events:
            kind = type(event).__name__
            if kind == "DocumentStartEvent" and tree is not None:
                raise self._refuse(event.start_mark.index, "a second document", "keep one manifest in a file")
            if kind == "DocumentStartEvent":
                tree = self._value(next(self._events), 0)
        return tree

    def _value(self, event: Any, depth: int) -> Tree:
        kind, at = type(event).__name__, self.source.position(event.start_mark.index)
        if kind == "AliasEvent":
            raise self._refuse(at, f"alias `*{event.anchor}` is not supported", "write the value out")
        if depth > MAX_DEPTH:
            raise self._refuse(at, f"nested more than {MAX_DEPTH} deep", "flatten the manifest")
        if event.tag is not None:
            tag = str(event.tag).replace("tag:yaml.org,2002:", "!!")
            self._report(at, f"tag `{tag}` is not supported", "remove it")
        if kind == "MappingStartEvent":
            return self._mapping(at, depth)
        if kind == "SequenceStartEvent":
            return Items(tuple(self._value(e, depth + 1) for e in self._until("SequenceEndEvent")), at)
        return self._scalar(event, at)

    def _until(self, end: str) -> Iterator[Any]:
        for event in self._events:
            if type(event).__name__ == end:
                return
            yield event

    def _scalar(self, event: Any, at: Position) -> Scalar:
        text: str = event.value
        if is_unicode(text):
            return Scalar(resolve_plain(text) if event.style is None else text, at)
        self._report(
            at, "half of a surrogate pair is not a character", "write the character itself, or \\U and 8 digits"
        )
        return Scalar("", at)

    def _mapping(self, at: Position, depth: int) -> Table:
        entries: dict[str, Entry] = {}
        for event in self._until("MappingEndEvent"):
            key_at = self.source.position(event.start_mark.index)
            if type(event).__name__ != "ScalarEvent":
                raise self._refuse(
                    key_at, "a key must be plain text", "write `name: value`; quote text that holds { or ["
                )
            self._scalar(event, key_at)
            entry = Entry(event.value, key_at, self._value(next(self._events), depth + 1))
            first = entries.setdefault(entry.key, entry).key_position
            if first != key_at:
                self._report(key_at, f"duplicate key `{entry.key}`, first at {first.line}:{first.column}", "keep one")
        return Table(tuple(entries.values()), at)


def is_unicode(text: str) -> bool:
    """Whether the text can be encoded as UTF-8."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _syntax(error: MarkedYAMLError) -> str:
    problem = str(error.problem or error.context or "not valid YAML").strip().splitlines()[0]
    if "\\t" in problem:
        return "a tab where YAML needs spaces"
    return f"not valid YAML: {problem}"
