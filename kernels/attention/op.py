"""The operator's interface and the implementations a target may choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from dagserve.kernels.attention.padded import Packing, packed_attention
from dagserve.kernels.optional import triton_function

Attention = Callable[[Tensor, Tensor, Tensor, Packing], Tensor]


def triton_packed_gqa(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
    """As :func:`dagserve.kernels.attention.padded.packed_attention`, in one launch without padding."""
    packed_gqa: Callable[..., Tensor] = triton_function("attention", "packed_gqa")
    longest, shared = packing.pad.shape[1], packing.prefix is not None
    return packed_gqa(q, k, v, packing.cu_seqlens, longest, shared_prefix=shared)


IMPLEMENTATIONS: Mapping[str, Attention] = {"torch": packed_attention, "triton_packed_gqa": triton_packed_gqa}
