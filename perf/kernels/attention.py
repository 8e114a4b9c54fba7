"""Packed attention: ours, PyTorch's SDPA, varlen, FlexAttention and Inductor, and flash-attn where it is installed."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dagserve.kernels.attention.op import IMPLEMENTATIONS
from dagserve.kernels.attention.padded import Packing
from dagserve.kernels.attention.reference import packed_attention
from dagserve.kernels.attention.triton import _packed_gqa, packed_gqa
from dagserve.kernels.configs import load_config
from perf.kernels.sides import Measure, Run, best, floor_us, timed

TOLERANCE = 2e-2
"""Of BF16 results from the FP32 reference; tests/tolerances.py has the same."""


@dataclass(frozen=True)
class Case:
    """``texts`` sequences of ``length`` tokens."""

    texts: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v in BF16 and ``cu_seqlens``, on the GPU."""
        generator = torch.Generator("cuda").manual_seed(self.length)
        heads, tokens = (self.heads, self.kv_heads, self.kv_heads), self.texts * self.length
        q, k, v = (torch.randn(tokens, h, self.head_dim, device="cuda", generator=generator).bfloat16() for h in heads)
        cu_seqlens = torch.arange(self.texts + 1, dtype=torch.int32, device="cuda") * self.length
        return q, k, v, cu_seqlens

    def described(self) -> dict[str, Any]:
        """The case, and what it takes at least."""
        tokens, size = self.texts * self.length, self.head_dim
        moved = 2 * tokens * size * 2 * (self.heads + self.kv_heads)
        flops = 4 * self.texts * (self.length * (self.length + 1) / 2) * size * self.heads
        name = f"{self.texts} x {self.length}, {self.heads}/{self.kv_heads} heads of {size}"
        return {"op": "attention", "case": name, "bytes": moved, "flops": flops, "floor_us": floor_us(moved, flops)}


CASES = tuple(
    Case(texts, length, *heads)
    for heads in ((16, 8, 128), (14, 2, 64))
    for texts, length in ((15, 107), (32, 60), (8, 500))
)


def rows(measure: Measure) -> list[dict[str, Any]]:
    """A row for each case and side; ``measure`` gives microseconds."""
    found = []
    for case in CASES:
        inputs = case.inputs()
        found += timed(case.described(), sides(case, *inputs), packed_attention(*inputs), TOLERANCE, measure)
    return found


def sides(case: Case, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Mapping[str, Callable[[], Run]]:
    """The calls to compare. All texts are equally long, so padding costs SDPA nothing here."""
    longest = case.length
    iota = torch.arange(longest, dtype=torch.int32, device="cuda")

    def sdpa() -> Run:
        qp, kp, vp = (x.view(case.texts, longest, -1, case.head_dim).transpose(1, 2) for x in (q, k, v))
        attention = torch.nn.functional.scaled_dot_product_attention
        return lambda: attention(qp, kp, vp, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)

    def varlen() -> Run:
        attention = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        options = {"window_size": (-1, 0), "enable_gqa": True}
        out: Run = lambda: attention(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)  # noqa: E731
        return out

    def varlen_expanded() -> Run:
        """As PyTorch before 2.13 needs it, K/V heads expanded beforehand, outside of the time."""
        attention = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        wide = [x.repeat_interleave(case.heads // case.kv_heads, dim=1) for x in (k, v)]
        out: Run = lambda: attention(q, *wide, cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0))  # noqa: E731
        return out

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
        document = torch.arange(q.shape[0], device="cuda") // longest
        mask = attention.create_block_mask(
            lambda _b, _h, i, j: (i >= j) & (document[i] == document[j]), None, None, q.shape[0], q.shape[0], "cuda"
        )
        compiled: Any = torch.compile(attention.flex_attention, dynamic=False)
        heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
        return lambda: compiled(*heads_first, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    def inductor() -> Run:
        packing = Packing.of(cu_seqlens, q.shape[0], iota)
        compiled = torch.compile(IMPLEMENTATIONS["torch"], dynamic=False)
        return lambda: compiled(q, k, v, packing)

    return {
        "triton_packed_gqa": lambda: lambda: packed_gqa(q, k, v, cu_seqlens, longest),
        "SDPA": sdpa,
        "varlen_attn": varlen,
        "varlen_attn, K/V expanded before": varlen_expanded,
        "flash-attn 3": flash("flash_attn_interface"),
        "flash-attn 2": flash("flash_attn"),
        "FlexAttention": flex,
        "torch (padded), Inductor": inductor,
    }


def candidates(head_dim: int) -> list[dict[str, int]]:
    """Tiles worth a try. A tile of 128 rows of 128 numbers needs 8 warps: its sums do not fit the registers of 4."""
    shapes = [(32, 4), (64, 4), (128, 8)] + ([(128, 4)] if head_dim <= 64 else [])
    return [
        {"BLOCK_M": rows, "BLOCK_N": keys, "SKIP_MASKS": skip, "warps": warps, "stages": stages}
        for (rows, warps), keys, skip, stages in itertools.product(shapes, (32, 64, 128), (0, 1), (2, 3))
    ]


def tune(measure: Measure) -> dict[str, Any]:
    """The content of ``kernels/attention/configs/<gpu>.json``, from the fastest tiles of each case, and its table.

    ``{"config": ..., "rows": [...]}``. Other shapes keep the default's tiles.
    """
    buckets, table = [], []
    for case in sorted(CASES, key=lambda c: (c.head_dim, c.length)):
        q, k, v, cu_seqlens = case.inputs()

        def call(c: Mapping[str, int], inputs: tuple[Tensor, ...] = (q, k, v, cu_seqlens)) -> Tensor:
            tiles = (c["BLOCK_M"], c["BLOCK_N"], c["SKIP_MASKS"], c["warps"], c["stages"])
            out: Tensor = _packed_gqa(*inputs, False, False, *tiles)
            return out

        expected = packed_attention(q, k, v, cu_seqlens)
        use, tried = best(candidates(case.head_dim), call, expected, TOLERANCE, measure)
        length = 2 ** (case.length - 1).bit_length()
        when = {"itemsize": 2, "head_dim_at_most": case.head_dim, "length_at_most": length}
        buckets.append({"when": when, "use": dict(use)})
        table += [{**case.described(), **row} for row in tried]
    buckets += [{"when": dict(b.when), "use": dict(b.use)} for b in load_config("attention", "default").buckets]
    return {"config": {"gpu": torch.cuda.get_device_name(), "buckets": buckets}, "rows": table}
