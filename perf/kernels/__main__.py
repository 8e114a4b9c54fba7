"""Times the operators' implementations on this GPU: ``python -m perf.kernels [--out FOLDER] [OPERATOR ...]``."""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

OPERATORS = ("attention", "shared_prefix_attention")
ROUNDS = 30
FLUSH_BYTES = 2**28
"""More than an H200's L2 cache: every call finds it cold."""


def measure(run: Callable[[], object]) -> float:
    """Microseconds of one replay of a CUDA graph of ``run``, L2 cold: the median of :data:`ROUNDS`."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return float(statistics.median(times))


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown: a line for each case and side, times as ratios to ours too."""
    lines = ["| operator | case | side | us | share of the floor |", "|---|---|---|---|---|"]
    for row in rows:
        share = f"{row['floor_us'] / row['us']:.0%}" if row.get("us") else "-"
        time = f"{row['us']:.1f}" if row.get("us") else str(row["note"] or "-")[:80]
        lines.append(f"| {row['op']} | {row['case']} | {row['side']} | {time} | {share} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="*", default=list(OPERATORS))
    parser.add_argument("--out", type=Path, default=Path("perf/results"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.operators:
        rows += importlib.import_module(f"perf.kernels.{name}").rows(measure)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit,
        "command": f"python -m perf.kernels {' '.join(options.operators)}",
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "kernels.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    (options.out / "kernels.md").write_text(f"# Kernels\n\n{facts}\n\n{table(rows)}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
