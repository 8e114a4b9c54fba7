"""The installed command: every subcommand as a user runs it, and its exit statuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from conftest import MANIFEST

from dagserve.bench import run_bench
from dagserve.errors import DagserveError

REQUEST = {"query": "Is it good?", "items": ["a good film", "bad", "日本語 \u0000"], "apply_softmax": True}


def dagserve(*arguments: object, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "dagserve.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, input=stdin, timeout=300)


@pytest.fixture
def request_file(tmp_path: Path) -> Path:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(REQUEST))
    return path


@contextmanager
def served(artifact: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process on a free port, and its address."""
    command = [sys.executable, "-m", "dagserve.cli", "serve", str(artifact), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert " on http://127.0.0.1:" in line, process.stderr
            yield process, line.split()[-1]
        finally:
            process.kill()


def test_help_imports_neither_torch_nor_the_server() -> None:
    code = (
        "import sys; from dagserve.cli import app; from typer.testing import CliRunner;"
        "r = CliRunner().invoke(app, ['--help']); assert r.exit_code == 0 and 'compile' in r.output;"
        "print([m for m in ('torch', 'numpy', 'fastapi', 'networkx', 'dagserve.manifest') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_check_says_ok_or_every_mistake() -> None:
    good = dagserve("check", MANIFEST)
    assert good.returncode == 0
    assert b"ok (4 nodes" in good.stdout
    bad = dagserve("check", MANIFEST.parent / "invalid" / "cycle.yaml")
    assert bad.returncode == 1
    assert b"->" in bad.stderr
    assert bad.stderr.startswith(str(MANIFEST.parent / "invalid" / "cycle.yaml:").encode())
    assert dagserve("check", "nowhere.yaml").returncode == 1
    unknown = dagserve("check", MANIFEST, "--target", "h100")
    assert unknown.returncode == 1
    assert dagserve("check", MANIFEST, "--set", "model").returncode == 2


@pytest.mark.parametrize("suffix", [".svg", ".png", ".dot", ".mmd"])
def test_graph_draws(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"graph{suffix}"
    done = dagserve("graph", MANIFEST, "-o", path)
    assert done.returncode == 0, done.stderr
    content = path.read_bytes()
    assert len(content) > 300
    if suffix != ".png":
        assert b"tokenize.tokens" in content
        assert b"i64[tokens]" in content
    assert dagserve("graph", MANIFEST, "-o", tmp_path / "graph.bmp").returncode == 1


def test_compile_reports_and_inspect_prints(tiny_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "a"
    first = dagserve("compile", MANIFEST, "--set", f"model={tiny_model}", "-o", output)
    assert first.returncode == 0, first.stderr
    assert b"compiled" in first.stdout
    second = dagserve("compile", MANIFEST, "--set", f"model={tiny_model}", "-o", output)
    assert b"is up to date" in second.stdout
    shown = dagserve("inspect", output, "--verify")
    assert shown.returncode == 0
    for part in (b"tensors of one context", b"total", b"runtime", b"build", b"validation", b"score.backbone"):
        assert part in shown.stdout
    plan = json.loads(dagserve("inspect", output, "--json").stdout)
    assert plan["name"] == "relevance"
    (output / "manifest.yaml").write_bytes((output / "manifest.yaml").read_bytes().replace(b"batch", b"betch"))
    changed = dagserve("inspect", output, "--verify")
    assert changed.returncode == 1
    assert b"manifest.yaml" in changed.stderr
    missing = dagserve("compile", MANIFEST, "--set", "model=/nowhere", "-o", output)
    assert missing.returncode == 1
    assert b"--set model=PATH" in missing.stderr


def test_run_the_reference_and_the_service_give_the_same_bytes(relevance_artifact: Path, request_file: Path) -> None:
    native = dagserve("run", relevance_artifact, "-i", request_file)
    assert native.returncode == 0, native.stderr
    assert native.stdout.startswith(b'{"scores":[[')
    assert dagserve("run", relevance_artifact, "-i", request_file, "--reference").stdout == native.stdout
    assert dagserve("run", relevance_artifact, "-i", "-", stdin=request_file.read_bytes()).stdout == native.stdout
    with served(relevance_artifact) as (_, url):
        assert httpx.post(f"{url}/v1/score", json=REQUEST, trust_env=False).content + b"\n" == native.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", b"not valid JSON"),
        (b"[]", b"JSON object"),
        (b"{}", b"query is missing"),
        (b'{"query": "q", "items": [1]}', b"items[0]"),
    ],
)
def test_run_refuses_a_bad_request(content: bytes, message: bytes, relevance_artifact: Path) -> None:
    done = dagserve("run", relevance_artifact, "-i", "-", stdin=content)
    assert done.returncode == 2
    assert message in done.stderr
    assert b"Traceback" not in done.stderr


def test_what_is_no_artifact_is_refused(tmp_path: Path) -> None:
    for command in (("run", tmp_path, "-i", "-"), ("inspect", tmp_path), ("serve", tmp_path)):
        done = dagserve(*command, stdin=b"{}")
        assert done.returncode == 1
        assert b"make one with `dagserve compile`" in done.stderr


def test_a_port_in_use_is_an_error_that_says_so(relevance_artifact: Path) -> None:
    with served(relevance_artifact) as (_, url):
        done = dagserve("serve", relevance_artifact, "--port", url.rpartition(":")[2])
    assert done.returncode == 1
    assert b"choose another --host or --port" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains(number: signal.Signals, relevance_artifact: Path) -> None:
    """Requests that were admitted are answered, and the exit status is 0."""
    large = {"query": "q", "items": ["\x01" * 100] * 32}
    replies: list[int] = []
    with served(relevance_artifact) as (process, url):

        def send() -> None:
            replies.append(httpx.post(f"{url}/v1/score", json=large, timeout=60, trust_env=False).status_code)

        threads = [threading.Thread(target=send) for _ in range(6)]
        for thread in threads:
            thread.start()
        metrics = ""
        while "dagserve_requests_admitted_total 8.0" not in metrics:  # six, and two of the warm-up
            metrics = httpx.get(f"{url}/metrics", trust_env=False).text
        process.send_signal(number)
        for thread in threads:
            thread.join()
        assert process.wait(30) == 0
    assert replies == [200] * 6


def test_bench_measures_and_writes(relevance_artifact: Path, request_file: Path, tmp_path: Path) -> None:
    result_file = tmp_path / "result.json"
    lines = tmp_path / "requests.jsonl"
    lines.write_text(f"{json.dumps(REQUEST)}\n\n{json.dumps({**REQUEST, 'items': []})}\n")
    with served(relevance_artifact) as (_, url):
        score = f"{url}/v1/score"
        done = dagserve("bench", score, "-r", request_file, "-n", 30, "-c", 3, "--json", result_file)
        assert done.returncode == 0, done.stderr
        half = run_bench(score, lines.read_bytes().split(b"\n\n"), concurrency=2, requests=20)
        timed = run_bench(score, [request_file.read_bytes()], concurrency=2, duration_s=0.3, warmup=1)
    result = json.loads(result_file.read_text())
    assert (result["requests"], result["errors"], result["concurrency"]) == (30, {}, 3)
    assert 0 < result["p50_ms"] <= result["p99_ms"] <= result["max_ms"]
    assert result["qps"] == pytest.approx(30 / result["wall_s"])
    assert (half.requests, half.errors) == (20, {"400": 10})
    assert timed.requests > 0
    assert timed.wall_s >= 0.3


def test_bench_says_when_nothing_answers_or_nothing_is_good(relevance_artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(DagserveError, match="nothing answers"):
        run_bench("http://127.0.0.1:9/v1/score", [b"{}"], requests=1)
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    with served(relevance_artifact) as (_, url):
        assert dagserve("bench", f"{url}/v1/score", "-r", bad, "-n", 3).returncode == 1
    assert dagserve("bench", "http://127.0.0.1:9", "-r", tmp_path / "none.json").returncode == 1
    bad.write_text("{")
    assert b"not JSON" in dagserve("bench", "http://127.0.0.1:9", "-r", bad).stderr
