"""The semantics of packed attention, one sequence at a time in FP32."""

from __future__ import annotations

import torch
from torch import Tensor


def packed_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, shared_prefix: bool = False) -> Tensor:
    """Causal attention inside each sequence of a packed batch.

    Args:
        q: ``[T, num_heads, head_dim]``.
        k, v: ``[T, num_kv_heads, head_dim]``; query head ``h`` reads K/V head ``h // (num_heads // num_kv_heads)``.
        cu_seqlens: ``i32[B+1]``, rising from 0 to ``T``.
        shared_prefix: sequence 0, which may be empty, comes before every other one; ``cu_seqlens`` is ``i32[B+2]``.

    Returns:
        ``[T, num_heads, head_dim]`` in q's dtype. Scores and softmax are FP32.
    """
    groups = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    prefix = int(cu_seqlens[1]) if shared_prefix else 0
    for i, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        before = prefix if i else 0
        qs = q[start:end].float().transpose(0, 1)
        rows = [torch.cat([x[:before], x[start:end]]).float() for x in (k, v)]
        ks, vs = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in rows)
        scores = qs @ ks.transpose(1, 2) * q.shape[2] ** -0.5
        future = torch.ones(end - start, before + end - start, dtype=torch.bool, device=q.device).triu(1 + before)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        out[start:end] = (weights @ vs).transpose(0, 1).to(q.dtype)
    return out
