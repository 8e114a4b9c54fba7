"""The semantics of the merge of a prompt's beams, and of the move of their K/V."""

from __future__ import annotations

import torch
from torch import Tensor

from dagserve.kernels.beam.selection import first_indices, order_key


def merge(cumulative: Tensor, scores: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best continuations of all beams of a prompt.

    Args:
        cumulative: ``f32[P, B]``, each beam's score; -inf where there is no beam.
        scores: ``f32[P, B, K]``, of each beam's candidates, the best first; NaN counts as -inf.
        ids: ``i64[P, B, K]``, their tokens.
        count: how many, at most ``B * K``.

    Returns:
        ``total: f32[P, count]``, the largest ``cumulative + score`` first, of equal ones the lower beam and then the
        earlier candidate, NaN as -inf; ``token: i64[P, count]``, and ``parent: i64[P, count]``, its beam.
    """
    totals = (cumulative[:, :, None] + scores).flatten(1)
    chosen = first_indices(order_key(totals), count)
    return totals.gather(1, chosen), ids.flatten(1).gather(1, chosen), chosen // scores.shape[2]


def reorder(suffix: Tensor, parent: Tensor, valid: Tensor, keys: int) -> Tensor:
    """Keys and values follow their beams.

    Args:
        suffix: ``[N, P, W, keys * C]``: N tensors of keys or values, ``C`` numbers a key.
        parent: ``i64[P, W]``, the beam whose keys a beam goes on from.
        valid: ``i64[1]``, how many keys there are so far; the rest of a row counts as zero.
        keys: how many keys fit in a row.

    Returns:
        ``[N, P, W, keys * C]``, row ``w`` of a prompt is its row ``parent[w]``.
    """
    tensors, prompts, width, columns = suffix.shape
    rows = (torch.arange(prompts, device=suffix.device)[:, None] * width + parent).flatten()
    moved = suffix.reshape(tensors, prompts * width, columns)[:, rows].reshape(suffix.shape)
    there = torch.arange(columns, device=suffix.device) < valid * (columns // keys)
    return torch.where(there, moved, 0)
