"""The semantics of the LM head of a beam search."""

from __future__ import annotations

from torch import Tensor

from dagserve.kernels.beam.selection import candidates


def lm_head(hidden: Tensor, weight: Tensor, allowed: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """The best next tokens of each row, by :func:`dagserve.kernels.beam.selection.candidates`.

    Args:
        hidden: ``[..., H]`` in the model's dtype.
        weight: ``[V, H]``, the output embedding.
        allowed: ``bool[V]``, or ``bool[..., V]`` for rows of their own; None for all.
        count: how many, at most ``V``.

    Returns:
        ``ids: i64[..., count]`` and ``scores: f32[..., count]``, log-probabilities over the whole vocabulary.
    """
    return candidates(hidden @ weight.t(), allowed, count)
