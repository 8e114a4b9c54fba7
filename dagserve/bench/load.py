"""Keeps a fixed number of requests in flight and measures each one."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import numpy as np

from dagserve.errors import DagserveError

TIMEOUT_S = 120.0
HEADERS = {"content-type": "application/json"}


@dataclass(frozen=True)
class BenchResult:
    """One measurement. Latencies are in milliseconds, from sending a request to its whole reply, failures left out.

    ``qps`` counts good replies over the wall time; ``cpu_share`` is the generator's own CPU time over the wall time.
    """

    url: str
    concurrency: int
    requests: int
    errors: dict[str, int]
    wall_s: float
    qps: float
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    cpu_share: float

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


@dataclass
class _Tally:
    latencies_s: list[float]
    errors: Counter[str]
    left: int | None
    end: float


def run_bench(
    url: str,
    bodies: Sequence[bytes],
    concurrency: int = 1,
    requests: int | None = None,
    duration_s: float | None = None,
    warmup: int = 0,
) -> BenchResult:
    """Posts the bodies in turn until ``requests`` are sent or ``duration_s`` has passed (100 requests if neither).

    Raises:
        DagserveError: nothing answers at the URL.
    """
    return asyncio.run(_run(url, bodies, concurrency, requests, duration_s, warmup))


async def _run(
    url: str, bodies: Sequence[bytes], concurrency: int, requests: int | None, duration_s: float | None, warmup: int
) -> BenchResult:
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    count = 100 if requests is None and duration_s is None else requests
    async with httpx.AsyncClient(limits=limits, timeout=TIMEOUT_S, headers=HEADERS, trust_env=False) as client:
        if warmup:
            await _drive(client, url, bodies, min(concurrency, warmup), _Tally([], Counter(), warmup, float("inf")))
        cpu, started = time.process_time(), time.perf_counter()
        tally = _Tally([], Counter(), count, started + (duration_s or float("inf")))
        await _drive(client, url, bodies, concurrency, tally)
        wall = time.perf_counter() - started
        return _summary(url, concurrency, tally, wall, (time.process_time() - cpu) / wall)


async def _drive(client: httpx.AsyncClient, url: str, bodies: Sequence[bytes], concurrency: int, tally: _Tally) -> None:
    source = itertools.cycle(bodies)
    await asyncio.gather(*(_worker(client, url, source, tally) for _ in range(concurrency)))


async def _worker(client: httpx.AsyncClient, url: str, source: Any, tally: _Tally) -> None:
    while time.perf_counter() < tally.end and (tally.left is None or tally.left > 0):
        if tally.left is not None:
            tally.left -= 1
        started = time.perf_counter()
        try:
            response = await client.post(url, content=next(source))
        except httpx.ConnectError as error:
            raise DagserveError(f"nothing answers at {url} ({error}); start it with `dagserve serve`") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            tally.errors[type(error).__name__] += 1
            continue
        if response.status_code == 200:
            tally.latencies_s.append(time.perf_counter() - started)
        else:
            tally.errors[str(response.status_code)] += 1


def _summary(url: str, concurrency: int, tally: _Tally, wall: float, cpu_share: float) -> BenchResult:
    milliseconds = np.array(tally.latencies_s or [float("nan")]) * 1000
    p50, p90, p99 = (float(p) for p in np.percentile(milliseconds, [50, 90, 99]))
    good = len(tally.latencies_s)
    return BenchResult(
        url=url,
        concurrency=concurrency,
        requests=good + tally.errors.total(),
        errors=dict(tally.errors),
        wall_s=wall,
        qps=good / wall,
        mean_ms=float(milliseconds.mean()),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        max_ms=float(milliseconds.max()),
        cpu_share=cpu_share,
    )
