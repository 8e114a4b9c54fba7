"""Packed attention: ours, PyTorch's SDPA, varlen, FlexAttention and Inductor, and flash-attn where it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dagserve.kernels.attention.op import IMPLEMENTATIONS
from dagserve.kernels.attention.padded import Packing
from dagserve.kernels.attention.reference import packed_attention
from dagserve.kernels.attention.triton import packed_gqa
from dagserve.kernels.attention.tune import CASES, SMALL, TOLERANCE, Case
from dagserve.kernels.tuning import largest_difference
from perf.kernels.sides import Comparison, Run, Work
from perf.kernels.sides import inductor as compiled_by_inductor

__all__ = ["CASES", "SMALL", "compare"]


def compare(case: Case, device: str) -> Comparison:
    tokens, size = case.texts * case.length, case.head_dim
    moved = 2 * tokens * size * 2 * (case.heads + case.kv_heads)
    flops = 4 * case.texts * (case.length * (case.length + 1) / 2) * size * case.heads
    inputs = case.inputs(device)
    difference = partial(largest_difference, expected=packed_attention(*inputs))
    return Comparison("attention", case.name, Work(moved, flops), sides(case, device, *inputs), difference, TOLERANCE)


def sides(
    case: Case, device: str, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor
) -> Mapping[str, Callable[[], Run]]:
    """The calls to compare. All texts are equally long, so padding costs SDPA nothing here."""
    longest = case.length
    iota = torch.arange(longest, dtype=torch.int32, device=device)

    def sdpa() -> Run:
        qp, kp, vp = (x.view(case.texts, longest, -1, case.head_dim).transpose(1, 2) for x in (q, k, v))
        attention = torch.nn.functional.scaled_dot_product_attention
        return lambda: attention(qp, kp, vp, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)

    def varlen() -> Run:
        attention = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        options = {"window_size": (-1, 0), "enable_gqa": True}
        return lambda: attention(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)

    def varlen_expanded() -> Run:
        """As PyTorch before 2.13 needs it, K/V heads expanded beforehand, outside of the time."""
        attention = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        wide = [x.repeat_interleave(case.heads // case.kv_heads, dim=1) for x in (k, v)]
        return lambda: attention(q, *wide, cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0))

    def flash_of_aten() -> Run:
        """FlashAttention as PyTorch has it, which takes fewer K/V heads by itself; not a public function."""
        attention = torch.ops.aten._flash_attention_forward.default
        return lambda: attention(q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, False)[0]

    def flash(module: str) -> Callable[[], Run]:
        def make() -> Run:
            attention = importlib.import_module(module).flash_attn_varlen_func

            def run() -> Tensor:
                out = attention(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True)
                first: Tensor = out[0] if isinstance(out, tuple) else out
                return first

            return run

        return make

    def flex() -> Run:
        attention: Any = importlib.import_module("torch.nn.attention.flex_attention")
        document = torch.arange(q.shape[0], device=device) // longest
        mask = attention.create_block_mask(
            lambda _b, _h, i, j: (i >= j) & (document[i] == document[j]), None, None, q.shape[0], q.shape[0], device
        )
        compiled: Any = compiled_by_inductor(attention.flex_attention, device)
        heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
        return lambda: compiled(*heads_first, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    def inductor() -> Run:
        packing = Packing.of(cu_seqlens, q.shape[0], iota)
        compiled = compiled_by_inductor(IMPLEMENTATIONS["torch"], device)
        return lambda: compiled(q, k, v, packing)

    return {
        "triton_packed_gqa": lambda: lambda: packed_gqa(q, k, v, cu_seqlens, longest),
        "SDPA": sdpa,
        "varlen_attn": varlen,
        "varlen_attn, K/V expanded before": varlen_expanded,
        "aten._flash_attention_forward": flash_of_aten,
        "flash-attn 3": flash("flash_attn_interface"),
        "flash-attn 2": flash("flash_attn"),
        "FlexAttention": flex,
        "torch (padded), Inductor": inductor,
    }
