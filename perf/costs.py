"""What a request, a start and a build cost, beside throughput and latency."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from dagserve.artifact import read_plan
from perf.environment import ROOT
from perf.health_probe import INTERVAL_S
from perf.processes import Worker, server, timed

RAMP_S = 2.0
MANIFEST = ROOT / "manifests" / "relevance.yaml"
HELP = """
import sys
sys.argv = ["dagserve", "--help"]
from dagserve.cli import app
app(standalone_mode=False)
print("torch" in sys.modules, file=sys.stderr)
"""


def scrape(url: str) -> dict[str, float]:
    """``/metrics`` by sample, such as ``dagserve_node_seconds_total{engine="aoti",node="score"}``."""
    text = httpx.get(url + "/metrics", timeout=60, trust_env=False).text
    samples = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def node_milliseconds(change: Mapping[str, float]) -> dict[str, float]:
    """Mean milliseconds of each node's run between two scrapes."""
    found = (re.fullmatch(r'dagserve_node_runs_total(\{engine=".*",node="(.*)"\})', sample) for sample in change)
    nodes = {match[2]: match[1] for match in found if match}
    runs = {name: change[f"dagserve_node_runs_total{labels}"] for name, labels in nodes.items()}
    seconds = {name: change[f"dagserve_node_seconds_total{labels}"] for name, labels in nodes.items()}
    return {name: 1000 * seconds[name] / runs[name] for name in nodes if runs[name]}


def where_time_goes(
    change: Mapping[str, float], measurements: Sequence[Mapping[str, Any]], http: str, runtime: str
) -> dict[str, Any]:
    """Mean milliseconds of a request with one in flight, from the client inwards.

    ``change`` is the difference of ``/metrics`` over the very requests that the client timed.
    """
    alone = {m["side"]: m["mean_ms"] for m in measurements if m["concurrency"] == 1}
    if http not in alone or runtime not in alone:
        return {}
    count = change["dagserve_http_request_seconds_count"]
    handler = 1000 * change["dagserve_http_request_seconds_sum"] / count
    nodes = node_milliseconds(change)
    return {
        "client_ms": alone[http],
        "handler_ms": handler,
        "nodes_ms": nodes,
        "outside_handler_ms": alone[http] - handler,
        "handler_without_nodes_ms": handler - sum(nodes.values()),
        "engine_run_ms": alone[runtime],
        "http_ms": alone[http] - alone[runtime],
        "http_share": (alone[http] - alone[runtime]) / alone[http],
    }


def measure_health(url: str, load: Worker, seconds: float, concurrency: int) -> dict[str, Any]:
    """Latency of ``/health``, idle and while ``concurrency`` scoring requests are in flight."""
    idle = run_probe(url, min(seconds, 2.0))
    load.send(url=url + "/v1/score", concurrency=concurrency, duration_s=seconds + 2 * RAMP_S)
    wait_for_load(url, concurrency)
    started = time.perf_counter()
    loaded = run_probe(url, seconds)
    probed_s = time.perf_counter() - started
    result = load.receive()
    return {
        "interval_ms": INTERVAL_S * 1000,
        "idle": idle,
        "loaded": loaded,
        "load": {
            "concurrency": concurrency,
            "qps": result["qps"],
            "errors": sum(result["errors"].values()),
            "outlasted_the_probe": result["wall_s"] > probed_s,
        },
    }


def wait_for_load(url: str, concurrency: int) -> None:
    """Returns once ``concurrency`` requests were seen in flight at a time, or :data:`RAMP_S` after the first try."""
    end = time.perf_counter() + RAMP_S
    while time.perf_counter() < end and scrape(url)['dagserve_tier_used{tier="in_flight"}'] < concurrency:
        time.sleep(0.1)


def run_probe(url: str, seconds: float) -> dict[str, Any]:
    """One :mod:`perf.health_probe` process."""
    command = [sys.executable, "-m", "perf.health_probe", url + "/health", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the probe failed: {done.stderr.strip()}")
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def measure_start(artifact: Path, repeats: int, help_repeats: int) -> dict[str, Any]:
    """Wall seconds of ``dagserve --help`` and of a server's start to its first good ``/ready``; medians."""
    script = Path(sys.executable).with_name("dagserve")
    command = [str(script)] if script.exists() else [sys.executable, "-m", "dagserve.cli"]
    help_s = [timed([*command, "--help"]) for _ in range(help_repeats)]
    starts = []
    for _ in range(repeats):
        with server("dagserve.cli", ["serve", str(artifact), "--port", "0"], "/ready") as running:
            starts.append(running.start_s)
    imported = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    return {
        "help_s": statistics.median(help_s),
        "help_rounds_s": help_s,
        "help_imports_torch": imported.stderr.split()[-1] == "True",
        "ready_s": statistics.median(starts),
        "ready_rounds_s": starts,
    }


def package_seconds(artifact: Path) -> dict[str, dict[str, float]]:
    """Seconds each package took to build, from the plan; packages are built beside one another."""
    return {package["name"]: package["seconds"] for package in read_plan(artifact)["packages"]}


def measure_compile(model: str) -> dict[str, float]:
    """Wall seconds of a compile with an empty cache, then of the same command again."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"DAGSERVE_CACHE": str(Path(folder) / "cache")}
        command = compile_command(model, Path(folder) / "relevance.cpu")
        cold = timed(command, environment)
        return {"cold_s": cold, "unchanged_s": timed(command, environment), "cores": len(os.sched_getaffinity(0))}


def compile_command(model: str, output: Path) -> list[str]:
    """``dagserve compile`` of the demo's manifest."""
    settings = ["--set", f"model={model}", "-o", str(output)]
    return [sys.executable, "-m", "dagserve.cli", "compile", str(MANIFEST), *settings]
