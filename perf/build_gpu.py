"""How long a compile for a GPU takes at true shapes: ``python -m perf.build_gpu [--layers N]``, on that GPU.

Writes random models, compiles ``perf/manifests`` for the target ``h200`` with an empty cache and again with a full one,
and answers one request of each with the Python artifact runtime.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dagserve.artifact import read_plan
from dagserve.build.cache import BuildCache
from dagserve.compiler import compile_manifest
from dagserve.runtime import ReferenceRuntime
from perf.environment import ROOT, describe_environment
from perf.models import write_model
from perf.report import Grid

WORKLOADS = {"scoring": "qwen3-0.6b", "beams": "qwen2.5-0.5b"}
REQUESTS = {
    "scoring": {"query": "q" * 40, "items": ["i" * 67] * 15},
    "beams": {"prompts": ["p" * 50], "n": 10},
}


def build(name: str, layers: int | None, folder: Path, target: str, workers: int | None) -> dict[str, Any]:
    """Seconds and sizes of one workload."""
    model = folder / name
    write_model(model, WORKLOADS[name], layers)
    manifest, cache = ROOT / "perf" / "manifests" / f"{name}.yaml", BuildCache(folder / "cache")
    seconds = []
    for attempt in ("first", "again"):
        output = folder / f"{name}.{attempt}"
        done = compile_manifest(manifest, {"model": str(model)}, target, output, cache=cache, workers=workers)
        seconds.append(done.seconds)
    plan = read_plan(output)
    runtime = ReferenceRuntime(output)
    started = time.perf_counter()
    reply = json.loads(runtime.run_body(json.dumps(REQUESTS[name]).encode()))
    return {
        "workload": name,
        "model": WORKLOADS[name],
        "layers": layers,
        "compile_s": seconds[0],
        "again_s": seconds[1],
        "packages": {p["name"]: p["seconds"] for p in plan["packages"]},
        "bytes": {n: size for n, size in plan["files"].items() if n.startswith("packages/") or n == "weights.bin"},
        "operators": plan["descriptions"]["build"]["operators"],
        "checks": plan["descriptions"]["validation"]["checks"],
        "first_request_s": time.perf_counter() - started,
        "reply": sorted(reply),
    }


def grid(results: list[dict[str, Any]]) -> Grid:
    """A row for each workload, then for each of its packages."""
    rows = []
    for r in results:
        size = sum(n for name, n in r["bytes"].items() if name.startswith("packages/")) / 1e6
        rows.append((r["workload"], f"{r['compile_s']:.0f}", f"{r['again_s']:.1f}", f"{size:.1f}", ""))
        for name, s in r["packages"].items():
            error = max(check["error"] for check in r["checks"][name].values())
            rows.append((f"- {name}", f"{s['export'] + s['compile']:.0f}", "", "", f"{error:.1e}"))
    return Grid("Compile for a GPU", ("what", "seconds", "from the cache", "MB of packages", "from eager"), tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", dest="workloads", action="append", choices=WORKLOADS, help="[all]")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--json", type=Path, default=ROOT / "perf" / "results" / "build_gpu.json")
    options = parser.parse_args()
    environment = describe_environment("perf.build_gpu", [])
    environment["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else environment["cpu"]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.workloads or WORKLOADS:
            results.append(build(name, options.layers, Path(folder), options.target, options.workers))
            options.json.write_text(json.dumps({**environment, "results": results}, indent=1) + "\n")
    facts = [f"- {key}: {environment[key]}" for key in ("date", "commit", "command", "device", "versions")]
    options.json.with_suffix(".md").write_text(
        "\n".join(["# Building for a GPU", "", *facts, "", grid(results).markdown()])
    )
    grid(results).print(Console())


if __name__ == "__main__":
    main()
