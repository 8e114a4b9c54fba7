"""The merge of a prompt's beams, and the move of suffix K/V, a launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from dagserve.kernels.beam.device import in_order, is_first, order_key, place_order, store_taken
from dagserve.kernels.configs import load_config, upper_bound

COPIED = 4096
"""Elements of a row that one program moves."""


@triton.jit
def merge_kernel(
    p_cumulative,
    p_score,
    p_token,
    p_first,
    p_order,
    p_total,
    p_next,
    p_parent,
    beams,
    candidates,
    count,
    GROUP: tl.constexpr,
    BEAMS: tl.constexpr,
    EACH: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Program ``(prompt,)``: its first ``count`` places. ``p_first``, ``p_order``: scratch, ``COUNT`` a prompt.

    A place is ``beam * candidates + candidate``. A group is ``GROUP`` candidates of one beam, ``EACH`` groups a beam at
    most; a group's first candidate has its largest key.
    """
    i_prompt = tl.program_id(0).to(tl.int64)
    p_cumulative += i_prompt * beams
    p_score += i_prompt * beams * candidates
    p_token += i_prompt * beams * candidates
    p_first += i_prompt * COUNT
    p_order += i_prompt * COUNT

    o_beam, o_candidate = tl.arange(0, BEAMS), tl.arange(0, EACH) * GROUP
    m_beam, m_group = o_beam < beams, (o_beam < beams)[:, None] & (o_candidate < candidates)[None, :]  # [BEAMS, EACH]
    o_first = o_beam[:, None] * candidates + o_candidate[None, :]
    b_total = tl.load(p_cumulative + o_beam, mask=m_beam, other=float("-inf"))[:, None]
    b_total += tl.load(p_score + o_first, mask=m_group, other=float("-inf"))
    b_key = tl.reshape(tl.where(m_group, order_key(b_total, 32), 0), [BEAMS * EACH])
    chosen = tl.minimum(count, beams * tl.cdiv(candidates, GROUP))
    store_taken(p_first, tl.reshape(o_first, [BEAMS * EACH]), is_first(b_key, chosen, 32))

    o_rank, o_member = tl.arange(0, COUNT), tl.arange(0, GROUP)
    m_chosen = o_rank < chosen
    b_first = tl.load(p_first + o_rank, mask=m_chosen, other=0)  # [COUNT]
    i_beam = b_first // candidates
    o_place = b_first[:, None] + o_member[None, :]  # [COUNT, GROUP]
    m_place = m_chosen[:, None] & (o_place < (i_beam[:, None] + 1) * candidates)
    b_total = tl.load(p_cumulative + i_beam, mask=m_chosen, other=float("-inf"))[:, None]
    b_total += tl.load(p_score + o_place, mask=m_place, other=float("-inf"))
    b_key = tl.reshape(tl.where(m_place, order_key(b_total, 32), 0), [COUNT * GROUP])
    o_place = tl.reshape(o_place, [COUNT * GROUP])
    store_taken(p_order, place_order(b_key, o_place), is_first(b_key, count, 32))

    o_place = in_order(p_order, count, COUNT)
    m_rank = o_rank < count
    i_beam = o_place.to(tl.int32) // candidates
    b_total = tl.load(p_cumulative + i_beam, mask=m_rank, other=float("-inf"))
    b_total += tl.load(p_score + o_place, mask=m_rank, other=float("-inf"))
    o_out = i_prompt * count + o_rank
    tl.store(p_total + o_out, b_total, mask=m_rank)
    tl.store(p_next + o_out, tl.load(p_token + o_place, mask=m_rank), mask=m_rank)
    tl.store(p_parent + o_out, i_beam.to(tl.int64), mask=m_rank)


@triton_op("dagserve::beam_merge", mutates_args={})
def _merge(
    cumulative: Tensor, scores: Tensor, ids: Tensor, count: int, group: int, warps: int
) -> tuple[Tensor, Tensor, Tensor]:
    prompts, beams, candidates = scores.shape
    each = (candidates + group - 1) // group
    most, groups, width = (triton.next_power_of_2(upper_bound(n)) for n in (beams, each, count))
    first = scores.new_empty(prompts, width, dtype=torch.int32)
    order = scores.new_empty(prompts, width, dtype=torch.int64)
    totals = scores.new_empty(prompts, count, dtype=torch.float32)
    tokens, parents = (scores.new_empty(prompts, count, dtype=torch.int64) for _ in range(2))
    wrap_triton(merge_kernel)[(prompts,)](
        cumulative,
        scores,
        ids,
        first,
        order,
        totals,
        tokens,
        parents,
        beams,
        candidates,
        count,
        GROUP=group,
        BEAMS=most,
        EACH=groups,
        COUNT=width,
        num_warps=warps,
    )
    return totals, tokens, parents


def merge(cumulative: Tensor, scores: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`dagserve.kernels.beam.reference.merge`; of inputs with other strides it makes copies."""
    cumulative, scores, ids = cumulative.contiguous(), scores.contiguous(), ids.contiguous()
    c = load_config("beam").pick(count=upper_bound(count))
    merged: tuple[Tensor, Tensor, Tensor] = _merge(cumulative, scores, ids, count, c["GROUP"], c["warps"])
    return merged


@triton.jit
def reorder_kernel(p_suffix, p_parent, p_valid, p_out, prompts, width, columns, key_columns, BLOCK: tl.constexpr):
    """Program ``(row, tensor, block)``: a block of columns of one beam's keys or values."""
    i_row, i_tensor = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_column = o_column < columns
    m_valid = m_column & (o_column < tl.load(p_valid) * key_columns)
    o_first = (i_tensor * prompts + i_row // width) * width  # the prompt's first row
    o_source = (o_first + tl.load(p_parent + i_row)) * columns
    b_row = tl.load(p_suffix + o_source + o_column, mask=m_valid, other=0)
    tl.store(p_out + (o_first + i_row % width) * columns + o_column, b_row, mask=m_column)


@triton_op("dagserve::beam_reorder", mutates_args={})
def _reorder(suffix: Tensor, parent: Tensor, valid: Tensor, keys: int) -> Tensor:
    tensors, prompts, width, columns = suffix.shape
    out = suffix.new_empty(tensors, prompts, width, columns)
    block = min(COPIED, triton.next_power_of_2(columns))
    wrap_triton(reorder_kernel)[(prompts * width, tensors, -(-columns // block))](
        suffix,
        parent,
        valid,
        out,
        prompts,
        width,
        columns,
        columns // keys,
        BLOCK=block,
        num_warps=max(1, min(8, block // 256)),
    )
    return out


def reorder(suffix: Tensor, parent: Tensor, valid: Tensor, keys: int) -> Tensor:
    """As :func:`dagserve.kernels.beam.reference.reorder`; of inputs with other strides it makes copies."""
    moved: Tensor = _reorder(suffix.contiguous(), parent.contiguous(), valid, keys)
    return moved
