"""Rows of E4M3 inside a Triton program."""

from __future__ import annotations

import triton
import triton.language as tl

from dagserve.kernels.quantize import reference

E4M3_MAX = tl.constexpr(reference.E4M3_MAX)
INVERSE_MAX = tl.constexpr(1 / reference.E4M3_MAX)
SMALLEST = tl.constexpr(reference.SMALLEST)


@triton.jit
def largest_magnitude(b_row):
    """``f32[ROWS]``, at least ``SMALLEST``, of ``f32[ROWS, COLUMNS]``."""
    return tl.maximum(tl.max(tl.abs(b_row), 1), SMALLEST)


@triton.jit
def to_e4m3(b_row, b_largest):
    """E4M3 of rows whose ``largest_magnitude`` is given; the conversion rounds to nearest even and saturates."""
    return (b_row * tl.div_rn(E4M3_MAX, b_largest)[:, None]).to(tl.float8e4nv)


@triton.jit
def scale_of(b_largest):
    """The rows' scales."""
    return b_largest * INVERSE_MAX
