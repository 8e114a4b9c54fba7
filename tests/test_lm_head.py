"""The LM head's candidates in Triton against the readable selection. Its order is total: ids are equal, not close."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import DEVICE, MARKS, NUMPY_MAY_WARN, exact_conversions, poison_new_tensors
from tolerances import SCORES
from torch import Tensor

pytest.importorskip("triton")

from dagserve.kernels.beam.selection import NEVER
from dagserve.kernels.beam.selection import candidates as reference
from dagserve.kernels.lm_head.op import IMPLEMENTATIONS
from dagserve.kernels.lm_head.triton import _candidates, candidates

pytestmark = MARKS
exact_conversions()

INF, NAN = float("inf"), float("nan")
TILES = {"block": 64, "group": 8, "scan_warps": 4, "select_warps": 4}


def same(logits: Tensor, allowed: Tensor | None, count: int, **tiles: int) -> None:
    """Small tiles, so that few tokens already are many blocks and groups."""
    logits, allowed = logits.to(DEVICE), None if allowed is None else allowed.to(DEVICE)
    ids, scores = _candidates(logits, allowed, count, **{**TILES, **tiles})
    expected_ids, expected = reference(logits, allowed, count)
    assert ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(scores, expected, rtol=SCORES["fp32"], atol=SCORES["fp32"], equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 3),
    vocabulary=st.sampled_from([1, 7, 63, 64, 65, 111, 300, 1000]),
    share=st.floats(0, 1),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float16]),
    levels=st.sampled_from([1, 2, 5, None]),
    masks=st.sampled_from(["none", "one", "rows"]),
    seed=st.integers(0, 2**31),
)
def test_ids_and_scores_are_the_readable_ones(
    rows: int, vocabulary: int, share: float, dtype: torch.dtype, levels: int | None, masks: str, seed: int
) -> None:
    """``levels``: so few different logits that most are ties."""
    generator = torch.Generator().manual_seed(seed)
    count = max(1, min(int(vocabulary * share), 200))
    logits = torch.randn(rows, vocabulary, generator=generator) * 4
    if levels is not None:
        logits = torch.randint(levels, (rows, vocabulary), generator=generator) * 1.5 - 2
    shape = {"none": None, "one": (vocabulary,), "rows": (rows, vocabulary)}[masks]
    allowed = None if shape is None else torch.rand(shape, generator=generator) < 0.5
    same(logits.to(dtype), allowed, count)


@NUMPY_MAY_WARN
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "special",
    [[INF], [-INF], [NAN], [NAN, -INF], [0.0, -0.0], [-INF, 3.0], [INF, NAN, -INF, 0.0, -0.0, 1.0], [3e38, -3e38]],
    ids=str,
)
def test_special_values(dtype: torch.dtype, special: list[float]) -> None:
    """In some places, in a whole block, and in every place."""
    generator = torch.Generator().manual_seed(1)
    values = torch.tensor(special)[torch.randint(len(special), (3, 200), generator=generator)]
    logits = torch.randn(3, 200, generator=generator)
    logits[0, ::7], logits[1, 64:128], logits[2] = values[0, ::7], values[1, 64:128], values[2]
    same(logits.to(dtype), None, 50)
    same(logits.to(dtype), torch.arange(200) % 3 > 0, 150)


@pytest.mark.parametrize("where", ["start", "end", "spread"])
def test_all_of_the_best_in_one_group_or_in_groups_of_their_own(where: str) -> None:
    best = {"start": torch.arange(24), "end": torch.arange(276, 300), "spread": torch.arange(24) * 12}[where]
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)).clamp(max=2)
    logits[0, best] = 3 + torch.randn(24, generator=torch.Generator().manual_seed(1)).abs()
    same(logits.bfloat16(), None, 24)


@pytest.mark.parametrize("group", [1, 2, 32, 64])
def test_group_sizes(group: int) -> None:
    same(torch.randn(2, 333, generator=torch.Generator().manual_seed(group)).bfloat16(), None, 20, group=group)


def test_every_output_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(3, 111, generator=torch.Generator().manual_seed(5)).bfloat16()
    poison_new_tensors(monkeypatch)
    same(logits, None, 31)


def test_columns_of_a_wider_matrix() -> None:
    """As an FP8 head whose rows are padded gives logits."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(2, 3, 112, generator=generator).bfloat16().to(DEVICE)[..., :111]
    allowed = (torch.rand(2, 3, 112, generator=generator) < 0.5).to(DEVICE)[..., :111]
    for mask in (None, allowed):
        ours, theirs = candidates(logits, mask, 17), reference(logits, mask, 17)
        assert ours[0].tolist() == theirs[0].tolist()
        assert (ours[1] - theirs[1]).abs().nan_to_num(0).max() < SCORES["fp32"]


def test_the_head_over_leading_dimensions_with_the_default_tiles() -> None:
    generator = torch.Generator().manual_seed(9)
    hidden, weight = (torch.randn(*s, generator=generator).bfloat16().to(DEVICE) for s in ((2, 3, 32), (1000, 32)))
    allowed = (torch.rand(2, 3, 1000, generator=generator) < 0.3).to(DEVICE)
    for mask in (None, allowed, allowed[0, 0]):
        ours = IMPLEMENTATIONS["triton"](hidden, weight, mask, 17)
        theirs = IMPLEMENTATIONS["torch"](hidden, weight, mask, 17)
        assert ours[0].tolist() == theirs[0].tolist()
        assert (ours[1] - theirs[1]).abs().nan_to_num(0).max() < SCORES["fp32"]


@pytest.mark.skipif(DEVICE == "cpu", reason="too large for the interpreter")
@pytest.mark.parametrize("rows", [1, 100, 400])
@pytest.mark.parametrize("levels", [1, 300, None])
def test_the_true_vocabulary(rows: int, levels: int | None) -> None:
    logits = torch.randn(rows, 151936, device=DEVICE) * 3
    if levels is not None:
        logits = (logits * levels / 20).round() * 20 / levels if levels > 1 else logits * 0
    for count in (2 * rows, 800):
        ids, scores = candidates(logits.bfloat16(), None, count)
        expected_ids, expected = reference(logits.bfloat16(), None, count)
        assert torch.equal(ids, expected_ids)
        assert (scores - expected).abs().max() < SCORES["fp32"]
        assert torch.equal(NEVER + scores, expected * 0 + NEVER)
