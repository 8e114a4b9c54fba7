"""Runs build steps in worker processes and follows their progress."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagserve.build.cache import BuildCache
from dagserve.errors import BuildError, CheckpointError, DagserveError

Progress = Callable[[str, str, float], None]
"""Called with a task's name, its stage, and the finished fraction of the stage."""

_ERRORS: Mapping[str, type[DagserveError]] = {"CheckpointError": CheckpointError, "BuildError": BuildError}


@dataclass(frozen=True)
class Step:
    """One cached build step: ``kind`` and ``key`` say where its result goes; ``job`` is what the worker reads."""

    name: str
    kind: str
    key: str
    job: Mapping[str, Any]


def run_steps(steps: list[Step], cache: BuildCache, progress: Progress, workers: int) -> dict[str, Path]:
    """Runs the steps whose results the cache lacks, ``workers`` at a time; returns each step's directory by name.

    Raises:
        BuildError, CheckpointError: the first step that failed, in the order given.
    """
    with ThreadPoolExecutor(max_workers=workers) as pool:
        futures = {step.name: pool.submit(_run_step, step, cache, progress) for step in steps}
        return {name: future.result() for name, future in futures.items()}


def _run_step(step: Step, cache: BuildCache, progress: Progress) -> Path:
    found = cache.get(step.kind, step.key)
    if found is not None:
        progress(step.name, "cached", 1.0)
        return found
    return cache.put(step.kind, step.key, lambda out: _run_worker(step, out, cache, progress))


def _run_worker(step: Step, out: Path, cache: BuildCache, progress: Progress) -> None:
    log = cache.root / "logs" / f"{step.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(cache.root / "inductor"))
    with tempfile.TemporaryDirectory() as scratch, log.open("w") as errors:
        job = Path(scratch) / "job.json"
        job.write_text(json.dumps({**step.job, "out": str(out)}))
        command = [sys.executable, "-m", "dagserve.build.worker", str(job)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as worker:
            try:
                event = _follow(step, worker, progress)
            finally:
                worker.kill()
    if "error" in event:
        raise _ERRORS[event["kind"]](event["error"])
    if "done" not in event:
        raise BuildError(f"building {step.name} stopped without a result; its compiler output is in {log}")


def _follow(step: Step, worker: subprocess.Popen[str], progress: Progress) -> dict[str, Any]:
    """Reports each line of progress; returns the last event, empty when there was none."""
    event: dict[str, Any] = {}
    assert worker.stdout is not None
    for line in worker.stdout:
        event = json.loads(line)
        if "stage" in event:
            progress(step.name, event["stage"], event["fraction"])
    worker.wait()
    return event
