"""Rotary position embedding in the half-split layout of Llama and Qwen checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


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
