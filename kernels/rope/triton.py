"""QK norm, rotation and the K/V write in one pass over the heads that a packed QKV projection gives.

A program takes some tokens and some heads of one kind. It reads a token's cosines and sines once for all of its heads,
and their first half only: the second is equal.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from dagserve.kernels.configs import load_config, upper_bound


@triton.jit
def turn(
    p_x,  # [T, HEADS, D], tokens STRIDE apart
    p_weight,  # [D]
    p_cos,  # [T, D]
    p_sin,
    p_out,  # [rows, HEADS, D]
    o_token,  # i64[TOKENS]
    o_row,  # i64[TOKENS], each token's row of the result
    m_token,  # [TOKENS]
    i_first,  # the first head
    EPS: tl.constexpr,  # a number that Inductor passes to a kernel is FP64
    STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    EACH: tl.constexpr,
):
    """Norm and rotation of heads ``i_first`` to ``i_first + EACH - 1`` of the tokens."""
    HALF: tl.constexpr = D // 2
    o_half = tl.arange(0, BLOCK)  # [BLOCK]
    m_half = o_half < HALF
    m_x = m_token[:, None] & m_half[None, :]
    o_angle = o_token[:, None] * D + o_half[None, :]
    b_cos = tl.load(p_cos + o_angle, mask=m_x, other=0.0).to(tl.float32)  # [TOKENS, BLOCK]
    b_sin = tl.load(p_sin + o_angle, mask=m_x, other=0.0).to(tl.float32)
    if NORM:
        b_low_weight = tl.load(p_weight + o_half, mask=m_half, other=0.0).to(tl.float32)[None, :]
        b_high_weight = tl.load(p_weight + HALF + o_half, mask=m_half, other=0.0).to(tl.float32)[None, :]
    for i in tl.static_range(EACH):
        i_head = i_first + i
        m_head = m_x & (i_head < HEADS)
        p_head = p_x + o_token[:, None] * STRIDE + i_head * D + o_half[None, :]
        b_low = tl.load(p_head, mask=m_head, other=0.0).to(tl.float32)
        b_high = tl.load(p_head + HALF, mask=m_head, other=0.0).to(tl.float32)
        if NORM:
            b_scale = tl.rsqrt((tl.sum(b_low * b_low, 1) + tl.sum(b_high * b_high, 1)) / D + EPS)[:, None]
            b_low = b_low * b_scale * b_low_weight
            b_high = b_high * b_scale * b_high_weight
        p_turned = p_out + o_row[:, None] * (HEADS * D) + i_head * D + o_half[None, :]
        b_turned_low = b_low * b_cos - b_high * b_sin
        b_turned_high = b_high * b_cos + b_low * b_sin
        tl.store(p_turned, b_turned_low.to(p_out.dtype.element_ty), mask=m_head)
        tl.store(p_turned + HALF, b_turned_high.to(p_out.dtype.element_ty), mask=m_head)


@triton.jit
def qk_norm_rope_kernel(
    p_q,  # [T, HEADS, D], tokens Q_STRIDE apart
    p_k,  # [T, KV_HEADS, D], tokens K_STRIDE apart
    p_v,  # [T, KV_HEADS, D], tokens V_STRIDE apart; read with WRITE only
    p_q_weight,  # [D]
    p_k_weight,  # [D]
    p_cos,  # [T, D]
    p_sin,  # [T, D]
    p_rows,  # i64[T], read with WRITE only
    p_q_out,  # [T, HEADS, D]
    p_k_out,  # [T, KV_HEADS, D], or [R, KV_HEADS, D] with WRITE
    p_v_out,  # [R, KV_HEADS, D]
    tokens,
    EPS: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    WRITE: tl.constexpr,
    TOKENS: tl.constexpr,
    EACH: tl.constexpr,
):
    """Some tokens, ``EACH`` heads of queries, of keys, or with WRITE of values. Grid: ``(tokens, heads)``."""
    Q_PARTS: tl.constexpr = (HEADS + EACH - 1) // EACH
    KV_PARTS: tl.constexpr = (KV_HEADS + EACH - 1) // EACH
    i_part = tl.program_id(1)
    o_token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)  # [TOKENS]
    m_token = o_token < tokens
    if i_part < Q_PARTS:
        i_first = i_part * EACH
        turn(
            p_q,
            p_q_weight,
            p_cos,
            p_sin,
            p_q_out,
            o_token,
            o_token,
            m_token,
            i_first,
            EPS,
            Q_STRIDE,
            HEADS,
            D,
            BLOCK,
            NORM,
            EACH,
        )
    else:
        o_row = o_token
        if WRITE:
            o_row = tl.load(p_rows + o_token, mask=m_token, other=-1)
            m_token = o_row >= 0
        if i_part < Q_PARTS + KV_PARTS:
            i_first = (i_part - Q_PARTS) * EACH
            turn(
                p_k,
                p_k_weight,
                p_cos,
                p_sin,
                p_k_out,
                o_token,
                o_row,
                m_token,
                i_first,
                EPS,
                K_STRIDE,
                KV_HEADS,
                D,
                BLOCK,
                NORM,
                EACH,
            )
        elif WRITE:  # else the compiler would see p_v_out as written
            o_d = tl.arange(0, 2 * BLOCK)  # [2 * BLOCK]
            m_v = m_token[:, None] & (o_d < D)[None, :]
            for i in tl.static_range(EACH):
                i_head = (i_part - Q_PARTS - KV_PARTS) * EACH + i
                m_head = m_v & (i_head < KV_HEADS)
                o_head = i_head * D + o_d[None, :]
                b_v = tl.load(p_v + o_token[:, None] * V_STRIDE + o_head, mask=m_head, other=0.0)
                tl.store(p_v_out + o_row[:, None] * (KV_HEADS * D) + o_head, b_v, mask=m_head)


@triton_op("dagserve::qk_norm_rope", mutates_args={})
def _qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    each_tokens: int,
    each_heads: int,
    warps: int,
) -> tuple[Tensor, Tensor]:
    tokens, heads, size = q.shape
    kv_heads = k.shape[1]
    q_out, k_out = q.new_empty(tokens, heads, size), k.new_empty(tokens, kv_heads, size)
    parts = -(-heads // each_heads) + -(-kv_heads // each_heads)
    wrap_triton(qk_norm_rope_kernel)[((tokens + each_tokens - 1) // each_tokens, parts)](
        q,
        k,
        k,
        q if q_weight is None else q_weight,
        k if k_weight is None else k_weight,
        cos,
        sin,
        cos,
        q_out,
        k_out,
        k_out,
        tokens,
        EPS=eps,
        Q_STRIDE=q.stride(0),
        K_STRIDE=k.stride(0),
        V_STRIDE=0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=size,
        BLOCK=triton.next_power_of_2(size // 2),
        NORM=q_weight is not None,
        WRITE=False,
        TOKENS=each_tokens,
        EACH=each_heads,
        num_warps=warps,
    )
    return q_out, k_out


@triton_op("dagserve::qk_norm_rope_write", mutates_args={"keys", "values"})
def _qk_norm_rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    each_tokens: int,
    each_heads: int,
    warps: int,
) -> Tensor:
    tokens, heads, size = q.shape
    kv_heads = k.shape[1]
    q_out = q.new_empty(tokens, heads, size)
    parts = -(-heads // each_heads) + 2 * -(-kv_heads // each_heads)
    wrap_triton(qk_norm_rope_kernel)[((tokens + each_tokens - 1) // each_tokens, parts)](
        q,
        k,
        v,
        q if q_weight is None else q_weight,
        k if k_weight is None else k_weight,
        cos,
        sin,
        rows,
        q_out,
        keys,
        values,
        tokens,
        EPS=eps,
        Q_STRIDE=q.stride(0),
        K_STRIDE=k.stride(0),
        V_STRIDE=v.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=size,
        BLOCK=triton.next_power_of_2(size // 2),
        NORM=q_weight is not None,
        WRITE=True,
        TOKENS=each_tokens,
        EACH=each_heads,
        num_warps=warps,
    )
    return q_out


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """As :func:`dagserve.kernels.rope.reference.qk_norm_rope`; q and k may be rows of a wider matrix."""
    assert (q_weight is None) == (k_weight is None)
    q, k = _rows(q), _rows(k)
    out: tuple[Tensor, Tensor] = _qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, *_tiles(q))
    return out


def qk_norm_rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
) -> Tensor:
    """As :func:`dagserve.kernels.rope.reference.qk_norm_rope_write`; q, k and v may be rows of a wider matrix.

    ``keys`` and ``values`` are contiguous.
    """
    assert (q_weight is None) == (k_weight is None)
    q, k, v = _rows(q), _rows(k), _rows(v)
    out: Tensor = _qk_norm_rope_write(q, k, v, q_weight, k_weight, cos, sin, eps, keys, values, rows, *_tiles(q))
    return out


def _rows(x: Tensor) -> Tensor:
    """As it is where a token's heads lie one after another."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _tiles(q: Tensor) -> tuple[int, int, int]:
    c = load_config("rope").pick(tokens=upper_bound(q.shape[0]), head_dim=q.shape[2])
    return c["TOKENS"], c["HEADS"], c["warps"]
