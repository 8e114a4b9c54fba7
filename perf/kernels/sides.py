"""What the operators' benchmarks share: a case, what it takes at least, its sides, and a row for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dagserve.kernels.tuning import Measure

Run = Callable[[], Any]


@dataclass(frozen=True)
class Ceilings:
    """What this GPU reaches: bytes a second of a large copy, read and written, and FLOP/s of large matrix products."""

    copy: float
    bf16: float
    fp8: float

    @staticmethod
    def measured(measure: Measure) -> Ceilings:
        """2 GiB copied; BF16 and E4M3 products of 8192 x 8192 random matrices."""
        source = torch.empty(2**30, device="cuda", dtype=torch.bfloat16).normal_()
        target = torch.empty_like(source)
        copy_us = measure(lambda: target.copy_(source))
        a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
        bf16_us = measure(lambda: a @ b)
        narrow, by_columns = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        scale = torch.ones(8192, 1, device="cuda")

        def fp8() -> torch.Tensor:
            return torch._scaled_mm(
                narrow, by_columns, scale, scale.view(1, -1), out_dtype=torch.bfloat16, use_fast_accum=True
            )

        flops = 2 * 8192**3
        return Ceilings(1e6 * 2 * source.nbytes / copy_us, 1e6 * flops / bf16_us, 1e6 * flops / measure(fp8))

    def floor_us(self, work: Work) -> float:
        """Microseconds that moving the bytes or doing the arithmetic takes at least."""
        return 1e6 * max(work.moved / self.copy, work.flops / (self.fp8 if work.fp8 else self.bf16))


@dataclass(frozen=True)
class Work:
    """The fewest bytes to move, each input read and each output written once, and the arithmetic."""

    moved: float
    flops: float = 0
    fp8: bool = False


@dataclass(frozen=True)
class Comparison:
    """One case of an operator.

    Attributes:
        op: folder of the operator.
        case: its name.
        work: what it takes at least.
        sides: make their call when they are asked to; ours is the first.
        difference: of a result from the reference; results that are None are not looked at.
        tolerance: the largest difference of a side that counts.
        works: of sides that must do other work than ours.
    """

    op: str
    case: str
    work: Work
    sides: Mapping[str, Callable[[], Run]]
    difference: Callable[[Any], float]
    tolerance: float
    works: Mapping[str, Work] = field(default_factory=dict)


def timed(comparison: Comparison, ceilings: Ceilings, measure: Measure) -> list[dict[str, Any]]:
    """A row a side: its difference from the reference, and its time only where that is within the tolerance.

    A side that cannot be made or run says why in ``note``.
    """
    rows = []
    for side, make in comparison.sides.items():
        work = comparison.works.get(side, comparison.work)
        row: dict[str, Any] = {"op": comparison.op, "case": comparison.case, "side": side, "us": None}
        row |= {"bytes": work.moved, "flops": work.flops, "floor_us": ceilings.floor_us(work)}
        row |= {"difference": None, "note": ""}
        rows.append(row)
        try:
            run = make()
            result = run()
            row["difference"] = 0.0 if result is None else comparison.difference(result)
            if row["difference"] <= comparison.tolerance:
                row["us"] = measure(run)
            else:
                row["note"] = f"differs by {row['difference']:.3g}, more than {comparison.tolerance:.3g}"
        except Exception as error:  # a side of another project may fail in any way
            row["note"] = described(error)
    return rows


def described(error: Exception) -> str:
    """Its kind and first line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]


def inductor(run: Callable[..., Any], device: str) -> Callable[..., Any]:
    """``run`` under ``torch.compile`` for its shapes; without a GPU traced only."""
    torch._dynamo.reset()  # else the ninth shape of a function is not compiled
    return torch.compile(run, dynamic=False, backend="inductor" if device == "cuda" else "eager")


def copy_of(moved: float, device: str) -> Callable[[], Run]:
    """A side that copies as many bytes: what the GPU reaches at this size."""

    def make() -> Run:
        source = torch.ones(max(1, int(moved) // 2), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)

        def run() -> None:
            target.copy_(source)

        return run

    return make
