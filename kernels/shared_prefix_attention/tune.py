"""What shared-prefix attention is tuned and timed on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dagserve.kernels.shared_prefix_attention.reference import shared_prefix_attention as reference
from dagserve.kernels.shared_prefix_attention.triton import _shared_prefix_attention
from dagserve.kernels.tuning import Problem, Tiles, Trial, largest_difference

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

    @property
    def name(self) -> str:
        """For a table."""
        heads = f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"
        return f"{self.prompts} x W={self.width}, Lp={self.length}, {heads}"

    def inputs(self, device: str) -> tuple[Tensor, ...]:
        """The operator's arguments in BF16."""
        generator = torch.Generator(device).manual_seed(self.width)
        prefix = (self.prompts, self.length, self.kv_heads, self.head_dim)
        suffix = (self.prompts, self.width, KEYS, self.kv_heads, self.head_dim)
        shapes = ((self.prompts, self.width, self.heads, self.head_dim), prefix, prefix, suffix, suffix)
        q, pk, pv, sk, sv = (torch.randn(s, device=device, generator=generator).bfloat16() for s in shapes)
        lengths = torch.full((self.prompts,), self.length, device=device)
        return q, pk, pv, lengths, sk, sv, torch.full((1,), KEYS, device=device)


CASES = (
    *(Case(1, width, length) for width in (100, 400) for length in (50, 500)),
    *(Case(8, 100, length) for length in (50, 500)),
)

SMALL = (Case(1, 3, 5),)


def candidates() -> list[Tiles]:
    """Tiles worth a try: small ones fill the GPU where there are few beams."""
    shapes = [(16, 2), (16, 4), (32, 2), (32, 4), (64, 4)]
    return [
        {"BLOCK_M": rows, "BLOCK_N": keys, "SPLITS": splits, "warps": warps, "stages": stages}
        for (rows, warps), keys, splits, stages in itertools.product(shapes, (32, 64, 128), (1, 2, 4), (2, 3))
    ]


def problems(cases: Sequence[Case] = CASES) -> list[Problem]:
    """A bucket for each case, by prompts, beams and length, few and short ones first."""
    return [
        Problem(
            case.name,
            {
                "itemsize": 2,
                "head_dim_at_most": case.head_dim,
                "prompts_at_most": case.prompts,
                "width_at_most": 128 if case.width <= 128 else 512,
                "prefix_at_most": 64 if case.length <= 64 else 512,
            },
            {
                "itemsize": 2,
                "head_dim": case.head_dim,
                "prompts": case.prompts,
                "width": case.width,
                "prefix": case.length,
                "groups": case.heads // case.kv_heads,
            },
            candidates(),
            partial(_prepare, case),
        )
        for case in cases
    ]


def _prepare(case: Case, device: str) -> Trial:
    inputs = case.inputs(device)

    def call(c: Tiles) -> Tensor:
        tiles = (c["BLOCK_M"], c["BLOCK_N"], c["SPLITS"], c["warps"], c["stages"])
        out: Tensor = _shared_prefix_attention(*inputs, device == "cpu", *tiles)
        return out

    return Trial(call, partial(largest_difference, expected=reference(*inputs)), TOLERANCE)
