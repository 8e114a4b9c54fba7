"""One AOTInductor package: export with dynamic shapes, compile, compare with eager. Runs in a worker."""

from __future__ import annotations

import json
import re
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx.experimental._config as shape_config
from torch._dynamo.exc import UserError
from torch.export import Dim, ExportedProgram, export

from dagserve.build.weights import TORCH_DTYPES, buffer_name, constant_sources, first_names, make_module, map_weights
from dagserve.errors import BuildError
from dagserve.shapes import TensorType, parse_type

_INDUCTOR_OPTIONS: Mapping[str, Any] = {"aot_inductor.package_constants_in_so": False, "cpp.threads": 1}
"""Constants stay outside, so that packages share them; one thread a run, since runs are parallel."""

SHAPES = ("min", "mid", "max")

_WIDEST_SMALL = 8
"""A range that ends at 2 would be taken for the constant 2, since sizes are assumed not to be 1 while compiling."""

Report = Callable[[str, float], None]


def inductor_options(device: str) -> dict[str, Any]:
    """How Inductor compiles a package for a device.

    A package for a GPU has no vectorised code for the CPU, and asking the compiler what vectors there are takes longer
    than the rest of it.
    """
    options = dict(_INDUCTOR_OPTIONS)
    if device != "cpu":
        options["cpp.vec_isa_ok"] = False
    return options


def load_module(job: Mapping[str, Any], *, reference: bool = False) -> torch.nn.Module:
    """The package's module on its device, its parameters over the weights file where that is the CPU.

    ``reference`` has the Torch implementation of every operator that has one, whatever the target chose.
    """
    arguments = dict(job["arguments"])
    if reference and "operators" in arguments:
        arguments["operators"] = {**arguments["operators"], **job["reference"]}
    module = make_module(job["module"], arguments)
    weights = map_weights(Path(job["weights"]) / "weights.bin", _index(job)["tensors"])
    for name, parameter in module.named_parameters():
        parameter.data = weights[name].to(job["device"])
    for name, buffer in module.named_buffers():
        buffer.data = weights[buffer_name(job["name"], name)].to(job["device"])
    return module


def _index(job: Mapping[str, Any]) -> dict[str, Any]:
    return dict(json.loads((Path(job["weights"]) / "index.json").read_text()))


def compile_package(job: Mapping[str, Any], out: Path, report: Report) -> None:
    """Writes ``model.so``, its kernels (``*.cubin``) and ``package.json`` (constants, seconds) into ``out``."""
    started = time.perf_counter()
    module = load_module(job)
    report("export", 0.1)
    program = export_module(module, job)
    exported = time.perf_counter()
    report("compile", 0.25)
    archive = out / "package.pt2"
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(archive), inductor_configs=inductor_options(job["device"])
        )
    _extract(archive, out)
    archive.unlink()
    runner = open_package(out / "model.so", job["device"])
    names = sorted(set(runner.get_constant_names_to_original_fqns().values()))
    record = {
        "constants": constant_sources(job["name"], names, _index(job)["tensors"], first_names(module)),
        "seconds": {"export": exported - started, "compile": time.perf_counter() - exported},
    }
    (out / "package.json").write_text(json.dumps(record))
    report("compiled", 1.0)


def open_package(library: Path, device: str) -> Any:
    """Torch's own runner of a package; kernels are beside its shared object."""
    if device == "cpu":
        return torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)
    return torch._C._aoti.AOTIModelContainerRunnerCuda(str(library), 1, device, str(library.parent))


def _extract(archive: Path, out: Path) -> None:
    """Takes the shared object and its kernels out of a package; refuses one that needs Python-side operators."""
    with zipfile.ZipFile(archive) as content:
        names = content.namelist()
        objects = [n for n in names if n.endswith(".so")]
        extern = [n for n in names if n.endswith(".json") and not n.endswith("metadata.json")]
        extern = [n for n in extern if json.loads(content.read(n) or b"{}").get("nodes")]
        if len(objects) != 1 or extern:
            without = ", ".join(extern) or "none"
            raise BuildError(
                f"package has {len(objects)} shared objects and operators without a C shim ({without}); "
                "replace the operator by one AOTInductor lowers"
            )
        (out / "model.so").write_bytes(content.read(objects[0]))
        for name in names:
            if name.endswith(".cubin"):
                (out / Path(name).name).write_bytes(content.read(name))


def sizes_at(shape: str, bounds: Mapping[str, int]) -> dict[str, int]:
    """Symbol sizes at ``min`` (1), ``mid`` (half the bound) or ``max`` (the bound)."""
    if shape == "min":
        return dict.fromkeys(bounds, 1)
    return {s: b if shape == "max" else max(1, (b + 1) // 2) for s, b in bounds.items()}


def export_module(module: torch.nn.Module, job: Mapping[str, Any]) -> ExportedProgram:
    """Exports with every symbol dynamic from 1 to its bound; a symbol bounded by 1 is static.

    Some of Torch's operators tell a size of 1 from all others while they are traced (``_scaled_mm``), and export then
    refuses it. Such a module is traced for sizes from 2; :func:`verify_package` compares it at 1 like any other.
    """
    try:
        return _export(module, job, 1)
    except UserError as error:
        if not re.search(r"!= 1\b", str(error)):
            raise
        return _export(module, job, 2)


def _export(module: torch.nn.Module, job: Mapping[str, Any], least: int) -> ExportedProgram:
    bounds = job["bounds"]
    sizes = {s: max(n, min(2, bounds[s])) for s, n in sizes_at("mid", bounds).items()}
    types = [parse_type(p["type"]) for p in job["inputs"]]
    dims: dict[str, Any] = {}
    shapes = tuple({i: d for i in range(len(t.shape)) if (d := _dim(t, i, bounds, dims, least))} for t in types)
    example = _example(module, job, sizes)
    # Sizes 0 and 1 are otherwise specialised, and a batch of one would be refused.
    oblivious = shape_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with torch.no_grad(), oblivious:
        return export(module, example, dynamic_shapes=shapes)


def _dim(type_: TensorType, axis: int, bounds: Mapping[str, int], dims: dict[str, Any], least: int) -> Any:
    dim = type_.shape[axis]
    if not dim.symbol or bounds[dim.symbol] == 1:
        return None
    name = str(dim).replace("+", "_plus_")
    largest = max(bounds[dim.symbol], _WIDEST_SMALL)
    return dims.setdefault(name, Dim(name, min=least + dim.add, max=largest + dim.add))


def _example(module: torch.nn.Module, job: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(20)
    make: Callable[..., tuple[torch.Tensor, ...]] | None = getattr(module, "example", None)
    example = make(sizes, generator) if make else _random_inputs(job, sizes, generator)
    assert isinstance(example, tuple)
    for tensor, port in zip(example, job["inputs"], strict=True):
        declared = parse_type(port["type"])
        where = f"{job['module']}: example {port['name']}"
        assert tensor.dtype == TORCH_DTYPES[declared.dtype], f"{where} is {tensor.dtype}"
        assert tensor.dim() == len(declared.shape), f"{where} has rank {tensor.dim()}"
    return tuple(tensor.to(job["device"]) for tensor in example)


def _random_inputs(
    job: Mapping[str, Any], sizes: Mapping[str, int], generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    """For a module without ``example``: normal numbers, and integers within the ranges the job gives."""
    inputs = []
    for port in job["inputs"]:
        type_ = parse_type(port["type"])
        shape, dtype = [d.size(sizes) for d in type_.shape], TORCH_DTYPES[type_.dtype]
        if dtype.is_floating_point:
            inputs.append(torch.randn(shape, generator=generator).to(dtype))
        else:
            low, high = job["ranges"].get(port["name"], (0, 2))
            inputs.append(torch.randint(low, high, shape, generator=generator).to(dtype))
    return tuple(inputs)


def verify_package(job: Mapping[str, Any], out: Path, report: Report) -> None:
    """Runs the package and eager on the same inputs at the minimum, middle and maximum shapes; writes ``checks.json``.

    Eager has the Torch implementation of every operator, so that kernels are compared with what they must compute.

    Raises:
        BuildError: shape or dtype differ, or the error passes the tolerance at some shape.
    """
    module = load_module(job, reference=True)
    runner = _bind(job)
    checks = {}
    for done, shape in enumerate(job["shapes"]):
        inputs = _example(module, job, sizes_at(shape, job["bounds"]))
        with torch.no_grad():
            expected = module(*inputs)
        where = f"{job['name']} at {shape} shapes"
        given = runner.run(list(inputs))
        wanted = list(expected) if isinstance(expected, tuple) else [expected]
        check_outputs(job, inputs, given, where)
        names = [p["name"] for p in job["outputs"]]
        places = [i for i, name in enumerate(names) if name in (job["compared"] or names)]
        error = compare([given[i] for i in places], [wanted[i] for i in places], job["tolerance"], where)
        checks[shape] = {"inputs": [list(t.shape) for t in inputs], "error": error}
        report("verify", (done + 1) / len(job["shapes"]))
    (out / "checks.json").write_text(json.dumps(checks))


def check_outputs(
    job: Mapping[str, Any], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], where: str
) -> None:
    """Compares what a package gives with the declared outputs.

    Raises:
        BuildError: another number of outputs, dtype or shape than declared, or memory that is not contiguous.
    """
    sizes = {}
    for port, tensor in zip(job["inputs"], inputs, strict=True):
        for dim, size in zip(parse_type(port["type"]).shape, tensor.shape, strict=True):
            sizes[dim.symbol] = size - dim.add
    if len(outputs) != len(job["outputs"]):
        raise BuildError(f"{where}: it gives {len(outputs)} outputs; {len(job['outputs'])} are declared")
    for port, tensor in zip(job["outputs"], outputs, strict=True):
        type_ = parse_type(port["type"])
        wanted = [None if d.symbol and d.symbol not in sizes else d.size(sizes) for d in type_.shape]
        fits = tensor.dtype == TORCH_DTYPES[type_.dtype] and len(wanted) == tensor.dim()
        if not fits or any(w not in (None, n) for w, n in zip(wanted, tensor.shape, strict=True)):
            given = f"{tensor.dtype}{list(tensor.shape)}"
            raise BuildError(f"{where}: {port['name']} is {given}, declared as {port['type']}; make them agree")
        if not tensor.is_contiguous():
            copied = ".clone(memory_format=torch.contiguous_format)"
            raise BuildError(f"{where}: {port['name']} is not contiguous in memory; end forward with {copied}")


def _bind(job: Mapping[str, Any]) -> Any:
    runner = open_package(Path(job["package"]) / "model.so", job["device"])
    weights = map_weights(Path(job["weights"]) / "weights.bin", _index(job)["tensors"])
    names = runner.get_constant_names_to_original_fqns()
    sources = json.loads((Path(job["package"]) / "package.json").read_text())["constants"]
    constants = {name: weights[sources[fqn]].to(job["device"]) for name, fqn in names.items()}
    runner.update_constant_buffer(constants, False, True, True)
    return runner


def compare(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float, where: str) -> float:
    """Largest absolute error over ``max(1, largest magnitude expected)``.

    Raises:
        BuildError: over the tolerance, not finite, or of another shape or dtype.
    """
    worst = 0.0
    for a, e in zip(actual, expected, strict=True):
        if a.shape != e.shape or a.dtype != e.dtype:
            raise BuildError(f"{where}: package gives {a.dtype}{list(a.shape)}, eager {e.dtype}{list(e.shape)}")
        finite = torch.isfinite(e.double()) | (a != e)  # infinities must be the same
        difference = (a.double() - e.double())[finite].abs()
        scale = e.double()[torch.isfinite(e.double())].abs()
        error = (difference.max() if difference.numel() else torch.zeros(())) / (
            scale.max() if scale.numel() else torch.zeros(())
        ).clamp(min=1)
        worst = max(worst, float(error)) if torch.isfinite(error) else float("inf")
    if worst > tolerance:
        raise BuildError(f"{where}: differs from eager by {worst:.3g}, over the tolerance {tolerance:.3g}")
    return worst
