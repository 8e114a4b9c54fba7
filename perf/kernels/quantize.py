"""Per-token quantisation, alone and after RMSNorm: ours, the readable one and that under Inductor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dagserve.kernels.quantize.op import ADD_NORM, IMPLEMENTATIONS
from dagserve.kernels.quantize.op import NORM as NORM_QUANTIZE
from dagserve.kernels.quantize.tune import ADD, CASES, EPS, NORM, PLAIN, SMALL, TOLERANCE, Case
from dagserve.kernels.tuning import quantized_difference
from perf.kernels.sides import Comparison, Run, Work, copy_of, inductor

__all__ = ["CASES", "SMALL", "compare"]


def compare(case: Case, device: str) -> Comparison:
    x, residual, weight = case.inputs(device)
    choices: dict[str, dict[str, Callable[..., Any]]] = {
        PLAIN: dict(IMPLEMENTATIONS),
        NORM: dict(NORM_QUANTIZE),
        ADD: dict(ADD_NORM),
    }
    arguments = {PLAIN: (x,), NORM: (x, weight, EPS), ADD: (x, residual, weight, EPS)}[case.kind]
    choice = choices[case.kind]
    moved = x.nbytes + x.numel() + 4 * case.tokens + {PLAIN: 0, NORM: 0, ADD: 2 * x.nbytes}[case.kind]

    def compiled() -> Run:
        run = inductor(choice["torch"], device)
        return lambda: run(*arguments)

    sides: dict[str, Callable[[], Run]] = {
        "triton": lambda: lambda: choice["triton"](*arguments),
        "torch": lambda: lambda: choice["torch"](*arguments),
        "torch, Inductor": compiled,
        "copy of as many bytes": copy_of(moved, device),
    }
    difference = partial(quantized_difference, expected=case.expected(x, residual, weight))
    return Comparison("quantize", case.name, Work(moved), sides, difference, TOLERANCE)
