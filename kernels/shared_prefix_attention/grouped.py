"""Shared-prefix attention as matrix products on any device: a prompt's keys are read once for all of its beams."""

from __future__ import annotations

import torch
from torch import Tensor


def shared_prefix_attention(
    q: Tensor, prefix_k: Tensor, prefix_v: Tensor, lengths: Tensor, suffix_k: Tensor, suffix_v: Tensor, count: Tensor
) -> Tensor:
    """Same result as :func:`dagserve.kernels.shared_prefix_attention.reference.shared_prefix_attention`."""
    prompts, width, heads, size = q.shape
    length, kv_heads = prefix_k.shape[1], prefix_k.shape[2]
    groups = heads // kv_heads
    grouped = q.reshape(prompts, width, kv_heads, groups, size)
    rows = grouped.permute(0, 2, 1, 3, 4).reshape(prompts, kv_heads, width * groups, size)
    keys, values = (x.transpose(1, 2) for x in (prefix_k, prefix_v))  # [P, Nkv, L, D]
    over_prefix = (rows @ keys.transpose(2, 3)).float() * size**-0.5
    beyond = torch.arange(length, device=q.device)[None, :] >= lengths[:, None]
    over_prefix = over_prefix.masked_fill(beyond[:, None, None, :], float("-inf"))
    over_prefix = over_prefix.reshape(prompts, kv_heads, width, groups, length)
    # The suffix is a handful of keys a beam: products and sums, no batch of tiny matrices.
    suffix = suffix_k.permute(0, 3, 1, 2, 4)  # [P, Nkv, W, M, D]
    per_head = grouped.permute(0, 2, 1, 3, 4)  # [P, Nkv, W, G, D]
    over_suffix = (per_head.unsqueeze(4).float() * suffix.unsqueeze(3).float()).sum(-1) * size**-0.5
    later = torch.arange(suffix_k.shape[2], device=q.device) >= count
    over_suffix = over_suffix.masked_fill(later, float("-inf"))
    weights = torch.cat([over_prefix, over_suffix], dim=-1).softmax(dim=-1)
    first = weights[..., :length].reshape(prompts, kv_heads, width * groups, length).to(q.dtype) @ values
    first = first.reshape(prompts, kv_heads, width, groups, size)
    second = (weights[..., length:].unsqueeze(-1) * suffix_v.permute(0, 3, 1, 2, 4).unsqueeze(3).float()).sum(4)
    out = first.float() + second
    return out.permute(0, 2, 1, 3, 4).reshape(prompts, width, heads, size).to(q.dtype)
