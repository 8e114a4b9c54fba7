"""What the merge of beams is tuned and timed on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from dagserve.kernels.beam.reference import merge
from dagserve.kernels.beam.triton import _merge
from dagserve.kernels.tuning import Problem, Tiles, Trial

MOST_KEYS = 64
"""More in a thread do not fit its registers, and take the compiler half a minute."""


@dataclass(frozen=True)
class Case:
    """``prompts`` of ``width`` beams with twice as many candidates each."""

    prompts: int
    width: int

    @property
    def name(self) -> str:
        """For a table."""
        return f"{self.prompts} x W={self.width}"

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Cumulative scores, and the candidates' scores, the best first, and ids."""
        generator = torch.Generator(device).manual_seed(self.width)
        shape = (self.prompts, self.width, 2 * self.width)
        scores = -9 * torch.rand(shape, device=device, generator=generator).sort(dim=-1).values
        ids = torch.randint(151936, shape, device=device, generator=generator)
        return -9 * torch.rand(shape[:2], device=device, generator=generator), scores, ids


CASES = (Case(1, 100), Case(8, 100), Case(1, 400))

SMALL = (Case(2, 5),)


def candidates(width: int) -> list[Tiles]:
    """Groups of the two-level selection, and warps.

    The merge holds a group's key, and then ``GROUP`` keys of each group that it chose: at most
    :data:`MOST_KEYS` in a thread.
    """
    found: list[Tiles] = []
    for group, warps in itertools.product((4, 8, 16, 32), (4, 8, 16, 32)):
        groups = triton.next_power_of_2(width) * triton.next_power_of_2(triton.cdiv(2 * width, group))
        keys = max(groups, triton.next_power_of_2(2 * width) * group)
        if keys <= MOST_KEYS * 32 * warps:
            found.append({"GROUP": group, "warps": warps})
    return found


def problems(cases: Sequence[Case] = (CASES[0], CASES[2])) -> list[Problem]:
    """Buckets by how many beams go on."""
    return [
        Problem(
            case.name,
            {"count_at_most": 256 if case.width <= 128 else 1024},
            {"count": 2 * case.width},
            candidates(case.width),
            partial(_prepare, case),
        )
        for case in cases
    ]


def _prepare(case: Case, device: str) -> Trial:
    inputs = case.inputs(device)

    def call(c: Tiles) -> Any:
        return _merge(*inputs, 2 * case.width, c["GROUP"], c["warps"])

    return Trial(call, partial(difference, expected=merge(*inputs, 2 * case.width)), 0)


def difference(result: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """0 where all are equal, else infinity."""
    return 0.0 if all(torch.equal(*pair) for pair in zip(result, expected, strict=True)) else float("inf")
