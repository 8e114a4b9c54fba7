"""Candidates of each row of logits in two passes: one over all logits, one over the few groups that may matter.

The first pass reads every logit once and leaves a partial log-sum-exp for each block and the largest key of each group.
The second, one program a row, takes the groups in which the first ``count`` tokens must lie, and of their tokens those.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from dagserve.kernels.beam.device import in_order, is_first, order_key, place_order, store_taken
from dagserve.kernels.configs import load_config, upper_bound


@triton.jit
def log_sum_exp(b_value):
    """Of a block, with the results of ``torch.logsumexp`` for infinities and NaN."""
    largest = tl.max(b_value, 0)
    anchor = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
    return tl.log(tl.sum(tl.exp(b_value - anchor), 0)) + anchor


@triton.jit
def scan_kernel(
    p_logits,
    p_allowed,
    p_partial,
    p_group_key,
    allowed_stride,
    vocabulary,
    blocks,
    groups,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Program ``(row, block)``: the block's log-sum-exp, and the largest key of each of its groups."""
    i_row, i_block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_token = i_block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_token = o_token < vocabulary
    p_logits += i_row * vocabulary
    b_logit = tl.load(p_logits + o_token, mask=m_token, other=float("-inf")).to(tl.float32)
    tl.store(p_partial + i_row * blocks + i_block, log_sum_exp(b_logit))
    b_value = b_logit
    if MASKED:
        b_allowed = tl.load(p_allowed + i_row * allowed_stride + o_token, mask=m_token, other=0)
        b_value = tl.where(b_allowed != 0, b_logit, float("-inf"))
    b_key = tl.where(m_token, order_key(b_value, BITS), 0)
    b_largest = tl.max(tl.reshape(b_key, [BLOCK // GROUP, GROUP]), 1)  # [BLOCK / GROUP]
    o_group = i_block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    tl.store(p_group_key + i_row * groups + o_group, b_largest.to(tl.int32), mask=o_group < groups)


@triton.jit
def select_kernel(
    p_logits,
    p_allowed,
    p_partial,
    p_group_key,
    p_group,
    p_order,
    p_id,
    p_score,
    allowed_stride,
    vocabulary,
    blocks,
    groups,
    count,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    COUNT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Program ``(row,)``: its first ``count`` tokens. ``p_group`` and ``p_order`` are scratch of ``COUNT`` a row.

    Logits are loaded here and not by a function: Torch takes a pointer that goes into a call for written where the
    call's result is part of an address that is, and Inductor then copies all logits first.
    """
    i_row = tl.program_id(0).to(tl.int64)
    p_logits += i_row * vocabulary
    p_allowed += i_row * allowed_stride
    p_group += i_row * COUNT
    p_order += i_row * COUNT

    o_group = tl.arange(0, GROUPS)
    b_group_key = tl.load(p_group_key + i_row * groups + o_group, mask=o_group < groups, other=0)
    chosen = tl.minimum(count, groups)
    store_taken(p_group, o_group, is_first(b_group_key.to(tl.uint32, bitcast=True), chosen, BITS))

    o_place = tl.arange(0, COUNT * GROUP)
    m_chosen = o_place // GROUP < chosen
    o_token = tl.load(p_group + o_place // GROUP, mask=m_chosen, other=0) * GROUP + o_place % GROUP
    m_token = m_chosen & (o_token < vocabulary)
    b_value = tl.load(p_logits + o_token, mask=m_token, other=float("-inf")).to(tl.float32)
    if MASKED:
        b_allowed = tl.load(p_allowed + o_token, mask=m_token, other=0)
        b_value = tl.where(b_allowed != 0, b_value, float("-inf"))
    b_key = tl.where(m_token, order_key(b_value, BITS), 0)  # [COUNT * GROUP]
    store_taken(p_order, place_order(b_key, o_token), is_first(b_key, count, BITS))

    o_block = tl.arange(0, BLOCKS)
    b_partial = tl.load(p_partial + i_row * blocks + o_block, mask=o_block < blocks, other=float("-inf"))
    o_token, o_rank = in_order(p_order, count, COUNT), tl.arange(0, COUNT)
    m_rank = o_rank < count
    b_value = tl.load(p_logits + o_token, mask=m_rank, other=float("-inf")).to(tl.float32)
    if MASKED:
        b_allowed = tl.load(p_allowed + o_token, mask=m_rank, other=0)
        b_value = tl.where(b_allowed != 0, b_value, float("-inf"))
    b_score = b_value - log_sum_exp(b_partial)
    tl.store(p_id + i_row * count + o_rank, o_token, mask=m_rank)
    tl.store(p_score + i_row * count + o_rank, tl.where(b_score > 0.0, 0.0, b_score), mask=m_rank)


@triton_op("dagserve::lm_head_candidates", mutates_args={})
def _candidates(
    logits: Tensor, allowed: Tensor | None, count: int, block: int, group: int, scan_warps: int, select_warps: int
) -> tuple[Tensor, Tensor]:
    rows, vocabulary = logits.shape
    blocks, groups, width = -(-vocabulary // block), -(-vocabulary // group), triton.next_power_of_2(upper_bound(count))
    bits = 16 if logits.dtype == torch.bfloat16 else 32
    shared = allowed is None or allowed.dim() == 1
    mask = logits if allowed is None else allowed
    partial = logits.new_empty(rows, blocks, dtype=torch.float32)
    group_keys = logits.new_empty(rows, groups, dtype=torch.int32)
    chosen = logits.new_empty(rows, width, dtype=torch.int32)
    order = logits.new_empty(rows, width, dtype=torch.int64)
    ids = logits.new_empty(rows, count, dtype=torch.int64)
    scores = logits.new_empty(rows, count, dtype=torch.float32)
    wrap_triton(scan_kernel)[(rows, blocks)](
        logits,
        mask,
        partial,
        group_keys,
        0 if shared else vocabulary,
        vocabulary,
        blocks,
        groups,
        BITS=bits,
        GROUP=group,
        BLOCK=block,
        MASKED=allowed is not None,
        num_warps=scan_warps,
    )
    wrap_triton(select_kernel)[(rows,)](
        logits,
        mask,
        partial,
        group_keys,
        chosen,
        order,
        ids,
        scores,
        0 if shared else vocabulary,
        vocabulary,
        blocks,
        groups,
        count,
        BITS=bits,
        GROUP=group,
        BLOCKS=triton.next_power_of_2(blocks),
        GROUPS=triton.next_power_of_2(groups),
        COUNT=width,
        MASKED=allowed is not None,
        num_warps=select_warps,
    )
    return ids, scores


def candidates(logits: Tensor, allowed: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """As :func:`dagserve.kernels.beam.selection.candidates`; ``allowed`` may also be ``bool[..., V]``.

    Of inputs with other strides it makes copies: an FP8 head gives logits as columns of a wider matrix.
    """
    rows, vocabulary = logits.shape[:-1], logits.shape[-1]
    mask = allowed if allowed is None or allowed.dim() == 1 else allowed.reshape(-1, vocabulary).contiguous()
    c = load_config("lm_head").pick(count=upper_bound(count))
    ids, scores = _candidates(
        logits.reshape(-1, vocabulary).contiguous(),
        mask,
        count,
        c["BLOCK"],
        c["GROUP"],
        c["scan_warps"],
        c["select_warps"],
    )
    return ids.reshape(*rows, count), scores.reshape(*rows, count)
