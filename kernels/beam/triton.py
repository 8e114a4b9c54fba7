"""The merge of a prompt's beams in two launches, and the move of suffix K/V in one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from dagserve.kernels.beam.device import in_order, is_first, order_key, store_taken
from dagserve.kernels.configs import load_config, upper_bound

COPIED = 4096
"""Elements of a row that one program moves."""


@triton.jit
def total(p_cumulative, p_score, o_place, m_place, candidates):
    """FP32 totals of places ``beam * candidates + candidate`` of one prompt."""
    b_score = tl.load(p_score + o_place, mask=m_place, other=float("-inf"))
    return tl.load(p_cumulative + o_place // candidates, mask=m_place, other=float("-inf")) + b_score


@triton.jit
def scan_kernel(
    p_cumulative,
    p_score,
    p_group_key,
    beams,
    candidates,
    groups,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program ``(prompt, block)``: the largest key of each of the block's groups."""
    i_prompt, i_block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_place = i_block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_place = o_place < beams * candidates
    p_score += i_prompt * beams * candidates
    b_total = total(p_cumulative + i_prompt * beams, p_score, o_place, m_place, candidates)
    b_key = tl.where(m_place, order_key(b_total, 32), 0)
    b_largest = tl.max(tl.reshape(b_key, [BLOCK // GROUP, GROUP]), 1)  # [BLOCK / GROUP]
    o_group = i_block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    tl.store(p_group_key + i_prompt * groups + o_group, b_largest.to(tl.int32, bitcast=True), mask=o_group < groups)


@triton.jit
def merge_kernel(
    p_cumulative,
    p_score,
    p_token,
    p_group_key,
    p_group,
    p_taken,
    p_total,
    p_next,
    p_parent,
    beams,
    candidates,
    groups,
    count,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Program ``(prompt,)``: its first ``count`` places. ``p_group``, ``p_taken``: scratch, ``COUNT`` a prompt."""
    i_prompt = tl.program_id(0).to(tl.int64)
    places = beams * candidates
    p_cumulative += i_prompt * beams
    p_score += i_prompt * places
    p_group += i_prompt * COUNT
    p_taken += i_prompt * COUNT

    o_group = tl.arange(0, GROUPS)
    b_group_key = tl.load(p_group_key + i_prompt * groups + o_group, mask=o_group < groups, other=0)
    chosen = tl.minimum(count, groups)
    store_taken(p_group, o_group, is_first(b_group_key.to(tl.uint32, bitcast=True), chosen, 32))

    o_member = tl.arange(0, COUNT * GROUP)
    m_chosen = o_member // GROUP < chosen
    o_place = tl.load(p_group + o_member // GROUP, mask=m_chosen, other=0) * GROUP + o_member % GROUP
    m_place = m_chosen & (o_place < places)
    b_key = tl.where(m_place, order_key(total(p_cumulative, p_score, o_place, m_place, candidates), 32), 0)
    store_taken(p_taken, o_place, is_first(b_key, count, 32))

    o_rank = tl.arange(0, COUNT)
    m_rank = o_rank < count
    b_taken = tl.load(p_taken + o_rank, mask=m_rank, other=0)
    b_key = order_key(total(p_cumulative, p_score, b_taken, m_rank, candidates), 32)
    b_place = in_order(b_key, b_taken, m_rank)
    o_out = i_prompt * count + o_rank
    tl.store(p_total + o_out, total(p_cumulative, p_score, b_place, m_rank, candidates), mask=m_rank)
    tl.store(p_next + o_out, tl.load(p_token + i_prompt * places + b_place, mask=m_rank), mask=m_rank)
    tl.store(p_parent + o_out, b_place // candidates, mask=m_rank)


@triton_op("dagserve::beam_merge", mutates_args={})
def _merge(
    cumulative: Tensor,
    scores: Tensor,
    ids: Tensor,
    count: int,
    block: int,
    group: int,
    scan_warps: int,
    merge_warps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    prompts, beams, candidates = scores.shape
    places = beams * candidates
    blocks, groups = (places + block - 1) // block, (places + group - 1) // group
    most, width = (triton.next_power_of_2(upper_bound(n)) for n in (groups, count))
    group_keys = scores.new_empty(prompts, groups, dtype=torch.int32)
    chosen, taken = (scores.new_empty(prompts, width, dtype=torch.int32) for _ in range(2))
    totals = scores.new_empty(prompts, count, dtype=torch.float32)
    tokens, parents = (scores.new_empty(prompts, count, dtype=torch.int64) for _ in range(2))
    wrap_triton(scan_kernel)[(prompts, blocks)](
        cumulative,
        scores,
        group_keys,
        beams,
        candidates,
        groups,
        GROUP=group,
        BLOCK=block,
        num_warps=scan_warps,
    )
    wrap_triton(merge_kernel)[(prompts,)](
        cumulative,
        scores,
        ids,
        group_keys,
        chosen,
        taken,
        totals,
        tokens,
        parents,
        beams,
        candidates,
        groups,
        count,
        GROUP=group,
        GROUPS=most,
        COUNT=width,
        num_warps=merge_warps,
    )
    return totals, tokens, parents


def merge(cumulative: Tensor, scores: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`dagserve.kernels.beam.reference.merge`; contiguous inputs."""
    c = load_config("beam").pick(count=upper_bound(count))
    tiles = (c["BLOCK"], c["GROUP"], c["scan_warps"], c["merge_warps"])
    merged: tuple[Tensor, Tensor, Tensor] = _merge(cumulative, scores, ids, count, *tiles)
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
    """As :func:`dagserve.kernels.beam.reference.reorder`; contiguous inputs."""
    moved: Tensor = _reorder(suffix, parent, valid, keys)
    return moved
