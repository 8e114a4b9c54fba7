"""Models a manifest names, imported once: configuration and tokenizer come from the cache the second time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dagserve.build.cache import BuildCache
from dagserve.build.keys import digest
from dagserve.checkpoint import open_checkpoint, open_file, resolve_source, source_files
from dagserve.errors import CheckpointError

_FORMAT = 2


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint as the compiler needs it before any tensor is read. ``digest`` covers all its files."""

    path: Path
    digest: str
    config: Mapping[str, Any]
    tokenizer_json: bytes | None = None


CHECKPOINT = "checkpoint"
"""The option that names a model; any other that a package's ``weights`` names is a safetensors file."""

NO_WEIGHTS = ModelSource(Path(), digest("no weights"), {})
"""What a module without parameters is made from."""


def import_weights(option: str, value: str | None, cache: BuildCache) -> ModelSource:
    """What an option of a node names: a model, or a safetensors file.

    Raises:
        CheckpointError: it is not there, damaged, or of a kind that is not supported.
    """
    if value is None:
        return NO_WEIGHTS
    if option == CHECKPOINT:
        return import_model(value, cache)
    path = open_file(Path(value).expanduser().resolve()).source
    return ModelSource(path, digest([_FORMAT, option, cache.digest_of(path)]), {})


@dataclass(frozen=True)
class TokenizerSource:
    """The content of a ``tokenizer.json`` and its digest."""

    digest: str
    tokenizer_json: bytes


def import_model(spec: str, cache: BuildCache) -> ModelSource:
    """Finds a checkpoint by directory, ``.gguf`` file or hub id.

    Raises:
        CheckpointError: it is not there, damaged, or of a kind that is not supported.
    """
    path = resolve_source(spec)
    key = digest([_FORMAT, [[p.name, cache.digest_of(p)] for p in source_files(path)]])
    entry = cache.get("sources", key) or cache.put("sources", key, partial(_import, path))
    tokenizer = entry / "tokenizer.json"
    config = json.loads((entry / "config.json").read_text())
    return ModelSource(path, key, config, tokenizer.read_bytes() if tokenizer.exists() else None)


def _import(path: Path, out: Path) -> None:
    checkpoint = open_checkpoint(path)
    (out / "config.json").write_text(json.dumps(dict(checkpoint.config)))
    if checkpoint.tokenizer_json is not None:
        (out / "tokenizer.json").write_bytes(checkpoint.tokenizer_json)


def import_tokenizer(spec: str, cache: BuildCache) -> TokenizerSource:
    """Finds a tokenizer: a ``.json`` file, or the one inside a checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    if spec.endswith(".json"):
        path = Path(spec).expanduser()
        if not path.is_file():
            raise CheckpointError(f"no tokenizer at {spec!r}: give a tokenizer.json or a checkpoint that has one")
        return TokenizerSource(cache.digest_of(path.resolve()), path.read_bytes())
    model = import_model(spec, cache)
    if model.tokenizer_json is None:
        raise CheckpointError(f"{model.path} has no tokenizer.json: put one there, or name one with `tokenizer:`")
    return TokenizerSource(model.digest, model.tokenizer_json)
