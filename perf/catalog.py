"""A large catalog: the size of its tables, and the time to build, to load, and to take a request's lists away.

Items are random semantic ids of three to five tokens, as many of each level as ``--codes`` says. Each has two
attributes: a region of eight, and whether it is in stock, which half of them are.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from dagserve._native import CpuNode
from dagserve.build.catalogs import build_tables
from dagserve.catalog import Section
from dagserve.nodes.catalog import Catalog
from perf.environment import describe_environment
from perf.report import Grid, timed, write_result

LISTS = ("allow", "deny", "allow_where", "deny_where")
RESULT = Path(__file__).parent / "results" / "catalog.json"
DEPTH = 5
LISTED = 1000
REGIONS = 8
ROUNDS = 50


def write_items(path: Path, count: int, codes: int) -> None:
    """``count`` items; a level's tokens are numbers of their own."""
    source = np.random.default_rng(0)
    lengths = source.integers(3, DEPTH + 1, count)
    tokens = source.integers(0, codes, (count, DEPTH)) + codes * np.arange(DEPTH)
    region, stock = source.integers(0, REGIONS, count), source.integers(0, 2, count)
    with path.open("w") as stream:
        for i in range(count):
            path, there = tokens[i, : lengths[i]].tolist(), "true" if stock[i] else "false"
            stream.write(f'{{"item":"sku{i:07d}","tokens":{path},"region":"r{region[i]}","stock":{there}}}\n')


def measure(folder: Path, count: int, codes: int) -> dict[str, Any]:
    """All figures."""
    write_items(folder / "items.jsonl", count, codes)
    limits: dict[str, Any] = {"max_items": count, "max_depth": DEPTH, "max_children": codes}
    limits |= {"vocab_size": codes * DEPTH, "attributes": ["region:text", "stock:bool"]}
    built, build_s = timed(lambda: build_tables(folder / "items.jsonl", limits, None))
    content = built.file
    (folder / "c.bin").write_bytes(content)
    interface = Catalog.interface({**limits}, {})
    bounds: Any = interface.bounds
    inputs = [(name, "text", [LISTED], 64 * LISTED) for name in LISTS]
    outputs = [(p.name, p.type.dtype, [d.size(bounds) for d in p.type.shape], 0) for p in interface.outputs]
    config = {"tables": "c.bin", **limits}
    loads = [timed(lambda: CpuNode("catalog", config, inputs, outputs, str(folder))) for _ in range(3)]
    node = loads[0][0]
    listed = [f"sku{i:07d}" for i in np.random.default_rng(1).integers(0, count, LISTED)]
    requests: dict[str, dict[str, list[str]]] = {
        "no list": {},
        "deny 100": {"deny": listed[:100]},
        f"deny {LISTED}": {"deny": listed},
        f"allow {LISTED}": {"allow": listed},
        "allow stock (half)": {"allow_where": ["stock=true"]},
        "deny stock (half)": {"deny_where": ["stock=true"]},
        "allow two regions in stock (an eighth)": {"allow_where": ["region=r0", "region=r1", "stock=true"]},
        f"allow {LISTED} in stock": {"allow": listed, "allow_where": ["stock=true"]},
    }
    return {
        "items": count,
        "codes": codes,
        "nodes": int(built.array(Section.SIZES)[1]),
        "bytes": len(content),
        "attribute_bytes": sum(len(built.sections[s]) for s in Section if s >= Section.ATTRIBUTES),
        "build_s": build_s,
        "load_s": statistics.median(s for _, s in loads),
        "request_us": {name: 1e6 * time_of(node, r) for name, r in requests.items()},
    }


def time_of(node: CpuNode, request: dict[str, Any]) -> float:
    """Median seconds of the native node alone."""
    return statistics.median(node.time(request) for _ in range(ROUNDS))


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(prog="python -m perf.catalog", description=__doc__)
    parser.add_argument("--items", type=int, default=1_500_000)
    parser.add_argument("--codes", type=int, default=256)
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"environment": describe_environment("perf.catalog", sys.argv[1:])}
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments.items, arguments.codes)
    result |= found
    rows = [
        ("items", f"{found['items']:,}"),
        ("nodes of the trie", f"{found['nodes']:,}"),
        ("tables, MB", f"{found['bytes'] / 1e6:.1f}"),
        ("of which attributes, MB", f"{found['attribute_bytes'] / 1e6:.1f}"),
        ("build from JSONL, s", f"{found['build_s']:.1f}"),
        ("load, s", f"{found['load_s']:.2f}"),
        *((f"request with {name}, us", f"{value:.0f}") for name, value in found["request_us"].items()),
    ]
    title = f"Items of 3 to {DEPTH} tokens, {found['codes']} codes a level"
    table = Grid(title, ("what", "value"), tuple(rows))
    write_result("A large catalog", result, [table], arguments.json)


if __name__ == "__main__":
    main()
