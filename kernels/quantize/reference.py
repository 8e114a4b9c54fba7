"""The semantics of per-token E4M3 quantisation: all arithmetic in FP32, one rounding at the end."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
SMALLEST = 1e-12
"""A row's largest magnitude counts as at least this, so that a row of zeros has a scale."""


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales each row so that its largest magnitude becomes 448, the largest of E4M3.

    Args:
        x: ``[T, K]``, finite.

    Returns:
        ``[T, K]`` in E4M3, rounded to nearest even, and ``scale: f32[T, 1]``; ``x`` is about their product.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST)
    factor = torch.full_like(largest, E4M3_MAX) / largest  # of a number and a tensor Torch would round twice
    scaled = (wide * factor).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn), largest * (1 / E4M3_MAX)  # CUDA divides so by a number


def dequantize(x: Tensor, scale: Tensor) -> Tensor:
    """``f32``, the shape of ``x``; ``scale`` broadcasts."""
    return x.float() * scale


def rms_norm_quantize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``quantize(x / sqrt(mean(x^2) + eps) * weight)``; ``x: [T, K]``, ``weight: [K]``."""
    wide = x.float()
    return quantize(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float())


def add_rms_norm_quantize(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`rms_norm_quantize` of ``x + residual``, and that sum, rounded to x's dtype; ``residual: [T, K]``."""
    summed = x + residual
    return *rms_norm_quantize(summed, weight, eps), summed
