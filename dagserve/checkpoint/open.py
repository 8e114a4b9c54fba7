"""Finds what a manifest's ``checkpoint:`` means and opens it."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from dagserve.checkpoint.base import Checkpoint
from dagserve.checkpoint.safetensors_directory import directory_files, open_directory
from dagserve.errors import CheckpointError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_PATTERNS = ("config.json", "tokenizer.json", "*.safetensors", "*.safetensors.index.json")
"""The files of a hub repository that are downloaded."""


def resolve_source(spec: str) -> Path:
    """The local directory or GGUF file that ``spec`` names; a hub id is downloaded (or found in the hub's cache) first.

    Raises:
        CheckpointError: nothing is there; the message says what would be accepted.
    """
    path = Path(spec).expanduser()
    if path.exists():
        return path.resolve()
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(spec):
        raise CheckpointError(
            f"no model at {spec!r}: give a directory with config.json and *.safetensors, a .gguf file, "
            "or a Hugging Face hub id such as org/name (for example --set model=PATH)"
        )
    return _download(spec)


def _download(hub_id: str) -> Path:
    hub = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(hub_id, allow_patterns=list(HUB_PATTERNS)))
    except Exception as error:  # the hub's client raises many unrelated types
        raise CheckpointError(
            f"no local model at {hub_id!r}, and the hub did not give it ({type(error).__name__}: {error}); "
            "point to a local directory or .gguf file with --set model=PATH"
        ) from error


def source_files(source: Path) -> list[Path]:
    """The files that decide what a checkpoint is, for cache keys."""
    return [source] if source.is_file() else directory_files(source)


def open_checkpoint(source: Path) -> Checkpoint:
    """Opens a directory of safetensors files with ``config.json``, or a GGUF file.

    Raises:
        CheckpointError: the files are missing, damaged, or of a kind that is not supported.
    """
    if source.is_dir():
        return open_directory(source)
    if source.suffix != ".gguf":
        raise CheckpointError(f"{source} is not a model: give a directory with config.json, or a .gguf file")
    return importlib.import_module("dagserve.checkpoint.gguf_file").open_gguf(source)  # type: ignore[no-any-return]
