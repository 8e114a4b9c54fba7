"""QK norm, rotation and K/V write in Triton against the readable ones: in the interpreter, or on the GPU."""

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

from dagserve.kernels.rms_norm.reference import rms_norm
from dagserve.kernels.rope.op import IMPLEMENTATIONS, WRITE
from dagserve.kernels.rope.reference import inverse_frequencies, rotate, rotation
from dagserve.kernels.rope.triton import _qk_norm_rope, _qk_norm_rope_write

pytestmark = MARKS
exact_conversions()

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
HEADS = [(1, 1), (4, 2), (7, 1), (14, 2), (3, 3)]
EPS = 1e-6
Inputs = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def _poisoned() -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        poison_new_tensors(monkeypatch)
        yield


def draw(
    tokens: int, heads: tuple[int, int], size: int, dtype: str, norm: bool, *, packed: bool = True, seed: int = 0
) -> Inputs:
    """The arguments; ``packed``: q, k and v are columns of one matrix, as a QKV projection gives them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [h * size for h in (heads[0], heads[1], heads[1])]
    rows = torch.randn(tokens, sum(sizes), generator=generator).to(DTYPES[dtype]).to(DEVICE)
    q, k, v = (x.view(tokens, x.shape[1] // size, size) for x in torch.split(rows, sizes, dim=1))
    if not packed:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    weights = torch.randn(2, size, generator=generator).to(DTYPES[dtype]).to(DEVICE)
    positions = torch.randint(512, (tokens,), generator=generator)
    cos, sin = (x.to(DEVICE) for x in rotation(positions, inverse_frequencies(size, 1e6, None)))
    q_weight, k_weight = weights if norm else (None, None)
    return {"q": q, "k": k, "v": v, "q_weight": q_weight, "k_weight": k_weight, "cos": cos, "sin": sin, "eps": EPS}


def without_v(inputs: Inputs) -> Inputs:
    return {name: x for name, x in inputs.items() if name != "v"}


def cache(inputs: Inputs, spare: int = 3, seed: int = 0) -> Inputs:
    """Keys and values with rows to spare, and a row for each token, some of them -1."""
    tokens, heads, size = inputs["k"].shape
    generator = torch.Generator().manual_seed(seed)
    kept = torch.randn(2, tokens + spare, heads, size, generator=generator).to(inputs["k"].dtype).to(DEVICE)
    rows = torch.randperm(tokens + spare, generator=generator)[:tokens]
    rows[torch.rand(tokens, generator=generator) < 0.2] = -1
    return {"keys": kept[0].clone(), "values": kept[1].clone(), "rows": rows.to(DEVICE)}


def close(actual: Tensor, expected: Tensor, dtype: str) -> None:
    assert actual.dtype == DTYPES[dtype]
    assert actual.shape == expected.shape
    assert not actual.isnan().any()
    apart = (actual.double() - expected.double()).abs()
    assert (apart <= OPERATORS[dtype] * expected.double().abs().clamp(min=1)).all()


DRAWS = {
    "tokens": st.sampled_from([0, 1, 2, 7, 33]),
    "heads": st.sampled_from(HEADS),
    "size": st.sampled_from([64, 128, 80]),
    "dtype": st.sampled_from(list(DTYPES)),
    "norm": st.booleans(),
    "packed": st.booleans(),
    "tile": st.sampled_from([(1, 1), (4, 2), (2, 4), (16, 8)]),
    "seed": st.integers(0, 2**31),
}


@settings(max_examples=60 if DEVICE == "cpu" else 100, deadline=None)
@given(**DRAWS)
@example(0, (14, 2), 64, "bf16", True, True, (4, 2), 0)
@example(2, (7, 1), 64, "fp32", True, True, (2, 4), 0)
def test_every_tile_equals_the_reference(
    tokens: int, heads: tuple[int, int], size: int, dtype: str, norm: bool, packed: bool, tile: Any, seed: int
) -> None:
    inputs = without_v(draw(tokens, heads, size, dtype, norm, packed=packed, seed=seed))
    ours = _qk_norm_rope(**inputs, each_tokens=tile[0], each_heads=tile[1], warps=4)
    for actual, expected in zip(ours, IMPLEMENTATIONS["torch"](**inputs), strict=True):
        close(actual, expected, dtype)


@settings(max_examples=60 if DEVICE == "cpu" else 100, deadline=None)
@given(**DRAWS)
def test_keys_and_values_go_to_their_rows_and_no_other_changes(
    tokens: int, heads: tuple[int, int], size: int, dtype: str, norm: bool, packed: bool, tile: Any, seed: int
) -> None:
    inputs = draw(tokens, heads, size, dtype, norm, packed=packed, seed=seed)
    ours, theirs, before = (cache(inputs, seed=seed) for _ in range(3))
    q = _qk_norm_rope_write(**inputs, **ours, each_tokens=tile[0], each_heads=tile[1], warps=4)
    close(q, WRITE["torch"](**inputs, **theirs), dtype)
    close(ours["keys"], theirs["keys"], dtype)
    assert torch.equal(ours["values"], theirs["values"])
    others = torch.ones(len(before["keys"]), dtype=torch.bool, device=DEVICE)
    others[before["rows"][before["rows"] >= 0]] = False
    assert torch.equal(ours["keys"][others], before["keys"][others])


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("tokens", [1, 63])
def test_the_default_tiles(tokens: int, size: int, norm: bool) -> None:
    inputs = draw(tokens, (14, 2), size, "bf16", norm)
    ours, theirs = (IMPLEMENTATIONS[name](**without_v(inputs)) for name in ("triton", "torch"))
    for actual, expected in zip(ours, theirs, strict=True):
        close(actual, expected, "bf16")
    mine, other = cache(inputs), cache(inputs)
    close(WRITE["triton"](**inputs, **mine), WRITE["torch"](**inputs, **other), "bf16")
    close(mine["keys"], other["keys"], "bf16")


@pytest.mark.parametrize("norm", [False, True])
def test_it_is_what_the_decoder_computes(norm: bool) -> None:
    """In FP32, where the order of roundings does not matter: norm of each head, then the rotation."""
    inputs = draw(9, (4, 2), 64, "fp32", norm)
    q, k = IMPLEMENTATIONS["triton"](**without_v(inputs))
    for ours, x, weight in ((q, inputs["q"], inputs["q_weight"]), (k, inputs["k"], inputs["k_weight"])):
        normed = x if weight is None else rms_norm(x, weight, EPS)
        close(ours, rotate(normed, inputs["cos"], inputs["sin"]), "fp32")


def test_heads_that_do_not_lie_one_after_another() -> None:
    inputs = without_v(draw(9, (4, 2), 64, "fp32", True))
    turned = {**inputs, **{name: inputs[name].transpose(0, 1).contiguous().transpose(0, 1) for name in "qk"}}
    for ours, theirs in zip(IMPLEMENTATIONS["triton"](**turned), IMPLEMENTATIONS["torch"](**inputs), strict=True):
        close(ours, theirs, "fp32")


def test_a_batch_equals_its_tokens_alone() -> None:
    inputs = without_v(draw(9, (4, 2), 64, "bf16", True))
    batch = IMPLEMENTATIONS["triton"](**inputs)
    for i in range(9):
        one = {n: x[i : i + 1] if n in ("q", "k", "cos", "sin") else x for n, x in inputs.items()}
        for ours, expected in zip(IMPLEMENTATIONS["triton"](**one), batch, strict=True):
            assert torch.equal(ours, expected[i : i + 1])


class Rope(torch.nn.Module):
    """Both operators over a packed projection, as a layer of a decode step has them."""

    def forward(
        self, qkv: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (x.view(qkv.shape[0], -1, 64) for x in torch.split(qkv, [14 * 64, 2 * 64, 2 * 64], dim=1))
        again = IMPLEMENTATIONS["triton"](q, k, None, None, cos, sin, EPS)
        return WRITE["triton"](q, k, v, weights[0], weights[1], cos, sin, EPS, keys, values, rows), *again


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_package_with_dynamic_shapes_writes_in_place(tmp_path: Any) -> None:
    def arguments(count: int) -> tuple[Inputs, Inputs, tuple[Tensor, ...]]:
        inputs = draw(count, (14, 2), 64, "bf16", True, seed=count)
        kept = cache(inputs, spare=2000 - count)
        qkv = torch.cat([inputs[n].flatten(1) for n in "qkv"], dim=1)
        weights = torch.stack([inputs["q_weight"], inputs["k_weight"]])
        return inputs, kept, (qkv, weights, inputs["cos"], inputs["sin"], *kept.values())

    tokens = torch.export.Dim("T", min=1, max=1999)
    dynamic = ({0: tokens}, None, {0: tokens}, {0: tokens}, None, None, {0: tokens})
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        program = torch.export.export(Rope(), arguments(9)[2], dynamic_shapes=dynamic, strict=False)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "rope.pt2"))
    package = torch._inductor.aoti_load_package(path)
    for count in (1, 2, 111, 1999):
        inputs, kept, given = arguments(count)
        theirs = cache(inputs, spare=2000 - count)
        q, again_q, again_k = package(*given)
        close(q, WRITE["torch"](**inputs, **theirs), "bf16")
        close(kept["keys"], theirs["keys"], "bf16")
        assert torch.equal(kept["values"], theirs["values"])
        plain = {**without_v(inputs), "q_weight": None, "k_weight": None}
        for ours, expected in zip((again_q, again_k), IMPLEMENTATIONS["torch"](**plain), strict=True):
            close(ours, expected, "bf16")
