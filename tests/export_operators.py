"""Exports every package of model nodes with all kernels, for dynamic shapes, in a process of its own: what Triton's
interpreter runs cannot be exported. Run by test_kernels_compile.py; prints each package's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from random_models import CONFIGS

from dagserve.build.design import package_symbols, port_json
from dagserve.build.package import export_module
from dagserve.build.weights import make_module
from dagserve.nodes.beam import BeamSearch
from dagserve.nodes.operators import BEAM, REFERENCE
from dagserve.nodes.prefill import Embed, Score

BOUNDS = {"T": 512, "B": 16, "L": 64, "S": 64, "N": 4, "P": 4, "W": 16, "R": 16}
KERNELS = {name: next(c for c in BEAM[name] if c.startswith("triton")) for name in BEAM if "torch" in BEAM[name]}
E4M3 = dict.fromkeys(("projections", "mlp", "lm_head"), "fp8_rowwise")
CHOICES: tuple[Mapping[str, str], ...] = (KERNELS, {**KERNELS, **E4M3}, {**KERNELS, **E4M3, "fp8_linear": "cublas"})
SEARCH: Mapping[str, Any] = {"width": 16, "steps": 3, "returned": 5, "stop_tokens": [2], "min_tokens": 0}
NODES: tuple[tuple[Any, Mapping[str, Any]], ...] = (
    (Score, {"reduce": "probability", "values": None, "shared_prefix": "exact"}),
    (Embed, {"dimensions": 64, "pool": "mean", "normalize": True, "shared_prefix": "off"}),
    (BeamSearch, {**SEARCH, "length_penalty": 1.0, "unrolled": False}),
    (BeamSearch, {**SEARCH, "length_penalty": 1.0, "unrolled": True}),
)


def main() -> None:
    torch.set_num_threads(1)
    config = {**CONFIGS["qwen3-tied-wide-heads"].to_dict(), "num_hidden_layers": 1}
    for choice in CHOICES:
        for node, options in NODES:
            operators = {**REFERENCE, **choice}
            spec = node.build({**options, "max_length": 64}, config, "bf16", operators, frozenset())
            for package in spec.packages:
                module = make_module(package.module, dict(package.arguments))
                inputs = [port_json(p) for p in package.inputs]
                bounds = {s: BOUNDS[s] for s in package_symbols(package)}
                job = {"module": package.module, "inputs": inputs, "bounds": bounds, "device": "cpu", "ranges": {}}
                export_module(module, job)
                print(package.name)


if __name__ == "__main__":
    main()
