"""The result as tables: printed by rich, and the same as Markdown."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Grid:
    """One table: a title, column names, rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def print(self, console: Console) -> None:
        """Prints it as a rich table."""
        table = Table(title=self.title, title_justify="left")
        for number, name in enumerate(self.columns):
            table.add_column(name, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)

    def markdown(self) -> str:
        """The same as a Markdown section."""
        align = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = [f"| {' | '.join(cells)} |" for cells in (self.columns, align, *self.rows)]
        return "\n".join([f"## {self.title}", "", *lines, ""])


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """A result and its seconds."""
    started = time.perf_counter()
    return run(), time.perf_counter() - started


def grids(result: Mapping[str, Any]) -> list[Grid]:
    """All tables of a result."""
    found = [load_grid(result), ratio_grid(result["ratios"]), health_grid(result["health"])]
    if result["where"]:
        found.append(where_grid(result["where"]))
    return [*found, start_grid(result)]


def load_grid(result: Mapping[str, Any]) -> Grid:
    """QPS and latency of every side."""
    workload = result["workload"]
    title = (
        f"Throughput and latency: {workload['items']} texts, "
        f"{workload['prompt_tokens_a_request']:.0f} tokens a request; median of {result['settings']['rounds']} rounds"
    )
    columns = ("side", "in flight", "QPS", "mean ms", "P50 ms", "P99 ms", "requests", "errors")
    rows = [
        (
            m["side"],
            str(m["concurrency"]),
            f"{m['qps']:.2f}",
            *(f"{m[name]:.1f}" for name in ("mean_ms", "p50_ms", "p99_ms")),
            str(m["requests"]),
            str(m["errors"]),
        )
        for m in result["measurements"]
    ]
    return Grid(title, columns, tuple(rows))


def ratio_grid(ratios: Sequence[Mapping[str, Any]]) -> Grid:
    """One side over another."""
    columns = ("ratio of medians", "in flight", "QPS", "mean", "P50", "P99")
    names = ("qps_ratio", "mean_ms_ratio", "p50_ms_ratio", "p99_ms_ratio")
    rows = [(f"{r['side']} / {r['over']}", r["concurrency"], *(f"{r[n]:.2f}" for n in names)) for r in ratios]
    return Grid("Ratios: above 1 is better for QPS, below 1 for latency", columns, tuple(rows))


def health_grid(health: Mapping[str, Any]) -> Grid:
    """``/health`` idle and loaded."""
    load = health["load"]
    title = f"/health every {health['interval_ms']:.0f} ms; load: {load['concurrency']} requests in flight"
    rows = [
        (name, str(h["probes"]), f"{h['p50_ms']:.2f}", f"{h['p99_ms']:.2f}", f"{h['max_ms']:.2f}")
        for name, h in (("idle", health["idle"]), ("under load", health["loaded"]))
    ]
    return Grid(title, ("endpoint", "probes", "P50 ms", "P99 ms", "max ms"), tuple(rows))


def where_grid(where: Mapping[str, Any]) -> Grid:
    """Mean time of a request by part, outermost first."""
    client = where["client_ms"]
    parts = {
        "client, whole request": client,
        "outside the handler: client, loopback, uvicorn, routing": where["outside_handler_ms"],
        "handler without nodes: decode, submit, wait, encode": where["handler_without_nodes_ms"],
        **{f"node {name}": value for name, value in where["nodes_ms"].items()},
        "Engine.run without HTTP": where["engine_run_ms"],
        "difference made by HTTP": where["http_ms"],
    }
    rows = tuple((name, f"{value:.3f}", f"{value / client:.2%}") for name, value in parts.items())
    return Grid("Where the time goes, one request in flight", ("part", "mean ms", "share"), rows)


def start_grid(result: Mapping[str, Any]) -> Grid:
    """Import, start and compile times."""
    start, compiled = result["start"], result["compile"]
    torch = "imports torch" if start["help_imports_torch"] else "without torch"
    rows = [
        (f"dagserve --help ({torch})", f"{start['help_s']:.3f}"),
        ("server start to /ready", f"{start['ready_s']:.2f}"),
    ]
    for name, seconds in compiled["packages"].items():
        rows += [(f"{stage} {name}", f"{value:.1f}") for stage, value in seconds.items()]
    if "cold_s" in compiled:
        rows += [
            ("dagserve compile, empty cache", f"{compiled['cold_s']:.1f}"),
            ("dagserve compile, nothing changed", f"{compiled['unchanged_s']:.2f}"),
        ]
    return Grid("Start and compile", ("what", "seconds"), tuple(rows))


def write_result(heading: str, result: Mapping[str, Any], tables: Sequence[Grid], path: Path) -> None:
    """Prints the tables, and writes the result as JSON and the tables as Markdown beside it.

    ``result["environment"]`` is where it was measured, as ``describe_environment`` says it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    head = [f"# {heading}", "", *facts(result["environment"]), ""]
    path.with_suffix(".md").write_text("\n".join([*head, *(table.markdown() for table in tables)]))
    for table in tables:
        table.print(Console())


def facts(where: Mapping[str, Any]) -> list[str]:
    """An environment as Markdown list items: date, commit, command, machine, versions."""
    commit = f"{where['commit'] or 'unknown'}{' with uncommitted changes' if where['uncommitted_changes'] else ''}"
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    busy = "unknown" if where["busy_cores_before"] is None else f"{where['busy_cores_before']:.1f}"
    return [
        f"- Date: {where['date']}",
        f"- Commit: {commit}",
        f"- Command: `{where['command']}`",
        f"- Machine: {where['cpu']}, {where['cores']} cores, busy before: {busy}",
        f"- Versions: {versions}",
    ]


def markdown(result: Mapping[str, Any]) -> str:
    """The whole result as a Markdown page."""
    lines = [
        *facts(result["environment"]),
        f"- Model: {result['workload']['model']}, {result['workload']['precision']}",
        *(f"- Largest difference of a score from {s}: {d:.1e}" for s, d in result["agreement"].items()),
    ]
    return "\n".join(["# Serving on a CPU", "", *lines, "", *(grid.markdown() for grid in grids(result))])
