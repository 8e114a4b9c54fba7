"""Embeddings and reranking with a tiny model: against transformers, both runtimes, HTTP in their services' shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from conftest import MANIFEST
from test_server import serving
from tokenizers import Tokenizer
from tolerances import SCORES
from transformers import AutoModelForCausalLM

from dagserve._native import CpuNode
from dagserve.build.cache import BuildCache
from dagserve.compiler import compile_manifest
from dagserve.engine import Engine
from dagserve.errors import CheckpointError
from dagserve.nodes.encode import EncodeEmbeddings
from dagserve.runtime import ReferenceRuntime

EMBED = MANIFEST.parent / "embed.yaml"
TEXTS = ["the cat sat on the mat", "a", "yes no " * 40, "日本語 é"]


def compiled(folder: Path, model: Path, cache: BuildCache, path: Path, *changes: tuple[str, str]) -> Path:
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "m.yaml").write_text(text)
    return compile_manifest(folder / "m.yaml", {"model": str(model)}, output=folder / "a", cache=cache).artifact


def expected(model_path: Path, text: str, pool: str, dimensions: int) -> npt.NDArray[np.float32]:
    """Unnormalized, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(model_path).train(False)
    ids = Tokenizer.from_file(str(model_path / "tokenizer.json")).encode(text).ids
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
    rows: npt.NDArray[np.float32] = (hidden[-1] if pool == "last" else hidden.mean(dim=0)).numpy()
    return rows[:dimensions]


@pytest.mark.parametrize(("pool", "normalize"), [("mean", True), ("last", False)])
def test_vectors_are_transformers(
    pool: str, normalize: bool, tmp_path: Path, tiny_model: Path, build_cache: BuildCache
) -> None:
    change = ("pool: mean, dimensions: 64", f"pool: {pool}, normalize: {str(normalize).lower()}, dimensions: 48")
    made = compiled(tmp_path, tiny_model, build_cache, EMBED, change, ("batch,64", "batch,48"))
    with Engine.load(made) as engine, serving(engine) as client:
        body = {"input": TEXTS, "model": "embed", "encoding_format": "float", "dimensions": 48}
        reply = client.post("/v1/embeddings", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.content == engine.run({"texts": TEXTS}) == ReferenceRuntime(made).run({"texts": TEXTS})
        one = client.post("/v1/embeddings", json={"input": TEXTS[0]}).json()
        wrong = client.post("/v1/embeddings", json={"input": TEXTS, "dimensions": 64})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["message"] == "dimensions must be 48: the manifest fixes the dimensions"
    data = reply.json()["data"]
    assert [d["index"] for d in data] == [0, 1, 2, 3]
    assert len(one["data"]) == 1
    assert one["data"][0]["embedding"] == pytest.approx(data[0]["embedding"], abs=1e-5)
    assert reply.json()["usage"]["prompt_tokens"] > one["usage"]["prompt_tokens"] > 0
    for entry, text in zip(data, TEXTS, strict=True):
        wanted = expected(tiny_model, text, pool, 48)
        wanted = wanted / np.linalg.norm(wanted) if normalize else wanted
        assert entry["embedding"] == pytest.approx(wanted.tolist(), abs=SCORES["fp32"] * 10)


def test_more_dimensions_than_the_model_has_are_refused(
    tmp_path: Path, tiny_model: Path, build_cache: BuildCache
) -> None:
    with pytest.raises(CheckpointError, match="dimensions is 65; the model's vectors have 64: lower it"):
        compiled(tmp_path, tiny_model, build_cache, EMBED, ("dimensions: 64", "dimensions: 65"), ("h,64", "h,65"))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 0)])
def test_both_encoders_write_the_same(shape: tuple[int, int], tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    if values.size > 1:
        values.flat[1] = np.nan
    cu_seqlens = np.arange(shape[0] + 1, dtype=np.int32) * 3
    inputs: dict[str, Any] = {"embeddings": values, "cu_seqlens": cu_seqlens}
    ports = [("embeddings", "f32", [8, 8], 256), ("cu_seqlens", "i32", [9], 36)]
    native = CpuNode("encode_embeddings", {"model": 'a"b'}, ports, [("body", "u8", [4096], 4096)], str(tmp_path))
    ours = native.run(inputs)["body"].tobytes()
    assert ours == EncodeEmbeddings({"model": 'a"b'}, tmp_path).run(inputs)["body"].tobytes()
    assert json.loads(ours)["usage"] == {"prompt_tokens": 3 * shape[0], "total_tokens": 3 * shape[0]}


def test_rerank_over_http(tmp_path: Path, tiny_model: Path, build_cache: BuildCache) -> None:
    """A pair by template, in text-embeddings-inference's shape; the packages are those of manifests/relevance.yaml."""
    made = compiled(
        tmp_path, tiny_model, build_cache, MANIFEST,
        ("endpoint: score", "endpoint: rerank"),
        ("op: encode_scores\n    inputs: {scores: score.scores, cu_seqlens: tokenize.cu_seqlens}",
         "op: encode_rerank\n    inputs: {scores: score.scores}"),
    )  # fmt: skip
    with Engine.load(made) as engine, serving(engine) as client:
        body = {"query": "q", "texts": TEXTS}
        reply = client.post("/rerank", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.content == ReferenceRuntime(made).run_body(json.dumps(body).encode())
        rows = engine.trace({"query": "q", "items": TEXTS})["score.scores"]
    assert [r["index"] for r in reply.json()] == np.argsort(-rows[:, 0], kind="stable").tolist()
