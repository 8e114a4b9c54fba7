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
    rows = _copied(grouped.permute(0, 2, 1, 3, 4)).view(prompts * kv_heads, width * groups, size)
    keys, values = (_copied(x.transpose(1, 2)).view(prompts * kv_heads, length, size) for x in (prefix_k, prefix_v))
    over_prefix = torch.bmm(rows, keys.transpose(1, 2)).float() * size**-0.5
    over_prefix = over_prefix.reshape(prompts, kv_heads, width, groups, length)
    beyond = torch.arange(length, device=q.device)[None, :] >= lengths[:, None]
    over_prefix = over_prefix.masked_fill(beyond[:, None, None, None, :], float("-inf"))
    # The suffix is a handful of keys a beam: products and sums, no batch of tiny matrices.
    suffix = suffix_k.permute(0, 3, 1, 2, 4)  # [P, Nkv, W, M, D]
    per_head = grouped.permute(0, 2, 1, 3, 4)  # [P, Nkv, W, G, D]
    over_suffix = (per_head.unsqueeze(4).float() * suffix.unsqueeze(3).float()).sum(-1) * size**-0.5
    later = torch.arange(suffix_k.shape[2], device=q.device) >= count
    over_suffix = over_suffix.masked_fill(later, float("-inf"))
    weights = torch.cat([over_prefix, over_suffix], dim=-1).softmax(dim=-1)
    first = _copied(weights[..., :length]).view(prompts * kv_heads, width * groups, length).to(q.dtype)
    first = torch.bmm(first, values).reshape(prompts, kv_heads, width, groups, size)
    second = (weights[..., length:].unsqueeze(-1) * suffix_v.permute(0, 3, 1, 2, 4).unsqueeze(3).float()).sum(4)
    out = first.float() + second
    return _copied(out.permute(0, 2, 1, 3, 4)).view(prompts, width, heads, size).to(q.dtype)


def _copied(x: Tensor) -> Tensor:
    """Contiguous memory, whatever x has: of ``reshape`` and ``contiguous`` the exporter would ask that no size is 1."""
    return x.clone(memory_format=torch.contiguous_format)
