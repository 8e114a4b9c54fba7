"""Catalogs of valid items: read from JSONL or parquet, checked, and built into the trie that a search walks.

Nodes are numbered breadth first, the root 0, and the children of a node in the order of their tokens, so that they
stand side by side: those of node ``n`` are ``first[n]`` to ``first[n + 1]``. Nodes of the last level have none, and are
not in ``first``. ``label`` has the token that leads to a node as a row of its level's ``alphabet``. docs/catalogs.md
describes the file.
"""

from __future__ import annotations

import itertools
import json
import mmap
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from dagserve.attributes import Attribute, named
from dagserve.errors import BuildError
from dagserve.sections import read_sections, section_file

MAGIC, VERSION = b"DAGITEMS", 2
MAX_ITEM_BYTES = 256
ENDS, OPEN = 1, 2
"""Marks of a node, two bits each: an item ends here; one is further down."""

Ints = npt.NDArray[np.int64]
Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]


class Section(IntEnum):
    """What stands where; the native ``Section`` of ``catalog_node.cc`` is the same."""

    SIZES = 0
    """``u32``: levels, nodes, nodes above the last level, items."""
    FIRST = 1
    LABEL = 2
    ALPHABETS = 3
    """``i32``: the tokens of each level in ascending order, level by level."""
    ALPHABET_ENDS = 4
    """``i32[levels + 1]``: where each level's are."""
    WIDEST = 5
    """``i32[levels]``: the most children of a node above each level."""
    MARKS = 6
    ITEM_NODES = 7
    """``i32``: the node each item ends at, ascending; of one node's, items are in the order of their bytes."""
    ITEM_OFFSETS = 8
    ITEMS = 9
    ITEM_ORDER = 10
    """``u32``: the items in the order of their bytes."""
    ATTRIBUTES = 11
    """The declared attributes, ``region:text``, a line each."""
    ATTRIBUTE_ENDS = 12
    """``i32[attributes + 1]``: where each attribute's values are."""
    VALUE_OFFSETS = 13
    VALUES = 14
    """The values' keys, those of one attribute in the order of their bytes."""
    SET_ENDS = 15
    """``i32[values + 1]``: where each value's items are among the words of ``SETS``."""
    SETS = 16
    """``u32``: a value's items ascending, or a bit an item, whichever has fewer words; of equal ones the bits."""


@dataclass(frozen=True)
class Limits:
    """What the manifest allows: a catalog beyond it is refused, when it is compiled and when it is put in later.

    ``vocab_size`` is the tokenizer's; None where the manifest names none. ``attributes`` are those that items may have,
    each as ``region:text``.
    """

    max_items: int
    max_depth: int
    max_children: int
    vocab_size: int | None = None
    attributes: Sequence[str] = ()

    @property
    def declared(self) -> list[Attribute]:
        """The attributes."""
        return [Attribute.of(text) for text in self.attributes]


LIMITS = tuple(field.name for field in fields(Limits))
"""What of a ``catalog`` node's config bounds every catalog it may be given."""


@dataclass(frozen=True)
class Catalog:
    """A built catalog: items in the order of their nodes, and the trie."""

    sections: Sequence[bytes]

    def array(self, section: Section) -> npt.NDArray[Any]:
        """A section's numbers."""
        kinds = dict.fromkeys((Section.SIZES, Section.ITEM_ORDER, Section.SETS), "<u4")
        kinds |= dict.fromkeys((Section.MARKS, Section.ITEMS, Section.ATTRIBUTES, Section.VALUES), "u1")
        return np.frombuffer(self.sections[section], dtype=kinds.get(section, "<i4"))

    @property
    def file(self) -> bytes:
        """The table file."""
        return section_file(MAGIC, VERSION, self.sections)


@dataclass(frozen=True)
class Column:
    """One attribute of all items: the code of each item's value, -1 for none, and the key of each code."""

    attribute: Attribute
    codes: array[int] = field(default_factory=lambda: array("i"))
    keys: dict[bytes, int] = field(default_factory=dict)
    _seen: dict[Any, int] = field(default_factory=dict)

    def add(self, place: str, value: Any) -> None:
        """Appends an item's value; None is no value.

        Raises:
            BuildError: it is of another kind.
        """
        if value is None:
            self.codes.append(-1)
            return
        code = self._seen.get(value) if self.attribute.takes(value) else None
        if code is None:
            key = self.attribute.key(value) if self.attribute.takes(value) else None
            if key is None:
                raise BuildError(f"{place}: `{self.attribute.name}` must be {self.attribute.meaning}")
            code = self._seen[value] = self.keys.setdefault(key, len(self.keys))
        self.codes.append(code)


@dataclass(frozen=True)
class Items:
    """What a file holds, in its order: ids, token paths, and a column for each declared attribute."""

    ids: list[str]
    paths: list[Sequence[int]]
    columns: Sequence[Column] = ()


def read_items(
    path: Path, encode: Encode | None, attributes: Sequence[Attribute] = (), max_items: int = 2**31 - 1
) -> Items:
    """The items of a ``.jsonl`` or ``.parquet`` file.

    Args:
        path: each line, or row, has ``item`` and either ``tokens`` or ``text``, and any of the attributes.
        encode: texts to tokens; None where the manifest names no tokenizer.
        attributes: what else an item may have.
        max_items: more are not read.

    Raises:
        BuildError: the file is not there, has more items, or a wrong line; the message says which and how to mend it.
    """
    if not path.is_file():
        raise BuildError(f"no catalog at {path}: give a .jsonl or .parquet file")
    items = Items([], [], [Column(attribute) for attribute in attributes])
    texts: dict[int, str] = {}
    for place, row in _rows(path, max_items):
        if len(items.ids) == max_items:
            raise BuildError(_too_many(path, max_items))
        item, tokens = _checked(place, row, attributes)
        items.ids.append(item)
        items.paths.append(tokens if isinstance(tokens, list) else [])
        if isinstance(tokens, str):
            texts[len(items.paths) - 1] = tokens
        for column in items.columns:
            column.add(place, row.get(column.attribute.name))
    if texts:
        if encode is None:
            raise BuildError(f"{path.name} has texts: name their `tokenizer` in the catalog's `with`, or give tokens")
        for i, ids in zip(texts, encode(list(texts.values())), strict=True):
            items.paths[i] = ids
    return items


def _too_many(path: Path, max_items: int) -> str:
    return f"{path.name} has more than max_items, {max_items}; leave some out, or raise it"


def _rows(path: Path, max_items: int) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".parquet":
        yield from _parquet_rows(path, max_items)
        return
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            place = f"{path.name}, line {number}"
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise BuildError(f"{place}: not JSON: {error}; write one object a line") from error
            # Every key has a colon: only a line with more of them can have a key twice, of which orjson keeps the last.
            if isinstance(row, dict) and line.count(b":") > len(row):
                with suppress(RecursionError):  # nested too deep to be a value that is accepted below
                    json.loads(line, object_pairs_hook=partial(_refuse_twice, place))
            yield place, row


def _refuse_twice(place: str, pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BuildError(f"{place}: `{twice}` is given twice; give it once")


def _parquet_rows(path: Path, max_items: int) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import parquet  # only those who have such files need it
    except ImportError as error:
        raise BuildError(f"{path.name}: reading parquet needs pyarrow: pip install 'dagserve[parquet]'") from error
    number = 0
    try:
        file = parquet.ParquetFile(path)
        if file.metadata.num_rows > max_items:  # a small file may hold millions of equal rows
            raise BuildError(_too_many(path, max_items))
        if twice := [name for name in file.schema_arrow.names if file.schema_arrow.names.count(name) > 1]:
            raise BuildError(f"{path.name} has two columns `{twice[0]}`; leave one out")
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path.name}, row {number}", {k: v for k, v in row.items() if v is not None}
    except BuildError:
        raise
    except Exception as error:  # values that Python has not, text that is not UTF-8: each has an exception of its own
        reason = " ".join(str(error).split())
        what = f"not readable as parquet after row {number}: {reason}"
        raise BuildError(f"{path.name}: {what}; write it again") from error


def _checked(place: str, row: Any, attributes: Sequence[Attribute]) -> tuple[str, list[int] | str]:
    if not isinstance(row, dict):
        raise BuildError(f'{place}: not an object; write {{"item": "...", "tokens": [...]}}')
    if unknown := row.keys() - {"item", "tokens", "text", *(a.name for a in attributes)}:
        name = next(k for k in row if k in unknown)
        known = f"an item has `item`, `tokens` or `text`, and the declared attributes, {named(attributes)}"
        fix = f"declare it in the catalog's `with: {{attributes: {{{name}: {_kind_of(row[name])}}}}}`, or leave it out"
        raise BuildError(f"{place}: unknown key `{name}`; {known}; {fix}")
    item = row.get("item")
    if not isinstance(item, str) or not 1 <= len(item.encode(errors="replace")) <= MAX_ITEM_BYTES:
        raise BuildError(f"{place}: `item` must be a string of 1 to {MAX_ITEM_BYTES} bytes")
    if ("tokens" in row) == ("text" in row):
        raise BuildError(f"{place}: give `tokens` or `text`, one of them")
    value: Any = row.get("tokens", row.get("text"))
    if "text" in row and not isinstance(value, str):
        raise BuildError(f"{place}: `text` must be a string")
    if "tokens" in row and not (isinstance(value, list) and all(type(t) is int for t in value)):
        raise BuildError(f"{place}: `tokens` must be a list of integers")
    if "tokens" in row and not all(0 <= t < 2**31 for t in value):
        wrong = next(t for t in value if not 0 <= t < 2**31)
        raise BuildError(f"{place}: item {item!r} has token {wrong}; tokens are from 0 to {2**31 - 1}")
    return item, value


def _kind_of(value: Any) -> str:
    return "bool" if isinstance(value, bool) else "number" if isinstance(value, int | float) else "text"


def build_catalog(found: Items, limits: Limits) -> Catalog:
    """The tables of a catalog.

    Raises:
        BuildError: no items or too many, an id twice, a path that is empty, too long or outside the vocabulary.
    """
    items, paths = found.ids, found.paths
    if not 1 <= len(items) <= limits.max_items:
        raise BuildError(f"the catalog has {len(items)} items; it must have from 1 to max_items, {limits.max_items}")
    lengths = np.fromiter(map(len, paths), np.int64, len(paths))
    for wrong, reason in ((lengths == 0, "no tokens"), (lengths > limits.max_depth, "too many tokens")):
        if wrong.any():
            i = int(wrong.argmax())
            fix = f"give it from 1 to max_depth, {limits.max_depth}"
            raise BuildError(f"item {items[i]!r} has {reason} ({lengths[i]}); {fix}")
    tokens = np.fromiter((t for path in paths for t in path), np.int64, int(lengths.sum()))
    most = 2**31 - 1 if limits.vocab_size is None else limits.vocab_size - 1
    if ((tokens < 0) | (tokens > most)).any():
        at = int(((tokens < 0) | (tokens > most)).argmax())
        i = int(np.searchsorted(lengths.cumsum(), at, side="right"))
        raise BuildError(f"item {items[i]!r} has token {tokens[at]}; tokens are from 0 to {most}")
    levels = int(lengths.max())
    padded = np.full((len(items), levels), -1, np.int64)
    padded[np.arange(levels) < lengths[:, None]] = tokens
    names = [item.encode("utf-8", "surrogatepass") for item in items]
    by_name = np.array(sorted(range(len(names)), key=names.__getitem__), np.int64)
    for a, b in itertools.pairwise(by_name):
        if names[a] == names[b]:
            raise BuildError(f"item {items[a]!r} is in the catalog twice; give every item an id of its own")
    # By path, then by id: lexsort's last key counts first and it keeps the order of equals.
    order = by_name[np.lexsort(padded[by_name].T[::-1])]
    tables, by_node = _tables(padded[order], lengths[order], [names[i] for i in order])
    built = Catalog([*tables, *_attribute_sections(found.columns, order[by_node])])
    if (widest := int(built.array(Section.WIDEST).max())) > limits.max_children:
        limit = f"over max_children, {limits.max_children}"
        raise BuildError(f"a beginning of the catalog's items has {widest} next tokens, {limit}; raise it")
    return built


def _tables(paths: Ints, lengths: Ints, names: Sequence[bytes]) -> tuple[list[bytes], Ints]:
    """The trie's sections, and the order of the items in them."""
    count, levels = paths.shape
    reached = np.zeros((levels + 1, count), np.int64)  # the node of each item's beginning of that length
    labels, alphabets, parents = [np.zeros(1, np.int64)], list[Ints](), list[Ints]()
    nodes, above, same = 1, 0, np.zeros(count, bool)
    same[1:] = True
    for level in range(levels):
        above = nodes
        there = lengths > level
        same[1:] &= paths[1:, level] == paths[:-1, level]
        new = there & ~same
        reached[level + 1] = np.where(there, nodes - 1 + np.cumsum(new), 0)
        nodes += int(new.sum())
        alphabet, rows = np.unique(paths[new, level], return_inverse=True)
        alphabets.append(alphabet)
        labels.append(rows)
        parents.append(reached[level][new])
    children = np.bincount(np.concatenate(parents), minlength=nodes)
    widest = [int(np.bincount(p).max()) for p in parents]
    ends = reached[lengths, np.arange(count)]
    order = np.argsort(ends, kind="stable")
    ends, names = ends[order], [names[i] for i in order]
    marks = np.where(children > 0, OPEN, 0)
    marks[ends] |= ENDS
    offsets = np.cumsum([0, *map(len, names)])
    by_name = sorted(range(count), key=names.__getitem__)
    first = np.concatenate([[1], 1 + np.cumsum(children[:above])])
    tables = [
        numbers([levels, nodes, above, count]),
        numbers(first),
        numbers(np.concatenate(labels)),
        numbers(np.concatenate(alphabets)),
        numbers(np.cumsum([0, *map(len, alphabets)])),
        numbers(widest),
        packed_marks(marks),
        numbers(ends),
        numbers(offsets),
        b"".join(names),
        numbers(by_name),
    ]
    return tables, order


def numbers(values: Any) -> bytes:
    """A section of 32-bit integers."""
    return np.asarray(values).astype("<i4").tobytes()


def _attribute_sections(columns: Sequence[Column], order: Ints) -> list[bytes]:
    """The attributes' sections; ``order`` has the row in the file of each item of the tables."""
    ends, keys, sets = [0], list[bytes](), list[npt.NDArray[np.uint32]]()
    for column in columns:
        codes = np.frombuffer(column.codes, np.int32)[order]
        by_code = np.argsort(codes, kind="stable")
        bounds = np.searchsorted(codes[by_code], np.arange(len(column.keys) + 1))
        for key in sorted(column.keys):
            code = column.keys[key]
            keys.append(key)
            sets.append(_item_set(by_code[bounds[code] : bounds[code + 1]], len(order)))
        ends.append(len(keys))
    return [
        "\n".join(column.attribute.declared for column in columns).encode(),
        numbers(ends),
        numbers(np.cumsum([0, *map(len, keys)])),
        b"".join(keys),
        numbers(np.cumsum([0, *map(len, sets)])),
        b"".join(words.tobytes() for words in sets),
    ]


def _item_set(items: Ints, count: int) -> npt.NDArray[np.uint32]:
    words = -(-count // 32)
    if len(items) < words:
        return items.astype("<u4")
    bits = np.zeros(32 * words, np.bool_)
    bits[items] = True
    return np.packbits(bits, bitorder="little").view("<u4")


def read_section(path: Path, section: Section) -> bytes:
    """One section of a table file."""
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return read_sections(content, [section])[0]


def packed_marks(marks: npt.NDArray[Any]) -> bytes:
    """Four nodes a byte, the first in the lowest bits."""
    padded = np.zeros(-(-len(marks) // 4) * 4, np.uint8)
    padded[: len(marks)] = marks
    rows = padded.reshape(-1, 4)
    return (rows[:, 0] | rows[:, 1] << 2 | rows[:, 2] << 4 | rows[:, 3] << 6).astype(np.uint8).tobytes()
