"""The passes: unification of shapes, bounds, all mistakes together, invariants."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dagserve.errors import ManifestError
from dagserve.graph import Graph, build_graph, frozen
from dagserve.manifest import load_manifest
from dagserve.passes import PASSES, PassError, check_manifest, run_passes
from dagserve.shapes import Dim

RELEVANCE = Path(__file__).parent.parent / "manifests" / "relevance.yaml"

JOIN = """\
apiVersion: dagserve/v1
name: joined
bounds: {BOUNDS}
inputs:
  a: {type: "A"}
  b: {type: "B"}
nodes:
  join:
    engine: cpu
    op: graph_definitions:Join
    inputs: {a: a, b: b}
    outputs: {out: "OUT"}
outputs: {out: join.out}
targets: {cpu: {}}
"""


@pytest.fixture(name="join")
def join_of(tmp_path: Path) -> Callable[..., Graph]:
    def join(a: str, b: str, out: str, bounds: str = "m: 5, k: 17") -> Graph:
        text = JOIN.replace("BOUNDS", bounds).replace('"A"', f'"{a}"').replace('"B"', f'"{b}"').replace("OUT", out)
        (tmp_path / "m.yaml").write_text(text)
        return check_manifest(tmp_path / "m.yaml", environment={})

    return join


def messages(run: Callable[[], object]) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        run()
    return [d.message for d in caught.value.diagnostics]


@pytest.mark.parametrize(
    ("a", "b", "out", "m"),
    [
        ("f32[m+2,k]", "f32[k,3]", "f32[m,r+1]", Dim("m")),
        ("f32[m+5,k]", "f32[k,3]", "f32[m+3,r+1]", Dim("m", 3)),
        ("f32[9,k]", "f32[k,3]", "f32[7,r+1]", Dim("", 7)),
        ("f32[3,k]", "f32[k,3]", "f32[1,r+1]", Dim("", 1)),
        ("f32[m+2,k+4]", "f32[k+4,3]", "f32[m,r+1]", Dim("m")),
    ],
)
def test_shapes_that_unify(join: Callable[..., Graph], a: str, b: str, out: str, m: Dim) -> None:
    bounds = ", ".join(s for s in ("m: 5", "k: 17") if s[0] in a.removeprefix("f32"))
    graph = join(a, b, out, bounds)
    assert graph.node("join").dims["M"] == m
    assert graph.bounds["r"] == 10


@pytest.mark.parametrize(
    ("a", "b", "out", "message"),
    [
        ("f32[m+1,k]", "f32[k,3]", "f32[m,r+1]", "`join.a` takes f32[M+2,K], but `a` is f32[m+1,k]"),
        ("f32[2,k]", "f32[k,3]", "f32[m,r+1]", "`join.a` takes f32[M+2,K], but `a` is f32[2,k]"),
        ("f32[m+2,k]", "f32[m,3]", "f32[m,r+1]", "`join.b` takes f32[K,3] (here f32[k,3]), but `b` is f32[m,3]"),
        ("f32[m+2,k]", "f32[k,4]", "f32[m,r+1]", "`join.b` takes f32[K,3] (here f32[k,3]), but `b` is f32[k,4]"),
        ("f32[m+2,k]", "f32[k,k]", "f32[m,r+1]", "`join.b` takes f32[K,3] (here f32[k,3]), but `b` is f32[k,k]"),
        ("f32[m+2,k]", "f32[k+1,3]", "f32[m,r+1]", "`join.b` takes f32[K,3] (here f32[k,3]), but `b` is f32[k+1,3]"),
        ("f32[m+2,k]", "f32[k,3]", "f32[m+2,r+1]", "f32[M,R+1] (here f32[m,R+1])"),
        ("f32[m+2,k]", "f32[k,3]", "f32[m,r]", "f32[M,R+1] (here f32[m,R+1])"),
        ("f32[m+2,k]", "f32[k,3]", "f32[m]", "f32[M,R+1] (here f32[m,R+1])"),
        ("f32[m+2,k]", "f16[k,3]", "f32[m,r+1]", "`join.b` takes f32[K,3] (here f32[k,3]), but `b` is f16[k,3]"),
        (
            "f32[m+2,k]",
            "f32[k,3]",
            "f32[m,8]",
            "node `join` decides this size at run time, up to 10; it is not always 7",
        ),
        (
            "f32[m+2,k]",
            "f32[k,3]",
            "f32[m,k+1]",
            "`k` is the size of request input `b`, but node `join` decides another size here",
        ),
    ],
)
def test_shapes_that_do_not(join: Callable[..., Graph], a: str, b: str, out: str, message: str) -> None:
    found = messages(lambda: join(a, b, out))
    assert len(found) == 1
    assert message in found[0]


def test_a_node_s_bound_of_an_offset_symbol(join: Callable[..., Graph]) -> None:
    assert join("f32[m+2,k]", "f32[k,3]", "f32[m,r+4]").bounds["r"] == 7
    assert join("f32[m+2,k]", "f32[k,3]", "f32[m,r+4]", "m: 5, k: 17, r: 7").bounds["r"] == 7
    found = messages(lambda: join("f32[m+2,k]", "f32[k,3]", "f32[m,r+4]", "m: 5, k: 17, r: 6"))
    assert found == ["bound `r` is 6, but node `join` makes up to 7"]


def test_bounds_a_definition_looks_at_are_used(join: Callable[..., Graph]) -> None:
    graph = join("f32[m+2,k]", "f32[k,3]", "f32[m,r+1]", "m: 5, k: 17, unread: 3")
    assert graph.node("join").bounds_read == {"unread"}
    found = messages(lambda: join("f32[m+2,k]", "f32[k,3]", "f32[m,r+1]", "m: 5, k: 17, other: 3"))
    assert found == ["no type uses the bound `other`"]


def test_defaults_of_options_and_nested_options(join: Callable[..., Graph], tmp_path: Path) -> None:
    graph = join("f32[m+2,k]", "f32[k,3]", "f32[m,r+1]")
    assert dict(graph.node("join").options) == {"scale": 1.5, "table": None}
    text = (
        (tmp_path / "m.yaml")
        .read_text()
        .replace("    inputs:", "    with: {table: [[1, 2], [3, x]], scale: -1}\n    inputs:")
    )
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(ManifestError) as caught:
        check_manifest(tmp_path / "m.yaml", environment={})
    assert [(d.line, d.column, d.message) for d in caught.value.diagnostics] == [
        (11, 32, "`nodes.join.with.table[1][1]` is text, but must be an integer"),
        (11, 44, "`nodes.join.with.scale` is -1, but must be at least 0"),
    ]


def test_one_text_for_every_row(tmp_path: Path) -> None:
    text = RELEVANCE.read_text().replace("endpoint: score\n", "").replace('"text[batch]"', "text")
    (tmp_path / "m.yaml").write_text(text)
    graph = check_manifest(tmp_path / "m.yaml", environment={})
    assert graph.node("tokenize").binds == ("tokens", "batch")


def test_mistakes_of_form_and_meaning_come_together(tmp_path: Path) -> None:
    text = RELEVANCE.read_text()
    for right, wrong in (
        ("batch: 32", "batch: 0"),
        ("query: {type: text,", "query: {type: txt,"),
        ("{query: query, item: items}", "{query: query, item: itms}"),
        ("reduce: softmax", "reduce: softmx"),
        ('{scores: "f32[batch,labels]"}', '{scores: "f16[batch,labels]"}'),
        ("runners: 2", "runners: 9"),
        ("admission: {max", "admission: {mx"),
        ("tokenizer: \"${model}\", default", "tokenizer: \"${modle}\", default"),
    ):  # fmt: skip
        assert right in text
        text = text.replace(right, wrong, 1)
    (tmp_path / "m.yaml").write_text(text)
    found = messages(lambda: check_manifest(tmp_path / "m.yaml", environment={}))
    expected = [
        "`bounds.batch` is 0",
        "unknown dtype 'txt'",
        "nothing makes `itms`",
        "unknown variable `modle`",
        "`nodes.score.with.reduce` is `softmx`",
        "`encode.scores` takes f32[B,N], but `score.scores` is f16[batch,labels]",
        "target `cpu` has 9 runners",
        "unknown key `mx_queued`",
    ]
    assert [m[: len(e)] for m, e in zip(found, expected, strict=True)] == expected


def test_cycle_is_printed_as_a_path_from_the_first_node(tmp_path: Path) -> None:
    node = '  N: {engine: aoti, op: graph_definitions:Model, inputs: {x: FROM}, outputs: {y: "f32[n]"}}\n'
    links = {"a": "x", "d": "c.y", "b": "d.y, more: a.y", "c": "b.y"}
    nodes = "".join(node.replace("N:", f"{n}:").replace("FROM", f) for n, f in links.items())
    head = 'apiVersion: dagserve/v1\nname: n\nbounds: {n: 3}\ninputs: {x: {type: "f32[n]"}}\n'
    (tmp_path / "m.yaml").write_text(f"{head}nodes:\n{nodes}outputs: {{y: c.y}}\ntargets: {{cpu: {{}}}}\n")
    with pytest.raises(ManifestError) as caught:
        check_manifest(tmp_path / "m.yaml", environment={})
    assert [(d.line, d.column, d.message) for d in caught.value.diagnostics] == [
        (7, 3, "the nodes form a cycle: d -> b -> c -> d")
    ]


def test_every_target_s_tiers_are_checked(tmp_path: Path) -> None:
    text = RELEVANCE.read_text().replace(
        "admission:", "  b: {concurrency: {runners: 4, contexts: 3, in_flight: 2}}\nadmission:"
    )
    (tmp_path / "m.yaml").write_text(text)
    found = messages(lambda: check_manifest(tmp_path / "m.yaml", target="cpu", environment={}))
    assert found == ["target `b` has 4 runners for 3 contexts", "target `b` has 3 contexts for 2 requests in flight"]


@pytest.mark.parametrize(
    ("kind", "default", "problem"),
    [
        ("i64", "1", ""),
        ("i64", "1.0", "an integer"),
        ("i64", "true", "an integer"),
        ("i64", str(2**63), "an integer"),
        ("u8", "256", "an integer from 0 to 255"),
        ("f32", "1", ""),
        ("f32", "x", "a number"),
        ("bool", "0", "true or false"),
        ("text", "1", "text"),
        ("text", '"ééé"', "6 bytes"),
        ("i64", "[1]", "is a list"),
        ('"i64[labels]"', "1", "is one value"),
        ('"i64[labels]"', "[1, 2]", ""),
        ('"i64[labels]"', "[]", "has 0 values"),
        ('"i64[3]"', "[1, 2]", "has 2 values"),
        ('"i64[labels]"', f"[{', '.join('1' * 17)}]", "has 17 values"),
        ('"f32[2,2]"', "[1]", "more than one dimension"),
    ],
)
def test_defaults_fit_their_type(tmp_path: Path, kind: str, default: str, problem: str) -> None:
    size = ", max_bytes: 5" if kind == "text" else ""
    line = f"  extra: {{type: {kind}, default: {default}{size}}}\n"
    node = '  use: {engine: cpu, op: graph_definitions:Join, inputs: {a: extra}, outputs: {out: "f32[a,b]"}}\n'
    text = RELEVANCE.read_text().replace("inputs:\n", f"inputs:\n{line}", 1).replace("nodes:\n", f"nodes:\n{node}")
    (tmp_path / "m.yaml").write_text(text)
    found = [m for m in messages(lambda: check_manifest(tmp_path / "m.yaml", environment={})) if "the default of" in m]
    assert [problem in m for m in found] == ([True] if problem else [])


def test_passes_are_the_ones_documented() -> None:
    names = [one.__name__ for one in PASSES]
    assert len(set(names)) == len(names) == 16
    doc = (RELEVANCE.parent.parent / "docs" / "manifest.md").read_text()
    assert [name for name in names if f"`{name}`" not in doc] == []


def skeleton() -> Graph:
    return build_graph(load_manifest(RELEVANCE, environment={}))


def lose_a_node(graph: Graph) -> Graph:
    return replace(graph, nodes=graph.nodes[1:])


def reverse_nodes(graph: Graph) -> Graph:
    return replace(graph, nodes=graph.nodes[::-1])


def lose_a_consumer(graph: Graph) -> Graph:
    node = replace(graph.node("score"), inputs=frozen({}))
    return replace(graph, nodes=tuple(node if n.name == "score" else n for n in graph.nodes))


def lose_bounds(graph: Graph) -> Graph:
    return replace(graph, bounds=frozen({}))


def lose_sizes(graph: Graph) -> Graph:
    return replace(graph, tensors=frozen({n: replace(t, capacity=0) for n, t in graph.tensors.items()}))


def move_tensors(graph: Graph) -> Graph:
    return replace(graph, tensors=frozen({n: replace(t, device="cuda") for n, t in graph.tensors.items()}))


@pytest.mark.parametrize("broken", [lose_a_node, reverse_nodes, lose_a_consumer, lose_bounds, lose_sizes, move_tensors])
def test_a_broken_invariant_names_its_pass(broken: Callable[[Graph], Graph]) -> None:
    with pytest.raises(PassError, match=f"^pass {broken.__name__}: "):
        run_passes(skeleton(), (*PASSES, broken))
    assert isinstance(PassError(""), AssertionError)


def test_passes_give_the_same_graph_every_time() -> None:
    first, second = run_passes(skeleton()), run_passes(skeleton())
    assert first == second
    assert list(first.tensors) == list(second.tensors)
