"""The merge of beams, and the move of their K/V: ours, the readable ones, those under Inductor, and a plain topk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dagserve.kernels.beam import reference, tune
from dagserve.kernels.beam.op import IMPLEMENTATIONS, REORDER
from perf.kernels.sides import Comparison, Run, Work, inductor

LAYERS, KEYS, COLUMNS = 24, 4, 128
"""Of Qwen2.5-0.5B in a search of 5 tokens."""


@dataclass(frozen=True)
class Case:
    """The merge, or the move of the suffix K/V of all layers."""

    beams: tune.Case
    reorder: bool


CASES = tuple(Case(beams, reorder) for reorder in (False, True) for beams in tune.CASES)

SMALL = tuple(Case(tune.SMALL[0], reorder) for reorder in (False, True))


def compare(case: Case, device: str) -> Comparison:
    return (_reorder if case.reorder else _merge)(case.beams, device)


def _merge(case: tune.Case, device: str) -> Comparison:
    """At least, all scores are read, and the ids that are taken."""
    inputs, count = case.inputs(device), 2 * case.width
    cumulative, scores, ids = inputs
    moved = cumulative.nbytes + scores.nbytes + case.prompts * count * (8 + 4 + 8 + 8)

    def plain() -> None:
        """Ties fall as they may, so its result is not compared."""
        total, place = (cumulative[:, :, None] + scores).flatten(1).topk(count)
        _ = total, ids.flatten(1).gather(1, place), place // scores.shape[2]

    def compiled() -> Run:
        run = inductor(partial(reference.merge, count=count), device)
        return lambda: run(*inputs)

    sides: dict[str, Callable[[], Run]] = {
        "triton": lambda: lambda: IMPLEMENTATIONS["triton"](*inputs, count),
        "topk": lambda: plain,
        "torch (exact order)": lambda: lambda: reference.merge(*inputs, count),
        "torch (exact order), Inductor": compiled,
    }
    difference = partial(tune.difference, expected=reference.merge(*inputs, count))
    return Comparison("beam", f"merge, {case.name}", Work(moved), sides, difference, 0)


def _reorder(case: tune.Case, device: str) -> Comparison:
    generator = torch.Generator(device).manual_seed(case.width)
    shape = (2 * LAYERS, case.prompts, case.width, KEYS * COLUMNS)
    suffix = torch.randn(shape, device=device, generator=generator).bfloat16()
    parent = torch.randint(case.width, shape[1:3], device=device, generator=generator)
    arguments = (suffix, parent, torch.full((1,), KEYS, device=device), KEYS)

    def compiled() -> Run:
        run = inductor(partial(reference.reorder, keys=KEYS), device)
        return lambda: run(*arguments[:3])

    rows = (torch.arange(case.prompts, device=device)[:, None] * case.width + parent).flatten()

    def selected() -> Tensor:
        return suffix.flatten(1, 2).index_select(1, rows).reshape(shape)

    sides: dict[str, Callable[[], Run]] = {
        "triton": lambda: lambda: REORDER["triton"](*arguments),
        "index_select": lambda: selected,
        "torch": lambda: lambda: reference.reorder(*arguments),
        "torch, Inductor": compiled,
    }
    expected = [reference.reorder(*arguments)]

    def difference(result: Tensor) -> float:
        return tune.difference([result], expected)

    return Comparison("beam", f"suffix reorder, {case.name}", Work(2 * suffix.nbytes), sides, difference, 0)
