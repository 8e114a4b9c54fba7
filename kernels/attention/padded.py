"""Packed attention that exports with dynamic shapes on any device: sequences are padded into Torch's fused SDPA.

Padding sits on the right and the mask is causal, so no valid query ever sees a padded key and no mask is built. Cost is
``B * max_seqlen`` rows, whatever the lengths: fine where they are alike, wasteful for one long text among short ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Packing:
    """Index tensors of one packed batch, computed once and used by every layer.

    Attributes:
        positions: ``i64[T]``, each token's place in its sequence.
        last: ``i64[B]``, row of each sequence's last token.
        pad: ``i64[B, L]``, packed row of each padded cell (clamped past the end).
        unpad: ``i64[T]``, padded cell of each packed row.
    """

    positions: Tensor
    last: Tensor
    pad: Tensor
    unpad: Tensor

    @staticmethod
    def of(cu_seqlens: Tensor, tokens: int, iota: Tensor) -> Packing:
        """From ``cu_seqlens: i32[B+1]``, the number of tokens, and ``iota: i32[L]`` = 0..max_seqlen-1."""
        batch = cu_seqlens.shape[0] - 1
        starts = cu_seqlens.narrow(0, 0, batch).long()
        ends = cu_seqlens.narrow(0, 1, batch).long()
        rows = torch.arange(tokens, device=cu_seqlens.device)
        sequence = torch.searchsorted(ends, rows, right=True)
        positions = rows - starts[sequence]
        pad = (starts[:, None] + iota.long()[None, :]).clamp(max=tokens - 1)
        return Packing(positions, ends - 1, pad, sequence * iota.shape[0] + positions)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
    """Same result as :func:`dagserve.kernels.attention.reference.packed_attention`, same shapes."""
    groups = q.shape[1] // k.shape[1]
    batch, length = packing.pad.shape
    qp, kp, vp = (x[packing.pad].transpose(1, 2) for x in (q, k, v))
    kp, vp = (x.repeat_interleave(groups, dim=1) for x in (kp, vp))
    out = scaled_dot_product_attention(qp, kp, vp, is_causal=True)
    return out.transpose(1, 2).reshape(batch * length, q.shape[1], q.shape[2])[packing.unpad]
