"""Pictures of graphs."""

import itertools
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from dagserve.draw import Layout, draw, layout, to_dot, to_mermaid
from dagserve.errors import DagserveError
from dagserve.graph import Graph
from dagserve.passes import check_manifest

RELEVANCE = Path(__file__).parent.parent / "manifests" / "relevance.yaml"

EDGES = {
    ("input query", "node tokenize", "query: text @ cpu"),
    ("input items", "node tokenize", "items: text[batch] @ cpu"),
    ("input labels", "node resolve_labels", "labels: text[labels] @ cpu"),
    ("input label_token_ids", "node resolve_labels", "label_token_ids: i64[labels] @ cpu"),
    ("input apply_softmax", "node score", "apply_softmax: bool @ cpu"),
    ("node tokenize", "node score", "tokenize.tokens: i64[tokens] @ cpu"),
    ("node tokenize", "node score", "tokenize.cu_seqlens: i32[batch+1] @ cpu"),
    ("node tokenize", "node encode", "tokenize.cu_seqlens: i32[batch+1] @ cpu"),
    ("node resolve_labels", "node score", "resolve_labels.label_ids: i64[labels] @ cpu"),
    ("node score", "node encode", "score.scores: f32[batch,labels] @ cpu"),
    ("node encode", "output response", "encode.body: u8[body_bytes] @ cpu"),
}


@pytest.fixture(name="graph", scope="module")
def relevance() -> Graph:
    return check_manifest(RELEVANCE, environment={})


@pytest.fixture(name="wide", scope="module")
def many_inputs(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """A graph with wide rows and edges over many rows, for a GPU."""
    names = [f"a_rather_long_name_{i}" for i in range(9)]
    inputs = "".join(f'  {n}: {{type: "f32[n]"}}\n' for n in names)
    chain = "".join(
        f"  step{i}: {{engine: aoti, op: graph_definitions:Model, "
        f'inputs: {{x: {f"step{i - 1}.y" if i else names[0]}, more: {n}}}, outputs: {{y: "f32[n]"}}}}\n'
        for i, n in enumerate(names)
    )
    outputs = "outputs: {last: step8.y, early: step1.y}\n"
    head = "apiVersion: dagserve/v1\nname: wide\nbounds: {n: 3}\n"
    path = tmp_path_factory.mktemp("wide") / "m.yaml"
    path.write_text(f"{head}inputs:\n{inputs}nodes:\n{chain}{outputs}targets: {{gpu: {{device: cuda}}}}\n")
    return check_manifest(path, environment={})


def test_dot_has_every_edge_with_its_tensor(graph: Graph) -> None:
    text = to_dot(graph)
    assert set(re.findall(r'"([^"]+)" -> "([^"]+)" \[label="([^"]+)"\]', text)) == EDGES
    shapes = dict(re.findall(r'  "([^"]+)" \[label="[^"]+", shape=(\w+)', text))
    assert {shapes["input query"], shapes["node score"], shapes["output response"]} == {
        "ellipse",
        "box",
        "doubleoctagon",
    }
    assert text.count("style=dashed") == 2
    assert text.startswith('digraph "relevance" {')
    assert text.endswith("}\n")


def test_mermaid_has_every_edge_with_its_tensor(graph: Graph) -> None:
    text = to_mermaid(graph)
    found = re.findall(r'^  (\w+) -[-.]+> ?\|"([^"]+)"\| (\w+)$', text, re.MULTILINE)
    assert {(a, b, label) for a, label, b in found} == {
        (a.replace(" ", "_"), b.replace(" ", "_"), t) for a, b, t in EDGES
    }
    assert 'input_query(["query"])' in text
    assert 'output_response((("response")))' in text


def test_devices_are_on_the_edges(wide: Graph) -> None:
    assert '"node step0" -> "node step1" [label="step0.y: f32[n] @ cuda"]' in to_dot(wide)
    assert '"input a_rather_long_name_0" -> "node step0" [label="a_rather_long_name_0: f32[n] @ cpu"]' in to_dot(wide)
    assert "Model · aoti on cuda" in to_dot(wide)


def boxes(plan: Layout) -> list[tuple[float, float, float, float]]:
    placed = [(*plan.centres[v], *plan.sizes[v]) for v in plan.labels]
    return [(x - w / 2, y - h / 2, x + w / 2, y + h / 2) for x, y, w, h in placed]


@pytest.mark.parametrize("name", ["graph", "wide"])
def test_labels_do_not_overlap_and_edges_go_down(name: str, request: pytest.FixtureRequest) -> None:
    plan = layout(request.getfixturevalue(name))
    for a, b in itertools.combinations(boxes(plan), 2):
        assert a[2] < b[0] or b[2] < a[0] or a[3] < b[1] or b[3] < a[1]
    for path in plan.paths:
        heights = [plan.centres[v][1] for v in path]
        assert heights == sorted(set(heights))
    bends = [v for v in plan.centres if v[0] == "bend"]
    for bend in bends:
        x, y = plan.centres[bend]
        assert not any(left < x < right and top < y < bottom for left, top, right, bottom in boxes(plan))
    assert bends


@pytest.mark.parametrize("name", ["graph", "wide"])
def test_svg_and_png(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    graph = request.getfixturevalue(name)
    for suffix in ("svg", "png"):
        draw(graph, tmp_path / f"a.{suffix}")
        draw(graph, tmp_path / f"b.{suffix}")
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    words = {
        "".join(e.itertext()).strip() for e in ElementTree.parse(tmp_path / "a.svg").iter() if e.tag.endswith("text")
    }
    for tensor in graph.tensors.values():
        assert f"{tensor.type} @ {tensor.device}" in words
        assert tensor.name in words
    assert {node.name for node in graph.nodes} | set(graph.outputs) <= words


def test_text_formats_by_suffix(graph: Graph, tmp_path: Path) -> None:
    draw(graph, str(tmp_path / "g.dot"))
    draw(graph, tmp_path / "g.MMD")
    assert (tmp_path / "g.dot").read_text() == to_dot(graph)
    assert (tmp_path / "g.MMD").read_text() == to_mermaid(graph)


@pytest.mark.parametrize("name", ["g.pdf", "g", ".svg"])
def test_unknown_suffix(graph: Graph, tmp_path: Path, name: str) -> None:
    with pytest.raises(DagserveError, match=r"give a name that ends in \.svg, \.png, \.dot, \.mmd"):
        draw(graph, tmp_path / name)
    assert list(tmp_path.iterdir()) == []
