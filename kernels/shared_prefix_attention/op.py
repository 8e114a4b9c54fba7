"""The implementations of shared-prefix attention a target may choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from dagserve.kernels.shared_prefix_attention.grouped import shared_prefix_attention

SharedPrefixAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

IMPLEMENTATIONS: Mapping[str, SharedPrefixAttention] = {"torch": shared_prefix_attention}
