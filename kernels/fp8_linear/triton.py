"""An FP8 matrix product that is good for few tokens.

The tensor cores want at least 64 rows on one side and take as few as 8 on the other: weights are the tall side, so that
16 tokens do not cost as many as 64. Where output channels are too few to fill the device, K is split; the parts are
added in one order, so results repeat.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from dagserve.kernels.configs import load_config, upper_bound

REDUCED = 1024
"""Output channels of a token that one program of the second launch adds up."""


@triton.jit
def finished(b_sum, p_x_scale, p_weight_scale, p_bias, i_token, o_feature, m_feature, BIAS: tl.constexpr):
    """``f32``, scales and bias applied; ``i_token`` and ``o_feature`` broadcast to the shape of ``b_sum``."""
    b_out = b_sum * tl.load(p_x_scale + i_token) * tl.load(p_weight_scale + o_feature, mask=m_feature, other=0.0)
    if BIAS:
        b_out += tl.load(p_bias + o_feature, mask=m_feature, other=0.0).to(tl.float32)
    return b_out


@triton.jit
def product_kernel(
    p_x,
    p_x_scale,
    p_weight,
    p_weight_scale,
    p_bias,
    p_out,
    tokens,
    features,
    columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Program ``(tile, part)``: ``[BLOCK_M, BLOCK_N]`` of the result, or of one part of its sums where K is split.

    Neighbouring programs share their weights, the larger operand. A part is ``BLOCKS`` blocks of K, WHOLE where
    no part reaches past the end.
    """
    tiles_m = tl.cdiv(tokens, BLOCK_M)
    i_m, i_n, i_part = tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m, tl.program_id(1)
    o_token = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_feature = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = i_part * (BLOCKS * BLOCK_K) + tl.arange(0, BLOCK_K)
    # Rows past the end repeat the last one: no mask in the loop, and their results are not stored.
    p_x_block = p_x + tl.minimum(o_token, tokens - 1).to(tl.int64)[:, None] * columns + o_k[None, :]
    p_w_block = p_weight + tl.minimum(o_feature, features - 1).to(tl.int64)[:, None] * columns + o_k[None, :]
    b_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for i_k in range(BLOCKS):
        if WHOLE:
            b_x = tl.load(p_x_block + i_k * BLOCK_K)  # [BLOCK_M, BLOCK_K]
            b_w = tl.load(p_w_block + i_k * BLOCK_K)  # [BLOCK_N, BLOCK_K]
        else:
            m_k = (o_k + i_k * BLOCK_K < columns)[None, :]
            b_x = tl.load(p_x_block + i_k * BLOCK_K, mask=m_k, other=0.0)
            b_w = tl.load(p_w_block + i_k * BLOCK_K, mask=m_k, other=0.0)
        b_sum = tl.dot(b_w, tl.trans(b_x), b_sum)
    b_sum = tl.trans(b_sum)  # [BLOCK_M, BLOCK_N]
    o_out = o_token.to(tl.int64)[:, None] * features + o_feature[None, :]
    m_out = (o_token < tokens)[:, None] & (o_feature < features)[None, :]
    if SPLIT == 1:
        i_token = tl.minimum(o_token, tokens - 1)[:, None]
        m_feature = (o_feature < features)[None, :]
        b_sum = finished(b_sum, p_x_scale, p_weight_scale, p_bias, i_token, o_feature[None, :], m_feature, BIAS)
    else:
        p_out += i_part.to(tl.int64) * tokens * features
    tl.store(p_out + o_out, b_sum.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def add_parts_kernel(
    p_part,
    p_x_scale,
    p_weight_scale,
    p_bias,
    p_out,
    tokens,
    features,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Program ``(token, block)``: adds up the parts of ``BLOCK`` channels, the first part first."""
    i_token = tl.program_id(0).to(tl.int64)
    o_feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_feature = o_feature < features
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i_part in tl.static_range(SPLIT):
        o_part = (tl.cast(i_part, tl.int64) * tokens + i_token) * features + o_feature
        b_sum += tl.load(p_part + o_part, mask=m_feature, other=0.0)
    b_out = finished(b_sum, p_x_scale, p_weight_scale, p_bias, i_token, o_feature, m_feature, BIAS)
    tl.store(p_out + i_token * features + o_feature, b_out.to(p_out.dtype.element_ty), mask=m_feature)


@triton_op("dagserve::fp8_linear", mutates_args={})
def _fp8_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    block_m: int,
    block_n: int,
    block_k: int,
    split: int,
    warps: int,
    stages: int,
) -> Tensor:
    tokens, columns, features = x.shape[0], x.shape[1], weight.shape[0]
    out = x_scale.new_empty(tokens, features, dtype=dtype)
    parts = out if split == 1 else x_scale.new_empty(split, tokens, features, dtype=torch.float32)
    tiles = ((tokens + block_m - 1) // block_m) * -(-features // block_n)
    wrap_triton(product_kernel)[(tiles, split)](
        x,
        x_scale,
        weight,
        weight_scale,
        weight_scale if bias is None else bias,
        parts,
        tokens,
        features,
        columns,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCKS=-(-columns // (block_k * split)),
        WHOLE=columns % (block_k * split) == 0,
        SPLIT=split,
        BIAS=bias is not None,
        num_warps=warps,
        num_stages=stages,
    )
    if split > 1:
        wrap_triton(add_parts_kernel)[(tokens, -(-features // REDUCED))](
            parts,
            x_scale,
            weight_scale,
            weight_scale if bias is None else bias,
            out,
            tokens,
            features,
            SPLIT=split,
            BLOCK=REDUCED,
            BIAS=bias is not None,
            num_warps=4,
        )
    return out


def fp8_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """As :func:`dagserve.kernels.fp8_linear.reference.fp8_linear`; contiguous inputs."""
    features, columns = weight.shape
    c = load_config("fp8_linear").pick(tokens=upper_bound(x.shape[0]), features=features, columns=columns)
    tiles = (c["BLOCK_M"], c["BLOCK_N"], c["BLOCK_K"], c["SPLIT"], c["warps"], c["stages"])
    out: Tensor = _fp8_linear(x, x_scale, weight, weight_scale, bias, dtype, *tiles)
    return out
