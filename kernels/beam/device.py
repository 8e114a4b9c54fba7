"""The total order of :mod:`dagserve.kernels.beam.selection` inside a Triton program: exact, and the same on every run.

Values become unsigned keys that compare as the values do, so the k-th largest is found bit by bit: one count for each
bit of a key, fewer where a count is exactly ``k``; no atomics. To find the first ``k`` of a long row, it is cut into
groups. They lie in the first ``k`` groups by (largest key, lower group first): before an element of any other group
come the largest of ``k`` groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dagserve.kernels.beam.selection import INDEX_BITS

LOWEST_PLACE = tl.constexpr((1 << INDEX_BITS) - 1)
PLACE_BITS = tl.constexpr(INDEX_BITS)


@triton.jit
def order_key(b_value, BITS: tl.constexpr):
    """``u32`` keys of ``BITS`` bits of FP32 values: -0.0 as 0.0, NaN as -inf. 0 is below every value's key."""
    b_plain = tl.where(b_value != b_value, float("-inf"), b_value)
    b_plain = tl.where(b_plain == 0.0, 0.0, b_plain)
    b_bits = b_plain.to(tl.uint32, bitcast=True)
    b_ordered = tl.where((b_bits >> 31) != 0, b_bits ^ 0xFFFFFFFF, b_bits | 0x80000000)
    return b_ordered >> (32 - BITS)


@triton.jit
def is_first(b_key, k, BITS: tl.constexpr):
    """Which ``k`` places of a one-dimensional block come first: by key, of equal keys the lower place."""
    found = tl.full([], 0, tl.uint32)
    reached = tl.full([], -1, tl.int32)  # how many keys are at least ``found``, once that is not 0
    bit = tl.full([], 1 << (BITS - 1), tl.uint32)
    while (bit != 0) & (reached != k):
        n = tl.sum((b_key >= (found | bit)).to(tl.int32))
        found = tl.where(n >= k, found | bit, found)
        reached = tl.where(n >= k, n, reached)
        bit = bit >> 1
    b_taken = b_key >= found
    if reached != k:  # more keys than there is room for equal the least one
        b_tied = (b_key == found).to(tl.int32)
        open_places = k - tl.sum((b_key > found).to(tl.int32))
        b_taken = (b_key > found) | ((b_tied != 0) & (tl.cumsum(b_tied, 0) <= open_places))
    return b_taken


@triton.jit
def store_taken(p_out, b_value, b_taken):
    """Stores the values that are taken, in their order, one after another; visible to the whole program."""
    tl.store(p_out + tl.cumsum(b_taken.to(tl.int32), 0) - 1, b_value, mask=b_taken)
    tl.debug_barrier()


@triton.jit
def place_order(b_key, o_place):
    """``i64``, not negative: a larger one comes first. As :func:`dagserve.kernels.beam.selection.order_key`."""
    return (b_key.to(tl.int64) << PLACE_BITS) + (LOWEST_PLACE - o_place)


@triton.jit
def in_order(p_order, count, COUNT: tl.constexpr):
    """``i64[COUNT]``: the places of ``count`` stored orders, the first one first, then zeros."""
    o_rank = tl.arange(0, COUNT)
    b_order = tl.sort(tl.load(p_order + o_rank, mask=o_rank < count, other=-1), descending=True)
    return LOWEST_PLACE - (b_order & LOWEST_PLACE)
