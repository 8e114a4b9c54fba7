"""The benchmark runs and says all it promises. No figure is checked: this machine's load is not the test's business."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_tokenizer import MULTILINGUAL, trained

from perf import serve_cpu, shared_prefix_cpu, text
from perf.costs import node_milliseconds
from perf.health_probe import summarize as summarize_probe
from perf.measure import Case, agreement, interleave, ratios
from perf.workload import make_workload

TEXTS = [f"a {word} product, {number} of them" for number in range(4) for word in ("good", "bad", "fine", "poor")]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


@pytest.fixture(scope="module")
def result(
    relevance_artifact: Path, tiny_model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("perf") / "serve_cpu.json"
    arguments = ["--quick", "--artifact", relevance_artifact, "--model", tiny_model, "--texts", texts, "--items", 3]
    serve_cpu.main([*map(str, arguments), "--json", str(output)])
    value: dict[str, Any] = json.loads(output.read_text())
    value["markdown"] = output.with_suffix(".md").read_text()
    return value


def test_quick_run_measures_every_side(result: dict[str, Any]) -> None:
    found = {(m["side"], m["concurrency"]): m for m in result["measurements"]}
    ours = {(side, c) for side in (serve_cpu.HTTP, serve_cpu.RUNTIME) for c in (1, 2)}
    assert set(found) == ours | {(serve_cpu.SINGLE, 1), (serve_cpu.BATCHED, 1)}
    for measured in found.values():
        assert measured["errors"] == 0
        assert measured["requests"] == 4
        assert 0 < measured["p50_ms"] <= measured["p99_ms"] <= measured["max_ms"]
    assert {r["over"] for r in result["ratios"]} == {serve_cpu.SINGLE, serve_cpu.BATCHED, serve_cpu.RUNTIME}
    assert all(difference < 1e-3 for difference in result["agreement"].values())


def test_quick_run_says_where_time_goes(result: dict[str, Any]) -> None:
    where = result["where"]
    assert set(where["nodes_ms"]) == {"tokenize", "resolve_labels", "score", "encode"}
    assert sum(where["nodes_ms"].values()) < where["handler_ms"]
    assert result["health"]["loaded"]["probes"] == 50
    assert "outlasted_the_probe" in result["health"]["load"]
    assert result["health"]["load"]["errors"] == 0
    assert result["start"]["help_imports_torch"] is False
    assert set(result["compile"]["packages"]) == {"score.backbone", "score.softmax", "score.probability"}


def test_quick_run_says_what_it_ran_on(result: dict[str, Any]) -> None:
    environment = result["environment"]
    assert set(environment) >= {"commit", "cpu", "cores", "command", "date", "versions"}
    assert environment["command"].startswith("python -m perf.serve_cpu --quick")
    assert result["workload"]["items"] == 3
    assert result["workload"]["prompt_tokens_a_request"] > 0
    for title in ("Throughput and latency", "Ratios", "/health", "Where the time goes", "Start and compile"):
        assert title in result["markdown"]


def test_the_shared_prefix_is_measured_beside_none(tiny_model: Path, tmp_path: Path) -> None:
    sizes = ["--texts", "3", "--tokens", "12", "--shared", "0", "5", "--rounds", "2"]
    shared_prefix_cpu.main([*sizes, "--model", str(tiny_model), "--json", str(tmp_path / "r.json")])
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row["shared"] for row in rows] == [0, 5]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["ms"]["off"] / row["ms"]["exact"])
        assert row["difference"] < 1e-4
    assert "| 5 |" in (tmp_path / "r.md").read_text()
    request = shared_prefix_cpu.make_request(3, 12, 5, 300)
    texts = np.array(request["tokens"]).reshape(3, 12)
    assert (texts[:, :5] == texts[0, :5]).all()
    assert len({*texts[:, 5].tolist()}) == 3


def outcome(qps: float, errors: int = 0) -> dict[str, Any]:
    times = dict.fromkeys(("mean_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms"), 1000 / qps)
    return {"qps": qps, **times, "cpu_share": 0.1, "requests": 2, "errors": {"503": errors} if errors else {}}


def test_rounds_are_interleaved_and_summed_up_by_medians() -> None:
    order: list[str] = []

    def case(side: str, rates: list[float]) -> Case:
        source = iter(rates)

        def run(requests: int) -> dict[str, Any]:
            if requests == 1:
                return outcome(1)
            order.append(side)
            return outcome(next(source), errors=1 if side == "b" else 0)

        return Case(side, 1, run)

    cases = [case("a", [10, 1, 4]), case("b", [2, 2, 100])]
    measured = interleave(cases, 3, lambda _: 2, lambda _: None, lambda _: nullcontext())
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [m["qps"] for m in measured] == [4, 2]
    assert [m["errors"] for m in measured] == [0, 3]
    assert [(r["concurrency"], r["qps_ratio"]) for r in ratios(measured, "a", ["b"])] == [("1", 2), ("best", 2)]


def test_other_scores_stop_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = {
        "ours": {"scores": [[0.25, 0.75]], "usage": {"prompt_tokens": 4}},
        "near": {"scores": [[0.2501, 0.7499]], "usage": {"prompt_tokens": 4}},
        "far": {"scores": [[0.35, 0.65]], "usage": {"prompt_tokens": 4}},
        "nan": {"scores": [[math.nan, 0.75]], "usage": {"prompt_tokens": 4}},
        "tokens": {"scores": [[0.25, 0.75]], "usage": {"prompt_tokens": 5}},
    }
    monkeypatch.setattr("perf.measure.post_scores", lambda url, _: replies[url])
    agreed = agreement({"ours": "ours", "near": "near"}, [b"{}"], "ours")
    assert agreed["largest_difference"]["near"] == pytest.approx(1e-4)
    for other in ("far", "nan", "tokens"):
        with pytest.raises(SystemExit, match=other):
            agreement({"ours": "ours", other: other}, [b"{}"], "ours")


def test_workload_repeats_few_texts_and_varies_many(texts: Path, tmp_path: Path) -> None:
    many = make_workload(3, texts)
    assert len(many.bodies) == len(TEXTS) // 3
    assert len(set(many.bodies)) == len(many.bodies)
    few = json.loads(make_workload(40, texts).bodies[0])["items"]
    assert few == (TEXTS * 3)[:40]
    (tmp_path / "empty").write_text("\n \n")
    with pytest.raises(SystemExit, match="holds no text"):
        make_workload(3, tmp_path / "empty")


def test_node_milliseconds_are_means_of_runs_between_scrapes() -> None:
    change = {
        'dagserve_node_runs_total{engine="aoti",node="score"}': 4.0,
        'dagserve_node_seconds_total{engine="aoti",node="score"}': 0.1,
        'dagserve_node_runs_total{engine="aoti",node="idle"}': 0.0,
        'dagserve_node_seconds_total{engine="aoti",node="idle"}': 0.0,
    }
    assert node_milliseconds(change) == {"score": pytest.approx(25.0)}


def test_probe_summary_is_in_milliseconds() -> None:
    summary = summarize_probe([0.001] * 99 + [0.5])
    assert summary["probes"] == 100
    assert summary["p50_ms"] == pytest.approx(1.0)
    assert summary["max_ms"] == pytest.approx(500.0)


def test_text_compares_ids_before_it_times(tmp_path: Path) -> None:
    document = trained(digits=True)
    native = text.Native(document, tmp_path)
    known = text.sides(document, native)
    chosen = {name: known[name] for name in ("dagserve", "tokenizers, single", "tokenizers, batch")}
    measured = text.measure([t[:50] for t in MULTILINGUAL], chosen, 1)
    assert measured["other_ids"] == []
    assert all(side["mb_s"] > 0 for side in measured["sides"].values())
    wrong = chosen | {"dagserve": (native.run, lambda texts: [[0] for _ in texts])}
    assert text.measure(["some text"], wrong, 1)["other_ids"] == ["dagserve"]
