"""The load generator: ``dagserve.bench.run_bench`` in a process that stays, so that no run pays for imports.

Reads one JSON order a line from standard input (``url``, ``concurrency``, and ``requests`` or ``duration_s``) and
answers each with one line of the fields of :class:`dagserve.bench.BenchResult`.
Run as ``python -m perf.generator BODIES.jsonl``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dagserve.bench import run_bench


def main() -> None:
    bodies = Path(sys.argv[1]).read_bytes().splitlines()
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        result = run_bench(bodies=bodies, **order)
        print(json.dumps(result.to_json()), flush=True)


if __name__ == "__main__":
    main()
