"""The implementations of the quantised gated activation that a target may choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from dagserve.kernels.silu_mul_quantize import reference

SiluMulQuantize = Callable[[Tensor], tuple[Tensor, Tensor]]


def triton_silu_mul_quantize(packed: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`dagserve.kernels.silu_mul_quantize.reference.silu_mul_quantize`."""
    from dagserve.kernels.silu_mul_quantize.triton import silu_mul_quantize  # Triton is not everywhere

    return silu_mul_quantize(packed)


IMPLEMENTATIONS: Mapping[str, SiluMulQuantize] = {
    "torch": reference.silu_mul_quantize,
    "triton": triton_silu_mul_quantize,
}
