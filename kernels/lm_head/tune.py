"""What the LM head's candidates are tuned and timed on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from dagserve.kernels.beam.selection import candidates as reference
from dagserve.kernels.beam.tune import MOST_KEYS
from dagserve.kernels.lm_head.triton import _candidates
from dagserve.kernels.tuning import Problem, Tiles, Trial, largest_difference

TOLERANCE = 1e-3
"""Of log-probabilities; ids are equal."""


@dataclass(frozen=True)
class Case:
    """``width`` beams that ask for twice as many candidates each; ``hidden`` features before the head."""

    width: int
    hidden: int = 896
    vocabulary: int = 151936

    @property
    def name(self) -> str:
        """For a table."""
        return f"W={self.width}, {self.hidden} x {self.vocabulary}"

    def inputs(self, device: str) -> tuple[Tensor, Tensor]:
        """Hidden states and the head in BF16, of such a scale that logits are a few units wide."""
        generator = torch.Generator(device).manual_seed(self.width)
        shapes = ((self.width, self.hidden), (self.vocabulary, self.hidden))
        hidden, weight = (torch.randn(s, device=device, generator=generator) for s in shapes)
        return hidden.bfloat16(), (weight * 3 * self.hidden**-0.5).bfloat16()

    def logits(self, device: str) -> Tensor:
        """What the head gives."""
        hidden, weight = self.inputs(device)
        return hidden @ weight.t()


CASES = (Case(100), Case(400), Case(100, 1024), Case(400, 1024))

SMALL = (Case(3, 16, 300),)


def tiles(case: Case) -> list[Tiles]:
    """Blocks of a row, groups of the two-level selection, and warps of either kernel, as for the merge of beams."""
    found: list[Tiles] = []
    for block, group, scan, select in itertools.product((4096, 8192), (8, 16, 32), (4, 8), (8, 16, 32)):
        groups, chosen = case.vocabulary // group, triton.next_power_of_2(2 * case.width) * group
        if max(triton.next_power_of_2(groups), chosen) <= MOST_KEYS * 32 * select:
            found.append({"BLOCK": block, "GROUP": group, "scan_warps": scan, "select_warps": select})
    return found


def problems(cases: Sequence[Case] = CASES[:2]) -> list[Problem]:
    """Buckets by how many candidates each row gives."""
    return [
        Problem(
            f"{case.name}, selection",
            {"count_at_most": 256 if case.width <= 128 else 1024},
            {"count": 2 * case.width},
            tiles(case),
            partial(_prepare, case),
        )
        for case in cases
    ]


def _prepare(case: Case, device: str) -> Trial:
    logits = case.logits(device)

    def call(c: Tiles) -> Any:
        return _candidates(logits, None, 2 * case.width, c["BLOCK"], c["GROUP"], c["scan_warps"], c["select_warps"])

    return Trial(call, partial(difference, expected=reference(logits, None, 2 * case.width)), TOLERANCE)


def difference(result: tuple[Tensor | None, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    """Of scores; infinity where ids are given and not the same."""
    ids, scores = result
    if ids is not None and not torch.equal(ids, expected[0]):
        return float("inf")
    return largest_difference(scores, expected[1])
