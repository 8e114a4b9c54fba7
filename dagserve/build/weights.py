"""The weights file: every constant of a group of packages once, each at a 64-byte boundary. Runs in a worker."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dagserve.checkpoint import Checkpoint, SourceTensor, open_checkpoint, open_file
from dagserve.checkpoint.base import bf16_to_f32, f32_to_bf16
from dagserve.errors import BuildError, CheckpointError
from dagserve.interface import Made, ParameterMapping

ALIGNMENT = 64

_TORCH_NAMES: Mapping[torch.dtype, str] = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "f8e4m3",
}
TORCH_DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in _TORCH_NAMES.items()}
"""Torch's dtype for each of this project's."""

_FLOATING = {"f32", "bf16", "f16"}

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


def constant_sources(
    package: str, constants: Iterable[str], tensors: Mapping[str, Any], first: Mapping[str, str]
) -> dict[str, str]:
    """For each constant of a package the weight it reads; ``first`` is :func:`first_names` of its module.

    Raises:
        BuildError: a constant that the weights file does not have, such as a tensor made inside ``forward``.
    """
    sources = {n: own if (own := buffer_name(package, n)) in tensors else first.get(n, n) for n in constants}
    absent = [name for name, weight in sources.items() if weight not in tensors]
    if absent:
        raise BuildError(f"{package} has constants that are no parameter or buffer: {', '.join(absent)}; register them")
    return sources


def write_weights(job: Mapping[str, Any], out: Path, report: Callable[[str, float], None]) -> None:
    """Reads a checkpoint and writes ``weights.bin`` and ``index.json``.

    ``job``: ``source``, ``mapping`` (function name; empty where the source has the modules' own names), ``config``,
    ``modules`` (package name, module and arguments of each). Parameters are shared by name; buffers belong to their
    package.

    Raises:
        CheckpointError: lists every parameter that is missing, unexpected or wrongly shaped.
    """
    modules = {m["name"]: make_module(m["module"], m["arguments"]) for m in job["modules"]}
    saved = {name: t for module in modules.values() for name, t in saved_tensors(module).items()}
    checkpoint = _open(job)
    mapping = load_object(job["mapping"])(job["config"]) if job["mapping"] else {name: name for name in saved}
    check_parameters(checkpoint, mapping, saved)
    index: dict[str, Any] = {}
    with (out / "weights.bin").open("wb") as stream:
        constants = list(_constants(checkpoint, mapping, modules))
        for done, (name, like, read) in enumerate(constants):
            values = read()
            stream.write(b"\0" * (-stream.tell() % ALIGNMENT))
            dtype, shape = _TORCH_NAMES[like.dtype], list(like.shape)
            index[name] = {"dtype": dtype, "shape": shape, "offset": stream.tell(), "bytes": values.nbytes}
            stream.write(np.ascontiguousarray(values).data)
            report("weights", (done + 1) / len(constants))
        size = stream.tell()
    said = {name: _said(source) for name, source in mapping.items() if name in saved}
    padding = {
        name: added for name, t in saved.items() if name in mapping and (added := padding_bytes(mapping[name], t))
    }
    record = {"bytes": size, "tensors": index, "mapping": said, "padding": padding}
    (out / "index.json").write_text(json.dumps(record))


def first_names(module: torch.nn.Module) -> dict[str, str]:
    """By every name of a parameter the first one it has: parts of a module may share parameters."""
    names: dict[int, str] = {}
    return {name: names.setdefault(id(p), name) for name, p in module.named_parameters(remove_duplicate=False)}


def saved_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint has of a module: each parameter once."""
    first = first_names(module)
    return {name: tensor for name, tensor in module.state_dict().items() if first.get(name, name) == name}


def _open(job: Mapping[str, Any]) -> Checkpoint:
    if job["mapping"]:
        return open_checkpoint(Path(job["source"]))
    return open_file(Path(job["source"])) if job["source"] else Checkpoint(Path(), {}, {}, None)


def check_parameters(checkpoint: Checkpoint, mapping: ParameterMapping, parameters: Mapping[str, torch.Tensor]) -> None:
    """Compares what a model loads, parameters and saved buffers, with a checkpoint's tensors.

    Raises:
        CheckpointError: with every difference, one a line.
    """
    wanted: dict[str, tuple[int, ...]] = {}
    for ours, source in mapping.items():
        if ours in parameters:
            shapes = source.shapes if isinstance(source, Made) else (tuple(parameters[ours].shape),)
            wanted |= dict(zip(_names(source), shapes, strict=True))
    problems = [f"no mapping for the model's parameter {p}" for p in parameters if p not in mapping]
    problems += [f"missing: {name} {list(shape)}" for name, shape in wanted.items() if name not in checkpoint.tensors]
    problems += [
        f"wrong shape: {name} is {list(checkpoint.tensors[name].shape)}, the model needs {list(shape)}"
        for name, shape in wanted.items()
        if name in checkpoint.tensors and checkpoint.tensors[name].shape != tuple(shape)
    ]
    problems += [f"unexpected: {name} {list(t.shape)}" for name, t in _unexpected(checkpoint, mapping)]
    if problems:
        lines = "\n".join(f"  {p}" for p in problems)
        raise CheckpointError(_misfit(checkpoint, len(problems)).format(lines))


def _misfit(checkpoint: Checkpoint, count: int) -> str:
    """The message's frame for the lines that say what differs."""
    if checkpoint.config:
        return (
            f"{checkpoint.source} does not fit its config.json ({count} differences):\n{{}}\n"
            "  check that config.json belongs to these weights, and that every shard is there"
        )
    if not checkpoint.tensors:
        return "the module has parameters:\n{}\n  name the safetensors file that has them with `weights:`"
    return (
        f"{checkpoint.source} does not fit the module ({count} differences):\n{{}}\n"
        "  save the module's state_dict() as it is, and give `arguments:` as it was made with"
    )


def padding_bytes(source: str | Made, parameter: torch.Tensor) -> int:
    """What a parameter has beyond the tensors it is made of: zeros that bring its sizes to what products want."""
    given = sum(math.prod(shape) for shape in source.shapes) if isinstance(source, Made) else parameter.numel()
    return max(0, parameter.numel() - given) * parameter.element_size()


def _said(source: str | Made) -> str | list[str]:
    """How the artifact's description names a parameter's source."""
    return source if isinstance(source, str) else list(source.sources)


def _names(source: str | Made) -> tuple[str, ...]:
    return (source,) if isinstance(source, str) else source.sources


def _unexpected(checkpoint: Checkpoint, mapping: ParameterMapping) -> Iterator[tuple[str, SourceTensor]]:
    known = {name for source in mapping.values() for name in _names(source)}
    tied = "lm_head.weight" not in known
    for name, tensor in checkpoint.tensors.items():
        ignored = name.endswith(IGNORED_SUFFIXES) or (tied and name == "lm_head.weight")
        if name not in known and not ignored:
            yield name, tensor


def _constants(
    checkpoint: Checkpoint, mapping: ParameterMapping, modules: Mapping[str, torch.nn.Module]
) -> Iterator[tuple[str, torch.Tensor, Callable[[], npt.NDArray[Any]]]]:
    parameters = {name: p for module in modules.values() for name, p in module.named_parameters()}
    for name, parameter in parameters.items():
        yield name, parameter, partial(_read, checkpoint, mapping[name], parameter)
    for package, module in modules.items():
        saved = module.state_dict()
        for name, buffer in module.named_buffers():
            read = partial(_read, checkpoint, mapping[name], buffer) if name in saved else partial(_bytes, buffer)
            yield buffer_name(package, name), buffer, read


def _read(checkpoint: Checkpoint, source: str | Made, like: torch.Tensor) -> npt.NDArray[Any]:
    if isinstance(source, str):
        return convert(checkpoint.tensors[source], _TORCH_NAMES[like.dtype])
    tensors = {name: torch.from_numpy(convert(checkpoint.tensors[name], "f32")) for name in source.sources}
    return _bytes(make_parameter(source, tensors, like))


def _bytes(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor's content, for NumPy has not all of Torch's dtypes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def convert(tensor: SourceTensor, dtype: str) -> npt.NDArray[Any]:
    """Reads a checkpoint tensor as a dtype of this project's (``uint16`` bits for ``bf16``).

    Raises:
        CheckpointError: integers where the model has floating-point numbers, or the other way round.
    """
    values = tensor.read()
    if tensor.dtype == dtype:
        return values
    if not {tensor.dtype, dtype} <= _FLOATING:
        raise CheckpointError(f"a tensor of {tensor.dtype} cannot become the model's {dtype}; save it as {dtype}")
    wide = bf16_to_f32(values) if tensor.dtype == "bf16" else values.astype(np.float32)
    return f32_to_bf16(wide) if dtype == "bf16" else wide.astype(np.float16 if dtype == "f16" else np.float32)


def make_parameter(source: str | Made, tensors: Mapping[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """A parameter from a checkpoint's tensors, in the format of ``like``."""
    if isinstance(source, str):
        return tensors[source].to(like.dtype)
    made: torch.Tensor = source.make([tensors[name].float() for name in source.sources], like)
    return made


def map_weights(path: Path, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The constants of a weights file as tensors over a private mapping of it."""
    if not tensors:
        return {}
    mapped = np.memmap(path, dtype=np.uint8, mode="c")
    return {
        name: torch.from_numpy(mapped[e["offset"] : e["offset"] + e["bytes"]])
        .view(TORCH_DTYPES[e["dtype"]])
        .reshape(e["shape"])
        for name, e in tensors.items()
    }
