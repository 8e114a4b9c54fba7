"""FP8 linears: our product, PyTorch's, PyTorch's behind our quantisation, and BF16's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from dagserve.kernels.fp8_linear.op import IMPLEMENTATIONS
from dagserve.kernels.fp8_linear.reference import fp8_linear
from dagserve.kernels.fp8_linear.tune import CASES, SMALL, TOLERANCE, Case
from dagserve.kernels.quantize.op import IMPLEMENTATIONS as QUANTIZE
from dagserve.kernels.quantize.reference import dequantize
from dagserve.kernels.tuning import relative_difference
from perf.kernels.sides import Comparison, Run, Work, inductor

__all__ = ["CASES", "SMALL", "compare"]

BF16, BF16_COMPILED = "BF16 matmul", "BF16 matmul, Inductor"
QUANTIZED = "triton quantize, then cublas (_scaled_mm)"
COMPILED_AT = (5, 100, 1605)
"""Token counts at which Inductor is asked: for a lone product it calls the same library."""


def compare(case: Case, device: str) -> Comparison:
    """BF16's operands are those of FP8, rounded, so that all sides compute the same."""
    x, x_scale, weight, scale = case.inputs(device)
    wide_x, wide_weight = dequantize(x, x_scale).bfloat16(), dequantize(weight, scale[:, None]).bfloat16()
    flops = 2 * case.tokens * case.features * case.columns
    operands, result = x.numel() + weight.numel(), 2 * case.tokens * case.features

    def product(name: str) -> Callable[[], Run]:
        return lambda: lambda: IMPLEMENTATIONS[name](x, x_scale, weight, scale, None, torch.bfloat16)

    def quantized() -> torch.Tensor:
        own, own_scale = QUANTIZE["triton"](wide_x)
        return IMPLEMENTATIONS["cublas"](own, own_scale, weight, scale, None, torch.bfloat16)

    def compiled() -> Run:
        run = inductor(torch.matmul, device)
        return lambda: run(wide_x, wide_weight.t())

    sides: dict[str, Callable[[], Run]] = {
        "triton": product("triton"),
        "cublas (_scaled_mm)": product("cublas"),
        QUANTIZED: lambda: quantized,
        BF16: lambda: lambda: torch.matmul(wide_x, wide_weight.t()),
    }
    if case.tokens in COMPILED_AT:
        sides[BF16_COMPILED] = compiled
    bf16 = Work(2 * operands + result, flops)
    works = {BF16: bf16, BF16_COMPILED: bf16, QUANTIZED: Work(2 * x.numel() + weight.numel() + result, flops, True)}
    difference = partial(relative_difference, expected=fp8_linear(x, x_scale, weight, scale, None, torch.bfloat16))
    return Comparison(
        "fp8_linear", case.name, Work(operands + result, flops, fp8=True), sides, difference, TOLERANCE, works
    )
