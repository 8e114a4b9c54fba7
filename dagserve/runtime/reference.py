"""Runs an artifact in plain Python: CPU nodes by their readable definitions, packages by torch's own loader."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dagserve._native import CpuNode
from dagserve.artifact import read_plan
from dagserve.endpoints import endpoint_of
from dagserve.errors import InternalError, InvalidRequest, RequestError
from dagserve.interface import REGISTERED
from dagserve.runtime.request import check_value, decode_body
from dagserve.shapes import parse_dim

_NUMPY: Mapping[str, Any] = {"u8": np.uint8, "bool": np.bool_, "i32": np.int32, "i64": np.int64, "f32": np.float32}
_TORCH: Mapping[str, torch.dtype] = {
    "u8": torch.uint8,
    "bool": torch.bool,
    "i32": torch.int32,
    "i64": torch.int64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f8e4m3": torch.float8_e4m3fn,
}


class ReferenceRuntime:
    """One artifact, one request at a time. Same inputs, outputs and errors as :class:`dagserve.engine.Engine`."""

    def __init__(self, artifact: Path) -> None:
        self.root = artifact
        self.plan = read_plan(artifact)
        self._bounds = {s["name"]: s["bound"] for s in self.plan["symbols"]}
        self._device = self.plan["device"]
        self._weights = {n: t.to(self._device) for n, t in _map_weights(artifact, self.plan["weights"]).items()}
        self._packages = [_load_package(artifact, p, self._weights, self._device) for p in self.plan["packages"]]
        self._cpu = {
            n["name"]: _make_cpu_node(self.plan, n, artifact) for n in self.plan["nodes"] if n["engine"] == "cpu"
        }

    def run(self, inputs: Mapping[str, object]) -> bytes:
        """The bytes of the request's ``response``.

        Raises:
            RequestError: as the native runtime does, with the same text.
        """
        values = self.trace(inputs)
        response = next(o["tensor"] for o in self.plan["outputs"] if o["name"] == "response")
        return bytes(values[self.plan["tensors"][response]["name"]].tobytes())

    def run_body(self, body: bytes) -> bytes:
        """As :meth:`run`, for the JSON body of the artifact's endpoint."""
        return self.run(decode_body(body, self.plan, endpoint_of(self.plan)))

    def trace(self, inputs: Mapping[str, object]) -> dict[str, Any]:
        """The value of every tensor of the graph: numpy arrays, ``str`` and ``list[str]``, None where absent."""
        request = _Request(self.plan, self._bounds)
        request.bind_inputs(inputs)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for node in self.plan["nodes"]:
                self._run_node(node, request)
        finally:
            torch.set_num_threads(threads)
        return {t["name"]: v for t, v in zip(self.plan["tensors"], request.values, strict=True)}

    def _run_node(self, node: Mapping[str, Any], request: _Request) -> None:
        try:
            if node["engine"] == "cpu":
                given = {p: None if t is None else request.values[t] for p, t in node["inputs"].items()}
                results = self._cpu[node["name"]].run(given)
                for port, tensor in node["outputs"].items():
                    request.set(tensor, results[port])
            else:
                self._run_aoti(node, request)
        except RequestError as error:
            raise type(error)(str(error), node["name"]) from error

    def _run_aoti(self, node: Mapping[str, Any], request: _Request) -> None:
        for check in node["checks"]:
            request.check(check)
        kept: dict[int, torch.Tensor] = {}
        for call in node["calls"]:
            if not request.selects(call.get("when"), kept):
                continue
            operands = [_operand(o, request, kept).to(self._device) for o in call["inputs"]]
            results = self._packages[call["package"]].run(operands)
            for output, result in zip(call["outputs"], results, strict=True):
                if "local" in output:
                    kept[output["local"]] = result
                else:
                    request.set(output["tensor"], result.cpu().numpy())


class _Request:
    """The tensors of one request and what its symbols stand for."""

    def __init__(self, plan: Mapping[str, Any], bounds: Mapping[str, int]) -> None:
        self.plan, self.bounds = plan, bounds
        self.values: list[Any] = [None] * len(plan["tensors"])
        self.symbols: dict[str, tuple[int, str]] = {}

    def bind_inputs(self, inputs: Mapping[str, object]) -> None:
        names = [spec["name"] for spec in self.plan["inputs"]]
        for spec in self.plan["inputs"]:
            value = inputs.get(spec["name"])
            value = spec["default"] if value is None else value
            if value is None and not spec["optional"]:
                raise InvalidRequest(f"{spec['name']} is missing")
            if value is not None:
                self.set(spec["tensor"], self._input_value(spec, value))
        for name in inputs:
            if name not in names:
                raise InvalidRequest(f"{name} is not an input of this graph")

    def _input_value(self, spec: Mapping[str, Any], value: Any) -> Any:
        tensor = self.plan["tensors"][spec["tensor"]]
        name, rank, dtype = spec["name"], len(tensor["shape"]), tensor["dtype"]
        if rank and not isinstance(value, list | tuple):
            raise InvalidRequest(f"{name} must be a list")
        if rank:
            dim = parse_dim(tensor["shape"][0])
            bound = dim.size(self.bounds)
            if not 1 <= len(value) <= bound:
                raise InvalidRequest(f"{name} has {len(value)} entries; it must have from 1 to {bound}")
        for i, one in enumerate(value if rank else [value]):
            check_value(f"{name}[{i}]" if rank else name, one, dtype)
        if dtype != "text":
            return np.array(value, dtype=_NUMPY[dtype])
        size = sum(len(_encode(t)) for t in (value if rank else [value]))
        if size > tensor["capacity"]:
            limit = f"{tensor['capacity']} bytes of text; shorten it or raise the input's max_bytes"
            raise InvalidRequest(f"{name} has more than {limit}")
        return list(value) if rank else value

    def set(self, index: int, value: Any) -> None:
        """Stores a tensor after checking its shape against bounds and other tensors."""
        tensor = self.plan["tensors"][index]
        sizes = [len(value)] if isinstance(value, list) else list(getattr(value, "shape", ()))
        for axis, (size, dim_text) in enumerate(zip(sizes, tensor["shape"], strict=True)):
            self._bind(tensor["name"], axis, size, dim_text)
        self.values[index] = value

    def _bind(self, name: str, axis: int, size: int, dim_text: str) -> None:
        dim = parse_dim(dim_text)
        if not dim.symbol:
            if size != dim.add:
                raise InvalidRequest(f"{name} has {size} rows in dimension {axis}; it must have {dim.add}")
            return
        value, bound = size - dim.add, self.bounds[dim.symbol]
        if not 1 <= value <= bound:
            raise InvalidRequest(f"{name} has {dim.symbol} = {value}; it must be between 1 and {bound}")
        known, by = self.symbols.setdefault(dim.symbol, (value, name))
        if known != value:
            raise InvalidRequest(f"{name} has {dim.symbol} = {value}, but {by} has {known}; they must agree")

    def selects(self, when: Mapping[str, Any] | None, kept: Mapping[int, torch.Tensor]) -> bool:
        """Whether a call's condition holds."""
        if when is None:
            return True
        value = kept.get(when["local"]) if "local" in when else self.values[when["tensor"]]
        return bool((when["default"] if value is None else int(value)) == when["equals"])

    def check(self, check: Mapping[str, Any]) -> None:
        """One of the plan's checks, before any package runs."""
        if check["kind"] == "range":
            self._check_range(check)
        elif check["kind"] == "at_most":
            self._check_at_most(check)
        else:
            self._check_packed(check)

    def _check_range(self, check: Mapping[str, Any]) -> None:
        name, values = self.plan["tensors"][check["tensor"]]["name"], self.values[check["tensor"]]
        if values is not None and values.dtype == np.float32:
            if not ((values >= check["low"]) & (values <= check["high"] - 1)).all():
                raise InvalidRequest(f"{name} must be from {check['low']} to {check['high'] - 1}")
            return
        for i, value in enumerate(() if values is None else values.flat):
            if not check["low"] <= value < check["high"]:
                limits = f"from {check['low']} to {check['high'] - 1}"
                place = f"{name}[{i}]" if values.shape else name
                raise InvalidRequest(f"{place} is {value}; it must be {limits}")

    def _check_at_most(self, check: Mapping[str, Any]) -> None:
        name, by = (self.plan["tensors"][check[key]]["name"] for key in ("tensor", "other"))
        value, limit = self.values[check["tensor"]], self.values[check["other"]]
        if value is not None and limit is not None and value > limit:
            raise InvalidRequest(f"{name} is {value} but {by} is {limit}; lower {name} or raise {by}")

    def count(self, count: Mapping[str, Any]) -> int:
        """The rows of a ``count`` operand."""
        value = None if count["tensor"] is None else self.values[count["tensor"]]
        if value is not None:
            return int(value)
        limit = count.get("at_most")
        return min(count["default"], self.count(limit)) if limit else int(count["default"])

    def _check_packed(self, check: Mapping[str, Any]) -> None:
        name, cu_seqlens = self.plan["tensors"][check["cu_seqlens"]]["name"], self.values[check["cu_seqlens"]]
        tokens = len(self.values[check["tokens"]])
        if cu_seqlens[0] != 0 or cu_seqlens[-1] != tokens:
            raise InvalidRequest(f"{name} must start at 0 and end at the number of tokens, {tokens}")
        prefix = 0
        for row, length in enumerate(np.diff(cu_seqlens)):
            if "shared" in check and row == 0:
                prefix = length
                if 0 <= length < check["max_length"]:
                    continue
            whole = length + (prefix if row else 0)
            if length < 1 or whole > check["max_length"]:
                limits = f"from 1 to {check['max_length']}"
                raise InvalidRequest(f"{name}: row {row} has {whole} tokens; it must have {limits}")


def _encode(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def _operand(operand: Mapping[str, Any], request: _Request, kept: Mapping[int, torch.Tensor]) -> torch.Tensor:
    if "local" in operand:
        return kept[operand["local"]]
    if "scalar" in operand:
        tensor = operand["scalar"]["tensor"]
        value = None if tensor is None else request.values[tensor]
        return torch.tensor(operand["scalar"]["default"] if value is None else float(value), dtype=torch.float32)
    if "row" in operand:
        row = operand["row"]
        ends = request.values[row["ends"]]
        values = request.values[row["tensor"]][ends[row["index"]] : ends[row["index"] + 1]]
        return torch.from_numpy(np.array(values))
    if "count" in operand:
        return torch.arange(request.count(operand["count"]), dtype=torch.int32)
    if "iota" in operand:
        lengths = np.diff(request.values[operand["iota"]["max_length_of"]])
        rows = operand["iota"].get("rows")
        longest = max(1, lengths[0]) if rows == "first" else lengths[1 if rows == "rest" else 0 :].max()
        return torch.arange(int(longest), dtype=torch.int32)
    return torch.from_numpy(np.array(request.values[operand["tensor"]]))


def _map_weights(root: Path, weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    if not weights["bytes"]:
        return {}
    mapped = np.memmap(root / weights["path"], dtype=np.uint8, mode="c")
    return {
        name: torch.from_numpy(mapped[e["offset"] : e["offset"] + e["bytes"]])
        .view(_TORCH[e["dtype"]])
        .reshape(e["shape"])
        for name, e in weights["tensors"].items()
    }


def _load_package(root: Path, package: Mapping[str, Any], weights: Mapping[str, torch.Tensor], device: str) -> Any:
    library = root / package["path"]
    runner: Any
    if device == "cpu":
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)
    else:
        runner = torch._C._aoti.AOTIModelContainerRunnerCuda(str(library), 1, device, str(library.parent))
    names = runner.get_constant_names_to_original_fqns()
    runner.update_constant_buffer({n: weights[package["constants"][f]] for n, f in names.items()}, False, True, True)
    return runner


def _make_cpu_node(plan: Mapping[str, Any], node: Mapping[str, Any], root: Path) -> Any:
    module, _, name = REGISTERED.get(node["op"], node["op"]).partition(":")
    try:
        definition = getattr(importlib.import_module(module), name)
        if hasattr(definition, "run") or "library" not in node:
            return definition(node["config"], root)
    except (ImportError, AttributeError) as error:
        raise InternalError(f"no Python reference for {node['op']}: {error}", node["name"]) from error
    bounds = {s["name"]: s["bound"] for s in plan["symbols"]}
    inputs, outputs = (
        [_native_port(p, plan["tensors"][t], bounds) for p, t in node[side].items() if t is not None]
        for side in ("inputs", "outputs")
    )
    return CpuNode(node["native_op"], node["config"], inputs, outputs, str(root), str(root / node["library"]))


def _native_port(name: str, tensor: Mapping[str, Any], bounds: Mapping[str, int]) -> tuple[str, str, list[int], int]:
    return name, tensor["dtype"], [parse_dim(d).size(bounds) for d in tensor["shape"]], tensor["capacity"]
