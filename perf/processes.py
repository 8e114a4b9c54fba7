"""Starts each side in a process of its own and drives load from another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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


class Direct:
    """The process that runs ``Engine.run``; see :mod:`perf.direct`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, concurrency: int, requests: int) -> dict[str, Any]:
        """One closed loop; the fields of a ``BenchResult``."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"concurrency": concurrency, "requests": requests}) + "\n")
        self._process.stdin.flush()
        result: dict[str, Any] = json.loads(self._read())
        return result

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"perf.direct ended early (exit status {self._process.wait()})")
        return line


@contextmanager
def direct(artifact: Path, bodies: Path) -> Iterator[Direct]:
    """The runtime without HTTP, loaded and warm."""
    command = [sys.executable, "-m", "perf.direct", str(artifact), str(bodies)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        runner = Direct(process)
        runner._read()
        yield runner


@dataclass(frozen=True)
class Load:
    """Load generator ``dagserve bench``, one process a measurement."""

    bodies: Path

    def start(self, url: str, concurrency: int, output: Path, limit: Sequence[str]) -> subprocess.Popen[str]:
        """Starts it; ``limit`` is ``--requests N`` or ``--duration S``."""
        command = [sys.executable, "-m", "dagserve.cli", "bench", url, "-r", str(self.bodies), "-c", str(concurrency)]
        command += [*limit, "--warmup", str(concurrency), "--json", str(output)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def run(self, url: str, concurrency: int, requests: int) -> dict[str, Any]:
        """One measurement of ``requests`` requests; the fields of a ``BenchResult``."""
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "bench.json"
            return finish(self.start(url, concurrency, output, ["--requests", str(requests)]), output)


def finish(process: subprocess.Popen[str], output: Path) -> dict[str, Any]:
    """Waits for a load generator and reads its result."""
    _, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"the load generator failed (exit status {process.returncode}): {errors.strip()}")
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def timed(command: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})) -> float:
    """Wall seconds of a command that must succeed."""
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return seconds
