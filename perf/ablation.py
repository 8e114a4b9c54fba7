"""What each operator's choice is worth on a whole package: ``python -m perf.ablation``, on a GPU.

Packages of true shape with random weights, each choice against the same package without it. A time is a replay of a
CUDA graph of the package's run; the packages of a table take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dagserve.build.design import package_symbols, port_json
from dagserve.build.package import export_module, inductor_options
from dagserve.build.weights import make_module
from dagserve.interface import PackageSpec
from dagserve.nodes.beam import BeamSearch
from dagserve.nodes.operators import REFERENCE
from dagserve.nodes.prefill import Score
from perf.environment import ROOT, describe_environment
from perf.models import config_of
from perf.report import Grid

FP8 = {"fp8_linear": "cublas", "quantize": "triton", "silu_mul_quantize": "triton"}
ATTENTION = {"attention": "triton_packed_gqa"}
SHARED = {"shared_prefix_attention": "triton"}


@dataclass(frozen=True)
class Case:
    """One package under several choices of operators; the first is what the others are compared with."""

    name: str
    model: str
    package: str
    shapes: Mapping[str, Mapping[str, int]]
    choices: Mapping[str, Mapping[str, str]]


CASES = (
    Case(
        "prefill of Score, Qwen3-0.6B",
        "qwen3-0.6b",
        "backbone",
        {
            "15 x 107": {"T": 1605, "B": 15, "L": 107},
            "32 x 60": {"T": 1920, "B": 32, "L": 60},
            "8 x 500": {"T": 4000, "B": 8, "L": 500},
        },
        {
            "torch": {},
            "attention: triton_packed_gqa": ATTENTION,
            "+ mlp: fp8_rowwise": {**ATTENTION, **FP8, "mlp": "fp8_rowwise"},
            "+ mlp: fp8_rowwise, quantised by Inductor": {
                **ATTENTION,
                "fp8_linear": "cublas",
                "mlp": "fp8_rowwise",
            },
            "+ mlp and projections: fp8_rowwise": {
                **ATTENTION,
                **FP8,
                "mlp": "fp8_rowwise",
                "projections": "fp8_rowwise",
            },
            "+ rope: triton": {**ATTENTION, "rope": "triton"},
            "+ rms_norm: triton": {**ATTENTION, "rms_norm": "triton"},
        },
    ),
    Case(
        "decode step of BeamSearch, Qwen2.5-0.5B",
        "qwen2.5-0.5b",
        "step",
        {
            "W=100, 50 tokens": {"P": 1, "W": 100, "L": 50},
            "W=100, 500 tokens": {"P": 1, "W": 100, "L": 500},
            "8 x W=100, 50 tokens": {"P": 8, "W": 100, "L": 50},
            "8 x W=100, 500 tokens": {"P": 8, "W": 100, "L": 500},
        },
        {
            "torch": {},
            "shared_prefix_attention: triton": SHARED,
            "+ suffix_reorder: triton": {**SHARED, "suffix_reorder": "triton"},
            "+ mlp: fp8_rowwise": {**SHARED, **FP8, "mlp": "fp8_rowwise"},
            "+ rope: triton": {**SHARED, "rope": "triton"},
        },
    ),
    Case(
        "expansion of BeamSearch, Qwen2.5-0.5B",
        "qwen2.5-0.5b",
        "expand",
        {
            "W=100": {"P": 1, "W": 100, "B": 100, "R": 10},
            "8 x W=100": {"P": 8, "W": 100, "B": 100, "R": 10},
        },
        {
            "torch": {},
            "candidates: triton": {"candidates": "triton"},
            "+ beam_merge: triton": {"candidates": "triton", "beam_merge": "triton"},
            "+ lm_head: fp8_rowwise": {"candidates": "triton", **FP8, "lm_head": "fp8_rowwise"},
        },
    ),
)


def package_spec(case: Case, operators: Mapping[str, str], layers: int | None) -> PackageSpec:
    """The package as the node declares it."""
    config = config_of(case.model, layers).to_dict()
    chosen = {**REFERENCE, **operators}
    if case.package == "backbone":
        options: dict[str, Any] = {"max_length": 512, "reduce": "softmax", "values": None, "shared_prefix": "off"}
        spec = Score.build(options, config, "bf16", chosen, frozenset())
    else:
        options = {"width": 100, "steps": 5, "returned": 10, "stop_tokens": [151645], "min_tokens": 0}
        options["unrolled"] = False
        spec = BeamSearch.build(
            {**options, "length_penalty": 1.0, "max_length": 512}, config, "bf16", chosen, frozenset()
        )
    return next(p for p in spec.packages if p.name == case.package)


def load(spec: PackageSpec, device: str) -> torch.nn.Module:
    """The module with small random weights."""
    module = make_module(spec.module, dict(spec.arguments)).to(device)
    generator = torch.Generator(device).manual_seed(1)
    for parameter in module.parameters():
        values = torch.randn(parameter.shape, generator=generator, device=device) * 0.02
        parameter.data = (values.abs() if parameter.dim() == 1 else values).to(parameter.dtype)
    return module


def build(case: Case, choice: str, layers: int | None, device: str, path: Path) -> None:
    """Writes the package."""
    spec = package_spec(case, case.choices[choice], layers)
    bounds = {"T": 4096, "B": 32 if case.package == "backbone" else 100, "L": 512, "P": 8, "W": 100, "R": 100}
    job = {
        "module": spec.module,
        "inputs": [port_json(p) for p in spec.inputs],
        "bounds": {s: bounds[s] for s in package_symbols(spec)},
        "device": device,
        "ranges": {},
    }
    module = load(spec, device)
    with torch.no_grad():
        program = export_module(module, job)
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs=inductor_options(device)
        )


def capture(path: Path, module: torch.nn.Module, shape: Mapping[str, int]) -> Any:
    """A CUDA graph of one run."""
    package = torch._inductor.aoti_load_package(str(path), run_single_threaded=True)
    constants = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    wanted = {name: constants[name] for name in package.get_constant_fqns()}
    package.load_constants(wanted, check_full_update=True, user_managed=True)
    make: Any = module.example
    inputs = tuple(t.to("cuda") for t in make(shape, torch.Generator().manual_seed(2)))
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(3):
            package(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = package(*inputs)
    return graph, (package, inputs, out)


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end) * 1000)


def measure(case: Case, paths: Mapping[str, Path], layers: int | None, rounds: int) -> list[dict[str, Any]]:
    """A row for each shape and choice."""
    rows = []
    for shape_name, shape in case.shapes.items():
        graphs: dict[str, Any] = {}
        for choice, path in paths.items():
            try:
                module = load(package_spec(case, case.choices[choice], layers), "cuda")
                graphs[choice] = capture(path, module, shape)
            except Exception as error:  # one choice that fails must not take the others' figures
                print(f"{case.name}, {shape_name}, {choice}: {type(error).__name__}: {error}", file=sys.stderr)
        times: dict[str, list[float]] = {choice: [] for choice in graphs}
        for _ in range(rounds):
            for choice, (graph, _) in graphs.items():
                times[choice].append(replay_us(graph))
        for choice, values in times.items():
            us = statistics.median(values)
            rows.append({"package": case.name, "shape": shape_name, "choice": choice, "us": us})
            rows[-1]["times_torch"] = statistics.median(times["torch"]) / us if times.get("torch") else None
        graphs.clear()
        torch.cuda.empty_cache()
    return rows


def grid(rows: Sequence[Mapping[str, Any]]) -> Grid:
    cells = tuple(
        (
            r["package"],
            r["shape"],
            r["choice"],
            f"{r['us']:.0f}",
            f"{r['times_torch']:.2f}" if r["times_torch"] else "-",
        )
        for r in rows
    )
    return Grid("Choices of operators on a package", ("package", "shape", "operators", "us", "times torch"), cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, help="fewer than the models have")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--workers", type=int, default=12, help="builds at a time")
    parser.add_argument("--json", type=Path, default=ROOT / "perf" / "results" / "ablation.json")
    parser.add_argument("--build", nargs=3, metavar=("CASE", "CHOICE", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        case = CASES[int(options.build[0])]
        build(case, options.build[1], options.layers, "cuda", Path(options.build[2]))
        return
    layers = ["--layers", str(options.layers)] if options.layers else []
    with tempfile.TemporaryDirectory() as folder:
        jobs = {
            (i, c): Path(folder) / f"{i}.{n}.pt2" for i, case in enumerate(CASES) for n, c in enumerate(case.choices)
        }

        def run(job: tuple[int, str]) -> None:
            command = [sys.executable, "-m", "perf.ablation", *layers]
            command += ["--build", str(job[0]), job[1], str(jobs[job])]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"{CASES[job[0]].name}, {job[1]}: not built\n{done.stderr[-1500:]}", file=sys.stderr)

        with ThreadPoolExecutor(options.workers) as pool:
            list(pool.map(run, jobs))
        rows: list[dict[str, Any]] = []
        environment = describe_environment("perf.ablation", layers)
        environment["device"] = torch.cuda.get_device_name()
        for i, case in enumerate(CASES):
            paths = {c: p for (j, c), p in jobs.items() if j == i and p.exists()}
            rows += measure(case, paths, options.layers, options.rounds)
            options.json.write_text(
                json.dumps({**environment, "layers": options.layers, "rows": rows}, indent=1) + "\n"
            )
    facts = [f"- {key}: {environment[key]}" for key in ("date", "commit", "command", "device", "versions")]
    options.json.with_suffix(".md").write_text("\n".join(["# Operators", "", *facts, "", grid(rows).markdown()]))
    grid(rows).print(Console(width=140))


if __name__ == "__main__":
    main()
