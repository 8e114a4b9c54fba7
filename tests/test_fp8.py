"""Artifacts whose linears are in E4M3, emulated on a CPU: what compile makes of a checkpoint, and both runtimes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from conftest import MANIFEST
from random_models import CONFIGS, train_tokenizer, write_model
from test_beam_search import PROMPTS, SUGGEST
from test_decoder import FP8_GROUPS, Rounded
from tolerances import SCORES
from transformers import AutoModelForCausalLM

from dagserve.artifact import read_plan
from dagserve.build.cache import BuildCache
from dagserve.build.weights import map_weights
from dagserve.compiler import compile_manifest
from dagserve.engine import Engine
from dagserve.errors import ManifestError
from dagserve.runtime import ReferenceRuntime

ALL = "{projections: fp8_rowwise, mlp: fp8_rowwise}"
REQUEST: dict[str, Any] = {
    "query": "the cat sat on the mat",
    "items": ["a good film", "a bad film, and long, with 12 things", "x"],
    "label_token_ids": [3, 300, 17],
}


def compiled(folder: Path, manifest: Path, model: Path, operators: str, cache: BuildCache) -> Path:
    text = manifest.read_text().replace("    operators: {attention: torch}\n", "")
    assert "    precision: fp32\n" in text
    text = text.replace("    precision: fp32\n", f"    precision: fp32\n    operators: {operators}\n", 1)
    (folder / manifest.name).write_text(text)
    output = folder / "artifact"
    return compile_manifest(folder / manifest.name, {"model": str(model)}, output=output, cache=cache).artifact


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, build_cache: BuildCache) -> Path:
    return compiled(tmp_path_factory.mktemp("fp8"), MANIFEST, tiny_model, ALL, build_cache)


def test_weights_are_in_e4m3_with_a_scale_a_row(artifact: Path, tiny_model: Path) -> None:
    plan = read_plan(artifact)
    jsonschema.validate(plan, json.loads((MANIFEST.parent.parent / "schemas" / "artifact.schema.json").read_text()))
    assert plan["descriptions"]["build"]["operators"]["score"]["mlp"] == "fp8_rowwise"
    assert plan["descriptions"]["validation"]["tolerance"] == {"score": 0.4}
    weights = map_weights(artifact / "weights.bin", plan["weights"]["tensors"])
    source = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    parts = [source[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
    packed = Rounded.rounded(torch.cat(parts).float())
    ours = weights["layers.1.attention.qkv.weight"].float() * weights["layers.1.attention.qkv.scale"][:, None]
    assert weights["layers.1.attention.qkv.weight"].dtype == torch.float8_e4m3fn
    torch.testing.assert_close(ours, packed)
    assert not any(".q." in name or ".gate." in name for name in weights)


def test_padding_is_counted(tmp_path: Path, build_cache: BuildCache) -> None:
    """An MLP of 40 is one of 48: 8 rows more of each ``down`` column, none of 80 for gate and up together."""
    config = {**CONFIGS["llama-tied"].to_dict(), "intermediate_size": 40, "num_hidden_layers": 1}
    write_model(tmp_path, type(CONFIGS["llama-tied"])(**config))
    train_tokenizer().save(str(tmp_path / "tokenizer.json"))
    artifact = compiled(tmp_path, MANIFEST, tmp_path, "{mlp: fp8_rowwise}", build_cache)
    assert read_plan(artifact)["descriptions"]["build"]["padding_bytes"] == 64 * 8
    runtime = ReferenceRuntime(artifact)
    with Engine.load(artifact) as engine:
        assert engine.run(REQUEST) == runtime.run(REQUEST)


def test_scores_are_those_of_a_model_with_rounded_linears(artifact: Path, tiny_model: Path) -> None:
    runtime = ReferenceRuntime(artifact)
    traced = runtime.trace(REQUEST)
    ends = traced["tokenize.cu_seqlens"]
    texts = [torch.from_numpy(np.array(traced["tokenize.tokens"][a:b])) for a, b in pairwise(ends)]
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    def scores() -> torch.Tensor:
        with torch.no_grad():
            logits = torch.stack([model(t[None]).logits[0, -1] for t in texts])
        return logits.softmax(-1)[:, torch.tensor(REQUEST["label_token_ids"])]

    exact = scores()
    for path, module in list(model.named_modules()):
        parent, _, last = path.rpartition(".")
        if last in FP8_GROUPS["mlp"] + FP8_GROUPS["projections"]:
            setattr(model.get_submodule(parent), last, Rounded(module))
    ours = torch.from_numpy(np.array(traced["score.scores"]))
    assert (ours - scores()).abs().max() < SCORES["bf16"]
    assert (ours - scores()).abs().max() < 0.2 * (ours - exact).abs().max()
    with Engine.load(artifact) as engine:
        assert engine.run(REQUEST) == runtime.run(REQUEST)


def test_a_beam_search_with_all_linears_in_e4m3(tmp_path: Path, tiny_model: Path, build_cache: BuildCache) -> None:
    operators = "{projections: fp8_rowwise, mlp: fp8_rowwise, lm_head: fp8_rowwise}"
    artifact = compiled(tmp_path, SUGGEST, tiny_model, operators, build_cache)
    weights = read_plan(artifact)["weights"]["tensors"]
    assert weights["fp8_head.weight"]["dtype"] == "f8e4m3"
    runtime = ReferenceRuntime(artifact)
    with Engine.load(artifact) as engine:
        for request in ({"prompts": PROMPTS, "n": 4, "return_scores": True}, {"prompts": PROMPTS[:1], "width": 1}):
            assert engine.run(request) == runtime.run(request)


def test_what_does_not_fit_the_model_is_refused(tmp_path: Path, build_cache: BuildCache) -> None:
    """Head sizes are known when the checkpoint is read; alternatives are named."""
    config = CONFIGS["llama-tied"].to_dict()
    write_model(tmp_path, type(CONFIGS["llama-tied"])(**{**config, "head_dim": 24}))
    (tmp_path / "tokenizer.json").write_bytes(b"")
    text = MANIFEST.read_text().replace("device: cpu", "device: cuda")
    (tmp_path / "m.yaml").write_text(text.replace("attention: torch", "attention: triton_packed_gqa"))
    with pytest.raises(ManifestError, match=r"the model's head_dim is 24; it must be one of 16, 32.*use torch"):
        compile_manifest(tmp_path / "m.yaml", {"model": str(tmp_path)}, output=tmp_path / "a", cache=build_cache)
