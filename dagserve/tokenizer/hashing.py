"""Open-addressing tables that native code probes without reading anything else."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

EMPTY = 0xFFFFFFFF
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


def spread(keys: npt.NDArray[np.uint64], bits: int) -> npt.NDArray[np.int64]:
    """The first place of each key in a table of ``1 << bits`` slots (multiplicative hashing, Knuth 6.4)."""
    return (keys * _SPREAD >> np.uint64(64 - bits)).astype(np.int64)


def place(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Which key each slot holds, -1 where it is free, with linear probing from :func:`spread`.

    The number of slots is a power of two; a quarter of them is free, for the sake of caches.
    """
    bits = max(1, (4 * len(keys) // 3).bit_length())
    slots = np.full(1 << bits, -1, dtype=np.int64)
    places = spread(keys, bits)
    waiting = np.arange(len(keys))
    while len(waiting):
        free = slots[places[waiting]] < 0
        _, first = np.unique(places[waiting[free]], return_index=True)
        placed = waiting[free][first]
        slots[places[placed]] = placed
        waiting = np.setdiff1d(waiting, placed, assume_unique=True)
        places[waiting] = (places[waiting] + 1) & ((1 << bits) - 1)
    return slots


def table(keys: npt.NDArray[np.uint64], rows: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """``rows`` (``u4[n, k]``) laid out by their keys: ``u4[slots, k]``, all ones where a slot is free."""
    slots = place(keys)
    laid = np.full((len(slots), rows.shape[1]), EMPTY, dtype="<u4")
    laid[slots >= 0] = rows[slots[slots >= 0]]
    return laid
