"""A YAML document as an immutable tree in which every key and value knows its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from dagserve.manifest.source import Position

Atom: TypeAlias = str | int | float | bool | None
Path: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True)
class Scalar:
    """A single value. ``substituted``: the whole text came from one ``${variable}``, so it may stand for a number."""

    value: Atom
    position: Position
    substituted: bool = False


@dataclass(frozen=True)
class Items:
    """A YAML sequence."""

    values: tuple[Tree, ...]
    position: Position


@dataclass(frozen=True)
class Entry:
    """One key of a mapping and its value."""

    key: str
    key_position: Position
    value: Tree


@dataclass(frozen=True)
class Table:
    """A YAML mapping, in file order, without duplicate keys."""

    entries: tuple[Entry, ...]
    position: Position

    def get(self, key: str) -> Tree | None:
        """The value of a key, or nothing."""
        return next((e.value for e in self.entries if e.key == key), None)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)


Tree: TypeAlias = Scalar | Items | Table


def plain(tree: Tree) -> Any:
    """The tree as ``dict``, ``list`` and scalars."""
    if isinstance(tree, Table):
        return {e.key: plain(e.value) for e in tree}
    if isinstance(tree, Items):
        return [plain(v) for v in tree.values]
    return tree.value


def locate(tree: Tree, path: Sequence[str | int]) -> Position:
    """The place of the value at a path, or of the last part of the path that exists."""
    for part in path:
        child = _child(tree, part)
        if child is None:
            break
        tree = child
    return tree.position


def locate_key(table: Tree, key: str) -> Position:
    """The place of a key of a mapping, or of the mapping where it has no such key."""
    entries = table.entries if isinstance(table, Table) else ()
    return next((e.key_position for e in entries if e.key == key), table.position)


def find(tree: Tree, path: Sequence[str | int]) -> Tree | None:
    """The value at a path, or nothing."""
    for part in path:
        child = _child(tree, part)
        if child is None:
            return None
        tree = child
    return tree


def _child(tree: Tree, part: str | int) -> Tree | None:
    if isinstance(tree, Table) and isinstance(part, str):
        return tree.get(part)
    if isinstance(tree, Items) and isinstance(part, int) and part < len(tree.values):
        return tree.values[part]
    return None


def without(tree: Tree, path: Path) -> Tree:
    """The tree without the entry at a path. A path into a sequence removes the whole sequence."""
    if not isinstance(tree, Table) or not path:
        return tree
    key, rest = path[0], path[1:]
    keep_inside = bool(rest) and isinstance(rest[0], str)
    entries = (
        replace(e, value=without(e.value, rest)) if e.key == key else e for e in tree if e.key != key or keep_inside
    )
    return replace(tree, entries=tuple(entries))
