"""Shared-prefix attention: ours, ours in plain Torch, that under Inductor, and gather-then-SDPA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from dagserve.kernels.shared_prefix_attention.grouped import shared_prefix_attention as grouped
from dagserve.kernels.shared_prefix_attention.reference import shared_prefix_attention as reference
from dagserve.kernels.shared_prefix_attention.triton import shared_prefix_attention
from dagserve.kernels.shared_prefix_attention.tune import CASES, KEYS, SMALL, TOLERANCE, Case
from dagserve.kernels.tuning import largest_difference
from perf.kernels.sides import Comparison, Run, Work, inductor

__all__ = ["CASES", "SMALL", "compare"]


def compare(case: Case, device: str) -> Comparison:
    """At least, prefix and suffix are read once, q is read and the result written."""
    keys = case.length + case.width * KEYS
    moved = 2 * 2 * case.prompts * case.head_dim * (keys * case.kv_heads + case.width * case.heads)
    flops = 4 * case.prompts * case.width * (case.length + KEYS) * case.head_dim * case.heads
    inputs = case.inputs(device)
    difference = partial(largest_difference, expected=reference(*inputs))
    return Comparison(
        "shared_prefix_attention", case.name, Work(moved, flops), sides(case, device, inputs), difference, TOLERANCE
    )


def sides(case: Case, device: str, inputs: tuple[Tensor, ...]) -> Mapping[str, Callable[[], Run]]:
    """The calls to compare."""

    def gather_then_sdpa() -> Tensor:
        """Every beam gets a copy of its prompt's keys, before its own."""
        q, pk, pv, _, sk, sv, _ = inputs
        beams = [x[:, None].expand(-1, case.width, -1, -1, -1) for x in (pk, pv)]
        k, v = (torch.cat(x, dim=2).flatten(0, 1).transpose(1, 2) for x in ((beams[0], sk), (beams[1], sv)))
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(q.flatten(0, 1)[:, :, None], k, v, enable_gqa=True).reshape(q.shape)

    def compiled() -> Run:
        run = inductor(grouped, device)
        return lambda: run(*inputs)

    return {
        "triton": lambda: lambda: shared_prefix_attention(*inputs),
        "gather, then SDPA": lambda: gather_then_sdpa,
        "torch": lambda: lambda: grouped(*inputs),
        "torch, Inductor": compiled,
    }
