"""How long a call takes on a GPU, for tuning and for benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

ROUNDS = 20
CALLS = 5
"""Of a captured graph."""

FLUSH_BYTES = 2**28
"""More than the L2 cache of an H200 (50 MB): every call finds it cold, and nothing in it to be written back."""


def measure(run: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Microseconds of ``run`` inside of a CUDA graph with L2 cold, the start of the graph not counted.

    One graph reads :data:`FLUSH_BYTES` before each of its calls, another only reads; the median of their differences
    counts.
    """
    buffer = torch.ones(FLUSH_BYTES // 4, device="cuda")
    total = torch.empty((), device="cuda")

    def flush() -> None:
        torch.sum(buffer, dim=0, out=total)

    def flush_and_run() -> None:
        flush()
        run()

    with_calls, without = _captured(flush_and_run), _captured(flush)
    differences = [(_replayed(with_calls) - _replayed(without)) / CALLS for _ in range(rounds)]
    return max(statistics.median(differences), 0.01)  # a call that takes nothing is noise


def _captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end) * 1000)
