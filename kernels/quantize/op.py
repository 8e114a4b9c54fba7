"""The implementations of quantisation that a target may choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from dagserve.kernels.quantize import reference

Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]
NormQuantize = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
AddNormQuantize = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]


def triton_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`dagserve.kernels.quantize.reference.quantize`."""
    from dagserve.kernels.quantize.triton import quantize  # Triton is not everywhere

    return quantize(x)


def triton_rms_norm_quantize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As :func:`dagserve.kernels.quantize.reference.rms_norm_quantize`."""
    from dagserve.kernels.quantize.triton import rms_norm_quantize  # Triton is not everywhere

    return rms_norm_quantize(x, weight, eps)


def triton_add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`dagserve.kernels.quantize.reference.add_rms_norm_quantize`."""
    from dagserve.kernels.quantize.triton import add_rms_norm_quantize  # Triton is not everywhere

    return add_rms_norm_quantize(x, residual, weight, eps)


IMPLEMENTATIONS: Mapping[str, Quantize] = {"torch": reference.quantize, "triton": triton_quantize}

NORM: Mapping[str, NormQuantize] = {"torch": reference.rms_norm_quantize, "triton": triton_rms_norm_quantize}

ADD_NORM: Mapping[str, AddNormQuantize] = {
    "torch": reference.add_rms_norm_quantize,
    "triton": triton_add_rms_norm_quantize,
}
