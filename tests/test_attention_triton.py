"""Packed attention in Triton against the readable one: in the interpreter, or on the GPU."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interpreter import DEVICE, MARKS, exact_conversions, loops_to_scalars, poison_new_tensors
from tolerances import OPERATORS
from torch import Tensor

pytest.importorskip("triton")

from dagserve.kernels.attention.op import IMPLEMENTATIONS
from dagserve.kernels.attention.padded import Packing
from dagserve.kernels.attention.reference import packed_attention
from dagserve.kernels.attention.triton import _packed_gqa, packed_gqa

pytestmark = MARKS
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


def draw(lengths: list[int], heads: tuple[int, int], head_dim: int, dtype: str) -> tuple[Tensor, ...]:
    """q, k, v and ``cu_seqlens``."""
    generator = torch.Generator().manual_seed(sum(lengths))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    shapes = [(int(cu_seqlens[-1]), h, head_dim) for h in (heads[0], heads[1], heads[1])]
    tensors = [torch.randn(shape, generator=generator).to(DTYPES[dtype]) for shape in shapes]
    return tuple(x.to(DEVICE) for x in (*tensors, cu_seqlens))


def close(actual: Tensor, expected: Tensor, dtype: str) -> None:
    assert actual.dtype == DTYPES[dtype]
    assert not actual.isnan().any()
    assert (actual.float() - expected.float()).abs().max() < OPERATORS[dtype]


@settings(max_examples=40 if DEVICE == "cpu" else 100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40) | st.sampled_from([1, 63, 64, 65, 111]), min_size=1, max_size=4).filter(any),
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from([64, 128]),
    dtype=st.sampled_from(list(DTYPES)),
    tile=st.sampled_from([(16, 16), (32, 16), (16, 64), (64, 32)]),
    skip_masks=st.booleans(),
    shared=st.booleans(),
)
@example([1], (4, 4), 64, "fp32", (16, 16), True, False)
@example([0, 0, 5, 0], (14, 2), 64, "bf16", (16, 16), True, False)
@example([0, 5, 0], (14, 2), 64, "fp32", (16, 16), True, True)
@example([512], (4, 2), 128, "bf16", (64, 64), True, False)
def test_every_tile_equals_the_reference(
    lengths: list[int],
    heads: tuple[int, int],
    head_dim: int,
    dtype: str,
    tile: tuple[int, int],
    skip_masks: bool,
    shared: bool,
) -> None:
    q, k, v, cu_seqlens = draw(lengths, heads, head_dim, dtype)
    wide = DEVICE == "cpu"
    actual = _packed_gqa(q, k, v, cu_seqlens, shared, wide, *tile, skip_masks=skip_masks, warps=4, stages=2)
    close(actual, packed_attention(q, k, v, cu_seqlens, shared_prefix=shared), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("longest", [1, 63, 111])
def test_configured_tiles(longest: int, head_dim: int, dtype: str) -> None:
    q, k, v, cu_seqlens = draw([longest, 1, 7], (14, 2), head_dim, dtype)
    close(packed_gqa(q, k, v, cu_seqlens, longest), packed_attention(q, k, v, cu_seqlens), dtype)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("lengths", [[7, 1, 63, 2], [111]])
def test_the_choice_equals_torchs(lengths: list[int], shared: bool) -> None:
    lengths = [0 if shared and len(lengths) == 1 else 5, *lengths] if shared else lengths
    q, k, v, cu_seqlens = draw(lengths, (4, 2), 64, "fp32")
    iota = torch.arange(max(lengths), dtype=torch.int32, device=DEVICE)
    packing = Packing.of(cu_seqlens, q.shape[0], iota)
    if shared:
        packing = Packing.shared(cu_seqlens, q.shape[0], iota, iota[: max(1, lengths[0])])
    close(IMPLEMENTATIONS["triton_packed_gqa"](q, k, v, packing), IMPLEMENTATIONS["torch"](q, k, v, packing), "fp32")


def test_tokens_may_be_rows_of_a_wider_matrix() -> None:
    q, k, v, cu_seqlens = draw([9, 20], (4, 2), 64, "fp32")
    expected = packed_attention(q, k, v, cu_seqlens)
    rows = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
    q, k, v = (rows[:, a:b].view(29, -1, 64) for a, b in ((0, 256), (256, 384), (384, 512)))
    close(packed_gqa(q, k, v, cu_seqlens, 20), expected, "fp32")


def test_a_sequence_does_not_see_its_neighbours() -> None:
    q, k, v, cu_seqlens = draw([20, 50, 13], (4, 2), 64, "fp32")
    before = packed_gqa(q, k, v, cu_seqlens, 50)
    for x in (k, v):
        x[:20], x[70:] = float("nan"), float("nan")
    torch.testing.assert_close(packed_gqa(q, k, v, cu_seqlens, 50)[20:70], before[20:70], rtol=0, atol=0)


def test_a_batch_equals_its_sequences_alone() -> None:
    lengths = [20, 1, 111, 64]
    q, k, v, cu_seqlens = draw(lengths, (14, 2), 64, "bf16")
    batch = packed_gqa(q, k, v, cu_seqlens, 111)
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        own = torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE)
        alone = packed_gqa(q[start:end], k[start:end], v[start:end], own, 111)
        torch.testing.assert_close(batch[start:end], alone, rtol=0, atol=0)


def test_more_sequences_than_one_look_up() -> None:
    q, k, v, cu_seqlens = draw([2, 0, 1] * 50, (4, 2), 64, "fp32")
    close(packed_gqa(q, k, v, cu_seqlens, 2), packed_attention(q, k, v, cu_seqlens), "fp32")


def test_a_head_size_that_no_tile_has() -> None:
    q, k, v, cu_seqlens = draw([3], (4, 2), 80, "fp32")
    with pytest.raises(ValueError, match=r"head_dim is 80; it must be one of .* choose torch"):
        packed_gqa(q, k, v, cu_seqlens, 3)


def test_without_triton_the_choice_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
        return plain(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "dagserve.kernels.attention.triton")
    q, k, v, cu_seqlens = draw([3], (4, 2), 64, "fp32")
    packing = Packing.of(cu_seqlens, 3, torch.arange(3, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ModuleNotFoundError, match=r"attention: .* pip install 'dagserve\[gpu\]', or choose"):
        IMPLEMENTATIONS["triton_packed_gqa"](q, k, v, packing)


class Attention(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, iota: Tensor) -> Tensor:
        return IMPLEMENTATIONS["triton_packed_gqa"](q, k, v, Packing.of(cu_seqlens, q.shape[0], iota))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_package_with_dynamic_shapes(tmp_path: Any) -> None:
    tokens, rows, longest = (torch.export.Dim(name, min=2, max=4096) for name in ("T", "R", "L"))
    dynamic = ({0: tokens}, {0: tokens}, {0: tokens}, {0: rows}, {0: longest})

    def inputs(lengths: list[int]) -> tuple[Tensor, ...]:
        return *draw(lengths, (14, 2), 64, "bf16"), torch.arange(max(lengths), dtype=torch.int32, device=DEVICE)

    with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        program = torch.export.export(Attention(), inputs([5, 9, 30]), dynamic_shapes=dynamic, strict=False)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attention.pt2"))
    package = torch._inductor.aoti_load_package(path)
    for lengths in ([2, 2], [111], [1, 63, 500, 0, 7], [60] * 32):
        arguments = inputs(lengths)
        close(package(*arguments), packed_attention(*arguments[:4]), "bf16")


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_captured_graph_follows_cu_seqlens() -> None:
    q, k, v, cu_seqlens = draw([50, 61], (14, 2), 64, "bf16")
    packed_gqa(q, k, v, cu_seqlens, 111)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = packed_gqa(q, k, v, cu_seqlens, 111)
    for lengths in ([50, 61], [111, 0], [1, 110]):
        cu_seqlens.copy_(torch.tensor([0, *lengths]).cumsum(0))
        graph.replay()
        close(out, packed_attention(q, k, v, cu_seqlens), "bf16")
