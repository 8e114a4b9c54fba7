"""What packed attention is tuned and timed on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dagserve.kernels.attention.reference import packed_attention
from dagserve.kernels.attention.triton import _packed_gqa
from dagserve.kernels.tuning import Problem, Tiles, Trial, largest_difference

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

    @property
    def name(self) -> str:
        """For a table."""
        return f"{self.texts} x {self.length}, {self.heads}/{self.kv_heads} heads of {self.head_dim}"

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v in BF16 and ``cu_seqlens``."""
        generator = torch.Generator(device).manual_seed(self.length)
        heads, tokens = (self.heads, self.kv_heads, self.kv_heads), self.texts * self.length
        shapes = [(tokens, h, self.head_dim) for h in heads]
        q, k, v = (torch.randn(s, device=device, generator=generator).bfloat16() for s in shapes)
        cu_seqlens = torch.arange(self.texts + 1, dtype=torch.int32, device=device) * self.length
        return q, k, v, cu_seqlens


CASES = tuple(
    Case(texts, length, *heads)
    for heads in ((14, 2, 64), (16, 8, 128))
    for texts, length in ((32, 60), (15, 107), (8, 500))
)

SMALL = (Case(2, 5, 4, 2, 64),)


def candidates(head_dim: int) -> list[Tiles]:
    """Tiles worth a try. A tile of 128 rows of 128 numbers needs 8 warps: its sums do not fit the registers of 4."""
    shapes = [(32, 4), (64, 4), (128, 8)] + ([(128, 4)] if head_dim <= 64 else [])
    return [
        {"BLOCK_M": rows, "BLOCK_N": keys, "SKIP_MASKS": skip, "warps": warps, "stages": stages}
        for (rows, warps), keys, skip, stages in itertools.product(shapes, (32, 64, 128), (0, 1), (2, 3))
    ]


def problems(cases: Sequence[Case] = CASES) -> list[Problem]:
    """A bucket for each case, by length and head size, short and small first."""
    return [
        Problem(
            case.name,
            {
                "itemsize": 2,
                "head_dim_at_most": case.head_dim,
                "length_at_most": 2 ** (case.length - 1).bit_length(),
            },
            {
                "itemsize": 2,
                "head_dim": case.head_dim,
                "length": case.length,
                "groups": case.heads // case.kv_heads,
            },
            candidates(case.head_dim),
            partial(_prepare, case),
        )
        for case in cases
    ]


def _prepare(case: Case, device: str) -> Trial:
    inputs = case.inputs(device)

    def call(c: Tiles) -> Tensor:
        tiles = (c["BLOCK_M"], c["BLOCK_N"], c["SKIP_MASKS"], c["warps"], c["stages"])
        out: Tensor = _packed_gqa(*inputs, False, device == "cpu", *tiles)
        return out

    return Trial(call, partial(largest_difference, expected=packed_attention(*inputs)), TOLERANCE)
