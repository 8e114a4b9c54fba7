"""The semantics of RMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, the mean and the division in FP32.

    Args:
        x: ``[..., H]``.
        weight: ``[H]``.

    Returns:
        ``[..., H]`` in x's dtype.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """:func:`rms_norm` of ``x + residual``, and that sum, rounded to x's dtype; ``residual: [..., H]``."""
    summed = x + residual
    return rms_norm(summed, weight, eps), summed
