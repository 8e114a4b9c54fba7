"""The implementations of a beam search's merge and of the move of suffix K/V that a target may choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from dagserve.kernels.beam import reference

Merge = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]
Reorder = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def triton_merge(cumulative: Tensor, scores: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`dagserve.kernels.beam.reference.merge`."""
    from dagserve.kernels.beam.triton import merge  # Triton is not everywhere

    return merge(cumulative, scores, ids, count)


def triton_reorder(suffix: Tensor, parent: Tensor, valid: Tensor, keys: int) -> Tensor:
    """As :func:`dagserve.kernels.beam.reference.reorder`."""
    from dagserve.kernels.beam.triton import reorder  # Triton is not everywhere

    return reorder(suffix, parent, valid, keys)


IMPLEMENTATIONS: Mapping[str, Merge] = {"torch": reference.merge, "triton": triton_merge}

REORDER: Mapping[str, Reorder] = {"torch": reference.reorder, "triton": triton_reorder}
