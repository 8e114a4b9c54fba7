"""What the operators' benchmarks share: rows of a table, sides that a machine may lack, and a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

Run = Callable[[], Tensor]
Measure = Callable[[Callable[[], Any]], float]
"""Microseconds of a call."""

COPY_BYTES = 4.3e12
"""A second, on an H200: a large device copy, read and written."""

MATMUL_FLOPS = 790e12
"""A second, on an H200: a large BF16 matrix product."""


def floor_us(moved: float, flops: float) -> float:
    """Microseconds that moving the bytes or doing the arithmetic takes at least."""
    return 1e6 * max(moved / COPY_BYTES, flops / MATMUL_FLOPS)


def timed(
    case: Mapping[str, Any],
    sides: Mapping[str, Callable[[], Run]],
    expected: Tensor,
    tolerance: float,
    measure: Measure,
) -> list[dict[str, Any]]:
    """A row a side: its largest difference from the reference, and its time only where that is within the tolerance.

    ``sides`` make their call when they are asked to; one that cannot be made or run says why in ``note``.
    """
    rows = []
    for name, make in sides.items():
        row = {**case, "side": name, "us": None, "difference": None, "note": ""}
        rows.append(row)
        try:
            run = make()
            row["difference"] = difference(run(), expected)
            if row["difference"] <= tolerance:
                row["us"] = measure(run)
            else:
                row["note"] = f"differs by more than {tolerance}"
        except Exception as error:  # a side of another project may fail in any way
            row["note"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
    return rows


def best(
    candidates: Sequence[Mapping[str, int]],
    call: Callable[[Mapping[str, int]], Tensor],
    expected: Tensor,
    tolerance: float,
    measure: Measure,
) -> tuple[Mapping[str, int], list[dict[str, Any]]]:
    """The fastest candidate that is right, and a row for each; those that do not fit the GPU are left out.

    Candidates are compiled beside one another first.

    Raises:
        RuntimeError: there is none.
    """

    def compiled(candidate: Mapping[str, int]) -> bool:
        try:
            return difference(call(candidate), expected) <= tolerance
        except Exception:  # more shared memory or registers than there are
            return False

    with ThreadPoolExecutor(16) as pool:
        right = [c for c, good in zip(candidates, pool.map(compiled, candidates), strict=True) if good]
    rows = [{**candidate, "us": measure(lambda c=candidate: call(c))} for candidate in right]  # type: ignore[misc]
    if not rows:
        raise RuntimeError("no candidate is right and fits the GPU")
    fastest = min(rows, key=lambda row: row["us"])
    return {name: int(value) for name, value in fastest.items() if name != "us"}, rows


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest, NaN counting as infinity."""
    apart = (actual.float() - expected.float()).abs().max().item()
    return apart if apart == apart else float("inf")
