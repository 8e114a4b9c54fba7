"""Shared-prefix attention: several beams of one K/V head in one tile, prefix and suffix in one online softmax.

A program takes ``BLOCK_M // groups`` beams of a prompt and all query heads of one K/V head: a tile's row ``r`` is beam
``r // groups``, head ``r % groups``. Prefix keys are read once a tile. The suffix keys of a tile's beams lie one after
another in memory, so they are one more block of keys in which a row sees its own beam's alone. With more than one split
the prefix is cut into as many ranges, each of them a program's; the last one has the suffix too, and a second kernel
joins them in their order.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor, float32
from torch.library import triton_op, wrap_triton

from dagserve.kernels import HEAD_SIZES
from dagserve.kernels.configs import load_config, upper_bound
from dagserve.kernels.online_softmax import attend

JOINED = 16
"""Rows that one program of the second kernel joins."""


@triton.jit
def shared_prefix_kernel(
    p_q,  # [P, W, KV_HEADS * GROUPS, D]
    p_prefix_k,  # [P, L, KV_HEADS, D]
    p_prefix_v,
    p_lengths,  # i64[P]
    p_suffix_k,  # [P, W, SUFFIX, KV_HEADS, D]
    p_suffix_v,
    p_count,  # i64[1]
    p_out,  # [SPLITS, P, W, KV_HEADS * GROUPS, D]
    p_weight,  # f32[SPLITS, P, W, KV_HEADS * GROUPS], log2 of the sum of a split's weights; unused with one split
    prompts,
    width,
    prefix,
    SCALE: tl.constexpr,  # of scores, times log2(e)
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    SUFFIX: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Some beams, one K/V head, one range of the prefix. Grid: ``(blocks of beams * SPLITS, KV_HEADS, P)``."""
    BLOCK_W: tl.constexpr = BLOCK_M // GROUPS  # beams of a tile; rows beyond them idle
    STRIDE: tl.constexpr = KV_HEADS * D  # from one key to the next
    i_block, i_split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    i_head, i_prompt = tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_first = i_block * BLOCK_W

    o_row = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    o_d = tl.arange(0, D)  # [D]
    o_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    o_beam = i_first + o_row // GROUPS
    m_row = (o_row < BLOCK_W * GROUPS) & (o_beam < width)
    o_query = (i_prompt * width + o_beam) * (KV_HEADS * GROUPS) + i_head * GROUPS + o_row % GROUPS
    b_q = tl.load(p_q + o_query[:, None] * D + o_d[None, :], mask=m_row[:, None], other=0.0)

    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_out = tl.zeros([BLOCK_M, D], tl.float32)
    o_kv = o_n[:, None].to(tl.int64) * STRIDE + i_head * D + o_d[None, :]  # [BLOCK_N, D]

    length = tl.load(p_lengths + i_prompt).to(tl.int32)
    each = tl.cdiv(length, SPLITS * BLOCK_N) * BLOCK_N
    begin = tl.minimum(i_split * each, length)
    end = tl.minimum(begin + each, length)
    full = begin + (end - begin) // BLOCK_N * BLOCK_N
    p_k = p_prefix_k + i_prompt * prefix * STRIDE + o_kv
    p_v = p_prefix_v + i_prompt * prefix * STRIDE + o_kv
    for o_key in range(begin, full, BLOCK_N):
        o_k = tl.cast(o_key, tl.int64) * STRIDE
        b_max, b_sum, b_out = attend(b_q, b_max, b_sum, b_out, p_k + o_k, p_v + o_k, None, None, SCALE, WIDE)
    if full < end:
        o_k = tl.cast(full, tl.int64) * STRIDE
        m_key = full + o_n < end
        b_max, b_sum, b_out = attend(
            b_q, b_max, b_sum, b_out, p_k + o_k, p_v + o_k, m_key[:, None], m_key[None, :], SCALE, WIDE
        )

    if i_split == SPLITS - 1:
        count = tl.load(p_count).to(tl.int32)
        keys = tl.minimum(BLOCK_W, width - i_first) * SUFFIX
        p_k = p_suffix_k + (i_prompt * width + i_first) * SUFFIX * STRIDE + o_kv
        p_v = p_suffix_v + (i_prompt * width + i_first) * SUFFIX * STRIDE + o_kv
        for o_key in range(0, BLOCK_W * SUFFIX, BLOCK_N):
            o_k = tl.cast(o_key, tl.int64) * STRIDE
            o_own = o_key + o_n
            m_key = (o_own < keys) & (o_own % SUFFIX < count)
            m_score = m_key[None, :] & (o_own[None, :] // SUFFIX == o_row[:, None] // GROUPS)
            b_max, b_sum, b_out = attend(
                b_q, b_max, b_sum, b_out, p_k + o_k, p_v + o_k, m_key[:, None], m_score, SCALE, WIDE
            )

    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)  # a split without a key: b_max is -inf, b_out 0
    b_out = b_out / b_sum[:, None]
    if SPLITS > 1:
        o_query += i_split * prompts * width * (KV_HEADS * GROUPS)
        tl.store(p_weight + o_query, b_max * SCALE + tl.log2(b_sum), mask=m_row)
    tl.store(p_out + o_query[:, None] * D + o_d[None, :], b_out.to(p_out.dtype.element_ty), mask=m_row[:, None])


@triton.jit
def join_kernel(
    p_part,  # f32[SPLITS, rows, D]
    p_weight,  # f32[SPLITS, rows]
    p_out,  # [rows, D]
    rows,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """The splits of ``BLOCK_R`` rows into one. Grid: ``(rows / BLOCK_R,)``."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    o_d = tl.arange(0, D)  # [D]
    m_row = o_row < rows
    b_max = tl.full([BLOCK_R], float("-inf"), tl.float32)
    for i_split in tl.static_range(SPLITS):
        b_max = tl.maximum(b_max, tl.load(p_weight + i_split * rows + o_row, mask=m_row, other=0.0))
    b_sum = tl.zeros([BLOCK_R], tl.float32)
    b_out = tl.zeros([BLOCK_R, D], tl.float32)
    for i_split in tl.static_range(SPLITS):
        o_part = i_split * rows + o_row
        b_share = tl.exp2(tl.load(p_weight + o_part, mask=m_row, other=0.0) - b_max)
        b_part = tl.load(p_part + o_part[:, None] * D + o_d[None, :], mask=m_row[:, None], other=0.0)
        b_sum += b_share
        b_out += b_share[:, None] * b_part
    b_out = (b_out / b_sum[:, None]).to(p_out.dtype.element_ty)
    tl.store(p_out + o_row[:, None] * D + o_d[None, :], b_out, mask=m_row[:, None])


@triton_op("dagserve::shared_prefix_attention", mutates_args={})
def _shared_prefix_attention(
    q: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    lengths: Tensor,
    suffix_k: Tensor,
    suffix_v: Tensor,
    count: Tensor,
    wide: bool,
    block_m: int,
    block_n: int,
    splits: int,
    warps: int,
    stages: int,
) -> Tensor:
    prompts, width, heads, size = q.shape
    prefix, kv_heads = prefix_k.shape[1], prefix_k.shape[2]
    groups = heads // kv_heads
    beams = block_m // groups
    out = q.new_empty(prompts, width, heads, size)
    rows = prompts * width * heads
    part = q.new_empty(splits, rows, size, dtype=float32) if splits > 1 else out
    weight = q.new_empty(splits, rows, dtype=float32) if splits > 1 else lengths
    wrap_triton(shared_prefix_kernel)[((width + beams - 1) // beams * splits, kv_heads, prompts)](
        q,
        prefix_k,
        prefix_v,
        lengths,
        suffix_k,
        suffix_v,
        count,
        part,
        weight,
        prompts,
        width,
        prefix,
        SCALE=size**-0.5 * math.log2(math.e),
        KV_HEADS=kv_heads,
        GROUPS=groups,
        D=size,
        SUFFIX=suffix_k.shape[2],
        SPLITS=splits,
        WIDE=wide,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=warps,
        num_stages=stages,
    )
    if splits > 1:
        wrap_triton(join_kernel)[((rows + JOINED - 1) // JOINED,)](
            part, weight, out, rows, D=size, SPLITS=splits, BLOCK_R=JOINED, num_warps=4
        )
    return out


def shared_prefix_attention(
    q: Tensor, prefix_k: Tensor, prefix_v: Tensor, lengths: Tensor, suffix_k: Tensor, suffix_v: Tensor, count: Tensor
) -> Tensor:
    """As :func:`dagserve.kernels.shared_prefix_attention.reference.shared_prefix_attention`.

    Raises:
        ValueError: a head size, or a number of query heads to a K/V head, that no tile has.
    """
    size, groups = q.shape[3], q.shape[2] // prefix_k.shape[2]
    if size not in HEAD_SIZES:
        raise ValueError(f"shared_prefix_attention: head_dim is {size}; it must be one of {HEAD_SIZES}: choose torch")
    c = load_config("shared_prefix_attention").pick(
        width=upper_bound(q.shape[1]),
        prefix=upper_bound(prefix_k.shape[1]),
        prompts=upper_bound(q.shape[0]),
        head_dim=size,
        groups=groups,
        itemsize=q.element_size(),
    )
    if groups > c["BLOCK_M"]:
        raise ValueError(
            f"shared_prefix_attention: {groups} query heads share one; a tile has {c['BLOCK_M']}: choose torch"
        )
    tiles = (c["BLOCK_M"], c["BLOCK_N"], c["SPLITS"], c["warps"], c["stages"])
    q, prefix_k, prefix_v, suffix_k, suffix_v = (x.contiguous() for x in (q, prefix_k, prefix_v, suffix_k, suffix_v))
    arguments = (q, prefix_k, prefix_v, lengths, suffix_k, suffix_v, count)
    out: Tensor = _shared_prefix_attention(*arguments, not q.is_cuda, *tiles)
    return out
