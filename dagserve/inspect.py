"""What ``dagserve inspect`` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dagserve.artifact import read_plan
from dagserve.build.keys import file_digest
from dagserve.errors import ArtifactError

PIPE_WIDTH = 240
"""Columns of a table that goes to a file or another program."""


def verify_digests(artifact: Path) -> int:
    """Compares every file with the digest taken at compile time; returns how many there are.

    Raises:
        ArtifactError: a file has changed.
    """
    digests = read_plan(artifact)["fingerprint"]["digests"]
    changed = [name for name, value in digests.items() if file_digest(artifact / name) != value]
    if changed:
        raise ArtifactError(
            f"{artifact}: changed since it was compiled: {', '.join(changed)}; compile the manifest again"
        )
    return len(digests)


def print_plan(artifact: Path, as_json: bool) -> None:
    """Prints an artifact's plan: as JSON, or as tables of nodes, tensors, packages, memory and descriptions."""
    plan = read_plan(artifact)
    console = Console(soft_wrap=True)
    if not console.is_terminal:  # a pipe has no width: names stay whole
        console.width = PIPE_WIDTH
    if as_json:
        console.print_json(json.dumps(plan))
        return
    console.print(f"{plan['name']} for target {plan['target']} ({plan['fingerprint']['precision']}), {artifact}")
    for table in (_nodes(plan), _tensors(plan), _packages(plan), _memory(plan)):
        console.print(table)
    for name, description in plan["descriptions"].items():
        console.print(f"[bold]{name}[/bold]")
        for line in _lines(description):
            console.print(f"  {line}", markup=False, highlight=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(
            column, justify="right" if column in ("bytes", "seconds", "constants") else "left", overflow="fold"
        )
    return table


def _nodes(plan: Mapping[str, Any]) -> Table:
    table = _table("nodes, in the order they run", "node", "engine", "op", "inputs", "outputs")
    names = [t["name"] for t in plan["tensors"]]
    for node in plan["nodes"]:
        inputs = [names[i] for i in node["inputs"].values() if i is not None]
        outputs = [names[i] for i in node["outputs"].values()]
        table.add_row(node["name"], node["engine"], node["op"], ", ".join(inputs), ", ".join(outputs))
    return table


def _tensors(plan: Mapping[str, Any]) -> Table:
    table = _table("tensors", "tensor", "type", "device", "bytes")
    for tensor in plan["tensors"]:
        kind = f"{tensor['dtype']}[{','.join(tensor['shape'])}]" if tensor["shape"] else tensor["dtype"]
        table.add_row(tensor["name"], kind, tensor["device"], f"{tensor['capacity']:,}")
    return table


def _packages(plan: Mapping[str, Any]) -> Table:
    table = _table("packages", "package", "constants", "bytes", "seconds")
    for package in plan["packages"]:
        seconds = sum(package["seconds"].values())
        size = plan["files"][package["path"]]
        table.add_row(package["name"], str(len(package["constants"])), f"{size:,}", f"{seconds:.1f}")
    return table


def _memory(plan: Mapping[str, Any]) -> Table:
    table = _table("memory", "what", "bytes")
    memory = plan["memory"]
    table.add_row("tensors of one context", f"{memory['context']:,}")
    table.add_row(f"{memory['contexts']} contexts", f"{memory['contexts'] * memory['context']:,}")
    table.add_row(f"{memory['slots']} request slots", f"{memory['slots'] * memory['slot']:,}")
    for node in plan["nodes"]:
        for name, size in node.get("state", {}).items():
            table.add_row(f"{node['name']}: {name} of one request", f"{size:,}")
    table.add_row("weights", f"{memory['weights']:,}")
    table.add_row("total", f"{memory['total']:,}")
    return table


def _lines(value: Any, indent: str = "") -> Iterator[str]:
    """A description as indented lines; long lists and tables of parameters are cut with their length."""
    if not isinstance(value, Mapping):
        yield f"{indent}{json.dumps(value)[:160]}"
        return
    for name, item in value.items():
        if isinstance(item, Mapping) and item:
            yield f"{indent}{name}:"
            yield from _lines(item, indent + "  ")
        elif isinstance(item, list) and item and isinstance(item[0], Mapping) and len(item[0]) > 8:
            first = next(iter(item[0].items()))
            yield f"{indent}{name}: {len(item[0])} entries, such as {first[0]} <- {first[1]}"
        else:
            yield f"{indent}{name}: {json.dumps(item)}"
