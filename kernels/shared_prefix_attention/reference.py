"""The semantics of shared-prefix attention, one beam at a time in FP32."""

from __future__ import annotations

import torch
from torch import Tensor


def shared_prefix_attention(
    q: Tensor, prefix_k: Tensor, prefix_v: Tensor, lengths: Tensor, suffix_k: Tensor, suffix_v: Tensor, count: Tensor
) -> Tensor:
    """One query a beam over its prompt's keys and the keys of its own generated tokens.

    Args:
        q: ``[P, W, num_heads, head_dim]``.
        prefix_k, prefix_v: ``[P, L, num_kv_heads, head_dim]``, shared by the ``W`` beams of a prompt; query head ``h``
            reads K/V head ``h // (num_heads // num_kv_heads)``.
        lengths: ``i64[P]``, valid keys of each prompt, at least 1.
        suffix_k, suffix_v: ``[P, W, M, num_kv_heads, head_dim]``.
        count: ``i64[1]``, valid keys of every suffix, 1 to ``M``.

    Returns:
        ``[P, W, num_heads, head_dim]`` in q's dtype. Scores and softmax are FP32, over prefix and suffix together.
    """
    groups = q.shape[2] // prefix_k.shape[2]
    out = torch.empty_like(q)
    for p in range(q.shape[0]):
        for w in range(q.shape[1]):
            n, m = int(lengths[p]), int(count)
            k = torch.cat([prefix_k[p, :n], suffix_k[p, w, :m]]).float().repeat_interleave(groups, dim=1)
            v = torch.cat([prefix_v[p, :n], suffix_v[p, w, :m]]).float().repeat_interleave(groups, dim=1)
            scores = torch.einsum("hd,nhd->hn", q[p, w].float(), k) * q.shape[3] ** -0.5
            out[p, w] = torch.einsum("hn,nhd->hd", scores.softmax(dim=-1), v).to(q.dtype)
    return out
