"""The runtime without HTTP: ``Engine.run`` from threads in a closed loop, in a process of its own.

Reads one JSON order a line from standard input (``concurrency``, ``requests``) and answers each with one line of the
fields of :class:`dagserve.bench.BenchResult`. Run as ``python -m perf.direct ARTIFACT BODIES.jsonl``.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from dagserve.bench import BenchResult
from dagserve.engine import Engine
from dagserve.errors import RequestError


class ClosedLoop:
    """Threads that each keep one request in flight until all are sent."""

    def __init__(self, engine: Engine, inputs: Sequence[Mapping[str, object]], requests: int) -> None:
        self._engine = engine
        self._source: Iterator[Mapping[str, object]] = itertools.islice(itertools.cycle(inputs), requests)
        self._lock = threading.Lock()
        self._latencies_s: list[float] = []
        self._errors: Counter[str] = Counter()

    def run(self, concurrency: int) -> BenchResult:
        """Runs all requests and returns the measurement."""
        threads = [threading.Thread(target=self._work) for _ in range(concurrency)]
        cpu, started = time.process_time(), time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall = time.perf_counter() - started
        return self._result(concurrency, wall, (time.process_time() - cpu) / wall)

    def _work(self) -> None:
        while (inputs := self._next()) is not None:
            started = time.perf_counter()
            try:
                self._engine.run(inputs)
            except RequestError as error:
                with self._lock:
                    self._errors[error.kind] += 1
                continue
            seconds = time.perf_counter() - started
            with self._lock:
                self._latencies_s.append(seconds)

    def _next(self) -> Mapping[str, object] | None:
        with self._lock:
            return next(self._source, None)

    def _result(self, concurrency: int, wall: float, cpu_share: float) -> BenchResult:
        milliseconds = np.array(self._latencies_s or [float("nan")]) * 1000
        p50, p90, p99 = (float(p) for p in np.percentile(milliseconds, [50, 90, 99]))
        good = len(self._latencies_s)
        return BenchResult(
            url="Engine.run",
            concurrency=concurrency,
            requests=good + self._errors.total(),
            errors=dict(self._errors),
            wall_s=wall,
            qps=good / wall,
            mean_ms=float(milliseconds.mean()),
            p50_ms=p50,
            p90_ms=p90,
            p99_ms=p99,
            max_ms=float(milliseconds.max()),
            cpu_share=cpu_share,
        )


def main() -> None:
    artifact, bodies = map(Path, sys.argv[1:3])
    inputs = [orjson.loads(line) for line in bodies.read_bytes().splitlines()]
    with Engine.load(artifact) as engine:
        print("ready", flush=True)
        for line in sys.stdin:
            order: dict[str, Any] = json.loads(line)
            result = ClosedLoop(engine, inputs, order["requests"]).run(order["concurrency"])
            print(json.dumps(result.to_json()), flush=True)


if __name__ == "__main__":
    main()
