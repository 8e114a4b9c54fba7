"""Shared-prefix attention: ours, ours in plain Torch, that under Inductor, and gather-then-SDPA."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dagserve.kernels.configs import load_config
from dagserve.kernels.shared_prefix_attention.grouped import shared_prefix_attention as grouped
from dagserve.kernels.shared_prefix_attention.reference import shared_prefix_attention as reference
from dagserve.kernels.shared_prefix_attention.triton import _shared_prefix_attention, shared_prefix_attention
from perf.kernels.sides import Measure, Run, best, floor_us, timed

TOLERANCE = 2e-2
"""Of BF16 results from the FP32 reference; tests/tolerances.py has the same."""

KEYS = 4
"""Of a suffix, as a search of 5 tokens has, all of them valid."""


@dataclass(frozen=True)
class Case:
    """``prompts`` of ``length`` tokens with ``width`` beams each."""

    prompts: int
    width: int
    length: int
    heads: int = 14
    kv_heads: int = 2
    head_dim: int = 64

    def inputs(self) -> tuple[Tensor, ...]:
        """The operator's arguments in BF16, on the GPU."""
        generator = torch.Generator("cuda").manual_seed(self.width)
        prefix = (self.prompts, self.length, self.kv_heads, self.head_dim)
        suffix = (self.prompts, self.width, KEYS, self.kv_heads, self.head_dim)
        shapes = ((self.prompts, self.width, self.heads, self.head_dim), prefix, prefix, suffix, suffix)
        q, pk, pv, sk, sv = (torch.randn(s, device="cuda", generator=generator).bfloat16() for s in shapes)
        lengths = torch.full((self.prompts,), self.length, device="cuda")
        return q, pk, pv, lengths, sk, sv, torch.full((1,), KEYS, device="cuda")

    def described(self) -> dict[str, Any]:
        """The case, and what it takes at least: prefix and suffix read once, q read and the result written."""
        keys = self.length + self.width * KEYS
        moved = 2 * 2 * self.prompts * self.head_dim * (keys * self.kv_heads + self.width * self.heads)
        flops = 4 * self.prompts * self.width * (self.length + KEYS) * self.head_dim * self.heads
        name = (
            f"{self.prompts} x W={self.width}, Lp={self.length}, {self.heads}/{self.kv_heads} heads of {self.head_dim}"
        )
        floor = floor_us(moved, flops)
        return {"op": "shared_prefix_attention", "case": name, "bytes": moved, "flops": flops, "floor_us": floor}


CASES = (
    *(Case(1, width, length) for width in (100, 400) for length in (50, 500)),
    *(Case(8, 100, length) for length in (50, 500)),
)


def rows(measure: Measure) -> list[dict[str, Any]]:
    """A row for each case and side; ``measure`` gives microseconds."""
    found = []
    for case in CASES:
        inputs = case.inputs()
        found += timed(case.described(), sides(case, inputs), reference(*inputs), TOLERANCE, measure)
    return found


def sides(case: Case, inputs: tuple[Tensor, ...]) -> Mapping[str, Callable[[], Run]]:
    """The calls to compare."""

    def gather_then_sdpa() -> Tensor:
        """Every beam gets a copy of its prompt's keys, before its own."""
        q, pk, pv, _, sk, sv, _ = inputs
        beams = [x[:, None].expand(-1, case.width, -1, -1, -1) for x in (pk, pv)]
        k, v = (torch.cat(x, dim=2).flatten(0, 1).transpose(1, 2) for x in ((beams[0], sk), (beams[1], sv)))
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(q.flatten(0, 1)[:, :, None], k, v, enable_gqa=True).reshape(q.shape)

    def inductor() -> Run:
        compiled = torch.compile(grouped, dynamic=False)
        return lambda: compiled(*inputs)

    return {
        "triton": lambda: lambda: shared_prefix_attention(*inputs),
        "gather, then SDPA": lambda: gather_then_sdpa,
        "torch": lambda: lambda: grouped(*inputs),
        "torch, Inductor": inductor,
    }


def candidates() -> list[dict[str, int]]:
    """Tiles worth a try: small ones fill the GPU where there are few beams."""
    shapes = [(16, 2), (16, 4), (32, 2), (32, 4), (64, 4)]
    return [
        {"BLOCK_M": rows, "BLOCK_N": keys, "SPLITS": splits, "warps": warps, "stages": stages}
        for (rows, warps), keys, splits, stages in itertools.product(shapes, (32, 64, 128), (1, 2, 4), (2, 3))
    ]


def tune(measure: Measure) -> dict[str, Any]:
    """The content of ``kernels/shared_prefix_attention/configs/<gpu>.json``, and the table of what was tried.

    ``{"config": ..., "rows": [...]}``. Other shapes keep the default's tiles.
    """
    buckets, table = [], []
    for case in CASES:
        inputs = case.inputs()

        def call(c: Mapping[str, int], inputs: tuple[Tensor, ...] = inputs) -> Tensor:
            tiles = (c["BLOCK_M"], c["BLOCK_N"], c["SPLITS"], c["warps"], c["stages"])
            out: Tensor = _shared_prefix_attention(*inputs, False, *tiles)
            return out

        use, tried = best(candidates(), call, reference(*inputs), TOLERANCE, measure)
        when = {
            "itemsize": 2,
            "head_dim_at_most": case.head_dim,
            "prompts_at_most": case.prompts,
            "width_at_most": 128 if case.width <= 128 else 512,
            "prefix_at_most": 64 if case.length <= 64 else 512,
        }
        buckets.append({"when": when, "use": dict(use)})
        table += [{**case.described(), **row} for row in tried]
    default = load_config("shared_prefix_attention", "default").buckets
    buckets += [{"when": dict(b.when), "use": dict(b.use)} for b in default]
    return {"config": {"gpu": torch.cuda.get_device_name(), "buckets": buckets}, "rows": table}
