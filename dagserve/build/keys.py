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

from dagserve.errors import BuildError

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


def environment_fingerprint() -> dict[str, str]:
    """Versions and instruction sets a package is tied to."""
    return {
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "isa": host_isa(),
        "compiler": compiler_version(),
    }


def device_fingerprint(target: str, match: Mapping[str, object]) -> dict[str, str]:
    """The GPU that packages are built and tuned for: the first one that CUDA shows to this process.

    Source: ``nvidia-smi``, so that nothing imports torch.

    Raises:
        BuildError: there is none, or it is not what the target's ``match`` says.
    """
    command = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        command += ["-i", visible.partition(",")[0]]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        lines = []
    if not lines:
        fix = "compile on a machine that has one, or choose a target with `device: cpu`"
        raise BuildError(f"target `{target}` is built on the GPU it is for, and here is none; {fix}")
    name, compute = (part.strip() for part in lines[0].rsplit(",", 1))
    wanted = {"name": str(match.get("name", "")), "compute": str(match.get("compute", compute))}
    if wanted["name"] not in name or wanted["compute"] != compute:
        asked = ", ".join(f"{key} {value}" for key, value in match.items())
        raise BuildError(f"target `{target}` is for {asked}; this machine has {name}, compute {compute}")
    return {"gpu": name, "compute": compute, "triton": package_version("triton")}


def package_version(name: str) -> str:
    """The installed version of a distribution, ``none`` where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"
