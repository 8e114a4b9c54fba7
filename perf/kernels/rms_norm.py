"""RMSNorm: ours, PyTorch's fused one, the readable one and that under Inductor."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dagserve.kernels.rms_norm import reference
from dagserve.kernels.rms_norm.op import ADD, IMPLEMENTATIONS
from dagserve.kernels.rms_norm.tune import CASES, EPS, SMALL, TOLERANCE, Case, difference
from perf.kernels.sides import Comparison, Run, Work, copy_of, inductor

__all__ = ["CASES", "SMALL", "compare"]


def compare(case: Case, device: str) -> Comparison:
    x, residual, weight = case.inputs(device)
    moved = (4 if case.residual else 2) * x.nbytes + weight.nbytes
    sides = (_with_residual if case.residual else _alone)(device, x, residual, weight)
    sides = {**sides, "copy of as many bytes": copy_of(moved, device)}
    return Comparison("rms_norm", case.name, Work(moved), sides, difference(case, x, residual, weight), TOLERANCE)


def _alone(device: str, x: Tensor, _: Tensor, weight: Tensor) -> Mapping[str, Callable[[], Run]]:
    def compiled() -> Run:
        run = inductor(reference.rms_norm, device)
        return lambda: run(x, weight, EPS)

    return {
        "triton": lambda: lambda: IMPLEMENTATIONS["triton"](x, weight, EPS),
        "torch.nn.functional.rms_norm": lambda: lambda: torch.nn.functional.rms_norm(x, weight.shape, weight, EPS),
        "torch": lambda: lambda: reference.rms_norm(x, weight, EPS),
        "torch, Inductor": compiled,
    }


def _with_residual(device: str, x: Tensor, residual: Tensor, weight: Tensor) -> Mapping[str, Callable[[], Run]]:
    def fused() -> tuple[Tensor, Tensor]:
        summed = x + residual
        return torch.nn.functional.rms_norm(summed, weight.shape, weight, EPS), summed

    def compiled() -> Run:
        run = inductor(reference.add_rms_norm, device)
        return lambda: run(x, residual, weight, EPS)

    return {
        "triton": lambda: lambda: ADD["triton"](x, residual, weight, EPS),
        "sum, then torch.nn.functional.rms_norm": lambda: fused,
        "torch": lambda: lambda: reference.add_rms_norm(x, residual, weight, EPS),
        "torch, Inductor": compiled,
    }
