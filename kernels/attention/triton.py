"""Packed grouped-query attention in one launch: no padding, no expanded K/V, no score matrix.

A program takes ``BLOCK_M // groups`` tokens of one sequence and all query heads of one K/V head: a tile's row ``r`` is
token ``r // groups``, head ``r % groups``, so K/V are read once a tile. Which sequence and block a program has it finds
itself: the blocks of sequence ``b`` begin at work item ``cu_seqlens[b] // tokens_per_block + b``. These places rise by
at least as many as a sequence has blocks, need no prefix sum, and end at ``T // tokens_per_block + B``, which the
launch knows without the lengths.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from dagserve.kernels import HEAD_SIZES
from dagserve.kernels.configs import load_config, upper_bound
from dagserve.kernels.online_softmax import attend


@triton.jit
def packed_gqa_kernel(
    p_q,  # [T, KV_HEADS * GROUPS, D], rows Q_STRIDE apart
    p_k,  # [T, KV_HEADS, D], rows K_STRIDE apart
    p_v,  # [T, KV_HEADS, D], rows V_STRIDE apart
    p_cu_seqlens,  # i32[sequences + 1]
    p_out,  # [T, KV_HEADS * GROUPS, D]
    sequences,
    SCALE: tl.constexpr,  # of scores, times log2(e)
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    SHARED_PREFIX: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    SKIP_MASKS: tl.constexpr,  # whole blocks that all rows see go without a mask, in a loop of their own
):
    """One block of one sequence, all query heads of one K/V head. Grid: ``(KV_HEADS, T // BLOCK_T + sequences)``."""
    BLOCK_T: tl.constexpr = BLOCK_M // GROUPS  # tokens of a tile; rows beyond them idle
    i_head, i_work = tl.program_id(0), tl.program_id(1)

    i_seq = -1
    for o_b in range(0, sequences, BLOCK_B):
        o_seq = o_b + tl.arange(0, BLOCK_B)  # [BLOCK_B]
        m_seq = o_seq < sequences
        b_start = tl.load(p_cu_seqlens + o_seq, mask=m_seq, other=0)
        i_seq += tl.sum((m_seq & (b_start // BLOCK_T + o_seq <= i_work)).to(tl.int32))
    seq_start = tl.load(p_cu_seqlens + i_seq)
    length = tl.load(p_cu_seqlens + i_seq + 1) - seq_start
    blocks = tl.cdiv(length, BLOCK_T)
    i_from_last = i_work - seq_start // BLOCK_T - i_seq
    if i_from_last >= blocks:
        return
    i_first = (blocks - 1 - i_from_last) * BLOCK_T  # a sequence's last block has most keys, so it begins first

    o_row = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    o_d = tl.arange(0, D)  # [D]
    o_place = i_first + o_row // GROUPS
    m_row = (o_row < BLOCK_T * GROUPS) & (o_place < length)
    o_token = seq_start.to(tl.int64) + o_place
    o_head = i_head * GROUPS + o_row % GROUPS
    b_q = tl.load(p_q + (o_token * Q_STRIDE + o_head * D)[:, None] + o_d[None, :], mask=m_row[:, None], other=0.0)

    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_out = tl.zeros([BLOCK_M, D], tl.float32)
    o_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    p_k += i_head * D + o_n[:, None].to(tl.int64) * K_STRIDE + o_d[None, :]  # [BLOCK_N, D]
    p_v += i_head * D + o_n[:, None].to(tl.int64) * V_STRIDE + o_d[None, :]

    if SHARED_PREFIX:
        prefix = tl.load(p_cu_seqlens + 1)
        prefix = tl.where(i_seq == 0, 0, prefix)
        full = prefix // BLOCK_N * BLOCK_N
        for o_key in range(0, full, BLOCK_N):
            o_k, o_v = tl.cast(o_key, tl.int64) * K_STRIDE, tl.cast(o_key, tl.int64) * V_STRIDE
            b_max, b_sum, b_out = attend(b_q, b_max, b_sum, b_out, p_k + o_k, p_v + o_v, None, None, SCALE, WIDE)
        if full < prefix:
            o_k, o_v = tl.cast(full, tl.int64) * K_STRIDE, tl.cast(full, tl.int64) * V_STRIDE
            m_key = full + o_n < prefix
            b_max, b_sum, b_out = attend(
                b_q, b_max, b_sum, b_out, p_k + o_k, p_v + o_v, m_key[:, None], m_key[None, :], SCALE, WIDE
            )

    p_k += seq_start.to(tl.int64) * K_STRIDE
    p_v += seq_start.to(tl.int64) * V_STRIDE
    full = 0
    if SKIP_MASKS:
        full = (i_first + 1) // BLOCK_N * BLOCK_N  # keys that every row of the tile sees, in whole blocks
        for o_key in range(0, full, BLOCK_N):
            o_k, o_v = tl.cast(o_key, tl.int64) * K_STRIDE, tl.cast(o_key, tl.int64) * V_STRIDE
            b_max, b_sum, b_out = attend(b_q, b_max, b_sum, b_out, p_k + o_k, p_v + o_v, None, None, SCALE, WIDE)
    last = tl.minimum(length, i_first + BLOCK_T)
    for o_key in range(full, last, BLOCK_N):
        o_k, o_v = tl.cast(o_key, tl.int64) * K_STRIDE, tl.cast(o_key, tl.int64) * V_STRIDE
        m_key = (o_key + o_n < last)[:, None]
        m_score = o_key + o_n[None, :] <= o_place[:, None]
        b_max, b_sum, b_out = attend(b_q, b_max, b_sum, b_out, p_k + o_k, p_v + o_v, m_key, m_score, SCALE, WIDE)

    b_out = b_out / b_sum[:, None]
    p_row = p_out + (o_token * (KV_HEADS * GROUPS * D) + o_head * D)[:, None] + o_d[None, :]
    tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=m_row[:, None])


@triton_op("dagserve::packed_gqa", mutates_args={})
def _packed_gqa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    shared_prefix: bool,
    wide: bool,
    block_m: int,
    block_n: int,
    skip_masks: int,
    warps: int,
    stages: int,
) -> Tensor:
    tokens, heads, size = q.shape
    kv_heads, sequences = k.shape[1], cu_seqlens.shape[0] - 1
    groups = heads // kv_heads
    out = q.new_empty(tokens, heads, size)
    wrap_triton(packed_gqa_kernel)[(kv_heads, tokens // (block_m // groups) + sequences)](
        q,
        k,
        v,
        cu_seqlens,
        out,
        sequences,
        SCALE=size**-0.5 * math.log2(math.e),
        Q_STRIDE=q.stride(0),
        K_STRIDE=k.stride(0),
        V_STRIDE=v.stride(0),
        KV_HEADS=kv_heads,
        GROUPS=groups,
        D=size,
        SHARED_PREFIX=shared_prefix,
        WIDE=wide,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_B=32 * warps,
        SKIP_MASKS=skip_masks,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def packed_gqa(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, shared_prefix: bool = False
) -> Tensor:
    """As :func:`dagserve.kernels.attention.reference.packed_attention`; tokens may be rows of a wider matrix.

    ``max_seqlen`` chooses the tiles, and in an export its bound does; the result is right for longer ones too.

    Raises:
        ValueError: a head size, or a number of query heads to a K/V head, that no tile has.
    """
    size, groups = q.shape[2], q.shape[1] // k.shape[1]
    if size not in HEAD_SIZES:
        raise ValueError(f"triton_packed_gqa: head_dim is {size}; it must be one of {HEAD_SIZES}: choose torch")
    c = load_config("attention").pick(
        length=upper_bound(max_seqlen), head_dim=size, groups=groups, itemsize=q.element_size()
    )
    if groups > c["BLOCK_M"]:
        raise ValueError(f"triton_packed_gqa: {groups} query heads share one; a tile has {c['BLOCK_M']}: choose torch")
    tiles = (c["BLOCK_M"], c["BLOCK_N"], c["SKIP_MASKS"], c["warps"], c["stages"])
    q, k, v = (_in_rows(x) for x in (q, k, v))
    out: Tensor = _packed_gqa(q, k, v, cu_seqlens, shared_prefix, not q.is_cuda, *tiles)
    return out


def _in_rows(x: Tensor) -> Tensor:
    """``[T, heads, D]`` with a token's heads one after another in memory."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
