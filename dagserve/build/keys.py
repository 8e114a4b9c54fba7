"""Cache keys: digests of everything that decides a build's result. Nothing here imports torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

_ISA_FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")


def digest(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def source_digest(folders: Iterable[Path]) -> str:
    """SHA-256 of all Python files below some folders and the kernels' tile sizes (`configs/*.json`), names included."""
    files = sorted(
        (p for folder in folders for kind in ("*.py", "configs/*.json") for p in folder.rglob(kind)), key=str
    )
    return digest([[p.name, file_digest(p)] for p in files])


def module_digest(module: str) -> str:
    """SHA-256 of the code of ``package.module:Class`` outside this project: its file, or all of its package's files.

    Empty for this project's own modules, which :func:`source_digest` covers.
    """
    top = module.partition(":")[0].partition(".")[0]
    found = importlib.util.find_spec(top) if top != "dagserve" else None
    if found is None or found.origin is None:
        return ""
    origin = Path(found.origin)
    return source_digest([origin.parent]) if origin.name == "__init__.py" else file_digest(origin)


def host_isa() -> str:
    """The instruction sets Inductor's choice depends on, for example ``x86_64+avx2+fma``.

    Source: ``/proc/cpuinfo``; without it the machine's architecture alone.
    """
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    line = next((entry for entry in text.splitlines() if entry.startswith(("flags", "Features"))), "")
    flags = set(line.partition(":")[2].split())
    return "+".join([platform.machine(), *(f for f in _ISA_FLAGS if f in flags)])


@cache
def compiler_version() -> str:
    """First line of ``$CXX --version``; Inductor compiles packages with it."""
    command = os.environ.get("CXX", "g++")
    try:
        out = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return out.partition("\n")[0]


def environment_fingerprint() -> Mapping[str, str]:
    """Versions and instruction sets a package is tied to."""
    return {
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "isa": host_isa(),
        "compiler": compiler_version(),
    }
