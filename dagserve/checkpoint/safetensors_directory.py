"""Local directories with ``config.json`` and one or several ``*.safetensors`` files."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dagserve.checkpoint.base import Checkpoint, SourceTensor
from dagserve.errors import CheckpointError

_DTYPES: Mapping[str, tuple[str, str]] = {"F32": ("f32", "<f4"), "F16": ("f16", "<f2"), "BF16": ("bf16", "<u2")}
_OTHER_DTYPES: Mapping[str, tuple[str, str]] = {
    "I64": ("i64", "<i8"),
    "I32": ("i32", "<i4"),
    "U8": ("u8", "|u1"),
    "BOOL": ("bool", "|b1"),
}
"""What a module's buffers may have beside; no parameter of a decoder does."""
_MAX_HEADER = 100 * 1024 * 1024


def directory_files(source: Path) -> list[Path]:
    """``config.json``, ``tokenizer.json`` where present, and the safetensors files, sorted."""
    named = [source / "config.json", source / "tokenizer.json"]
    return [p for p in named if p.exists()] + _weight_files(source)


def open_directory(source: Path) -> Checkpoint:
    """Opens a model directory.

    Raises:
        CheckpointError: no ``config.json``, no weights, a shard that the index names is absent, or a damaged file.
    """
    config = _read_json(source / "config.json")
    files = _weight_files(source)
    if not files:
        raise CheckpointError(f"{source} has no *.safetensors file; convert other formats to safetensors first")
    tensors: dict[str, SourceTensor] = {}
    for file in files:
        for name, tensor in _file_tensors(file).items():
            if name in tensors:
                raise CheckpointError(f"{file} repeats the tensor {name!r} of another file of {source}")
            tensors[name] = tensor
    tokenizer = source / "tokenizer.json"
    return Checkpoint(source, config, tensors, tokenizer.read_bytes() if tokenizer.exists() else None)


def open_file(source: Path) -> Checkpoint:
    """Opens one safetensors file that belongs to no model directory: tensors alone, ``config`` empty.

    Raises:
        CheckpointError: it is not there, or damaged.
    """
    if not source.is_file():
        raise CheckpointError(f"there is no file {source}: give a .safetensors file")
    return Checkpoint(source, {}, _file_tensors(source, {**_DTYPES, **_OTHER_DTYPES}), None)


def _weight_files(source: Path) -> list[Path]:
    index = source / "model.safetensors.index.json"
    if not index.exists():
        return sorted(source.glob("*.safetensors"))
    files = [source / name for name in sorted(set(_read_json(index).get("weight_map", {}).values()))]
    missing = [f.name for f in files if not f.exists()]
    if missing:
        raise CheckpointError(f"{index} names files that are not there: {', '.join(missing)}")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: a model directory needs it") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def _file_tensors(file: Path, dtypes: Mapping[str, tuple[str, str]] = _DTYPES) -> dict[str, SourceTensor]:
    """Maps the file and reads its header. Source: the safetensors format description."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise CheckpointError(f"{file} is not a safetensors file, or is cut off")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise CheckpointError(f"{file} has a damaged header: {error}") from error
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    base = 8 + length
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in dtypes:
            raise CheckpointError(f"{file}: {name} has dtype {entry['dtype']}; use one of {', '.join(dtypes)}")
    return {name: _tensor(file, mapped, base, name, entry, *dtypes[entry["dtype"]]) for name, entry in header.items()}


def _tensor(
    file: Path, mapped: mmap.mmap, base: int, name: str, entry: Mapping[str, Any], dtype: str, code: str
) -> SourceTensor:
    shape = tuple(entry["shape"])
    start, end = entry["data_offsets"]
    count = int(np.prod(shape, dtype=np.int64))
    if end - start != count * np.dtype(code).itemsize or base + end > len(mapped):
        raise CheckpointError(f"{file}: {name} does not fit its shape {list(shape)}; the file is damaged or cut off")
    return SourceTensor(dtype, shape, partial(_read, mapped, code, count, base + start, shape))


def _read(mapped: mmap.mmap, code: str, count: int, offset: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    return np.frombuffer(mapped, dtype=code, count=count, offset=offset).reshape(shape)
