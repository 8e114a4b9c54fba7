"""Packed attention that exports with dynamic shapes on any device: sequences are padded into Torch's fused SDPA.

Padding sits on the right and the mask is causal, so no valid query ever sees a padded key and no mask is built. Cost is
``B * max_seqlen`` rows, whatever the lengths: fine where they are alike, wasteful for one long text among short ones.

With a shared prefix row 0 of the packed batch is what every other row goes on from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Packing:
    """Index tensors of one packed batch, computed once and used by every layer.

    They stay in range whatever ``cu_seqlens`` holds: while a package is built for a GPU, kernels run on zeros.

    Attributes:
        cu_seqlens: ``i32[B+1]``, or ``i32[B+2]`` with a shared prefix.
        positions: ``i64[T]``, each token's place in its text.
        last: ``i64[B]``, row of each text's last token.
        pad: ``i64[B, L]``, packed row of each padded cell (clamped past the end); of the shared prefix none.
        unpad: ``i64[T]``, padded cell of each packed row, those of the prefix before all others.
        prefix: ``i64[S]``, packed row of each cell of the shared prefix (clamped past the end); None without one.
    """

    cu_seqlens: Tensor
    positions: Tensor
    last: Tensor
    pad: Tensor
    unpad: Tensor
    prefix: Tensor | None = None

    @staticmethod
    def of(cu_seqlens: Tensor, tokens: int, iota: Tensor) -> Packing:
        """From ``cu_seqlens: i32[B+1]``, the number of tokens, and ``iota: i32[L]`` = 0..max_seqlen-1."""
        batch = cu_seqlens.shape[0] - 1
        starts = cu_seqlens.narrow(0, 0, batch).long()
        ends = cu_seqlens.narrow(0, 1, batch).long()
        rows = torch.arange(tokens, device=cu_seqlens.device)
        sequence = torch.searchsorted(ends, rows, right=True).clamp(max=batch - 1)
        positions = rows - starts[sequence]
        pad = (starts[:, None] + iota.long()[None, :]).clamp(max=tokens - 1)
        unpad = (sequence * iota.shape[0] + positions).clamp(max=batch * iota.shape[0] - 1)
        return Packing(cu_seqlens, positions, ends - 1, pad, unpad)

    @staticmethod
    def shared(cu_seqlens: Tensor, tokens: int, iota: Tensor, prefix_iota: Tensor) -> Packing:
        """As :meth:`of`, with a prefix in row 0, which may be empty.

        ``iota``: 0..L-1 for the longest of the other rows; ``prefix_iota: i32[S]``, as long as the prefix, at least 1.
        """
        batch = cu_seqlens.shape[0] - 2
        starts = cu_seqlens.narrow(0, 1, batch).long()
        ends = cu_seqlens.narrow(0, 2, batch).long()
        length = cu_seqlens.narrow(0, 1, 1).long()
        rows = torch.arange(tokens, device=cu_seqlens.device)
        sequence = torch.searchsorted(ends, rows, right=True).clamp(max=batch - 1)
        within = rows - starts[sequence]
        positions = torch.where(rows < length, rows, within + length)
        pad = (starts[:, None] + iota.long()[None, :]).clamp(max=tokens - 1)
        cell = prefix_iota.shape[0] + sequence * iota.shape[0] + within
        unpad = torch.where(rows < length, rows, cell).clamp(max=prefix_iota.shape[0] + batch * iota.shape[0] - 1)
        return Packing(cu_seqlens, positions, ends - 1, pad, unpad, prefix_iota.long().clamp(max=tokens - 1))


def packed_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
    """Same result as :func:`dagserve.kernels.attention.reference.packed_attention`, same shapes."""
    if packing.prefix is not None:
        return _over_prefix(q, k, v, packing, packing.prefix)
    groups = q.shape[1] // k.shape[1]
    batch, length = packing.pad.shape
    qp, kp, vp = (x[packing.pad].transpose(1, 2) for x in (q, k, v))
    kp, vp = (x.repeat_interleave(groups, dim=1) for x in (kp, vp))
    out = scaled_dot_product_attention(qp, kp, vp, is_causal=True)
    return out.transpose(1, 2).reshape(batch * length, q.shape[1], q.shape[2])[packing.unpad]


def _over_prefix(q: Tensor, k: Tensor, v: Tensor, packing: Packing, prefix: Tensor) -> Tensor:
    """Every row over the prefix and over itself; the prefix over itself alone."""
    groups = q.shape[1] // k.shape[1]
    batch, length = packing.pad.shape
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    pq, pk, pv = (x[prefix].transpose(0, 1)[None] for x in (q, k, v))
    over_itself = scaled_dot_product_attention(pq, pk, pv, is_causal=True)
    qp, kp, vp = (x[packing.pad].transpose(1, 2) for x in (q, k, v))
    keys, values = (torch.cat([x.expand(batch, -1, -1, -1), own], dim=2) for x, own in ((pk, kp), (pv, vp)))
    there = torch.arange(prefix.shape[0], device=q.device) < packing.cu_seqlens[1]
    place = torch.arange(length, device=q.device)
    causal = place[None, :] <= place[:, None]
    mask = torch.cat([there[None, :].expand(length, -1), causal], dim=1)
    out = scaled_dot_product_attention(qp, keys, values, attn_mask=mask)
    cells = [x.transpose(1, 2).reshape(-1, q.shape[1], q.shape[2]) for x in (over_itself, out)]
    return torch.cat(cells)[packing.unpad]
