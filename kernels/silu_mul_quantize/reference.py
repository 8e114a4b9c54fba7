"""The semantics of the gated activation in front of an FP8 linear."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from dagserve.kernels.quantize.reference import quantize


def silu_mul_quantize(packed: Tensor) -> tuple[Tensor, Tensor]:
    """``quantize(silu(gate) * up)``, all in FP32 up to the rounding to E4M3.

    Args:
        packed: ``[T, 2 * I]``, a row is gate and then up, as the packed linear gives them.

    Returns:
        ``[T, I]`` in E4M3 and ``scale: f32[T, 1]``.
    """
    gate, up = packed.float().chunk(2, dim=-1)
    return quantize(silu(gate) * up)
