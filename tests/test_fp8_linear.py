"""FP8 linears against products of the dequantised matrices in FP64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import DEVICE, MARKS, exact_conversions, poison_new_tensors
from tolerances import FP8_LINEAR, RELATIVE
from torch import Tensor

from dagserve.kernels.fp8_linear.linear import Fp8Linear, linear
from dagserve.kernels.fp8_linear.op import IMPLEMENTATIONS
from dagserve.kernels.fp8_linear.weights import pack, scale
from dagserve.kernels.quantize.reference import dequantize, quantize

pytestmark = MARKS
OPERATORS = {"fp8_linear": "torch", "quantize": "torch"}
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def quantize_weight(*weights: Tensor) -> tuple[Tensor, Tensor]:
    """As the compiler makes a linear's ``weight`` and ``scale``."""
    like = torch.empty(0, dtype=torch.float8_e4m3fn)
    return pack(weights, like), scale(weights, like)


def draw(tokens: int, features: int, columns: int, seed: int) -> Inputs:
    """``x, x_scale, weight, weight_scale``."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, columns, generator=generator) for n in (tokens, features))
    x, x_scale = quantize(x * torch.logspace(-3, 3, tokens)[:, None])
    values, weight_scale = quantize_weight(weight)
    return x.to(DEVICE), x_scale.to(DEVICE), values.to(DEVICE), weight_scale.to(DEVICE)


def exact(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    out = (x.double() * x_scale) @ (weight.double() * weight_scale[:, None]).t()
    return out if bias is None else out + bias.double()


def close(ours: Tensor, inputs: Inputs, bias: Tensor | None, fast_sums: bool = False) -> None:
    """Relative to the sum of magnitudes, as errors of a sum are."""
    x, x_scale, weight, weight_scale = inputs
    wide = exact(x.double().abs(), x_scale, weight.double().abs(), weight_scale, None if bias is None else bias.abs())
    tolerance = max(RELATIVE[ours.dtype], FP8_LINEAR if fast_sums else 0)
    assert ((ours.double() - exact(*inputs, bias)).abs() <= tolerance * wide + 1e-30).all()


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.sampled_from([1, 3, 16, 17, 63, 111]),
    features=st.sampled_from([16, 64, 112]),
    columns=st.sampled_from([16, 64, 112, 256]),
    tiles=st.sampled_from([(16, 64, 32, 1), (16, 64, 32, 3), (64, 64, 64, 2), (32, 128, 128, 1)]),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 2**31),
)
def test_triton(
    tokens: int, features: int, columns: int, tiles: tuple[int, ...], bias: bool, dtype: torch.dtype, seed: int
) -> None:
    pytest.importorskip("triton")
    from dagserve.kernels.fp8_linear.triton import _fp8_linear

    exact_conversions()
    inputs = draw(tokens, features, columns, seed)
    added = torch.randn(features, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE) if bias else None
    close(_fp8_linear(*inputs, added, dtype, *tiles, 4, 2), inputs, added, fast_sums=True)


@pytest.mark.parametrize("split", [1, 2])
def test_triton_writes_every_output_and_repeats(split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from dagserve.kernels.fp8_linear.triton import _fp8_linear

    inputs = draw(7, 48, 96, 0)
    arguments = (*inputs, None, torch.float32, 16, 64, 32, split, 4, 2)
    before = _fp8_linear(*arguments)
    poison_new_tensors(monkeypatch)
    assert torch.equal(_fp8_linear(*arguments), before)


def implementations() -> list[str]:
    """Those that this machine has."""
    return ["torch", "cublas"] if DEVICE == "cuda" else ["torch"]


@pytest.mark.parametrize("name", implementations())
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 16, 16), (63, 64, 112), (111, 896, 4864)])
def test_other_implementations(name: str, bias: bool, shape: tuple[int, int, int]) -> None:
    inputs = draw(*shape, seed=1)
    added = torch.ones(shape[1], dtype=torch.bfloat16, device=DEVICE) if bias else None
    close(IMPLEMENTATIONS[name](*inputs, added, torch.bfloat16), inputs, added, fast_sums=name == "cublas")


@pytest.mark.skipif(DEVICE == "cpu", reason="too large for the interpreter")
@pytest.mark.parametrize("tokens", [1, 16, 50, 100, 400, 1605])
@pytest.mark.parametrize("shape", [(9728, 896), (896, 4864), (6144, 1024), (1024, 3072), (1152, 896), (4096, 1024)])
def test_the_default_tiles_at_the_models_sizes(tokens: int, shape: tuple[int, int]) -> None:
    inputs = draw(tokens, *shape, seed=1)
    close(IMPLEMENTATIONS["triton"](*inputs, None, torch.bfloat16), inputs, None, fast_sums=True)


def test_a_weight_is_padded() -> None:
    weight = torch.randn(33, 20, generator=torch.Generator().manual_seed(0))
    parts = weight[:30], weight[30:]
    values, scales = quantize_weight(*parts)
    assert (tuple(values.shape), tuple(scales.shape)) == ((48, 32), (48,))
    assert not values[33:].float().any()
    assert not values[:, 20:].float().any()
    error = (dequantize(values, scales[:, None])[:33, :20] - weight).abs()
    assert (error <= weight.abs() / 16 + scales[:33, None] * 2.0**-10).all()


@pytest.mark.parametrize("sizes", [(64, 48), (20, 33)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_module_is_a_linear_of_what_was_quantised(sizes: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    dense = torch.nn.Linear(*sizes, bias=bias)
    module = Fp8Linear(*sizes, bias, torch.float32, OPERATORS)
    values, scales = quantize_weight(dense.weight)
    state = {"weight": values, "scale": scales} | ({"bias": dense.bias} if bias else {})
    module.load_state_dict(state)
    x = torch.randn(2, 3, sizes[0])
    rounded = dequantize(*quantize(x.flatten(0, 1))).view_as(x)
    dense.weight.data = dequantize(values, scales[:, None])[: sizes[1], : sizes[0]]
    torch.testing.assert_close(module(x), dense(rounded))


def test_a_model_in_another_precision_keeps_its_fp8_weights() -> None:
    module = torch.nn.Sequential(Fp8Linear(16, 16, True, torch.bfloat16, OPERATORS), torch.nn.Linear(16, 16))
    module.to(torch.bfloat16)
    dtypes = [p.dtype for p in module.parameters()]
    assert dtypes == [torch.float8_e4m3fn, torch.float32, *[torch.bfloat16] * 3]


def test_a_group_is_fp8_where_the_target_says_so() -> None:
    operators = {**OPERATORS, "mlp": "fp8_rowwise", "projections": "dense"}
    layers = {group: linear(group, 16, 16, False, torch.bfloat16, operators) for group in ("mlp", "projections")}
    assert isinstance(layers["mlp"], Fp8Linear)
    assert isinstance(layers["projections"], torch.nn.Linear)
