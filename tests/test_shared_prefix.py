"""The tokens that all texts of a request begin with, computed once: against the same node without, and references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MANIFEST
from hypothesis import given, settings
from hypothesis import strategies as st
from test_embed import EMBED, compiled
from tolerances import SCORES

from dagserve._native import CpuNode
from dagserve.build.cache import BuildCache
from dagserve.engine import Engine
from dagserve.errors import InvalidRequest, ManifestError
from dagserve.kernels.attention.padded import Packing, packed_attention
from dagserve.kernels.attention.reference import packed_attention as reference_attention
from dagserve.nodes.share_prefix import SharePrefix
from dagserve.passes import check_manifest
from dagserve.runtime import ReferenceRuntime

SHARE = """  share:
    engine: cpu
    op: share_prefix
    inputs: {tokens: tokenize.tokens, cu_seqlens: tokenize.cu_seqlens}
    outputs: {tokens: "i64[shared_tokens]", cu_seqlens: "i32[batch+2]"}
"""
QUERY = "the cat sat on the mat, a good film and 12 positive things"
ITEMS = ["yes", "a good film, a bad film", "x" * 90, "日本語 é", "yes no"]


def node(rows: int) -> CpuNode:
    inputs: list[Any] = [("tokens", "i64", [64], 512), ("cu_seqlens", "i32", [rows + 1], 4 * rows + 4)]
    outputs: list[Any] = [("tokens", "i64", [64], 512), ("cu_seqlens", "i32", [rows + 2], 4 * rows + 8)]
    return CpuNode("share_prefix", {}, inputs, outputs, ".")


@settings(max_examples=300, deadline=None)
@given(
    prefix=st.lists(st.integers(0, 3), max_size=6),
    rests=st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=5),
)
def test_taking_the_prefix_out(prefix: list[int], rests: list[list[int]]) -> None:
    texts = [prefix + rest or [9] for rest in rests]
    inputs = {
        "tokens": np.array([token for text in texts for token in text], dtype=np.int64),
        "cu_seqlens": np.cumsum([0, *map(len, texts)]).astype(np.int32),
    }
    ours, readable = node(len(texts)).run(inputs), SharePrefix({}, Path()).run(inputs)
    for name in ("tokens", "cu_seqlens"):
        np.testing.assert_array_equal(ours[name], readable[name])
    first, *others = np.split(ours["tokens"], ours["cu_seqlens"][1:-1])
    assert [[*first, *other] for other in others] == texts
    assert all(len(other) > 0 for other in others)
    if len(texts) > 1:  # as long as can be: some text would be left empty, or they differ after it
        more = [text[: len(first) + 1] for text in texts]
        assert any(len(text) == len(first) + 1 for text in texts) or any(m != more[0] for m in more)
    else:
        assert len(first) == 0


@pytest.mark.parametrize("ends", [[0, 2], [1, 3], [0, 4, 3]])
def test_texts_that_are_not_packed(ends: list[int]) -> None:
    inputs = {"tokens": np.zeros(3, dtype=np.int64), "cu_seqlens": np.array(ends, dtype=np.int32)}
    for run in (node(len(ends) - 1).run, SharePrefix({}, Path()).run):
        with pytest.raises(InvalidRequest, match="cu_seqlens must rise from 0 to the number of tokens, 3"):
            run(inputs)


@settings(max_examples=40, deadline=None)
@given(
    prefix=st.integers(0, 20),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    heads=st.sampled_from([(4, 4), (6, 2), (14, 2)]),
)
def test_attention_over_a_prefix(prefix: int, lengths: list[int], heads: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(prefix)
    total = prefix + sum(lengths)
    q, k, v = (torch.randn(total, h, 16, generator=generator) for h in (heads[0], heads[1], heads[1]))
    cu_seqlens = torch.tensor([0, prefix, *lengths]).cumsum(0).int()
    iotas = [torch.arange(n, dtype=torch.int32) for n in (max(lengths), max(1, prefix))]
    packing = Packing.shared(cu_seqlens, total, *iotas)
    actual = packed_attention(q, k, v, packing)
    torch.testing.assert_close(actual, reference_attention(q, k, v, cu_seqlens, shared_prefix=True), rtol=0, atol=1e-5)
    for i, start in enumerate(cu_seqlens[1:-1].tolist()):  # and every text as if it stood alone
        rows = [*range(prefix), *range(start, start + lengths[i])]
        alone = reference_attention(q[rows], k[rows], v[rows], torch.tensor([0, len(rows)]))
        torch.testing.assert_close(actual[start : start + lengths[i]], alone[prefix:], rtol=0, atol=1e-5)
    assert packing.positions[packing.last].tolist() == [prefix + n - 1 for n in lengths]


def with_prefix(op: str) -> list[tuple[str, str]]:
    name = "score" if op == "Score" else "embed"
    return [
        (f"  {name}:\n    engine: aoti", f"{SHARE}  {name}:\n    engine: aoti"),
        (
            "inputs: {tokens: tokenize.tokens, cu_seqlens: tokenize.cu_seqlens",
            "inputs: {tokens: share.tokens, cu_seqlens: share.cu_seqlens",
        ),
        ('checkpoint: "${model}", ', 'checkpoint: "${model}", shared_prefix: exact, '),
    ]


@pytest.mark.parametrize("op", ["Score", "Embed"])
def test_results_are_those_without(op: str, tmp_path: Path, tiny_model: Path, build_cache: BuildCache) -> None:
    path = MANIFEST if op == "Score" else EMBED
    (tmp_path / "plain").mkdir()
    plain = compiled(tmp_path / "plain", tiny_model, build_cache, path)
    first, *others = with_prefix(op)
    made = compiled(tmp_path, tiny_model, build_cache, path, *others, first)
    port = "score.scores" if op == "Score" else "embed.embeddings"
    with Engine.load(made) as engine, Engine.load(plain) as without:
        for items in (ITEMS, ITEMS[:1], [ITEMS[1]] * 3):
            texts = [f"{QUERY} {item}" for item in items]
            request: dict[str, Any] = {"query": QUERY, "items": items} if op == "Score" else {"texts": texts}
            assert engine.run(request) == ReferenceRuntime(made).run(request)
            ours, wanted = engine.trace(request), without.trace(request)
            np.testing.assert_allclose(ours[port], wanted[port], rtol=0, atol=SCORES["fp32"] * 10)
            saved = len(wanted["tokenize.tokens"]) - len(ours["share.tokens"])
            assert saved == (len(items) - 1) * ours["share.cu_seqlens"][1]
            assert (saved > 0) == (len(items) > 1)
        unlike: dict[str, Any] = {"texts": ["yes", "no", "a"]}
        if op == "Embed":
            np.testing.assert_allclose(engine.trace(unlike)[port], without.trace(unlike)[port], rtol=0, atol=1e-4)
            assert engine.trace(unlike)["share.cu_seqlens"][1] == 0
        long = {"query": QUERY * 40, "items": ITEMS} if op == "Score" else {"texts": [QUERY * 40] * 2}
        errors = []
        for run in (engine.run, ReferenceRuntime(made).run, without.run):
            with pytest.raises(InvalidRequest) as caught:
                run(long)
            errors.append(str(caught.value))
        assert errors[0] == errors[1]


def test_the_layouts_must_agree(tmp_path: Path) -> None:
    text = MANIFEST.read_text()
    (tmp_path / "m.yaml").write_text(text.replace("reduce: softmax}", "reduce: softmax, shared_prefix: exact}"))
    with pytest.raises(
        ManifestError, match=r"`score.cu_seqlens` takes i32\[B\+2\], but `tokenize.cu_seqlens` is i32\[batch\+1\]"
    ):
        check_manifest(tmp_path / "m.yaml")
