"""Catalogs: the trie against plain sets, the native node against the readable one, the search against a plain one."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from beam_reference import Hypothesis
from catalog_reference import exhaustive, legal, search
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow.parquet import write_table
from random_models import CONFIGS, make_model
from test_beam_modules import Modules, logits_of, same, sequences
from torch import Tensor

import dagserve.nodes.beam_search as beam_search
from dagserve._native import CpuNode
from dagserve.attributes import Attribute
from dagserve.build.catalogs import build_tables
from dagserve.build.weights import make_parameter
from dagserve.catalog import ENDS, OPEN, Catalog, Column, Limits, Section, build_catalog, read_items
from dagserve.catalog import Items as Rows
from dagserve.errors import BuildError, InvalidRequest
from dagserve.kernels.beam.selection import NEVER
from dagserve.nodes.beam_search import ExpandCatalog, Finish, Prefill
from dagserve.nodes.catalog import Catalog as CatalogNode
from dagserve.nodes.decoder import parameter_mapping
from dagserve.nodes.operators import REFERENCE as OPERATORS

DEPTH = 4
LIMITS = Limits(max_items=2000, max_depth=DEPTH, max_children=512)
Items = dict[str, tuple[int, ...]]


def catalog_of(items: Mapping[str, Sequence[int]]) -> Catalog:
    return build_catalog(Rows(list(items), list(items.values())), LIMITS)


def marks_of(packed: Any, nodes: int) -> list[int]:
    return [int(packed[n // 4]) >> n % 4 * 2 & 3 for n in range(nodes)]


def paths_of(catalog: Catalog) -> dict[int, tuple[int, ...]]:
    """The tokens that lead to each node, walked from the root."""
    first, label = catalog.array(Section.FIRST), catalog.array(Section.LABEL)
    alphabets, ends = catalog.array(Section.ALPHABETS), catalog.array(Section.ALPHABET_ENDS)
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(len(first) - 1):
        for child in range(first[node], first[node + 1]):
            paths[child] = (*paths[node], int(alphabets[ends[len(paths[node])] + label[child]]))
    return paths


PATHS = st.lists(st.integers(0, 6), min_size=1, max_size=DEPTH).map(tuple)
CATALOGS = st.lists(PATHS, min_size=1, max_size=30).map(lambda found: {f"i{n}": p for n, p in enumerate(found)})


@settings(max_examples=300, deadline=None)
@given(CATALOGS)
def test_the_trie_holds_exactly_the_items(items: Items) -> None:
    catalog = catalog_of(items)
    levels, nodes, _, count = catalog.array(Section.SIZES).tolist()
    paths = paths_of(catalog)
    beginnings = {p[:n] for p in items.values() for n in range(len(p) + 1)}
    assert len(paths) == nodes == len(beginnings)
    assert set(paths.values()) == beginnings
    assert list(paths.values()) == sorted(paths.values(), key=lambda p: (len(p), p))
    assert levels == max(map(len, items.values()))
    for node, mark in enumerate(marks_of(catalog.array(Section.MARKS), nodes)):
        assert bool(mark & ENDS) == (paths[node] in items.values())
        assert bool(mark & OPEN) == any(len(p) > len(paths[node]) and p in beginnings for p in beginnings
                                        if p[: len(paths[node])] == paths[node])  # fmt: skip
    offsets, ids = catalog.array(Section.ITEM_OFFSETS), catalog.sections[Section.ITEMS]
    found = [ids[a:b].decode() for a, b in itertools.pairwise(offsets)]
    assert {i: paths[n] for i, n in zip(found, catalog.array(Section.ITEM_NODES), strict=True)} == items
    assert [found[i] for i in catalog.array(Section.ITEM_ORDER)] == sorted(items)
    widest = [max(len(legal(set(items.values()), p)) for p in beginnings if len(p) == n) for n in range(levels)]
    assert catalog.array(Section.WIDEST).tolist() == widest
    assert count == len(items)


def ports_of(config: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Inputs and outputs of the native node."""
    interface = CatalogNode.interface(config, {})
    bounds: Any = interface.bounds
    outputs = [(p.name, p.type.dtype, [d.size(bounds) for d in p.type.shape], 0) for p in interface.outputs]
    return [(name, "text", [64], 65536) for name in ("allow", "deny", "allow_where", "deny_where")], outputs


def nodes_of(
    folder: Path, items: Mapping[str, Sequence[int]], limits: Limits = LIMITS, columns: Sequence[Column] = ()
) -> tuple[Any, CatalogNode]:
    """The native node and the readable one."""
    (folder / "c.bin").write_bytes(build_catalog(Rows(list(items), list(items.values()), columns), limits).file)
    config = {"tables": "c.bin", "max_items": limits.max_items, "max_depth": limits.max_depth, "max_children": 512}
    config["attributes"] = [c.attribute.declared for c in columns]
    return CpuNode("catalog", config, *ports_of(config), str(folder), ""), CatalogNode(config, folder)


@settings(max_examples=200, deadline=None)
@given(CATALOGS, st.data())
def test_both_nodes_permit_the_same(tmp_path_factory: pytest.TempPathFactory, items: Items, data: Any) -> None:
    native, plain = nodes_of(tmp_path_factory.mktemp("catalog"), items)
    ids = st.lists(st.sampled_from([*items, "unknown", "i", ""]), min_size=1, max_size=40)
    given_ = {name: data.draw(st.none() | ids) for name in ("allow", "deny")}
    ours, theirs = native.run(given_), plain.run(given_)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    allowed = set(items) if given_["allow"] is None else set(given_["allow"]) & set(items)
    check_marks(ours["marks"], items, allowed - set(given_["deny"] or ()))


def check_marks(marks: Any, items: Items, permitted: set[str]) -> None:
    """Nodes are marked for exactly the permitted items."""
    wanted = {items[i] for i in permitted}
    paths = paths_of(catalog_of(items))
    for node, mark in enumerate(marks_of(marks, len(paths))):
        n = len(paths[node])
        assert bool(mark & ENDS) == (paths[node] in wanted)
        assert bool(mark & OPEN) == any(len(p) > n and p[:n] == paths[node] for p in wanted)


ATTRIBUTES = [Attribute("region", "text"), Attribute("price", "number"), Attribute("stock", "bool")]
VALUES: Mapping[str, Sequence[Any]] = {
    "region": ["de", "fr", "", "日本", "a=b"],
    "price": [0, -0.0, 1, 2.5, 1e300, -3],
    "stock": [True, False],
}


def term(name: str, value: Any) -> str:
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    columns = [Column(attribute) for attribute in ATTRIBUTES]
    for column in columns:
        for row in rows:
            column.add("here", row.get(column.attribute.name))
    return columns


def draw_terms(data: Any) -> list[tuple[str, Any]] | None:
    one = st.sampled_from([(name, value) for name, values in VALUES.items() for value in values])
    unknown = st.sampled_from([("region", "none"), ("price", 77), ("price", 1.5)])
    found: list[tuple[str, Any]] | None = data.draw(st.none() | st.lists(one | unknown, min_size=1, max_size=5))
    return found


@settings(max_examples=300, deadline=None)
@given(CATALOGS, st.data())
def test_both_nodes_permit_by_attribute(tmp_path_factory: pytest.TempPathFactory, items: Items, data: Any) -> None:
    """Against plain sets, with lists of ids beside; an item without an attribute has none of its values."""
    row = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in VALUES.items()})
    rows = dict(zip(items, data.draw(st.lists(row, min_size=len(items), max_size=len(items))), strict=True))
    native, plain = nodes_of(tmp_path_factory.mktemp("catalog"), items, LIMITS, columns_of(list(rows.values())))
    ids = st.none() | st.lists(st.sampled_from([*items, "unknown"]), min_size=1, max_size=40)
    allow, deny, allowed, denied = data.draw(ids), data.draw(ids), draw_terms(data), draw_terms(data)
    request = {
        "allow": allow,
        "deny": deny,
        "allow_where": None if allowed is None else [term(*t) for t in allowed],
        "deny_where": None if denied is None else [term(*t) for t in denied],
    }
    ours, theirs = native.run(request), plain.run(request)
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    permitted = (set(items) if allow is None else set(allow) & set(items)) - set(deny or ())
    for name in {n for n, _ in allowed or ()}:
        permitted = {i for i in permitted if any(n == name and rows[i].get(n) == v for n, v in allowed or ())}
    permitted = {i for i in permitted if not any(rows[i].get(n) == v for n, v in denied or ())}
    check_marks(ours["marks"], items, permitted)
    offsets, found = ours["item_offsets"], bytes(ours["items"])
    order = [found[a:b].decode() for a, b in itertools.pairwise(offsets)]
    assert {i for n, i in enumerate(order) if ours["permitted"][n // 8] >> n % 8 & 1} == permitted


@pytest.mark.parametrize("share", [1, 5, 50, 950, 995, 999])
def test_every_way_of_marking_gives_the_same(share: int, tmp_path: Path) -> None:
    """Few items are let in, few taken away, or all nodes marked in one pass."""
    items = random_items(random.Random(share), 1000, 512)
    rows = [{"stock": n < share} for n in range(len(items))]
    native, plain = nodes_of(tmp_path, items, LIMITS, columns_of(rows))
    for request in ({"allow_where": ["stock=true"]}, {"deny_where": ["stock=true"]}):
        ours, theirs = native.run(request), plain.run(request)
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@pytest.mark.parametrize("text", ["0", "-0", "-0.0", "0e5"])
def test_zero_is_one_number(text: str, tmp_path: Path) -> None:
    for node in nodes_of(
        tmp_path, {"a": (1,), "b": (2,), "c": (3,)}, LIMITS, columns_of([{"price": 0}, {"price": -0.0}, {}])
    ):
        assert node.run({"allow_where": [f"price={text}"]})["permitted"].tolist() == [0b011]


WRONG_TERMS = ["region", "", "=de", "colour=red", "stock=1", "stock=", "price=", "price=1x", "price=nan", "price=1e999",
               "price= 1", "price=inf", "Region=de"]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_TERMS)
@pytest.mark.parametrize("port", ["allow_where", "deny_where"])
def test_a_wrong_term_is_refused(port: str, wrong: str, tmp_path: Path) -> None:
    known = r"must be NAME=VALUE of an attribute; there is region \(text\), price \(number\), stock \(bool\)"
    for node in nodes_of(tmp_path, {"a": (1,)}, LIMITS, columns_of([{}])):
        with pytest.raises(InvalidRequest, match=rf"{port}\[1\] {known}"):
            node.run({port: ["region=de", wrong]})
    for node in nodes_of(tmp_path, {"a": (1,)}):
        with pytest.raises(InvalidRequest, match=r"there is none"):
            node.run({port: ["region=de"]})


def test_a_values_items_take_the_smaller_form() -> None:
    """A value of many items is a bit an item, one of few is a list; together they stay small."""
    items = {f"i{n}": (n % 500, n // 500) for n in range(1900)}
    rows = [{"stock": n % 2 == 0, "region": "xy" if n % 100 else f"rare{n}"} for n in range(1900)]
    catalog = build_catalog(Rows(list(items), list(items.values()), columns_of(rows)), LIMITS)
    sizes = np.diff(catalog.array(Section.SET_ENDS)).tolist()
    assert sizes == [1] * 19 + [60] * 3, "words: rare regions, xy; false, true"
    assert len(catalog.sections[Section.SETS]) == 4 * sum(sizes)


WRONG_LINES = [
    (b"{", "line 1: not JSON"),
    (b"[]", 'not an object; write {"item": "...", "tokens": [...]}'),
    (b'{"tokens":[1]}', "`item` must be a string of 1 to 256 bytes"),
    (b'{"item":3,"tokens":[1]}', "`item` must be a string"),
    (b'{"item":"a","tokens":[1],"tokens":[2]}', "line 1: `tokens` is given twice; give it once"),
    (b'{"item":"a:b","tokens":[1]}\n{"item":"a","it\\u0065m":"b","tokens":[1]}', "line 2: `item` is given twice"),
    (b'{"item":"a:b","tokens":' + b"[" * 1010 + b"]" * 1010 + b"}", "`tokens` must be a list of integers"),
    (b'{"item":"","tokens":[1]}', "`item` must be a string of 1 to 256 bytes"),
    (b'{"item":"' + b"x" * 257 + b'","tokens":[1]}', "`item` must be a string of 1 to 256 bytes"),
    (b'{"item":"a"}', "give `tokens` or `text`, one of them"),
    (b'{"item":"a","tokens":[1],"text":"b"}', "give `tokens` or `text`, one of them"),
    (b'{"item":"a","tokens":1}', "`tokens` must be a list of integers"),
    (b'{"item":"a","tokens":[true]}', "`tokens` must be a list of integers"),
    (b'{"item":"a","tokens":[1.0]}', "`tokens` must be a list of integers"),
    (b'{"item":"a","text":1}', "`text` must be a string"),
    (b'{"item":"a","text":"b"}', "name their `tokenizer`"),
    (b'{"item":"a","tokens":[1],"colour":"red"}', "unknown key `colour`"),
    (
        b'{"item":"a","tokens":[1],"colour":"red"}',
        "the declared attributes, region (text), price (number), stock (bool)",
    ),
    (b'{"item":"a","tokens":[1],"colour":2}', "declare it in the catalog's `with: {attributes: {colour: number}}`"),
    (b'{"item":"a","tokens":[1],"region":3}', "line 1: `region` must be text of at most 256 bytes"),
    (b'{"item":"a","tokens":[1],"region":["de"]}', "`region` must be text"),
    (b'{"item":"a","tokens":[1],"region":"' + b"x" * 257 + b'"}', "`region` must be text of at most 256 bytes"),
    (b'{"item":"a","tokens":[1],"price":"3"}', "`price` must be a number that a 64-bit float holds exactly"),
    (b'{"item":"a","tokens":[1],"price":true}', "`price` must be a number"),
    (b'{"item":"a","tokens":[1],"price":9007199254740993}', "`price` must be a number that a 64-bit float holds"),
    (b'{"item":"b","tokens":[1],"stock":true}\n{"item":"a","tokens":[1],"stock":1}', "line 2: `stock` must be true"),
    (b'{"item":"a","tokens":[]}', "item 'a' has no tokens (0); give it from 1 to max_depth, 4"),
    (b'{"item":"a","tokens":[1,2,3,4,5]}', "item 'a' has too many tokens (5)"),
    (b'{"item":"b","tokens":[1]}\n{"item":"a","tokens":[1,-2]}', "item 'a' has token -2; tokens are from 0"),
    (b'{"item":"a","tokens":[1]}\n{"item":"a","tokens":[2]}', "item 'a' is in the catalog twice"),
    (
        b'{"item":"a","tokens":[9223372036854775808]}',
        "line 1: item 'a' has token 9223372036854775808; tokens are from 0",
    ),
    (b"\n\n", "the catalog has 0 items; it must have from 1 to max_items, 2000"),
    (b"\n".join(b'{"item":"%d","tokens":[%d]}' % (i, i) for i in range(600)), "600 next tokens, over max_children"),
]


@pytest.mark.parametrize(("content", "message"), WRONG_LINES, ids=range(len(WRONG_LINES)))
def test_a_wrong_catalog_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_bytes(content)
    with pytest.raises(BuildError) as caught:
        build_catalog(read_items(tmp_path / "c.jsonl", None, ATTRIBUTES), LIMITS)
    assert message in str(caught.value)


PARQUET_ROWS: list[dict[str, Any]] = [
    {"item": f"i{n}", "tokens": [n % 7, n // 7], "stock": n % 3 == 0 or None, "price": n / 4}
    | ({"region": ["de", "日本", None][n % 3]})
    for n in range(200)
]
PARQUET_LIMITS = {"max_items": 300, "max_depth": DEPTH, "max_children": 64}


def parquet(path: Path, columns: Mapping[str, Any]) -> Path:
    """A file of several row groups."""
    write_table(pyarrow.table(columns), path, row_group_size=64)
    return path


def columns_in(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: [row[name] for row in rows] for name in rows[0]}


@pytest.mark.parametrize("form", ["plain", "dictionary", "small numbers"])
def test_parquet_gives_the_catalog_of_jsonl(form: str, tmp_path: Path) -> None:
    lines = [json.dumps({k: v for k, v in row.items() if v is not None}) for row in PARQUET_ROWS]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    columns = columns_in(PARQUET_ROWS)
    if form == "dictionary":
        columns["region"] = pyarrow.array(columns["region"]).dictionary_encode()
    elif form == "small numbers":
        columns["tokens"] = pyarrow.array(columns["tokens"], pyarrow.large_list(pyarrow.uint16()))
        columns["price"] = pyarrow.array(columns["price"], pyarrow.float32())
    limits = {**PARQUET_LIMITS, "attributes": [a.declared for a in ATTRIBUTES]}
    built = build_tables(parquet(tmp_path / "c.parquet", columns), limits, None)
    assert built.file == build_tables(tmp_path / "c.jsonl", limits, None).file
    assert len(built.array(Section.VALUE_OFFSETS)) == 2 + 200 + 1 + 1, "regions, prices, true, and the end"


def test_parquet_and_jsonl_have_the_same_texts(tmp_path: Path) -> None:
    rows = [{"item": "a", "text": "xy"}, {"item": "b", "text": "z"}]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = [
        read_items(path, lambda texts: [[ord(c) for c in text] for text in texts])
        for path in (tmp_path / "c.jsonl", parquet(tmp_path / "c.parquet", columns_in(rows)))
    ]
    assert read[0] == read[1]
    assert read[1].paths == [[120, 121], [122]]


WRONG_PARQUET: list[tuple[Mapping[str, Any], str]] = [
    ({"item": ["a", "b"], "tokens": [[1], [2]], "colour": [None, "red"]}, "row 2: unknown key `colour`"),
    ({"item": ["a", "b"], "tokens": [[1], [2]], "stock": ["yes", "no"]}, "row 1: `stock` must be true or false"),
    ({"item": ["a", "b"], "tokens": [[1], None]}, "row 2: give `tokens` or `text`, one of them"),
    ({"item": ["a", "b"], "tokens": [[1], [None]]}, "row 2: `tokens` must be a list of integers"),
    ({"item": ["a", "b"], "tokens": [[1], [0.5]]}, "row 1: `tokens` must be a list of integers"),
    ({"item": [1, 2], "tokens": [[1], [2]]}, "row 1: `item` must be a string"),
    ({"item": [b"a", b"b"], "tokens": [[1], [2]]}, "row 1: `item` must be a string"),
    ({"item": ["a"], "tokens": [[1]], "price": [float("nan")]}, "row 1: `price` must be a number"),
    ({"item": ["a", "a"], "tokens": [[1], [2]]}, "item 'a' is in the catalog twice"),
    ({"tokens": [[1]]}, "row 1: `item` must be a string"),
    ({"item": ["a"], "tokens": pyarrow.array([[2**63]], pyarrow.list_(pyarrow.uint64()))}, "token 9223372036854775808"),
    ({"item": ["a"], "x": pyarrow.array([2**62], pyarrow.timestamp("us"))}, "not readable as parquet after row 0"),
    ({"item": pyarrow.array([b"\xff"]).view(pyarrow.string()), "tokens": [[1]]}, "not readable as parquet after row 0"),
    ({"item": pyarrow.array([], pyarrow.string())}, "the catalog has 0 items"),
]


@pytest.mark.parametrize(("columns", "message"), WRONG_PARQUET, ids=range(len(WRONG_PARQUET)))
def test_wrong_parquet_is_refused(columns: Mapping[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError) as caught:
        build_catalog(read_items(parquet(tmp_path / "c.parquet", columns), None, ATTRIBUTES), LIMITS)
    assert message in str(caught.value)


def test_no_more_than_max_items_are_read(tmp_path: Path) -> None:
    """A small parquet file may hold millions of equal rows: their number is in its end."""
    rows = 5_000_000
    same = pyarrow.DictionaryArray.from_arrays(np.zeros(rows, np.int8), ["a"])
    path = tmp_path / "c.parquet"
    write_table(pyarrow.table({"item": same, "text": same}), path)
    assert path.stat().st_size < 100_000
    started = time.monotonic()
    with pytest.raises(BuildError, match="more than max_items, 2000; leave some out"):
        read_items(path, None, (), 2000)
    assert time.monotonic() - started < 20
    (tmp_path / "c.jsonl").write_bytes(b'{"item":"a","tokens":[1]}\n{"item":"b","tokens":[1]}\nnot read')
    with pytest.raises(BuildError, match="more than max_items, 1"):
        read_items(tmp_path / "c.jsonl", None, (), 1)


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path / "c.parquet", columns_in(PARQUET_ROWS))
    good = path.read_bytes()
    middle = bytearray(good)
    middle[100:400] = bytes(300)
    for damaged in (b"", b"x", b"PAR1" * 3, good[:-1], good[: len(good) // 2], good[:4] + good[8:], bytes(middle)):
        path.write_bytes(damaged)
        with pytest.raises(BuildError, match=r"not readable as parquet after row 0: .*; write it again") as caught:
            read_items(path, None, ATTRIBUTES)
        assert "\n" not in str(caught.value)
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["item", "item"])
    write_table(twice, path)
    with pytest.raises(BuildError, match="has two columns `item`; leave one out"):
        read_items(path, None)


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    items = {"a": (1, 2), "b": (1,)}
    nodes_of(tmp_path, items)
    good = (tmp_path / "c.bin").read_bytes()
    config = {"tables": "c.bin", "max_items": 2000, "max_depth": DEPTH, "max_children": 512}
    _, outputs = ports_of(config)
    for damaged, message in ((good[:-1], "cut short"), (good[:-1] + b"?", "damaged"), (b"X" + good[1:], "not a file")):
        (tmp_path / "c.bin").write_bytes(damaged)
        with pytest.raises((ValueError, RuntimeError), match=message):
            CpuNode("catalog", config, [], outputs, str(tmp_path), "")


def test_a_table_of_other_attributes_is_refused(tmp_path: Path) -> None:
    nodes_of(tmp_path, {"a": (1,)}, LIMITS, columns_of([{}]))
    config = {"tables": "c.bin", "max_items": 2000, "max_depth": DEPTH, "max_children": 512}
    other = {**config, "attributes": ["stock:bool"]}
    with pytest.raises((ValueError, RuntimeError), match="other attributes than the graph declares, stock"):
        CpuNode("catalog", other, [], ports_of(config)[1], str(tmp_path), "")


@pytest.mark.parametrize(("having", "words"), [(40, [0xFFFFFFFF, 0x1FF]), (1, [40])], ids=["bits", "list"])
def test_a_set_of_items_that_are_not_there_is_refused(having: int, words: list[int], tmp_path: Path) -> None:
    items = {f"i{n}": (n,) for n in range(40)}
    rows = [{"region": "de"} if n < having else {} for n in range(40)]
    sections = list(build_catalog(Rows(list(items), list(items.values()), columns_of(rows)), LIMITS).sections)
    assert len(sections[Section.SETS]) == 4 * len(words)
    sections[Section.SETS] = np.array(words, np.uint32).tobytes()
    (tmp_path / "c.bin").write_bytes(Catalog(sections).file)
    config = {"tables": "c.bin", "max_items": 2000, "max_depth": DEPTH, "max_children": 512}
    config["attributes"] = [a.declared for a in ATTRIBUTES]
    with pytest.raises((ValueError, RuntimeError), match="inconsistent"):
        CpuNode("catalog", config, [], ports_of(config)[1], str(tmp_path), "")


LARGER = [
    ({"max_items": 2}, "have 3 items, over max_items, 2"),
    ({"max_depth": 1}, "have items of 2 tokens, over max_depth, 1"),
    ({"max_children": 1}, "have 2 next tokens after one beginning, over max_children, 1"),
]


@pytest.mark.parametrize(("limit", "message"), LARGER, ids=range(len(LARGER)))
def test_a_table_beyond_the_graphs_limits_is_refused(limit: dict[str, int], message: str, tmp_path: Path) -> None:
    nodes_of(tmp_path, {"a": (1, 2), "b": (1,), "c": (2,)})
    config = {"tables": "c.bin", "max_items": 2000, "max_depth": DEPTH, "max_children": 512, **limit}
    with pytest.raises((ValueError, RuntimeError), match=message):
        CpuNode("catalog", config, [], ports_of(config)[1], str(tmp_path), "")


class CatalogModules(Modules):
    """The modules of a catalog's search, called in the order of the node."""

    def __init__(self, model: Any, steps: int, normalize: str) -> None:
        super().__init__(model, steps, (), 0, 16)
        config = model.config.to_dict()
        self.prefill = Prefill(config, "fp32", OPERATORS, steps, catalog=True)
        self.catalog_expand = ExpandCatalog(config, "fp32", OPERATORS, steps, normalize)
        self.finish = Finish(steps, catalog=True)
        state, mapping = model.state_dict(), parameter_mapping(config)
        for module in (self.prefill, self.catalog_expand):
            for name, parameter in module.named_parameters():
                parameter.data = make_parameter(mapping[name], state, parameter)
        self.tables: Mapping[str, Any] = {}
        self.expand: Any = self._down

    def _down(self, hidden: Tensor, step: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.catalog_expand(hidden, step, *state, *level_of(self.tables, int(step))))


def level_of(tables: Mapping[str, Any], level: int) -> list[Tensor]:
    """What one level's expansion reads."""

    def row(name: str) -> Any:
        ends = tables[f"{name[:-1] if name == 'alphabets' else name}_ends"]
        return tables[name][ends[level] : ends[level + 1]]

    return [torch.tensor(v) for v in (tables["first"], tables["label"], tables["marks"], row("alphabets"),
                                      row("children"))]  # fmt: skip


def random_items(source: random.Random, count: int, vocabulary: int) -> Items:
    tokens = [source.sample(range(vocabulary), 6) for _ in range(DEPTH)]
    lengths = (1, 2, 3, 3, 4, 4)
    return {
        f"item {n}": tuple(source.choice(level) for level in tokens[: source.choice(lengths)]) for n in range(count)
    }


@pytest.mark.parametrize("normalize", ["vocabulary", "catalog"])
@pytest.mark.parametrize("seed", range(4))
def test_the_search_is_the_plain_one(seed: int, normalize: str, tmp_path: Path) -> None:
    source = random.Random(seed)
    model = make_model(CONFIGS["llama-tied"], seed)
    items = random_items(source, 80, 512)
    _, node = nodes_of(tmp_path, items)
    modules = CatalogModules(model, DEPTH, normalize)
    denied = source.sample(sorted(items), 20)
    prompts = [[3, 1, 4], [1, 5]]
    for width, penalty, deny in ((1, 0.0, []), (5, 1.0, denied), (16, -0.5, denied), (200, 0.7, [])):
        modules.tables = node.run({"deny": deny})
        outputs = modules.run(prompts, width, width, penalty)
        for index, prompt in enumerate(prompts):
            permitted = set(items) - set(deny)
            expected = search(logits_of(model, prompt), items, permitted, width, DEPTH, penalty, normalize)
            same(sequences(outputs[:7], index), expected)
            paths = paths_of(catalog_of(items))
            assert [paths[int(n)] for n in outputs[7][index, : len(expected)]] == [tuple(h.tokens) for h in expected]
    everything = exhaustive(logits_of(model, prompts[0]), items, items, 0.7, normalize)
    found = [(h.final(0.7), tuple(h.tokens)) for h in sequences(outputs[:7], 0)]
    assert [p for _, p in found] == [p for _, p in everything]
    assert [s for s, _ in found] == pytest.approx([s for s, _ in everything], abs=1e-3)


def constrained(expand: ExpandCatalog, tables: Mapping[str, Any], width: int, seed: int) -> list[Hypothesis]:
    """A search whose hidden states are random: only what is legal counts."""
    prompts, n, hidden = 4, DEPTH, expand.hidden_size
    generator = torch.Generator().manual_seed(seed)
    state = [
        torch.zeros(prompts, 1, n + 1, dtype=torch.int64),
        torch.zeros(prompts, 1, n + 1),
        torch.zeros(prompts, width, n + 2, dtype=torch.int64),
        torch.full((prompts, width, n + 2), NEVER),
    ]
    step, options = torch.zeros(1, dtype=torch.int64), (torch.tensor(0.0), torch.arange(width, dtype=torch.int32))
    with torch.no_grad():
        for level in range(n):
            beams = torch.randn(prompts, state[0].shape[1], hidden, generator=generator)
            _, _, _, step, *state = expand(beams, step, *state, *options, *level_of(tables, level))
        outputs = list(Finish(n, catalog=True)(step, *state, *options))
    return [h for prompt in range(prompts) for h in sequences(outputs[:7], prompt)]


def expansion(normalize: str) -> ExpandCatalog:
    module = ExpandCatalog(CONFIGS["llama-tied"].to_dict(), "fp32", OPERATORS, DEPTH, normalize)
    torch.nn.init.normal_(module.get_parameter(f"{module.name}.weight"))
    return module


def test_no_sequence_of_a_hundred_thousand_is_illegal(tmp_path: Path) -> None:
    source, total, seed = random.Random(5), 0, 0
    modules = {name: expansion(name) for name in ("vocabulary", "catalog")}
    while total < 100_000:
        seed += 1
        items = random_items(source, source.choice([1, 10, 500, 1900]), 512)
        _, node = nodes_of(tmp_path, items)
        deny = source.sample(sorted(items), source.randrange(len(items)))
        permitted = {items[i] for i in items.keys() - set(deny)}
        found = constrained(modules[source.choice(sorted(modules))], node.run({"deny": deny}), 400, seed)
        assert {tuple(h.tokens) for h in found} <= permitted
        assert len(found) == 4 * min(400, len(permitted)) or len(permitted) > 400
        total += 4 * 400 * DEPTH


@pytest.mark.parametrize("taken_out", ["children", "marks"])
def test_without_its_masks_the_search_gives_what_is_illegal(
    taken_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above would fail if the search did not look."""
    items = random_items(random.Random(6), 100, 512)
    _, node = nodes_of(tmp_path, items)
    deny = sorted(items)[:50]
    tables = dict(node.run({"deny": deny}))
    if taken_out == "marks":
        tables["marks"] = np.full_like(tables["marks"], 0b01010101)
    else:
        plain = beam_search._children

        def all_children(*arguments: Tensor) -> tuple[Tensor, Tensor]:
            child, there = plain(*arguments)
            return child.clamp(max=len(tables["label"]) - 1), torch.ones_like(there)

        monkeypatch.setattr(beam_search, "_children", all_children)
    permitted = {items[i] for i in items.keys() - set(deny)}
    found = constrained(expansion("vocabulary"), tables, 100, 0)
    assert not {tuple(h.tokens) for h in found} <= permitted
