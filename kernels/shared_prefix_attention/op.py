"""The implementations of shared-prefix attention a target may choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from dagserve.kernels.optional import triton_function
from dagserve.kernels.shared_prefix_attention.grouped import shared_prefix_attention

SharedPrefixAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def triton_shared_prefix_attention(
    q: Tensor, prefix_k: Tensor, prefix_v: Tensor, lengths: Tensor, suffix_k: Tensor, suffix_v: Tensor, count: Tensor
) -> Tensor:
    """As :func:`dagserve.kernels.shared_prefix_attention.reference.shared_prefix_attention`."""
    attention: SharedPrefixAttention = triton_function("shared_prefix_attention", "shared_prefix_attention")
    return attention(q, prefix_k, prefix_v, lengths, suffix_k, suffix_v, count)


IMPLEMENTATIONS: Mapping[str, SharedPrefixAttention] = {
    "torch": shared_prefix_attention,
    "triton": triton_shared_prefix_attention,
}
