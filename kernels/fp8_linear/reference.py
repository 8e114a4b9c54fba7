"""The semantics of an FP8 linear, and its emulation where a device has no FP8 matrix products."""

from __future__ import annotations

import torch
from torch import Tensor


def fp8_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``(x * x_scale) @ (weight * weight_scale).T + bias`` in FP32, rounded once to ``dtype``.

    Args:
        x: ``[M, K]`` in E4M3.
        x_scale: ``f32[M, 1]``.
        weight: ``[N, K]`` in E4M3; K and N are multiples of 16 (:mod:`dagserve.kernels.fp8_linear.weights` pads).
        weight_scale: ``f32[N]``.
        bias: ``[N]`` in ``dtype``, or None.
        dtype: of the result.

    Returns:
        ``[M, N]``.
    """
    out = (x.float() @ weight.float().t()) * x_scale * weight_scale
    return (out if bias is None else out + bias.float()).to(dtype)
