"""Manifest -> graph -> passes -> build -> artifact: the compile path, each step one module down."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from dagserve.artifact import read_plan, replacing
from dagserve.build.assemble import artifact_key, write_artifact
from dagserve.build.cache import BuildCache, default_cache_root
from dagserve.build.design import design_build
from dagserve.build.run import Progress, run_steps
from dagserve.errors import ArtifactError
from dagserve.passes import check_manifest


@dataclass(frozen=True)
class CompileResult:
    """Where the artifact is, how long it took in seconds, and whether it was there already."""

    artifact: Path
    seconds: float
    up_to_date: bool


def compile_manifest(
    path: Path,
    variables: Mapping[str, str] = MappingProxyType({}),
    target: str | None = None,
    output: Path | None = None,
    *,
    cache: BuildCache | None = None,
    progress: Progress = lambda *_: None,
    workers: int | None = None,
) -> CompileResult:
    """Compiles a manifest for one target into an artifact directory.

    Args:
        path: the manifest.
        variables: values of ``--set``.
        target: a target's name; the first one when left out.
        output: the artifact directory; ``artifacts/NAME.TARGET`` when left out.
        cache: where build results are kept; :func:`default_cache_root` when left out.
        progress: called as workers go on.
        workers: build processes at a time; the number of cores, at most 4, when left out.

    Raises:
        ManifestError: the manifest has mistakes.
        CheckpointError: a model cannot be imported.
        BuildError: a package cannot be built, or differs from eager; or the target's GPU is not here.
    """
    started = time.perf_counter()
    cache = cache or BuildCache(default_cache_root())
    graph = check_manifest(path, variables, target)
    output = output or Path("artifacts") / f"{graph.manifest.name}.{graph.target.name}"
    design = design_build(graph, cache)
    key = artifact_key(graph, design)
    if not _is_current(output, key):
        count = workers or min(4, os.cpu_count() or 1)
        built = run_steps(design.weight_steps, cache, progress, count)
        built |= run_steps(design.package_steps(built), cache, progress, count)
        built |= run_steps(design.verify_steps(built), cache, progress, count)
        with replacing(output) as scratch:
            write_artifact(scratch, graph, design, built, key, cache)
        return CompileResult(output, time.perf_counter() - started, False)
    return CompileResult(output, time.perf_counter() - started, True)


def _is_current(output: Path, key: str) -> bool:
    try:
        return bool(read_plan(output)["fingerprint"]["key"] == key)
    except ArtifactError:
        return False
