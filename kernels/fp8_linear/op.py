"""The implementations of the FP8 linear that a target may choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dagserve.kernels.fp8_linear import reference

Fp8Linear = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor]


def cublas_fp8_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """As :func:`dagserve.kernels.fp8_linear.reference.fp8_linear`, by the library PyTorch has; ``dtype`` is BF16.

    Sums inside a matrix instruction keep fewer bits than FP32: less than E4M3's own rounding by far, and twice as fast.
    """
    out: Tensor = torch._scaled_mm(
        x, weight.t(), x_scale, weight_scale.unsqueeze(0), bias=bias, out_dtype=dtype, use_fast_accum=True
    )
    return out


def triton_fp8_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """As :func:`dagserve.kernels.fp8_linear.reference.fp8_linear`; for few tokens."""
    from dagserve.kernels.fp8_linear.triton import fp8_linear  # Triton is not everywhere

    return fp8_linear(x, x_scale, weight, weight_scale, bias, dtype)


IMPLEMENTATIONS: Mapping[str, Fp8Linear] = {
    "torch": reference.fp8_linear,
    "cublas": cublas_fp8_linear,
    "triton": triton_fp8_linear,
}
