"""Closed-loop load generator: a fixed number of requests in flight, in a process of its own."""

from dagserve.bench.command import bench
from dagserve.bench.load import BenchResult, run_bench

__all__ = ["BenchResult", "bench", "run_bench"]
