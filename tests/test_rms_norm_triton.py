"""RMSNorm in Triton against the readable one: in the interpreter, or on the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interpreter import DEVICE, MARKS, exact_conversions, poison_new_tensors
from tolerances import OPERATORS
from torch import Tensor

pytest.importorskip("triton")

from dagserve.kernels.rms_norm.op import ADD, IMPLEMENTATIONS
from dagserve.kernels.rms_norm.triton import _rms_norm

pytestmark = MARKS
exact_conversions()

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
EPS = 1e-6


@pytest.fixture(autouse=True, scope="module")
def _poisoned() -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        poison_new_tensors(monkeypatch)
        yield


def draw(*shape: int, dtype: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual and weight."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(s, generator=generator) for s in (shape, shape, shape[-1:])]
    x, residual, weight = (t.to(DTYPES[dtype]).to(DEVICE) for t in tensors)
    return x, residual, weight


def close(actual: Tensor, expected: Tensor, dtype: str) -> None:
    """The reference's own roundings are the kernel's, so that the last bit of values up to 8 is the largest step."""
    assert actual.dtype == DTYPES[dtype]
    assert actual.shape == expected.shape
    assert not actual.isnan().any()
    apart = (actual.double() - expected.double()).abs()
    assert (apart <= OPERATORS[dtype] * expected.double().abs().clamp(min=1)).all()


@settings(max_examples=60 if DEVICE == "cpu" else 100, deadline=None)
@given(
    tokens=st.sampled_from([0, 1, 2, 7, 33]),
    columns=st.sampled_from([1, 16, 63, 64, 111, 300]),
    dtype=st.sampled_from(list(DTYPES)),
    rows=st.sampled_from([1, 2, 4]),
    residual=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(0, 64, "bf16", 4, True, 0)
def test_every_tile_equals_the_reference(
    tokens: int, columns: int, dtype: str, rows: int, residual: bool, seed: int
) -> None:
    x, added, weight = draw(tokens, columns, dtype=dtype, seed=seed)
    out, summed = _rms_norm(x, added if residual else None, weight, EPS, rows, 4)
    if residual:
        expected, expected_sum = ADD["torch"](x, added, weight, EPS)
        assert torch.equal(summed, expected_sum)
    else:
        expected = IMPLEMENTATIONS["torch"](x, weight, EPS)
    close(out, expected, dtype)


@pytest.mark.parametrize("columns", [64, 128, 896, 1024, 4864])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_default_tiles_at_the_models_sizes(columns: int, dtype: str) -> None:
    x, residual, weight = draw(5, columns, dtype=dtype)
    close(IMPLEMENTATIONS["triton"](x, weight, EPS), IMPLEMENTATIONS["torch"](x, weight, EPS), dtype)
    ours, theirs = (ADD[name](x, residual, weight, EPS) for name in ("triton", "torch"))
    close(ours[0], theirs[0], dtype)
    assert torch.equal(ours[1], theirs[1])


def test_rows_of_a_wider_matrix_and_leading_dimensions() -> None:
    wide, residual, weight = draw(9, 3, 64, dtype="fp32")
    theirs = ADD["torch"](wide[:, 1], residual[:, 2], weight, EPS)
    for ours, expected in zip(ADD["triton"](wide[:, 1], residual[:, 2], weight, EPS), theirs, strict=True):
        close(ours, expected, "fp32")
    close(IMPLEMENTATIONS["triton"](wide, weight, EPS), IMPLEMENTATIONS["torch"](wide, weight, EPS), "fp32")
    columns = wide[:, 0].t()
    weight = weight[:9]
    close(IMPLEMENTATIONS["triton"](columns, weight, EPS), IMPLEMENTATIONS["torch"](columns, weight, EPS), "fp32")


def test_eps_keeps_a_row_of_zeros_and_counts_in_small_ones() -> None:
    x, _, weight = draw(3, 64, dtype="fp32")
    x = x * torch.tensor([0.0, 1e-4, 1.0], device=DEVICE)[:, None]
    for eps in (1e-5, 1e-9):
        close(IMPLEMENTATIONS["triton"](x, weight, eps), IMPLEMENTATIONS["torch"](x, weight, eps), "fp32")


def test_a_batch_equals_its_rows_alone() -> None:
    x, residual, weight = draw(7, 111, dtype="bf16")
    batch = ADD["triton"](x, residual, weight, EPS)
    for i in range(7):
        alone = ADD["triton"](x[i : i + 1], residual[i : i + 1], weight, EPS)
        for ours, expected in zip(alone, batch, strict=True):
            assert torch.equal(ours, expected[i : i + 1])


class Norm(torch.nn.Module):
    def forward(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return IMPLEMENTATIONS["triton"](x, weight, EPS), *ADD["triton"](x, residual, weight, EPS)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_package_with_dynamic_shapes(tmp_path: Any) -> None:
    tokens = torch.export.Dim("T", min=1, max=4096)
    arguments = draw(9, 896, dtype="bf16")
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        dynamic = ({0: tokens}, {0: tokens}, None)
        program = torch.export.export(Norm(), arguments, dynamic_shapes=dynamic, strict=False)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "norm.pt2"))
    package = torch._inductor.aoti_load_package(path)
    for count in (1, 2, 111, 4096):
        x, residual, weight = draw(count, 896, dtype="bf16", seed=count)
        expected = (IMPLEMENTATIONS["torch"](x, weight, EPS), *ADD["torch"](x, residual, weight, EPS))
        for ours, theirs in zip(package(x, residual, weight), expected, strict=True):
            close(ours, theirs, "bf16")
