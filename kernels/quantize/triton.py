"""Per-token E4M3 quantisation in one pass: a program holds its rows in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from dagserve.kernels.configs import load_config, upper_bound
from dagserve.kernels.quantize.device import largest_magnitude, scale_of, to_e4m3


@triton.jit
def quantize_kernel(
    p_x,
    p_residual,
    p_weight,
    p_out,
    p_scale,
    p_sum,
    rows,
    columns,
    EPS: tl.constexpr,  # a number that Inductor passes to a kernel is FP64
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
):
    """Program ``(rows,)``: adds the residual, normalises and quantises ``ROWS`` rows."""
    o_row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    o_column = tl.arange(0, COLUMNS)
    o_x = o_row[:, None] * columns + o_column[None, :]
    m_row = o_row < rows
    m_x = m_row[:, None] & (o_column < columns)[None, :]
    b_x = tl.load(p_x + o_x, mask=m_x, other=0.0).to(tl.float32)  # [ROWS, COLUMNS]
    if ADD:
        b_sum = b_x + tl.load(p_residual + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_sum = b_sum.to(p_sum.dtype.element_ty)
        tl.store(p_sum + o_x, b_sum, mask=m_x)
        b_x = b_sum.to(tl.float32)
    if NORM:
        b_weight = tl.load(p_weight + o_column, mask=o_column < columns, other=0.0).to(tl.float32)
        b_x = b_x * tl.rsqrt(tl.sum(b_x * b_x, 1) / columns + EPS)[:, None] * b_weight[None, :]
    b_largest = largest_magnitude(b_x)
    tl.store(p_out + o_x, to_e4m3(b_x, b_largest), mask=m_x)
    tl.store(p_scale + o_row, scale_of(b_largest), mask=m_row)


@triton_op("dagserve::quantize", mutates_args={})
def _quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, rows: int, warps: int
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, columns = x.shape
    out = x.new_empty(tokens, columns, dtype=torch.float8_e4m3fn)
    scale = x.new_empty(tokens, 1, dtype=torch.float32)
    summed = x.new_empty(0 if residual is None else tokens, columns)
    wrap_triton(quantize_kernel)[((tokens + rows - 1) // rows,)](
        x,
        x if residual is None else residual,
        x if weight is None else weight,
        out,
        scale,
        out if residual is None else summed,
        tokens,
        columns,
        EPS=eps,
        ROWS=rows,
        COLUMNS=triton.next_power_of_2(columns),
        ADD=residual is not None,
        NORM=weight is not None,
        num_warps=warps,
    )
    return out, scale, summed


def _tuned(x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of inputs with other strides it makes copies."""
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    c = load_config("quantize").pick(tokens=upper_bound(x.shape[0]), columns=upper_bound(x.shape[1]))
    result: tuple[Tensor, Tensor, Tensor] = _quantize(x, residual, weight, eps, c["ROWS"], c["warps"])
    return result


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`dagserve.kernels.quantize.reference.quantize`."""
    return _tuned(x, None, None, 0.0)[:2]


def rms_norm_quantize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As :func:`dagserve.kernels.quantize.reference.rms_norm_quantize`."""
    return _tuned(x, None, weight, eps)[:2]


def add_rms_norm_quantize(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`dagserve.kernels.quantize.reference.add_rms_norm_quantize`."""
    return _tuned(x, residual, weight, eps)
