"""Rotary position embedding in the half-split layout of Llama and Qwen checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dagserve.kernels.rms_norm.reference import rms_norm


def inverse_frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any] | None) -> Tensor:
    """``f32[head_dim / 2]``; ``scaling`` is the checkpoint's ``llama3`` rope scaling, or None.

    Source: the ``rope_scaling`` fields of Llama-3.1's config.json.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = torch.pow(theta, exponent).reciprocal()
    if scaling is None:
        return frequencies
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequencies
    blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    scaled: Tensor = (1 - blend) * frequencies / factor + blend * frequencies
    return scaled


def rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each ``f32[T, head_dim]``, for ``positions: i64[T]``."""
    angles = positions.float()[:, None] * frequencies[None, :]
    doubled = torch.cat((angles, angles), dim=-1)
    return doubled.cos(), doubled.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates ``x: [T, heads, head_dim]`` by per-token ``cos, sin: [T, head_dim]`` of x's dtype."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None, :] + turned * sin[:, None, :]


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of each head, where the model has it, and the rotation, all in FP32 and rounded once.

    Args:
        q: ``[T, num_heads, head_dim]``.
        k: ``[T, num_kv_heads, head_dim]``.
        q_weight, k_weight: ``[head_dim]`` (Qwen3), or None both (Qwen2.5, Llama).
        cos, sin: ``[T, head_dim]`` in any floating dtype, as :func:`rotation` gives them: both halves are equal.
        eps: of the norm.

    Returns:
        q and k, the same shapes and dtypes.
    """
    return _turned(q, q_weight, cos, sin, eps), _turned(k, k_weight, cos, sin, eps)


def qk_norm_rope_write(
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
    """:func:`qk_norm_rope`, with k and v written where attention will read them.

    Args:
        q, k, q_weight, k_weight, cos, sin, eps: as there.
        v: ``[T, num_kv_heads, head_dim]``.
        keys, values: ``[R, num_kv_heads, head_dim]``, changed in place.
        rows: ``i64[T]``, each token's row of them, all different, or -1 for one that is not kept.

    Returns:
        q, the same shape and dtype.
    """
    kept = rows >= 0
    keys[rows[kept]] = _turned(k, k_weight, cos, sin, eps)[kept]
    values[rows[kept]] = v[kept]
    return _turned(q, q_weight, cos, sin, eps)


def _turned(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    wide = x.float() if weight is None else rms_norm(x.float(), weight.float(), eps)
    return rotate(wide, cos.float(), sin.float()).to(x.dtype)
