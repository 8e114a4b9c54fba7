"""E4M3 quantisation in Triton against the readable one: the same bits where only a scale is applied, else one step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import DEVICE, MARKS, NUMPY_MAY_WARN, exact_conversions, poison_new_tensors
from tolerances import E4M3_STEP, SCORES
from torch import Tensor

pytest.importorskip("triton")

from dagserve.kernels.quantize.op import ADD_NORM, IMPLEMENTATIONS, NORM
from dagserve.kernels.quantize.reference import E4M3_MAX, dequantize, quantize
from dagserve.kernels.quantize.triton import _quantize
from dagserve.kernels.silu_mul_quantize.op import IMPLEMENTATIONS as GATED
from dagserve.kernels.silu_mul_quantize.triton import _silu_mul_quantize, pieces

pytestmark = MARKS
exact_conversions()

DRAWS = {
    "tokens": st.sampled_from([1, 2, 7, 33]),
    "columns": st.sampled_from([1, 16, 63, 64, 111, 300]),
    "dtype": st.sampled_from([torch.bfloat16, torch.float32]),
    "rows": st.sampled_from([1, 2, 4]),
    "seed": st.integers(0, 2**31),
}


def draw(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows of magnitudes far apart, one of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.logspace(-6, 6, shape[0])[:, None]
    x[shape[0] // 2] = 0 if shape[0] > 2 else x[shape[0] // 2]
    return x.to(dtype).to(DEVICE)


def same_bits(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    assert torch.equal(ours[0].view(torch.uint8), theirs[0].view(torch.uint8))
    assert torch.equal(ours[1], theirs[1])


def close(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    """Scales to FP32's rounding, values to one step: of E4M3's smallest numbers the step is absolute, 2^-9."""
    assert not ours[0].float().isnan().any()
    torch.testing.assert_close(ours[1], theirs[1], rtol=SCORES["fp32"], atol=0)
    torch.testing.assert_close(ours[0].float(), theirs[0].float(), rtol=E4M3_STEP, atol=2.0**-9)


@settings(max_examples=40, deadline=None)
@given(**DRAWS)
def test_quantize_is_the_readable_one(tokens: int, columns: int, dtype: torch.dtype, rows: int, seed: int) -> None:
    x = draw(tokens, columns, dtype=dtype, seed=seed)
    same_bits(_quantize(x, None, None, 0.0, rows, 4)[:2], quantize(x))


def test_every_e4m3_value_and_every_rounding() -> None:
    """All BF16 numbers up to the largest E4M3, in rows whose scale is 1."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.abs() <= E4M3_MAX]
    values = values[: len(values) // 64 * 64].view(-1, 64)
    rows = torch.cat([values.new_full((len(values), 1), E4M3_MAX), values], 1).to(DEVICE)
    same_bits(_quantize(rows, None, None, 0.0, 4, 4)[:2], quantize(rows))


def test_a_value_is_within_half_a_step_of_what_it_stands_for() -> None:
    x = draw(9, 300, dtype=torch.float32, seed=1)
    error = (dequantize(*quantize(x)) - x).abs()
    assert (error <= x.abs() * E4M3_STEP / 2 + quantize(x)[1] * 2.0**-10).all()


@settings(max_examples=40, deadline=None)
@given(**DRAWS, residual=st.booleans())
def test_norm_and_residual_in_front(
    tokens: int, columns: int, dtype: torch.dtype, rows: int, seed: int, residual: bool
) -> None:
    x, r = (draw(tokens, columns, dtype=dtype, seed=seed + i) for i in range(2))
    weight = torch.randn(columns, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)
    ours = _quantize(x, r if residual else None, weight, 1e-6, rows, 4)
    theirs = ADD_NORM["torch"](x, r, weight, 1e-6) if residual else NORM["torch"](x, weight, 1e-6)
    close(ours, theirs)
    assert not residual or torch.equal(ours[2], x + r)


@settings(max_examples=40, deadline=None)
@given(**DRAWS)
def test_gated_activation(tokens: int, columns: int, dtype: torch.dtype, rows: int, seed: int) -> None:
    packed = draw(tokens, 2 * columns, dtype=dtype, seed=seed).clamp(-60, 60)
    close(_silu_mul_quantize(packed, rows, 4), GATED["torch"](packed))


@NUMPY_MAY_WARN
def test_gates_of_any_size() -> None:
    gate = torch.tensor([-1e30, -200.0, -80.0, -1e-30, 0.0, 1e-30, 80.0, 1e4])
    packed = torch.cat([gate, torch.ones(8)])[None].to(DEVICE)
    close(_silu_mul_quantize(packed, 1, 4), GATED["torch"](packed))


@NUMPY_MAY_WARN
def test_columns_of_a_wider_matrix() -> None:
    """As a linear whose rows are padded gives them."""
    wide, other = (draw(5, 112, dtype=torch.bfloat16, seed=i) for i in range(2))
    x, residual, weight = wide[:, :110], other[:, 1:111], torch.linspace(-1, 2, 110).bfloat16().to(DEVICE)
    same_bits(IMPLEMENTATIONS["triton"](x), quantize(x))
    close(NORM["triton"](x, weight, 1e-6), NORM["torch"](x, weight, 1e-6))
    close(ADD_NORM["triton"](x, residual, weight, 1e-6), ADD_NORM["torch"](x, residual, weight, 1e-6))
    close(GATED["triton"](x), GATED["torch"](x))


def test_blocks_of_a_row() -> None:
    sizes = {1: (1, 0), 2: (2, 0), 3: (2, 1), 896: (1024, 0), 1024: (1024, 0), 3072: (2048, 1024), 4864: (4096, 1024)}
    assert {columns: pieces(columns) for columns in sizes} == sizes
    assert all(columns <= sum(pieces(columns)) for columns in range(1, 5000))


@NUMPY_MAY_WARN
@pytest.mark.parametrize("columns", [896, 1024, 3072, 4864])
def test_the_default_tiles(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models' sizes; outputs start as NaN."""
    x, residual = (draw(5, columns, dtype=torch.bfloat16, seed=i) for i in range(2))
    weight = torch.linspace(-1, 2, columns).bfloat16().to(DEVICE)
    packed = draw(5, 2 * columns, dtype=torch.bfloat16, seed=3)
    theirs = (NORM["torch"](x, weight, 1e-6), ADD_NORM["torch"](x, residual, weight, 1e-6), GATED["torch"](packed))
    plain = quantize(x)
    poison_new_tensors(monkeypatch)
    same_bits(IMPLEMENTATIONS["triton"](x), plain)
    close(NORM["triton"](x, weight, 1e-6), theirs[0])
    close(ADD_NORM["triton"](x, residual, weight, 1e-6), theirs[1])
    close(GATED["triton"](packed), theirs[2])
