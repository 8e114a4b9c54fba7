"""What RMSNorm is tuned and timed on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dagserve.kernels.rms_norm.reference import add_rms_norm, rms_norm
from dagserve.kernels.rms_norm.triton import _rms_norm
from dagserve.kernels.rows import TOKENS
from dagserve.kernels.tuning import Problem, Tiles, Trial, relative_difference

TOLERANCE = 1e-2
"""Of BF16 results from the reference, relative to all of them."""

EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """``tokens`` rows of ``columns``, with or without a residual in front."""

    tokens: int
    columns: int
    residual: bool

    @property
    def name(self) -> str:
        """For a table."""
        return f"{self.tokens} x {self.columns}{', residual' if self.residual else ''}"

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """x, residual and weight in BF16."""
        generator = torch.Generator(device).manual_seed(self.columns)
        shapes = ((self.tokens, self.columns), (self.tokens, self.columns), (self.columns,))
        x, residual, weight = (torch.randn(s, device=device, generator=generator).bfloat16() for s in shapes)
        return x, residual, weight


CASES = tuple(
    Case(tokens, columns, residual)
    for residual in (False, True)
    for columns in (896, 1024)
    for tokens in (1, *TOKENS.values())
)

SMALL = (Case(3, 48, False), Case(3, 48, True))


def candidates() -> list[Tiles]:
    """Rows that share a program, and its warps."""
    return [{"ROWS": rows, "warps": warps} for rows, warps in itertools.product((1, 2, 4, 8), (1, 2, 4, 8))]


def problems(tokens: Sequence[tuple[int, int]] = tuple(TOKENS.items()), columns: int = 1024) -> list[Problem]:
    """A bucket for each token count; with a residual, as all norms but the first of a model are."""
    return [
        Problem(
            f"{count} x {columns}, residual",
            {"tokens_at_most": most, "columns_at_most": columns},
            {"tokens": count, "columns": columns},
            candidates(),
            partial(_prepare, Case(count, columns, residual=True)),
        )
        for most, count in tokens
    ]


def _prepare(case: Case, device: str) -> Trial:
    x, residual, weight = case.inputs(device)

    def call(c: Tiles) -> Any:
        out = _rms_norm(x, residual if case.residual else None, weight, EPS, c["ROWS"], c["warps"])
        return out if case.residual else out[0]

    return Trial(call, difference(case, x, residual, weight), TOLERANCE)


def difference(case: Case, x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    """Of ``normed`` or ``(normed, summed)``, the larger one."""
    if not case.residual:
        return partial(relative_difference, expected=rms_norm(x, weight, EPS))
    expected = add_rms_norm(x, residual, weight, EPS)
    return lambda result: max(relative_difference(ours, e) for ours, e in zip(result, expected, strict=True))
