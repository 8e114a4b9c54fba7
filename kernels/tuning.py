"""Offline search over tile sizes: what an operator's ``tune.py`` declares, the search, and the file it ends in.

Nothing here knows a GPU: the timer is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dagserve.kernels.configs import KernelConfig

Tiles = Mapping[str, int]
Measure = Callable[[Callable[[], Any]], float]
"""Microseconds of a call."""

COMPILED_AT_ONCE = 16
FINALISTS = 3
"""Candidates that are timed a second time, so that none wins by one lucky measurement."""


@dataclass(frozen=True)
class Trial:
    """An operator over one set of inputs.

    Attributes:
        call: runs it with the given tiles.
        difference: of a result from the reference.
        tolerance: the largest difference that a candidate may have.
    """

    call: Callable[[Tiles], Any]
    difference: Callable[[Any], float]
    tolerance: float


@dataclass(frozen=True)
class Problem:
    """One bucket of shapes, and what its tiles are timed on.

    Attributes:
        name: for the table.
        when: the bucket, as :class:`dagserve.kernels.configs.Bucket` has it.
        shape: what the operator picks by, at the shape that is timed.
        candidates: tiles worth a try; those of ``default.json`` are tried anyway.
        prepare: inputs on a device.
    """

    name: str
    when: Mapping[str, int]
    shape: Mapping[str, int]
    candidates: Sequence[Tiles]
    prepare: Callable[[str], Trial]


@dataclass(frozen=True)
class Found:
    """The fastest tiles of a problem.

    ``default_us``: what the default's tiles took; None where they do not fit. ``rows``: each candidate's tiles with its
    ``us``, or with the ``note`` that says why it has none.
    """

    problem: Problem
    use: Tiles
    us: float
    default_us: float | None
    rows: Sequence[Mapping[str, Any]]


def search(
    problem: Problem, default: Tiles, device: str, measure: Measure, out_of_time: Callable[[], bool]
) -> Found | None:
    """Tries all candidates, those that are wrong or do not fit the device left out.

    They are compiled beside one another first. None where time ran out before all were timed, or none is right.
    """
    trial = problem.prepare(device)
    candidates = [default, *(c for c in problem.candidates if c != default)]

    def refused(tiles: Tiles) -> str:
        if out_of_time():
            return "no time left"
        try:
            apart = trial.difference(trial.call(tiles))
        except Exception as error:  # more shared memory or registers than there are, or a shape no tile has
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]
        return "" if apart <= trial.tolerance else f"differs by {apart:.3g}"

    with ThreadPoolExecutor(COMPILED_AT_ONCE if device != "cpu" else 1) as pool:
        notes = list(pool.map(refused, candidates))
    right = [c for c, note in zip(candidates, notes, strict=True) if not note]
    times: dict[int, float] = {}
    for i, tiles in enumerate(right):
        if out_of_time():
            return None
        times[i] = measure(lambda tiles=tiles: trial.call(tiles))  # type: ignore[misc]
    if not times:
        return None
    finalists = sorted(times, key=lambda i: times[i])[:FINALISTS]
    again = {i: measure(lambda i=i: trial.call(right[i])) for i in finalists}  # type: ignore[misc]
    fastest = min(again, key=lambda i: again[i])
    rows = [{**right[i], "us": again.get(i, us), "note": ""} for i, us in times.items()]
    rows += [{**c, "us": None, "note": note} for c, note in zip(candidates, notes, strict=True) if note]
    default_us = again.get(0, times[0]) if right[0] == default else None
    return Found(problem, right[fastest], again[fastest], default_us, rows)


def document(
    gpu: str, problems: Iterable[Problem], found: Iterable[Found], previous: KernelConfig | None, default: KernelConfig
) -> dict[str, Any]:
    """The content of ``configs/<gpu>.json``.

    A problem that was not searched keeps what the previous file of this GPU has for its bucket, if any; all other
    shapes have the default's tiles.
    """
    uses = [(b.when, b.use) for b in previous.buckets if b.when] if previous is not None else []
    uses = [(f.problem.when, f.use) for f in found] + uses
    buckets = []
    for problem in problems:
        use = next((use for when, use in uses if when == problem.when), None)
        if use is not None:
            buckets.append({"when": dict(problem.when), "use": dict(use)})
    buckets += [{"when": dict(b.when), "use": dict(b.use)} for b in default.buckets]
    return {"gpu": gpu, "buckets": buckets}


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """The largest absolute one; NaN counts as infinity."""
    apart = (actual.float() - expected.float()).abs().max().item()
    return apart if apart == apart else float("inf")


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """``|actual - expected| / |expected|`` of the whole tensors; NaN counts as infinity."""
    apart = ((actual.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30)).item()
    return apart if apart == apart else float("inf")


def quantized_difference(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest relative one of E4M3 values, 2^-3 where a value is a step away; infinity where scales differ.

    Results are ``values, scale`` and whatever follows, which is not looked at.
    """
    values, theirs = actual[0].float(), expected[0].float()
    if not torch.allclose(actual[1].reshape(-1), expected[1].reshape(-1), rtol=1e-2, atol=0):
        return float("inf")
    apart = ((values - theirs).abs() / theirs.abs().clamp(min=2.0**-6)).max().item()
    return apart if apart == apart else float("inf")
