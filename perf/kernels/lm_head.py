"""An LM head's candidates: ours, topk and log-softmax, those under Inductor; with the head's product and without."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from dagserve.kernels.beam.selection import candidates
from dagserve.kernels.lm_head import tune
from dagserve.kernels.lm_head.op import CANDIDATES
from perf.kernels.sides import Comparison, Run, Work, inductor

Select = Callable[[Tensor, Tensor | None, int], tuple[Tensor | None, Tensor]]


@dataclass(frozen=True)
class Case:
    """A head, or the selection from its logits alone."""

    head: tune.Case
    product: bool


CASES = tuple(
    Case(head, product)
    for head, product in itertools.product(tune.CASES, (False, True))
    if product or head.hidden == 896
)

SMALL = tuple(Case(tune.SMALL[0], product) for product in (False, True))


def compare(case: Case, device: str) -> Comparison:
    head, count = case.head, 2 * case.head.width
    hidden, weight = head.inputs(device)
    logits = hidden @ weight.t()
    written = head.width * count * 12
    work = Work(logits.nbytes + written)
    if case.product:
        work = Work(hidden.nbytes + weight.nbytes + written, 2 * head.width * head.hidden * head.vocabulary)

    def run(select: Select) -> Run:
        if case.product:
            return lambda: select(hidden @ weight.t(), None, count)
        return lambda: select(logits, None, count)

    def compiled(select: Select) -> Callable[[], Run]:
        def make() -> Run:
            fast: Any = inductor(lambda given: select(given, None, count), device)
            return run(lambda given, _allowed, _count: fast(given))

        return make

    sides: dict[str, Callable[[], Run]] = {
        "triton": lambda: run(CANDIDATES["triton"]),
        "topk and log_softmax": lambda: run(topk_and_log_softmax),
        "topk and log_softmax, Inductor": compiled(topk_and_log_softmax),
        "torch (exact order)": lambda: run(candidates),
        "torch (exact order), Inductor": compiled(candidates),
    }
    difference = partial(tune.difference, expected=candidates(logits, None, count))
    name = f"{head.name}, {'with the product' if case.product else 'selection'}"
    return Comparison("lm_head", name, work, sides, difference, tune.TOLERANCE)


def topk_and_log_softmax(logits: Tensor, allowed: Tensor | None, count: int) -> tuple[Tensor | None, Tensor]:
    """As it is usually written. Which of equal logits it takes is not stated, so its ids are not compared."""
    assert allowed is None
    ids = logits.topk(count, dim=-1).indices
    return None, logits.float().log_softmax(dim=-1).gather(-1, ids)
