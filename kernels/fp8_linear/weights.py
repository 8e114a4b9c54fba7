"""Offline conversion of weights: several linears as one, and E4M3 with a scale for each output channel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from dagserve.kernels.quantize.reference import quantize

ALIGNMENT = 16
"""FP8 products want input and output sizes that are multiples of this."""


def aligned(size: int) -> int:
    """The next multiple of 16."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def pack(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Weights ``[N, K]`` or biases ``[N]`` of linears over the same input as one, in the format of ``like``.

    Where that is E4M3 each row has its own :func:`scale`, and rows and columns of zeros are added up to its shape.
    """
    packed = torch.cat(list(tensors))
    if like.dtype != torch.float8_e4m3fn:
        return packed.to(like.dtype)
    return quantize(_padded(packed))[0]


def scale(tensors: Sequence[Tensor], like: Tensor) -> Tensor:  # noqa: ARG001
    """``f32[N]``, the scales of :func:`pack`'s rows."""
    return quantize(_padded(torch.cat(list(tensors))))[1].squeeze(1)


def _padded(weight: Tensor) -> Tensor:
    features, columns = weight.shape
    return pad(weight, (0, aligned(columns) - columns, 0, aligned(features) - features))
