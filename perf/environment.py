"""What a result was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagserve

PACKAGES = ("torch", "transformers", "tokenizers", "fastapi", "uvicorn", "httpx", "orjson")
ROOT = Path(__file__).parent.parent


def describe_environment(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Commit, machine, versions, command and date of a run."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", ".", ":!perf/results")),
        "command": shlex.join(["python", "-m", module, *arguments]),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "busy_cores_before": busy_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": {"dagserve": dagserve.__version__, "python": platform.python_version(), **versions},
    }


def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def busy_cores(seconds: float = 1.0) -> float | None:
    """Cores that others keep busy, over a moment in which this process sleeps; None where that cannot be told."""
    counters = Path("/proc/stat")
    if not counters.exists():
        return None
    before = _idle_ticks(counters)
    time.sleep(seconds)
    idle_s = (_idle_ticks(counters) - before) / os.sysconf("SC_CLK_TCK")
    return max(0.0, (os.cpu_count() or 1) - idle_s / seconds)


def _idle_ticks(counters: Path) -> int:
    """Idle and waiting for input or output, all cores together."""
    fields = counters.read_text().split("\n", 1)[0].split()
    return int(fields[4]) + int(fields[5])


def _git(*arguments: str) -> str | None:
    """Output of a git command; None outside a repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
