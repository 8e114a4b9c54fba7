"""Beam search written plainly, one prompt at a time over lists: the independent reference of docs/beam.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

Logits = Callable[[Sequence[int]], npt.NDArray[np.float32]]
"""The logits after some tokens, in the model's dtype widened to f32."""


@dataclass
class Hypothesis:
    """One sequence: tokens so far, their log-probabilities, the parent's place among the beams before."""

    tokens: list[int] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    cumulative: float = 0.0
    parent: int = 0
    finished: bool = False

    def final(self, penalty: float) -> float:
        return float(np.float32(self.cumulative) / np.float32(np.float32(len(self.tokens)) ** np.float32(penalty)))


@dataclass
class Search:
    """Options of a search; ``trace`` keeps the open beams after each step."""

    width: int
    steps: int
    stops: frozenset[int] = frozenset()
    min_tokens: int = 0
    penalty: float = 1.0
    trace: list[list[Hypothesis]] = field(default_factory=list)

    def run(self, logits: Logits, returned: int) -> list[Hypothesis]:
        count = (1 + max(1, len(self.stops))) * self.width
        beams, pool = [Hypothesis()], list[Hypothesis]()
        for step in range(self.steps):
            found = [c for place, beam in enumerate(beams) for c in self._candidates(logits, beam, place, step, count)]
            found = sorted(found, key=lambda h: -h.cumulative)[:count]  # stable: earlier beams, better logits first
            for one in found:
                one.finished = one.tokens[-1] in self.stops
            pool += [h for h in found if h.finished]
            pool = sorted(pool, key=lambda h: -h.final(self.penalty))[: self.width]
            beams = [h for h in found if not h.finished][: self.width]
            self.trace.append(beams)
        return sorted([*pool, *beams], key=lambda h: -h.final(self.penalty))[:returned]

    def _candidates(self, logits: Logits, beam: Hypothesis, place: int, step: int, count: int) -> list[Hypothesis]:
        values = logits(beam.tokens)
        wide = values.astype(np.float64)
        normalizer = np.float32(wide.max() + math.log(np.exp(wide - wide.max()).sum()))
        order = sorted(range(len(values)), key=lambda t: (-values[t], t))
        allowed = [t for t in order if t not in self.stops or step + 1 >= self.min_tokens]
        found = []
        for token in allowed[:count]:
            score = min(np.float32(values[token]) - normalizer, np.float32(0))
            if not np.isfinite(score):
                continue
            cumulative = float(np.float32(beam.cumulative) + np.float32(score))
            found.append(Hypothesis([*beam.tokens, token], [*beam.steps, float(score)], cumulative, place))
        return found


def exhaustive(logits: Logits, vocabulary: int, search: Search, returned: int) -> list[Hypothesis]:
    """The best of all sequences: those that end at their first stop token, and those of full length without one."""
    found = []
    cache: dict[tuple[int, ...], Any] = {}

    def score(prefix: tuple[int, ...], token: int) -> float:
        if prefix not in cache:
            wide = logits(prefix).astype(np.float64)
            cache[prefix] = wide - (wide.max() + math.log(np.exp(wide - wide.max()).sum()))
        return float(cache[prefix][token])

    for length in range(1, search.steps + 1):
        for tokens in product(range(vocabulary), repeat=length):
            stopped = tokens[-1] in search.stops
            if any(t in search.stops for t in tokens[:-1]) or (length < search.steps and not stopped):
                continue
            if stopped and length < search.min_tokens:
                continue
            steps = [score(tokens[:i], t) for i, t in enumerate(tokens)]
            if all(map(math.isfinite, steps)):
                found.append(Hypothesis(list(tokens), steps, sum(steps), finished=stopped))
    return sorted(found, key=lambda h: -h.final(search.penalty))[:returned]
