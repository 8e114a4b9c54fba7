"""Shared-prefix attention in Triton against the readable one: in the interpreter, or on the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interpreter import DEVICE, MARKS, NUMPY_MAY_WARN, exact_conversions, loops_to_scalars, poison_new_tensors
from tolerances import OPERATORS
from torch import Tensor

pytest.importorskip("triton")

from dagserve.kernels.shared_prefix_attention.op import IMPLEMENTATIONS
from dagserve.kernels.shared_prefix_attention.reference import shared_prefix_attention as reference
from dagserve.kernels.shared_prefix_attention.triton import _shared_prefix_attention, shared_prefix_attention

pytestmark = [*MARKS, NUMPY_MAY_WARN]
exact_conversions()
loops_to_scalars()

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
HEADS = [(4, 4), (4, 2), (8, 2), (7, 1), (14, 2), (8, 1)]
"""Groups of 1, 2, 4, 7 and 8."""


@pytest.fixture(autouse=True, scope="module")
def _poisoned() -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        poison_new_tensors(monkeypatch)
        yield


def draw(
    lengths: list[int], width: int, heads: tuple[int, int], head_dim: int, keys: tuple[int, int], dtype: str
) -> tuple[Tensor, ...]:
    """The arguments; ``keys``: how many of a suffix are valid, and how many there are. NaN is what must not be read."""
    generator = torch.Generator().manual_seed(sum(lengths) + width)
    prompts, longest, (count, capacity) = len(lengths), max(lengths), keys

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DTYPES[dtype])

    q = random(prompts, width, heads[0], head_dim)
    prefix = [random(prompts, longest, heads[1], head_dim) for _ in range(2)]
    suffix = [random(prompts, width, capacity, heads[1], head_dim) for _ in range(2)]
    for x in prefix:
        for p, length in enumerate(lengths):
            x[p, length:] = float("nan")
    for x in suffix:
        x[:, :, count:] = float("nan")
    arguments = (q, *prefix, torch.tensor(lengths), *suffix, torch.tensor([count]))
    return tuple(x.to(DEVICE) for x in arguments)


def close(actual: Tensor, expected: Tensor, dtype: str) -> None:
    assert actual.dtype == DTYPES[dtype]
    assert not actual.isnan().any()
    assert (actual.float() - expected.float()).abs().max() < OPERATORS[dtype]


@settings(max_examples=40 if DEVICE == "cpu" else 100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70) | st.sampled_from([1, 63, 64, 65, 111]), min_size=1, max_size=3),
    width=st.sampled_from([1, 2, 5, 13]),
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from([64, 128]),
    keys=st.integers(1, 7).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))),
    dtype=st.sampled_from(list(DTYPES)),
    tile=st.sampled_from([(16, 16), (32, 16), (16, 64), (64, 32)]),
    splits=st.sampled_from([1, 2, 5]),
)
@example([1], 1, (4, 4), 64, (1, 1), "fp32", (16, 16), 5)
@example([111, 1], 13, (14, 2), 64, (3, 4), "bf16", (16, 64), 2)
def test_every_tile_equals_the_reference(
    lengths: list[int],
    width: int,
    heads: tuple[int, int],
    head_dim: int,
    keys: tuple[int, int],
    dtype: str,
    tile: tuple[int, int],
    splits: int,
) -> None:
    arguments = draw(lengths, width, heads, head_dim, keys, dtype)
    actual = _shared_prefix_attention(*arguments, DEVICE == "cpu", *tile, splits=splits, warps=4, stages=2)
    close(actual, reference(*arguments), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("longest", [1, 63, 111])
def test_configured_tiles(longest: int, head_dim: int, dtype: str) -> None:
    arguments = draw([longest, 1], 5, (14, 2), head_dim, (2, 4), dtype)
    close(shared_prefix_attention(*arguments), reference(*arguments), dtype)


def test_the_choice_equals_torchs() -> None:
    arguments = draw([50, 50], 13, (14, 2), 64, (4, 4), "fp32")
    close(IMPLEMENTATIONS["triton"](*arguments), IMPLEMENTATIONS["torch"](*arguments), "fp32")


@pytest.mark.parametrize("splits", [1, 3])
def test_a_result_is_the_same_on_every_run_and_of_a_prompt_alone(splits: int) -> None:
    arguments = draw([111, 5], 13, (14, 2), 64, (3, 4), "bf16")
    tile = (DEVICE == "cpu", 32, 32, splits, 4, 2)
    both = _shared_prefix_attention(*arguments, *tile)
    for _ in range(3):
        torch.testing.assert_close(_shared_prefix_attention(*arguments, *tile), both, rtol=0, atol=0)
    alone = _shared_prefix_attention(*(x[:1] for x in arguments), *tile)
    torch.testing.assert_close(alone, both[:1], rtol=0, atol=0)


def test_a_head_size_that_no_tile_has() -> None:
    with pytest.raises(ValueError, match=r"head_dim is 80; it must be one of .* choose torch"):
        shared_prefix_attention(*draw([3], 2, (4, 2), 80, (1, 1), "fp32"))


class Attention(torch.nn.Module):
    def forward(self, *arguments: Tensor) -> Tensor:
        return IMPLEMENTATIONS["triton"](*arguments)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_package_with_dynamic_shapes(tmp_path: Any) -> None:
    prompts, width, longest = (torch.export.Dim(n, min=m, max=512) for n, m in (("P", 1), ("W", 1), ("L", 1)))
    q, prefix, suffix = {0: prompts, 1: width}, {0: prompts, 1: longest}, {0: prompts, 1: width}
    dynamic = ((q, prefix, prefix, {0: prompts}, suffix, suffix, None),)
    example_inputs = draw([50, 3], 13, (14, 2), 64, (2, 4), "bf16")
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        program = torch.export.export(Attention(), example_inputs, dynamic_shapes=dynamic, strict=False)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attention.pt2"))
    package = torch._inductor.aoti_load_package(path)
    for lengths, beams in (([1], 1), ([500], 400), ([50, 7, 1], 100)):
        arguments = draw(lengths, beams, (14, 2), 64, (3, 4), "bf16")
        close(package(*arguments), reference(*arguments), "bf16")
