"""Selections with a total order, so that equal inputs give equal results on any device.

Values are compared as FP32; of equal ones the lower index comes first. -0.0 equals 0.0, and NaN counts as -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

INDEX_BITS = 31
NEVER = float("-inf")


def order_key(values: Tensor) -> Tensor:
    """``i64``, the same shape: a larger key comes first. ``values``: floating, selected along the last dimension.

    The upper half holds the FP32 value's bits, mapped so that integers compare as the values do; the lower half counts
    down along the last dimension.
    """
    plain = values.float() + 0.0
    plain = torch.where(plain.isnan(), NEVER, plain)
    bits = plain.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    places = torch.arange(values.shape[-1], device=values.device)
    return (ordered.long() << INDEX_BITS) + ((1 << INDEX_BITS) - 1 - places)


def first_indices(keys: Tensor, count: int) -> Tensor:
    """``i64[..., count]``: where the ``count`` largest keys are, the largest first. Keys are distinct."""
    return keys.topk(count, dim=-1, sorted=True).indices


def candidates(logits: Tensor, allowed: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """The best next tokens of each row.

    Args:
        logits: ``[..., V]`` in the model's dtype; tokens are ordered by them, of equal ones the lower id first.
        allowed: ``bool[V]``, tokens that may be taken; None for all. The others keep their share of the softmax.
        count: how many, at most ``V``.

    Returns:
        ``ids: i64[..., count]`` and ``scores: f32[..., count]``, their log-probability over the whole vocabulary in
        FP32, -inf where a token is not allowed.
    """
    scores = logits.float()
    normalizer = scores.logsumexp(dim=-1, keepdim=True)
    masked = logits if allowed is None else logits.masked_fill(~allowed, NEVER)
    ids = first_indices(order_key(masked), count)
    taken = masked.gather(-1, ids).float()
    return ids, (taken - normalizer).clamp(max=0)  # rounding must not make a sequence better as it grows
