"""QK norm, rotation and K/V write: ours, the readable ones, those under Inductor, and the decoder's own steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dagserve.kernels.rms_norm.reference import rms_norm
from dagserve.kernels.rope.op import IMPLEMENTATIONS, WRITE
from dagserve.kernels.rope.reference import qk_norm_rope, rotate
from dagserve.kernels.rope.tune import CASES, SMALL, TOLERANCE, Case, difference
from perf.kernels.sides import Comparison, Run, Work, copy_of, inductor

__all__ = ["CASES", "SMALL", "compare"]


def compare(case: Case, device: str) -> Comparison:
    """Half of each row of cos and sin counts: the other half is equal."""
    inputs = case.inputs(device)
    read = [inputs[name].numel() * 2 for name in ("q", "k", "v") if name in inputs]
    moved = 2 * sum(read) + inputs["cos"].nbytes + (8 * case.tokens if case.write else 0)
    compared = difference(inputs)

    def with_keys(q: Tensor) -> float:
        return compared((q, inputs["keys"].index_select(0, inputs["rows"])))

    sides = (_writing if case.write else _alone)(device, inputs)
    sides = {**sides, "copy of as many bytes": copy_of(moved, device)}
    return Comparison("rope", case.name, Work(moved), sides, with_keys if case.write else compared, TOLERANCE)


def _alone(device: str, inputs: Mapping[str, Any]) -> Mapping[str, Callable[[], Run]]:
    def compiled(function: Callable[..., Any]) -> Callable[[], Run]:
        def make() -> Run:
            run = inductor(function, device)
            return lambda: run(**inputs)

        return make

    return {
        "triton": lambda: lambda: IMPLEMENTATIONS["triton"](**inputs),
        "torch": lambda: lambda: qk_norm_rope(**inputs),
        "torch, Inductor": compiled(qk_norm_rope),
        "decoder's steps in BF16": lambda: lambda: steps(**inputs),
        "decoder's steps in BF16, Inductor": compiled(steps),
    }


def _writing(device: str, inputs: Mapping[str, Any]) -> Mapping[str, Callable[[], Run]]:
    """Each side finds keys of NaN and gives q; :func:`compare` looks at the keys that it wrote."""

    def cleared(run: Callable[..., Tensor]) -> Run:
        inputs["keys"].fill_(float("nan"))
        return lambda: run(**inputs)

    return {
        "triton": lambda: cleared(WRITE["triton"]),
        "torch": lambda: cleared(written_everywhere),
        "torch, Inductor": lambda: cleared(inductor(written_everywhere, device)),
    }


def written_everywhere(**inputs: Any) -> Tensor:
    """The reference where each row is kept: a mask of rows would wait for the GPU and cannot be captured."""
    keys, values, rows, v = (inputs.pop(name) for name in ("keys", "values", "rows", "v"))
    q, k = qk_norm_rope(**inputs)
    keys.index_copy_(0, rows, k)
    values.index_copy_(0, rows, v)
    return q


def steps(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """What the decoder computes, each step rounded to BF16."""
    cos, sin = cos.to(torch.bfloat16), sin.to(torch.bfloat16)
    pairs = ((q, q_weight), (k, k_weight))
    turned = [rotate(x if weight is None else rms_norm(x, weight, eps), cos, sin) for x, weight in pairs]
    return turned[0], turned[1]
