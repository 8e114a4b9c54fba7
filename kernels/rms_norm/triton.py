"""RMSNorm in one pass, with a residual in front where there is one: a program holds its rows in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from dagserve.kernels.configs import load_config, upper_bound


@triton.jit
def rms_norm_kernel(
    p_x,  # [rows, columns], rows X_STRIDE apart
    p_residual,  # [rows, columns], rows RESIDUAL_STRIDE apart
    p_weight,  # [columns]
    p_out,  # [rows, columns]
    p_sum,  # [rows, columns]
    rows,
    columns,
    EPS: tl.constexpr,  # a number that Inductor passes to a kernel is FP64
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Program ``(rows,)``: adds the residual and normalises ``ROWS`` rows. Each step rounds as the reference does."""
    o_row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)  # [ROWS]
    o_column = tl.arange(0, COLUMNS)  # [COLUMNS]
    m_column = o_column < columns
    m_x = (o_row < rows)[:, None] & m_column[None, :]
    o_out = o_row[:, None] * columns + o_column[None, :]
    b_x = tl.load(p_x + o_row[:, None] * X_STRIDE + o_column[None, :], mask=m_x, other=0.0).to(tl.float32)
    if ADD:
        p_added = p_residual + o_row[:, None] * RESIDUAL_STRIDE + o_column[None, :]
        b_sum = (b_x + tl.load(p_added, mask=m_x, other=0.0).to(tl.float32)).to(p_sum.dtype.element_ty)
        tl.store(p_sum + o_out, b_sum, mask=m_x)
        b_x = b_sum.to(tl.float32)
    b_weight = tl.load(p_weight + o_column, mask=m_column, other=0.0).to(tl.float32)
    b_x = b_x * tl.rsqrt(tl.sum(b_x * b_x, 1) / columns + EPS)[:, None]
    b_x = b_x.to(p_out.dtype.element_ty).to(tl.float32) * b_weight[None, :]
    tl.store(p_out + o_out, b_x.to(p_out.dtype.element_ty), mask=m_x)


@triton_op("dagserve::rms_norm", mutates_args={})
def _rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, rows: int, warps: int
) -> tuple[Tensor, Tensor]:
    tokens, columns = x.shape
    out = x.new_empty(tokens, columns)
    summed = x.new_empty(0 if residual is None else tokens, columns)
    wrap_triton(rms_norm_kernel)[((tokens + rows - 1) // rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        out if residual is None else summed,
        tokens,
        columns,
        EPS=eps,
        X_STRIDE=x.stride(0),
        RESIDUAL_STRIDE=columns if residual is None else residual.stride(0),
        ROWS=rows,
        COLUMNS=triton.next_power_of_2(columns),
        ADD=residual is not None,
        num_warps=warps,
    )
    return out, summed


def _tuned(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Rows of a wider matrix are read in place; leading dimensions become rows."""
    rows, added = _rows(x), None if residual is None else _rows(residual)
    c = load_config("rms_norm").pick(tokens=upper_bound(rows.shape[0]), columns=upper_bound(x.shape[-1]))
    out, summed = _rms_norm(rows, added, weight, eps, c["ROWS"], c["warps"])
    return out.reshape(x.shape), summed


def _rows(x: Tensor) -> Tensor:
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As :func:`dagserve.kernels.rms_norm.reference.rms_norm`; ``weight`` has x's dtype."""
    return _tuned(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As :func:`dagserve.kernels.rms_norm.reference.add_rms_norm`; all have x's dtype."""
    out, summed = _tuned(x, residual, weight, eps)
    return out, summed.reshape(x.shape)
