"""The implementations of QK norm and rotation, alone and with the K/V write, that a target may choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from dagserve.kernels.optional import triton_function
from dagserve.kernels.rope import reference

QkNormRope = Callable[..., tuple[Tensor, Tensor]]
"""Arguments as :func:`dagserve.kernels.rope.reference.qk_norm_rope` has them."""

QkNormRopeWrite = Callable[..., Tensor]
"""Arguments as :func:`dagserve.kernels.rope.reference.qk_norm_rope_write` has them."""


def triton_qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """As :func:`dagserve.kernels.rope.reference.qk_norm_rope`, in one pass."""
    qk_norm_rope: QkNormRope = triton_function("rope", "qk_norm_rope")
    return qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps)


def triton_qk_norm_rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
) -> Tensor:
    """As :func:`dagserve.kernels.rope.reference.qk_norm_rope_write`, in one pass."""
    qk_norm_rope_write: QkNormRopeWrite = triton_function("rope", "qk_norm_rope_write")
    return qk_norm_rope_write(q, k, v, q_weight, k_weight, cos, sin, eps, keys, values, rows)


IMPLEMENTATIONS: Mapping[str, QkNormRope] = {"torch": reference.qk_norm_rope, "triton": triton_qk_norm_rope}

WRITE: Mapping[str, QkNormRopeWrite] = {
    "torch": reference.qk_norm_rope_write,
    "triton": triton_qk_norm_rope_write,
}
