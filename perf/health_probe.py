"""Asks ``/health`` at a fixed rate from a process of its own and prints the latencies as JSON.

A latency runs from the moment a request was due, not sent: a slow reply also counts against the requests it held up.
Run as ``python -m perf.health_probe URL SECONDS``.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import numpy as np

INTERVAL_S = 0.02
TIMEOUT_S = 30


def probe(url: str, seconds: float, interval_s: float = INTERVAL_S) -> list[float]:
    """Latency in seconds of each of ``seconds / interval_s`` requests over one kept connection."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    latencies = []
    started = time.perf_counter()
    for number in range(max(1, round(seconds / interval_s))):
        due = started + number * interval_s
        time.sleep(max(0.0, due - time.perf_counter()))
        connection.request("GET", parts.path)
        response = connection.getresponse()
        response.read()
        if response.status != 200:
            raise SystemExit(f"{url} answered {response.status}")
        latencies.append(time.perf_counter() - due)
    connection.close()
    return latencies


def summarize(latencies_s: Sequence[float]) -> dict[str, float]:
    """Number of probes and their latencies in milliseconds."""
    milliseconds = np.array(latencies_s) * 1000
    p50, p99 = (float(p) for p in np.percentile(milliseconds, [50, 99]))
    return {"probes": len(latencies_s), "p50_ms": p50, "p99_ms": p99, "max_ms": float(milliseconds.max())}


if __name__ == "__main__":
    print(json.dumps(summarize(probe(sys.argv[1], float(sys.argv[2])))))
