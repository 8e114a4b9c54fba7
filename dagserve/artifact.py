"""The artifact directory: reading, checking, and replacing it in one step. The plan's format is in ``docs/plan.md``."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from dagserve.errors import ArtifactError

FORMAT = 1
PLAN = "plan.json"

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def read_plan(root: Path) -> dict[str, Any]:
    """Reads and checks ``plan.json``: its schema, its version, and the presence and size of every file it names.

    Raises:
        ArtifactError: the directory is no artifact, or is damaged; the message says what to do.
    """
    path = root / PLAN
    try:
        plan = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ArtifactError(f"{root} is not an artifact: it has no {PLAN}; make one with `dagserve compile`") from None
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged ({error}); compile the manifest again") from error
    if not isinstance(plan, dict) or plan.get("format") != FORMAT:
        raise ArtifactError(f"{path} is of another format than {FORMAT}; compile the manifest again")
    _check_schema(path, plan)
    problems = list(missing_files(root, plan))
    if problems:
        raise ArtifactError(f"{root} is damaged: {'; '.join(problems)}; compile the manifest again")
    return plan


def _check_schema(path: Path, plan: Mapping[str, Any]) -> None:
    import jsonschema

    schema = json.loads(files("dagserve").joinpath("schemas/artifact.schema.json").read_text())
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(plan))
    if error is not None:
        raise ArtifactError(f"{path}: {error.json_path}: {error.message}; compile the manifest again")


def missing_files(root: Path, plan: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the files the plan names; nothing when all are there with their sizes."""
    for name, size in plan["files"].items():
        file = root / name
        if not file.is_file():
            yield f"{name} is missing"
        elif file.stat().st_size != size:
            yield f"{name} has {file.stat().st_size} bytes, not {size}"


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A scratch directory that becomes ``target`` when the block ends well; on any error ``target`` stays as it was.

    An existing directory is exchanged in one system call where the file system can, so that no moment is without one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.new-", dir=target.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        _publish(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    """Scratch directories of builds that were killed: those whose maker is gone are a day old at most in practice."""
    for path in target.parent.glob(f".{target.name}.new-*"):
        shutil.rmtree(path, ignore_errors=True)


def _publish(scratch: Path, target: Path) -> None:
    if not target.exists():
        scratch.rename(target)
    elif not _exchange(scratch, target):
        aside = scratch.with_name(scratch.name + ".old")
        target.rename(aside)
        scratch.rename(target)
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two paths atomically. False where the system or file system has no such call (``renameat2``)."""
    rename: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0
