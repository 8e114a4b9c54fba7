"""Search of a catalog written plainly, one prompt at a time: the independent reference of docs/catalogs.md."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from beam_reference import Hypothesis, Logits

Items = Mapping[str, tuple[int, ...]]


def legal(paths: Collection[tuple[int, ...]], beginning: tuple[int, ...]) -> list[int]:
    """The tokens that continue a beginning in a catalog, ascending."""
    n = len(beginning)
    return sorted({p[n] for p in paths if len(p) > n and p[:n] == beginning})


def search(
    logits: Logits, items: Items, permitted: Collection[str], width: int, steps: int, penalty: float, normalize: str
) -> list[Hypothesis]:
    """The best ``width`` sequences that are permitted items, best first."""
    paths, wanted = set(items.values()), {items[i] for i in permitted}
    beams, pool = [Hypothesis()], list[Hypothesis]()
    for _ in range(steps):
        ends, goes = list[Hypothesis](), list[Hypothesis]()
        for place, beam in enumerate(beams):
            tokens = legal(paths, tuple(beam.tokens))
            if not tokens:
                continue
            wide = logits(beam.tokens).astype(np.float64)
            over = wide if normalize == "vocabulary" else wide[tokens]
            normalizer = np.float32(over.max() + math.log(np.exp(over - over.max()).sum()))
            for token in tokens:
                score = min(np.float32(wide[token]) - normalizer, np.float32(0))
                total = float(np.float32(beam.cumulative) + np.float32(score))
                path = (*beam.tokens, token)
                one = Hypothesis(list(path), [*beam.steps, float(score)], total, place, finished=True)
                if path in wanted:
                    ends.append(one)
                if any(len(p) > len(path) and p[: len(path)] == path for p in wanted):
                    goes.append(one)
        ends = sorted(ends, key=lambda h: -h.cumulative)[:width]
        pool = sorted([*pool, *ends], key=lambda h: -h.final(penalty))[:width]
        beams = sorted(goes, key=lambda h: -h.cumulative)[:width]
    return pool


def exhaustive(
    logits: Logits, items: Items, permitted: Collection[str], penalty: float, normalize: str
) -> Sequence[tuple[float, tuple[int, ...]]]:
    """Every permitted item's score, best first."""
    paths, found = set(items.values()), []
    for path in {items[i] for i in permitted}:
        total = 0.0
        for n, token in enumerate(path):
            wide = logits(path[:n]).astype(np.float64)
            over = wide if normalize == "vocabulary" else wide[legal(paths, path[:n])]
            total += wide[token] - (over.max() + math.log(np.exp(over - over.max()).sum()))
        found.append((total / len(path) ** penalty, path))
    return sorted(found, reverse=True)
