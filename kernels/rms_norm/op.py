"""The implementations of RMSNorm, alone and behind a residual, that a target may choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from dagserve.kernels.optional import triton_function
from dagserve.kernels.rms_norm import reference

RmsNorm = Callable[[Tensor, Tensor, float], Tensor]
AddRmsNorm = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def triton_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As :func:`dagserve.kernels.rms_norm.reference.rms_norm`, in one pass."""
    rms_norm: RmsNorm = triton_function("rms_norm", "rms_norm")
    return rms_norm(x, weight, eps)


def triton_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As :func:`dagserve.kernels.rms_norm.reference.add_rms_norm`, in one pass."""
    add_rms_norm: AddRmsNorm = triton_function("rms_norm", "add_rms_norm")
    return add_rms_norm(x, residual, weight, eps)


IMPLEMENTATIONS: Mapping[str, RmsNorm] = {"torch": reference.rms_norm, "triton": triton_rms_norm}

ADD: Mapping[str, AddRmsNorm] = {"torch": reference.add_rms_norm, "triton": triton_add_rms_norm}
