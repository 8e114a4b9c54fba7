"""A catalog of valid items as a node: the trie that a search walks, less what a request may not have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dagserve.attributes import KINDS, MAX_ATTRIBUTES, NAME, NAME_MEANING, Attribute, named
from dagserve.catalog import ENDS, LIMITS, MAX_ITEM_BYTES, OPEN, Section, packed_marks
from dagserve.catalog import Catalog as Tables
from dagserve.errors import InvalidRequest
from dagserve.interface import Assets, Interface, Option, Port
from dagserve.sections import read_sections

MAX_DEPTH = 8


class Catalog:
    """CPU node ``catalog``: the items a search may give, for this request.

    ``allow`` keeps only the items it names, ``deny`` takes those it names away; ``allow_where`` and ``deny_where`` do
    so by terms, ``region=de``. An item is kept that has, of each attribute that ``allow_where`` names, one of the
    values; one is taken away that has any value of ``deny_where``. Ids and values that the catalog lacks are passed
    over. The search meets all of it on its way: a branch without a permitted item is not entered.
    """

    engine: ClassVar[str] = "cpu"
    files: ClassVar[tuple[str, ...]] = ("file",)
    options: ClassVar[tuple[Option, ...]] = (
        Option("file", {"type": "string", "minLength": 1}, required=True),
        Option("max_items", {"type": "integer", "minimum": 1, "maximum": 50_000_000}, required=True),
        Option("max_depth", {"type": "integer", "minimum": 1, "maximum": MAX_DEPTH}, required=True),
        Option("max_children", {"type": "integer", "minimum": 1, "maximum": 1_000_000}, default=4096),
        Option("tokenizer", {"type": "string", "minLength": 1}),
        Option(
            "attributes",
            {
                "type": "object",
                "maxProperties": MAX_ATTRIBUTES,
                "propertyNames": {"pattern": NAME, "description": NAME_MEANING},
                "additionalProperties": {"enum": list(KINDS)},
            },
        ),
    )

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """``allow: text[X]``, ``deny: text[Y]``, ``allow_where: text[V]``, ``deny_where: text[Z]``, each optional ->
        the tables of :mod:`dagserve.catalog`, all borrowed.

        ``marks: u8[M]`` and ``permitted: u8[G]``, a bit an item, are the request's own. ``alphabets: i32[A]`` and
        ``children: i32[K]`` (0, 1, ... up to a level's widest node) have a row a level.
        """
        depth, items = options["max_depth"], options["max_items"]
        nodes = items * depth + 1
        outputs = {
            "first": "i32[F]",
            "label": "i32[N]",
            "marks": "u8[M]",
            "alphabets": "i32[A]",
            "alphabet_ends": f"i32[{depth + 1}]",
            "children": "i32[K]",
            "children_ends": f"i32[{depth + 1}]",
            "item_nodes": "i32[I]",
            "item_offsets": "i32[I+1]",
            "items": "u8[Q]",
            "permitted": "u8[G]",
        }
        lists = {"allow": "text[X]", "deny": "text[Y]", "allow_where": "text[V]", "deny_where": "text[Z]"}
        return Interface(
            tuple(Port.of(name, kind, optional=True) for name, kind in lists.items()),
            tuple(Port.of(name, kind, borrowed=True) for name, kind in outputs.items()),
            {
                "F": nodes + 1,
                "N": nodes,
                "M": -(-nodes // 4),
                "A": nodes + depth,
                "K": options["max_children"] * depth,
                "I": items,
                "Q": min(items * MAX_ITEM_BYTES, 2**31 - 1),
                "G": -(-items // 8),
            },
        )

    @staticmethod
    def configure(options: Mapping[str, Any], assets: Assets) -> dict[str, Any]:
        """The plan's ``config``: the table file and its limits."""
        files = assets.tokenizer(options["tokenizer"]) if options["tokenizer"] else None
        attributes = [Attribute(name, kind).declared for name, kind in (options["attributes"] or {}).items()]
        limits = {**options, "vocab_size": files.vocab_size if files else None, "attributes": attributes}
        limits = {name: limits[name] for name in LIMITS}
        tables = assets.catalog(options["file"], options["tokenizer"], limits)
        return {"tables": tables, "tokenizer": files.json if files else None, **limits}

    def __init__(self, config: Mapping[str, Any], root: Path) -> None:
        """Readable form of the native node. ``config`` is what :meth:`configure` returns."""
        tables = Tables(read_sections((root / config["tables"]).read_bytes()))
        self._depth = int(config["max_depth"])
        self._first, self._label = tables.array(Section.FIRST), tables.array(Section.LABEL)
        self._nodes, self._marks = tables.array(Section.ITEM_NODES), tables.array(Section.MARKS)
        offsets, payload = tables.array(Section.ITEM_OFFSETS), bytes(tables.sections[Section.ITEMS])
        self._places = {payload[a:b]: i for i, (a, b) in enumerate(itertools.pairwise(offsets))}
        self._attributes, self._sets = _item_sets(tables)
        alphabets, ends = tables.array(Section.ALPHABETS), tables.array(Section.ALPHABET_ENDS)
        widest = tables.array(Section.WIDEST)
        unused = self._depth - len(widest)  # levels that the catalog does not reach have one entry, never looked at
        self._fixed = {
            "alphabets": np.concatenate([alphabets, np.zeros(unused, np.int32)]),
            "alphabet_ends": np.concatenate([ends, ends[-1] + 1 + np.arange(unused)]).astype(np.int32),
            "children": np.concatenate([np.arange(n) for n in (*widest, *[1] * unused)]).astype(np.int32),
            "children_ends": np.cumsum([0, *widest, *[1] * unused]).astype(np.int32),
            "item_nodes": self._nodes,
            "item_offsets": offsets,
            "items": tables.array(Section.ITEMS),
        }

    def run(self, inputs: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """The tables; ``marks`` and ``permitted`` without what the request may not have.

        Raises:
            InvalidRequest: a term that is none, of an attribute that is not declared or with a value of another kind.
        """
        allow = inputs.get("allow")
        permitted = np.full(len(self._nodes), allow is None)
        permitted[self._named(allow)] = True
        permitted[self._named(inputs.get("deny"))] = False
        wanted: dict[str, set[int]] = {}
        for name, items in self._terms("allow_where", inputs):
            wanted.setdefault(name, set()).update(items.tolist())
        for of_attribute in wanted.values():
            permitted &= np.isin(np.arange(len(permitted)), sorted(of_attribute))
        for _, items in self._terms("deny_where", inputs):
            permitted[items] = False
        marks = np.frombuffer(self._marks, np.uint8)
        if not permitted.all():
            marks = np.frombuffer(packed_marks(self._marked(permitted)), np.uint8)
        bits = np.packbits(permitted, bitorder="little")
        return {"first": self._first, "label": self._label, "marks": marks, "permitted": bits, **self._fixed}

    def _named(self, names: Any) -> list[int]:
        found = (self._places.get(_utf8(name)) for name in names or ())
        return [i for i in found if i is not None]

    def _terms(self, port: str, inputs: Mapping[str, Any]) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Each term's attribute and items."""
        for row, text in enumerate(inputs.get(port) or ()):
            name, equals, value = _utf8(text).partition(b"=")
            attribute = next((a for a in self._attributes if a.name.encode() == name), None)
            key = attribute.key_of_text(value) if attribute and equals else None
            if attribute is None or key is None:
                known = named(self._attributes)
                raise InvalidRequest(f"{port}[{row}] must be NAME=VALUE of an attribute; there is {known}")
            yield attribute.name, self._sets[attribute.name].get(key, np.zeros(0, np.int64))

    def _marked(self, permitted: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
        marks = np.zeros(len(self._label), np.uint8)
        marks[self._nodes[permitted]] = ENDS
        # A parent is numbered before its children: from the last to the first, each tells its parent.
        for node in range(len(self._first) - 2, -1, -1):
            if marks[self._first[node] : self._first[node + 1]].any():
                marks[node] |= OPEN
        return marks


def _utf8(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def _item_sets(tables: Tables) -> tuple[list[Attribute], dict[str, dict[bytes, npt.NDArray[Any]]]]:
    """The attributes, and of each the items of every value by its key."""
    declared = tables.sections[Section.ATTRIBUTES].decode().splitlines()
    attributes = [Attribute.of(text) for text in declared]
    keys, words = bytes(tables.sections[Section.VALUES]), tables.array(Section.SETS)
    values = itertools.pairwise(tables.array(Section.VALUE_OFFSETS))
    sets = itertools.pairwise(tables.array(Section.SET_ENDS))
    items = len(tables.array(Section.ITEM_NODES))
    found = [(keys[a:b], _members(words[c:d], items)) for (a, b), (c, d) in zip(values, sets, strict=True)]
    ends = itertools.pairwise(tables.array(Section.ATTRIBUTE_ENDS))
    return attributes, {a.name: dict(found[i:j]) for a, (i, j) in zip(attributes, ends, strict=True)}


def _members(words: npt.NDArray[Any], items: int) -> npt.NDArray[Any]:
    if len(words) < -(-items // 32):
        return words.astype(np.int64)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
