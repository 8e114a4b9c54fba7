"""The quantised gated activation: ours, the readable one and that under Inductor, and BF16 without quantisation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn.functional import silu

from dagserve.kernels.silu_mul_quantize.op import IMPLEMENTATIONS
from dagserve.kernels.silu_mul_quantize.tune import CASES, SMALL, TOLERANCE, Case
from dagserve.kernels.tuning import quantized_difference
from perf.kernels.sides import Comparison, Run, Work, copy_of, inductor

__all__ = ["CASES", "SMALL", "compare"]

BF16 = "SiLU x up in BF16, Inductor"


def compare(case: Case, device: str) -> Comparison:
    packed = case.inputs(device)
    values = case.tokens * case.columns
    moved = packed.nbytes + values + 4 * case.tokens

    def compiled() -> Run:
        run = inductor(IMPLEMENTATIONS["torch"], device)
        return lambda: run(packed)

    def unquantized() -> Run:
        """What a BF16 down projection has instead; its result is not compared."""
        run = inductor(gated, device)

        def call() -> None:
            run(packed)

        return call

    sides: dict[str, Callable[[], Run]] = {
        "triton": lambda: lambda: IMPLEMENTATIONS["triton"](packed),
        "torch": lambda: lambda: IMPLEMENTATIONS["torch"](packed),
        "torch, Inductor": compiled,
        BF16: unquantized,
        "copy of as many bytes": copy_of(moved, device),
    }
    difference = partial(quantized_difference, expected=IMPLEMENTATIONS["torch"](packed))
    works = {BF16: Work(packed.nbytes + 2 * values)}
    return Comparison("silu_mul_quantize", case.name, Work(moved), sides, difference, TOLERANCE, works)


def gated(packed: Tensor) -> Tensor:
    """As the decoder computes it."""
    gate, up = packed.chunk(2, dim=-1)
    return silu(gate) * up
