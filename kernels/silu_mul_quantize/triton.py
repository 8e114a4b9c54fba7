"""SiLU(gate) x up to E4M3 in one pass: a program holds its rows in registers.

A block's length is a power of two, and 4,864 columns in one block of 8,192 would keep two fifths of the lanes idle: a
row is one block, or a large one and a small one where that is less.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from dagserve.kernels.configs import load_config, upper_bound
from dagserve.kernels.quantize.device import largest_magnitude, scale_of, to_e4m3


@triton.jit
def gated(p_packed, o_row, o_column, m_out, columns):
    """``f32[ROWS, COLUMNS]``, SiLU(gate) x up."""
    p_gate = p_packed + o_row[:, None] * (2 * columns) + o_column[None, :]
    b_gate = tl.load(p_gate, mask=m_out, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + columns, mask=m_out, other=0.0).to(tl.float32)
    return b_gate / (1.0 + tl.exp(-b_gate)) * b_up


@triton.jit
def silu_mul_quantize_kernel(
    p_packed, p_out, p_scale, rows, columns, ROWS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr
):
    """Program ``(rows,)``: ``ROWS`` rows of ``HEAD`` columns and, where there are more, ``TAIL`` columns."""
    o_row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    m_row = o_row < rows
    o_head = tl.arange(0, HEAD)
    m_head = m_row[:, None] & (o_head < columns)[None, :]
    b_head = gated(p_packed, o_row, o_head, m_head, columns)  # [ROWS, HEAD]
    b_largest = largest_magnitude(b_head)
    if TAIL > 0:
        o_tail = HEAD + tl.arange(0, TAIL)
        m_tail = m_row[:, None] & (o_tail < columns)[None, :]
        b_tail = gated(p_packed, o_row, o_tail, m_tail, columns)  # [ROWS, TAIL]
        b_largest = tl.maximum(b_largest, largest_magnitude(b_tail))
        tl.store(p_out + o_row[:, None] * columns + o_tail[None, :], to_e4m3(b_tail, b_largest), mask=m_tail)
    tl.store(p_out + o_row[:, None] * columns + o_head[None, :], to_e4m3(b_head, b_largest), mask=m_head)
    tl.store(p_scale + o_row, scale_of(b_largest), mask=m_row)


def pieces(columns: int) -> tuple[int, int]:
    """Lengths of the large and the small block of a row; 0 where one block is no longer than two.

    Example: ``pieces(4864) == (4096, 1024)`` and ``pieces(896) == (1024, 0)``.
    """
    whole = triton.next_power_of_2(columns)
    head = max(whole // 2, 1)
    tail = triton.next_power_of_2(columns - head) if columns > head else 0
    return (head, tail) if head + tail < whole else (whole, 0)


@triton_op("dagserve::silu_mul_quantize", mutates_args={})
def _silu_mul_quantize(packed: Tensor, rows: int, warps: int) -> tuple[Tensor, Tensor]:
    tokens, columns = packed.shape[0], packed.shape[1] // 2
    head, tail = pieces(columns)
    out = packed.new_empty(tokens, columns, dtype=torch.float8_e4m3fn)
    scale = packed.new_empty(tokens, 1, dtype=torch.float32)
    wrap_triton(silu_mul_quantize_kernel)[((tokens + rows - 1) // rows,)](
        packed, out, scale, tokens, columns, ROWS=rows, HEAD=head, TAIL=tail, num_warps=warps
    )
    return out, scale


def silu_mul_quantize(packed: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`dagserve.kernels.silu_mul_quantize.reference.silu_mul_quantize`; copies an input with other strides."""
    c = load_config("silu_mul_quantize").pick(
        tokens=upper_bound(packed.shape[0]), columns=upper_bound(packed.shape[1]) // 2
    )
    result: tuple[Tensor, Tensor] = _silu_mul_quantize(packed.contiguous(), c["ROWS"], c["warps"])
    return result
