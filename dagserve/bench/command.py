"""What ``dagserve bench`` does: read bodies, run, print."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dagserve.bench.load import BenchResult, run_bench
from dagserve.errors import DagserveError

TABLE_WIDTH = 120


def bench(
    url: str,
    request: Path,
    concurrency: int = 1,
    requests: int | None = None,
    duration_s: float | None = None,
    warmup: int = 5,
    json_path: Path | None = None,
) -> int:
    """Runs the load and prints a table; returns 0, or 1 when no request succeeded.

    Raises:
        DagserveError: the request file cannot be read, or nothing answers.
    """
    result = run_bench(url, read_bodies(request), concurrency, requests, duration_s, warmup)
    console = Console()
    console.print(result_table(result), width=max(console.width, TABLE_WIDTH), crop=False, no_wrap=True)
    if json_path is not None:
        values = {k: None if v != v else v for k, v in result.to_json().items()}  # no success: no latency
        json_path.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n")
    return 0 if result.qps > 0 else 1


def read_bodies(path: Path) -> list[bytes]:
    """One body from a ``.json`` file, or one a line from a ``.jsonl`` file.

    Raises:
        DagserveError: it is missing, empty, or not JSON.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DagserveError(f"cannot read {path}: {error.strerror}") from error
    bodies = [line for line in content.splitlines() if line.strip()] if path.suffix == ".jsonl" else [content]
    for number, body in enumerate(bodies, 1):
        try:
            json.loads(body)
        except ValueError as error:
            raise DagserveError(f"{path}: body {number} is not JSON: {error}") from error
    if not bodies:
        raise DagserveError(f"{path} holds no request; write one JSON object a line")
    return bodies


def result_table(result: BenchResult) -> Table:
    """The result as a table of one row."""
    table = Table(title=result.url, title_justify="left")
    cells = {
        "in flight": str(result.concurrency),
        "requests": str(result.requests),
        "errors": ", ".join(f"{n} x {kind}" for kind, n in result.errors.items()) or "0",
        "QPS": f"{result.qps:.1f}",
        "mean ms": f"{result.mean_ms:.1f}",
        "P50 ms": f"{result.p50_ms:.1f}",
        "P90 ms": f"{result.p90_ms:.1f}",
        "P99 ms": f"{result.p99_ms:.1f}",
        "max ms": f"{result.max_ms:.1f}",
        "client CPU": f"{result.cpu_share:.0%}",
    }
    for name in cells:
        table.add_column(name, justify="right")
    table.add_row(*cells.values())
    return table
