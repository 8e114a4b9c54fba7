"""The graph of a manifest: definitions, options, tensors, order."""

import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from dagserve.graph import Graph, Transfer, load_definition
from dagserve.passes import check_manifest
from dagserve.shapes import Dim, parse_type

ROOT = Path(__file__).parent.parent
RELEVANCE = ROOT / "manifests" / "relevance.yaml"


@pytest.fixture(name="graph", scope="module")
def relevance() -> Graph:
    return check_manifest(RELEVANCE, environment={})


def test_nodes_run_after_their_producers_in_manifest_order(graph: Graph) -> None:
    assert [node.name for node in graph.nodes] == ["tokenize", "resolve_labels", "score", "encode"]


def test_order_does_not_follow_the_file_where_it_cannot(tmp_path: Path) -> None:
    text = RELEVANCE.read_text()
    start, end = text.index("  encode:\n"), text.index("outputs: {response")
    encode = text[start:end]
    moved = text[:start] + text[end:]
    moved = moved.replace("nodes:\n", "nodes:\n" + encode)
    (tmp_path / "m.yaml").write_text(moved)
    graph = check_manifest(tmp_path / "m.yaml", environment={})
    assert next(iter(graph.manifest.nodes)) == "encode"
    assert [node.name for node in graph.nodes] == ["tokenize", "resolve_labels", "score", "encode"]


def test_tensors_have_types_producers_and_consumers(graph: Graph) -> None:
    offsets = graph.tensors["tokenize.cu_seqlens"]
    assert offsets.type == parse_type("i32[batch+1]")
    assert (offsets.node, offsets.port, offsets.device) == ("tokenize", "cu_seqlens", "cpu")
    assert [(c.node, c.port) for c in offsets.consumers] == [("score", "cu_seqlens"), ("encode", "cu_seqlens")]
    query = graph.tensors["query"]
    assert (query.node, query.type, query.max_bytes) == ("", parse_type("text"), 8192)
    assert dict(graph.outputs) == {"response": "encode.body"}


def test_capacities_are_bytes_at_the_bounds(graph: Graph) -> None:
    assert {name: tensor.capacity for name, tensor in graph.tensors.items()} == {
        "query": 8192,
        "items": 65536,
        "labels": 1024,
        "label_token_ids": 16 * 8,
        "apply_softmax": 1,
        "tokenize.tokens": 4096 * 8,
        "tokenize.cu_seqlens": 33 * 4,
        "resolve_labels.label_ids": 16 * 8,
        "score.scores": 32 * 16 * 4,
        "encode.body": graph.bounds["body_bytes"],
    }
    offsets = {"query": 2 * 8, "items": 33 * 8, "labels": 17 * 8}
    assert {n: t.offsets_bytes(graph.bounds) for n, t in graph.tensors.items() if t.type.dtype == "text"} == offsets
    assert sum(graph.memory_bytes) == sum(t.capacity for t in graph.tensors.values()) + sum(offsets.values())


def test_bounds_that_a_node_states(graph: Graph) -> None:
    encode = graph.node("encode")
    assert encode.interface is not None
    stated = encode.interface.bounds["J"]
    assert callable(stated)
    assert graph.bounds["body_bytes"] == stated({"B": 32, "N": 16}) == 8800
    assert "body_bytes" not in graph.manifest.bounds


def test_options_have_defaults_and_max_length_is_a_bound(graph: Graph, tmp_path: Path) -> None:
    expected = {
        "checkpoint": "models/SmolLM2-135M-Instruct.Q4_1.gguf",
        "reduce": "softmax",
        "values": None,
        "shared_prefix": "off",
        "max_length": 512,
    }
    assert dict(graph.node("score").options) == expected
    (tmp_path / "m.yaml").write_text(RELEVANCE.read_text().replace(" length: 512,", ""))
    assert check_manifest(tmp_path / "m.yaml", environment={}).node("score").options["max_length"] == 4096
    (tmp_path / "n.yaml").write_text(
        RELEVANCE.read_text().replace("reduce: softmax", 'reduce: softmax, max_length: "${m}"')
    )
    assert check_manifest(tmp_path / "n.yaml", {"m": "77"}, environment={}).node("score").options["max_length"] == 77


def test_local_symbols_are_the_manifest_s(graph: Graph) -> None:
    assert dict(graph.node("score").dims) == {"T": Dim("tokens"), "B": Dim("batch"), "N": Dim("labels")}
    assert graph.node("tokenize").binds == ("tokens",)
    assert graph.node("encode").binds == ("body_bytes",)
    assert graph.node("score").binds == graph.node("resolve_labels").binds == ()


def test_network_has_an_edge_for_each_connection(graph: Graph) -> None:
    edges = sorted((a, b, key[0], key[1]) for a, b, key in graph.network().edges(keys=True))
    assert edges == [
        ("resolve_labels", "score", "resolve_labels.label_ids", "label_ids"),
        ("score", "encode", "score.scores", "scores"),
        ("tokenize", "encode", "tokenize.cu_seqlens", "cu_seqlens"),
        ("tokenize", "score", "tokenize.cu_seqlens", "cu_seqlens"),
        ("tokenize", "score", "tokenize.tokens", "tokens"),
    ]


def test_graph_is_frozen(graph: Graph) -> None:
    with pytest.raises(FrozenInstanceError):
        graph.nodes = ()  # type: ignore[misc]
    for mapping in (
        graph.tensors,
        graph.bounds,
        graph.outputs,
        graph.node("score").options,
        graph.node("score").inputs,
    ):
        with pytest.raises(TypeError):
            mapping["x"] = 1  # type: ignore[index]


def test_devices_and_transfers_of_a_gpu_target(graph: Graph, tmp_path: Path) -> None:
    assert graph.transfers == ()
    (tmp_path / "m.yaml").write_text(RELEVANCE.read_text().replace("admission:", "  gpu: {device: cuda}\nadmission:"))
    on_gpu = check_manifest(tmp_path / "m.yaml", target="gpu", environment={})
    assert {node.name: node.device for node in on_gpu.nodes} == {
        "tokenize": "cpu", "resolve_labels": "cpu", "score": "cuda", "encode": "cpu"
    }  # fmt: skip
    assert on_gpu.tensors["score.scores"].device == "cuda"
    assert set(on_gpu.transfers) == {
        Transfer("apply_softmax", "cpu", "cuda"),
        Transfer("tokenize.tokens", "cpu", "cuda"),
        Transfer("tokenize.cu_seqlens", "cpu", "cuda"),
        Transfer("resolve_labels.label_ids", "cpu", "cuda"),
        Transfer("score.scores", "cuda", "cpu"),
    }
    assert check_manifest(tmp_path / "m.yaml", environment={}).target.name == "cpu"


def test_load_definition() -> None:
    from dagserve.nodes.prefill import Score

    assert load_definition("dagserve.nodes.prefill:Score") is Score
    assert load_definition("tokenize").engine == "cpu"


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("encode_score", "unknown op `encode_score`; .*did you mean `encode_scores`?"),
        ("nowhere.to:Be", "cannot import `nowhere.to`: No module named 'nowhere'"),
        (":X", "cannot import ``"),
        (".x:Y", "cannot import `.x`"),
        ("graph_definitions:NOT_A_DEFINITION", "no node definition `NOT_A_DEFINITION`; use one of Join, Model"),
        ("os:path", "`os` has no node definition `path`; name a class"),
        ("dagserve.interface:NodeDefinition", "has no node definition `NodeDefinition`"),
    ],
)
def test_load_definition_of_something_else(op: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_definition(op)


def test_a_module_that_fails_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_definitions.py").write_text("raise RuntimeError('no luck')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="cannot import `failing_definitions`: no luck"):
        load_definition("failing_definitions:X")


def test_checking_does_not_import_torch() -> None:
    code = (
        "import sys; from dagserve.passes import check_manifest;"
        "check_manifest('manifests/relevance.yaml', environment={});"
        "print([m for m in ('torch', 'matplotlib', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
