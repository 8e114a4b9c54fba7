"""What the quantised gated activation is tuned and timed on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dagserve.kernels.rows import TOKENS
from dagserve.kernels.silu_mul_quantize.reference import silu_mul_quantize
from dagserve.kernels.silu_mul_quantize.triton import _silu_mul_quantize
from dagserve.kernels.tuning import Problem, Tiles, Trial, quantized_difference

TOLERANCE = 2.0**-3
"""A step of E4M3, where FP32 arithmetic rounds otherwise."""


@dataclass(frozen=True)
class Case:
    """``tokens`` rows that become ``columns``."""

    tokens: int
    columns: int

    @property
    def name(self) -> str:
        """For a table."""
        return f"{self.tokens} x 2 x {self.columns}"

    def inputs(self, device: str) -> Tensor:
        """Gate and up in BF16."""
        generator = torch.Generator(device).manual_seed(self.columns)
        return torch.randn(self.tokens, 2 * self.columns, device=device, generator=generator).bfloat16()


CASES = tuple(Case(tokens, columns) for columns in (3072, 4864) for tokens in TOKENS.values())

SMALL = (Case(3, 48),)

BUCKETS = tuple((most, Case(count, columns)) for columns in (3072, 4864) for most, count in TOKENS.items())


def candidates() -> list[Tiles]:
    """Rows that share a program, and its warps."""
    return [{"ROWS": rows, "warps": warps} for rows, warps in itertools.product((1, 2, 4), (2, 4, 8, 16))]


def problems(buckets: Sequence[tuple[int, Case]] = BUCKETS) -> list[Problem]:
    """Buckets by tokens and columns."""
    return [
        Problem(
            case.name,
            {"tokens_at_most": most, "columns_at_most": case.columns},
            {"tokens": case.tokens, "columns": case.columns},
            candidates(),
            partial(_prepare, case),
        )
        for most, case in buckets
    ]


def _prepare(case: Case, device: str) -> Trial:
    packed = case.inputs(device)

    def call(c: Tiles) -> Any:
        return _silu_mul_quantize(packed, c["ROWS"], c["warps"])

    return Trial(call, partial(quantized_difference, expected=silu_mul_quantize(packed)), TOLERANCE)
