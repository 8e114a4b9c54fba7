"""The operator's interface and the implementations a target may choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from dagserve.kernels.attention.padded import Packing, packed_attention

Attention = Callable[[Tensor, Tensor, Tensor, Packing], Tensor]

IMPLEMENTATIONS: Mapping[str, Attention] = {"torch": packed_attention}
