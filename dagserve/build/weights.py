"""The weights file: every constant of a group of packages once, each at a 64-byte boundary. Runs in a worker."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dagserve.checkpoint import Checkpoint, SourceTensor, open_checkpoint
from dagserve.checkpoint.base import bf16_to_f32, f32_to_bf16
from dagserve.errors import BuildError, CheckpointError

ALIGNMENT = 64

_TORCH_NAMES: Mapping[torch.dtype, str] = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
    torch.uint8: "u8",
}
TORCH_DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in _TORCH_NAMES.items()}
"""Torch's dtype for each of this project's."""

IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")
"""Checkpoint tensors that old exporters wrote and no model reads."""


def load_object(name: str) -> Any:
    """The object that ``package.module:Name`` stands for."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def make_module(name: str, arguments: Mapping[str, Any]) -> torch.nn.Module:
    """A package's Torch module in evaluation mode, its parameters not yet loaded."""
    module = load_object(name)(**arguments).eval()
    assert isinstance(module, torch.nn.Module)
    return module.requires_grad_(False)


def buffer_name(package: str, buffer: str) -> str:
    """The name of a package's buffer in the weights file."""
    return f"{package}:{buffer}"


def constant_sources(package: str, constants: Iterable[str], tensors: Mapping[str, Any]) -> dict[str, str]:
    """For each constant of a package the weight it reads.

    Raises:
        BuildError: a constant that the weights file does not have, such as a tensor made inside ``forward``.
    """
    sources = {name: own if (own := buffer_name(package, name)) in tensors else name for name in constants}
    absent = [name for name, weight in sources.items() if weight not in tensors]
    if absent:
        raise BuildError(f"{package} has constants that are no parameter or buffer: {', '.join(absent)}; register them")
    return sources


def write_weights(job: Mapping[str, Any], out: Path, report: Callable[[str, float], None]) -> None:
    """Reads a checkpoint and writes ``weights.bin`` and ``index.json``.

    ``job``: ``source``, ``mapping`` (function name), ``config``, ``modules`` (package name, module and arguments of
    each). Parameters are shared by name; buffers belong to their package.

    Raises:
        CheckpointError: lists every parameter that is missing, unexpected or wrongly shaped.
    """
    checkpoint = open_checkpoint(Path(job["source"]))
    mapping = load_object(job["mapping"])(job["config"])
    modules = [make_module(m["module"], m["arguments"]) for m in job["modules"]]
    parameters = {name: p for module in modules for name, p in module.named_parameters()}
    buffers = {
        buffer_name(m["name"], name): b
        for m, module in zip(job["modules"], modules, strict=True)
        for name, b in module.named_buffers()
    }
    check_parameters(checkpoint, mapping, parameters)
    index: dict[str, Any] = {}
    with (out / "weights.bin").open("wb") as stream:
        constants = list(_constants(checkpoint, mapping, parameters, buffers))
        for done, (name, dtype, read) in enumerate(constants):
            values = read()
            stream.write(b"\0" * (-stream.tell() % ALIGNMENT))
            index[name] = {"dtype": dtype, "shape": list(values.shape), "offset": stream.tell(), "bytes": values.nbytes}
            stream.write(np.ascontiguousarray(values).data)
            report("weights", (done + 1) / len(constants))
        size = stream.tell()
    record = {"bytes": size, "tensors": index, "mapping": mapping}
    (out / "index.json").write_text(json.dumps(record))


def check_parameters(
    checkpoint: Checkpoint, mapping: Mapping[str, str], parameters: Mapping[str, torch.nn.Parameter]
) -> None:
    """Compares a model's parameters with a checkpoint's tensors.

    Raises:
        CheckpointError: with every difference, one a line.
    """
    wanted = {theirs: parameters[ours] for ours, theirs in mapping.items() if ours in parameters}
    problems = [f"no mapping for the model's parameter {p}" for p in parameters if p not in mapping]
    problems += [f"missing: {name} {list(p.shape)}" for name, p in wanted.items() if name not in checkpoint.tensors]
    problems += [
        f"wrong shape: {name} is {list(checkpoint.tensors[name].shape)}, the model needs {list(p.shape)}"
        for name, p in wanted.items()
        if name in checkpoint.tensors and checkpoint.tensors[name].shape != tuple(p.shape)
    ]
    problems += [f"unexpected: {name} {list(t.shape)}" for name, t in _unexpected(checkpoint, mapping)]
    if problems:
        lines = "\n".join(f"  {p}" for p in problems)
        raise CheckpointError(
            f"{checkpoint.source} does not fit its config.json ({len(problems)} differences):\n{lines}\n"
            "  check that config.json belongs to these weights, and that every shard is there"
        )


def _unexpected(checkpoint: Checkpoint, mapping: Mapping[str, str]) -> Iterator[tuple[str, SourceTensor]]:
    known = set(mapping.values())
    tied = "lm_head.weight" not in known
    for name, tensor in checkpoint.tensors.items():
        ignored = name.endswith(IGNORED_SUFFIXES) or (tied and name == "lm_head.weight")
        if name not in known and not ignored:
            yield name, tensor


def _constants(
    checkpoint: Checkpoint,
    mapping: Mapping[str, str],
    parameters: Mapping[str, torch.nn.Parameter],
    buffers: Mapping[str, torch.Tensor],
) -> Iterator[tuple[str, str, Callable[[], npt.NDArray[Any]]]]:
    for name, parameter in parameters.items():
        dtype = _TORCH_NAMES[parameter.dtype]
        yield name, dtype, partial(convert, checkpoint.tensors[mapping[name]], dtype)
    for name, buffer in buffers.items():
        yield name, _TORCH_NAMES[buffer.dtype], partial(_to_numpy, buffer)


def _to_numpy(buffer: torch.Tensor) -> npt.NDArray[Any]:
    return buffer.contiguous().numpy()


def convert(tensor: SourceTensor, dtype: str) -> npt.NDArray[Any]:
    """Reads a checkpoint tensor as ``f32`` or ``bf16`` (``uint16`` bits)."""
    values = tensor.read()
    if tensor.dtype == dtype:
        return values
    wide = bf16_to_f32(values) if tensor.dtype == "bf16" else values.astype(np.float32)
    return wide if dtype == "f32" else f32_to_bf16(wide)


def map_weights(path: Path, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The constants of a weights file as tensors over a private mapping of it."""
    mapped = np.memmap(path, dtype=np.uint8, mode="c")
    return {
        name: torch.from_numpy(mapped[e["offset"] : e["offset"] + e["bytes"]])
        .view(TORCH_DTYPES[e["dtype"]])
        .reshape(e["shape"])
        for name, e in tensors.items()
    }
