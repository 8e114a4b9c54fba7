"""The merge of beams and the move of their K/V in Triton against the readable ones: equal, not close."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import DEVICE, MARKS, NUMPY_MAY_WARN, exact_conversions, poison_new_tensors
from torch import Tensor

pytest.importorskip("triton")

from dagserve.kernels.beam import reference
from dagserve.kernels.beam.op import IMPLEMENTATIONS, REORDER
from dagserve.kernels.beam.selection import candidates, order_key
from dagserve.kernels.beam.triton import _merge, merge

pytestmark = MARKS
exact_conversions()

INF, NAN = float("inf"), float("nan")


def same_merge(cumulative: Tensor, scores: Tensor, ids: Tensor, count: int) -> None:
    """Small groups, so that few candidates already are many. Each beam's candidates are put in order first."""
    scores = scores.gather(-1, order_key(scores).argsort(dim=-1, descending=True))
    cumulative, scores, ids = (x.to(DEVICE) for x in (cumulative, scores, ids))
    ours = _merge(cumulative, scores, ids, count, group=4, warps=4)
    for actual, expected in zip(ours, reference.merge(cumulative, scores, ids, count), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.integers(1, 3),
    beams=st.sampled_from([1, 2, 7, 13]),
    each=st.sampled_from([1, 2, 14, 63]),
    share=st.floats(0, 1),
    levels=st.sampled_from([1, 3, None]),
    dead=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_totals_tokens_and_parents_are_the_readable_ones(
    prompts: int, beams: int, each: int, share: float, levels: int | None, dead: float, seed: int
) -> None:
    """``levels``: so few different scores that most are ties; ``dead``: share of beams that are not there."""
    generator = torch.Generator().manual_seed(seed)
    scores = -torch.rand(prompts, beams, each, generator=generator) * 9
    if levels is not None:
        scores = -torch.randint(levels, scores.shape, generator=generator).float()
    cumulative = -torch.randint(3, (prompts, beams), generator=generator).float()
    cumulative[torch.rand(prompts, beams, generator=generator) < dead] = -INF
    ids = torch.randint(2**40, scores.shape, generator=generator)
    same_merge(cumulative, scores, ids, max(1, min(int(beams * each * share), 120)))


@NUMPY_MAY_WARN
@pytest.mark.parametrize("special", [[NAN], [-INF], [NAN, -INF, 0.0, -0.0], [-0.0]], ids=str)
def test_special_scores(special: list[float]) -> None:
    generator = torch.Generator().manual_seed(2)
    scores = -torch.rand(2, 9, 20, generator=generator)
    scores[0, ::2] = torch.tensor(special)[torch.randint(len(special), (5, 20), generator=generator)]
    same_merge(torch.zeros(2, 9), scores, torch.arange(360).reshape(2, 9, 20), 100)


def test_columns_of_a_wider_tensor() -> None:
    """As a search has them: a beam's cumulative score lies in front of those of its tokens."""
    generator = torch.Generator().manual_seed(3)
    beams = torch.randn(2, 5, 4, generator=generator).to(DEVICE)
    scores = torch.randn(2, 5, 10, generator=generator).sort(dim=-1, descending=True).values.to(DEVICE)
    ids = torch.arange(100, device=DEVICE).reshape(2, 5, 10)
    given = (beams[:, :, 0], scores, ids, 10)
    for actual, expected in zip(merge(*given), reference.merge(*given), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_every_output_of_the_merge_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = -torch.rand(2, 7, 14, generator=torch.Generator().manual_seed(3))
    poison_new_tensors(monkeypatch)
    same_merge(torch.zeros(2, 7), scores, torch.arange(196).reshape(2, 7, 14), 14)


@pytest.mark.parametrize("width", [5, 100])
def test_the_merge_of_true_candidates_with_the_default_tiles(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(1, width, 300, generator=generator).bfloat16().to(DEVICE)
    ids, scores = candidates(logits, None, 2 * width)
    cumulative = -torch.rand(1, width, generator=generator).to(DEVICE)
    ours, theirs = (IMPLEMENTATIONS[i](cumulative, scores, ids, 2 * width) for i in ("triton", "torch"))
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.skipif(DEVICE == "cpu", reason="too large for the interpreter")
@pytest.mark.parametrize("width", [1, 50, 100, 400])
def test_the_widths_of_a_service(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    scores = -torch.rand(3, width, 2 * width, generator=generator).sort(dim=-1).values * 9
    cumulative, ids = -torch.rand(3, width, generator=generator), torch.randint(151936, scores.shape)
    cumulative, scores, ids = (x.to(DEVICE) for x in (cumulative, scores, ids))
    ours, theirs = (IMPLEMENTATIONS[i](cumulative, scores, ids, 2 * width) for i in ("triton", "torch"))
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 5, 11])),
    keys=st.integers(1, 4),
    columns=st.sampled_from([1, 16, 63]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_keys_and_values_follow_their_beams(
    shape: tuple[int, int, int], keys: int, columns: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    suffix = torch.randn(*shape, keys * columns, generator=generator).to(dtype)
    parent = torch.randint(shape[2], shape[1:], generator=generator)
    valid = torch.randint(keys + 1, (1,), generator=generator)
    suffix, parent, valid = (x.to(DEVICE) for x in (suffix, parent, valid))
    ours, theirs = (REORDER[i](suffix, parent, valid, keys) for i in ("triton", "torch"))
    assert torch.equal(ours, theirs)


def test_the_first_rows_of_a_wider_tensor_move() -> None:
    suffix = torch.randn(2, 3, 5, 40, generator=torch.Generator().manual_seed(1)).to(DEVICE)[:, :2, :, :21]
    parent, valid = torch.tensor([[4, 4, 0, 1, 1], [0, 3, 2, 2, 1]]).to(DEVICE), torch.tensor([2]).to(DEVICE)
    for rows in (parent, parent.t().contiguous().t()):
        assert torch.equal(REORDER["triton"](suffix, rows, valid, 3), REORDER["torch"](suffix, rows, valid, 3))


def test_every_moved_row_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    suffix = torch.randn(2, 1, 5, 3 * 7, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    parent, valid = torch.tensor([[4, 4, 0, 1, 1]]).to(DEVICE), torch.tensor([2]).to(DEVICE)
    expected = suffix[:, :, parent[0]]
    expected[..., 14:] = 0
    poison_new_tensors(monkeypatch)
    assert torch.equal(REORDER["triton"](suffix, parent, valid, 3), expected)
