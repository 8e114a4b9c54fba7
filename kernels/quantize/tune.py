"""What quantisation is tuned and timed on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dagserve.kernels.quantize.reference import add_rms_norm_quantize, quantize, rms_norm_quantize
from dagserve.kernels.quantize.triton import _quantize
from dagserve.kernels.rows import TOKENS
from dagserve.kernels.tuning import Problem, Tiles, Trial, quantized_difference

TOLERANCE = 2.0**-3
"""A step of E4M3, where FP32 arithmetic rounds otherwise."""

EPS = 1e-6
PLAIN, NORM, ADD = "plain", "after RMSNorm", "after residual and RMSNorm"


@dataclass(frozen=True)
class Case:
    """``tokens`` rows of ``columns``, quantised as they are or after what ``kind`` says."""

    tokens: int
    columns: int
    kind: str = PLAIN

    @property
    def name(self) -> str:
        """For a table."""
        return f"{self.tokens} x {self.columns}, {self.kind}"

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """x, residual and weight in BF16."""
        generator = torch.Generator(device).manual_seed(self.columns)
        shapes = ((self.tokens, self.columns), (self.tokens, self.columns), (self.columns,))
        x, residual, weight = (torch.randn(s, device=device, generator=generator).bfloat16() for s in shapes)
        return x, residual, weight

    def expected(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        """By the reference."""
        if self.kind == PLAIN:
            return quantize(x)
        if self.kind == NORM:
            return rms_norm_quantize(x, weight, EPS)
        return add_rms_norm_quantize(x, residual, weight, EPS)


CASES = tuple(
    Case(tokens, columns, kind)
    for kind, sizes in ((PLAIN, (896, 2048)), (NORM, (896, 1024)), (ADD, (896, 1024)))
    for columns in sizes
    for tokens in TOKENS.values()
)

SMALL = tuple(Case(3, 48, kind) for kind in (PLAIN, NORM, ADD))

BUCKETS = tuple(
    (most, columns, Case(count, columns, kind))
    for columns, kind in ((1024, ADD), (2048, PLAIN))
    for most, count in TOKENS.items()
)


def candidates() -> list[Tiles]:
    """Rows that share a program, and its warps."""
    return [{"ROWS": rows, "warps": warps} for rows, warps in itertools.product((1, 2, 4, 8), (1, 2, 4, 8))]


def problems(buckets: Sequence[tuple[int, int, Case]] = BUCKETS) -> list[Problem]:
    """Buckets by tokens and columns; the short rows are those that a norm and a residual come before."""
    return [
        Problem(
            case.name,
            {"tokens_at_most": most, "columns_at_most": columns},
            {"tokens": case.tokens, "columns": case.columns},
            candidates(),
            partial(_prepare, case),
        )
        for most, columns, case in buckets
    ]


def _prepare(case: Case, device: str) -> Trial:
    x, residual, weight = case.inputs(device)

    def call(c: Tiles) -> Any:
        added, norm = residual if case.kind == ADD else None, None if case.kind == PLAIN else weight
        return _quantize(x, added, norm, EPS, c["ROWS"], c["warps"])

    return Trial(call, partial(quantized_difference, expected=case.expected(x, residual, weight)), TOLERANCE)
