"""Starts each side in a process of its own and drives load from another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import httpx

START_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Server:
    """A running service: its address, and the seconds from its process's start to its first good reply."""

    url: str
    start_s: float


@contextmanager
def server(
    module: str, arguments: Sequence[str], ready: str, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Server]:
    """A Python module that prints its address as the last word of a line; ``ready`` is the path asked first."""
    command, variables = [sys.executable, "-m", module, *arguments], {**os.environ, **environment}
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"{module} did not start (exit status {process.wait()})")
            url = line.split()[-1]
            httpx.get(url + ready, timeout=START_TIMEOUT_S, trust_env=False).raise_for_status()
            yield Server(url, time.perf_counter() - started)
        finally:
            process.terminate()


class Worker:
    """A process that answers each JSON order, a line, with one JSON line: :mod:`perf.generator`, :mod:`perf.direct`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._read()

    def run(self, **order: Any) -> dict[str, Any]:
        """Sends an order and waits for its answer: the fields of a ``BenchResult``."""
        self.send(**order)
        return self.receive()

    def send(self, **order: Any) -> None:
        """Sends an order; :meth:`receive` must follow before the next one."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """The answer to the order that was sent."""
        answer: dict[str, Any] = json.loads(self._read())
        return answer

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args!r} ended early (exit status {self._process.wait()})")
        return line


@contextmanager
def worker(module: str, *arguments: str) -> Iterator[Worker]:
    """Starts a worker and waits until it is ready; it ends when its input does."""
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Worker(process)


def timed(command: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})) -> float:
    """Wall seconds of a command that must succeed."""
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return seconds
