"""Artifacts for a GPU, built there: their scores and beams against those of a CPU artifact of the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MANIFEST
from random_models import CONFIGS, train_tokenizer, write_model
from test_beam_search import PROMPTS, SUGGEST
from test_fp8 import REQUEST

from dagserve.artifact import read_plan
from dagserve.build.cache import BuildCache
from dagserve.compiler import compile_manifest
from dagserve.engine import Engine
from dagserve.errors import ArtifactError
from dagserve.runtime import ReferenceRuntime

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

KERNELS = {"rms_norm": "triton", "rope": "triton"}
E4M3 = {"projections": "fp8_rowwise", "mlp": "fp8_rowwise"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of Qwen3 with heads of 32."""
    folder = tmp_path_factory.mktemp("qwen3")
    write_model(folder, CONFIGS["qwen3-tied-wide-heads"])
    train_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def compiled(
    folder: Path, manifest: Path, model: Path, cache: BuildCache, device: str, operators: dict[str, str]
) -> ReferenceRuntime:
    text = manifest.read_text().replace("    operators: {attention: torch}\n", "").replace("    device: cpu\n", "")
    target = f"    device: {device}\n    precision: {'bf16' if device == 'cuda' else 'fp32'}\n"
    target += f"    operators: {json.dumps(operators)}\n"
    path = folder / f"{device}.yaml"
    path.write_text(text.replace("    precision: fp32\n", target))
    output = folder / device
    return ReferenceRuntime(compile_manifest(path, {"model": str(model)}, output=output, cache=cache).artifact)


@pytest.mark.parametrize(
    "operators",
    [
        {"attention": "torch"},
        {},
        KERNELS,
        {**KERNELS, **E4M3},
        {**E4M3, "fp8_linear": "triton"},
        {**E4M3, "fp8_linear": "torch", "quantize": "torch", "silu_mul_quantize": "torch"},
    ],
)
def test_scores_are_those_of_a_cpu(
    operators: dict[str, str], model: Path, build_cache: BuildCache, tmp_path: Path
) -> None:
    exact = compiled(tmp_path, MANIFEST, model, build_cache, "cpu", {}).trace(REQUEST)["score.scores"]
    runtime = compiled(tmp_path, MANIFEST, model, build_cache, "cuda", operators)
    ours = runtime.trace(REQUEST)["score.scores"]
    assert abs(ours - exact).max() < 0.1
    assert (runtime.trace(REQUEST)["score.scores"] == ours).all()
    built = read_plan(runtime.root)
    assert built["fingerprint"]["gpu"] == torch.cuda.get_device_name()
    with pytest.raises(ArtifactError, match="does not serve"):
        Engine.load(runtime.root)


@pytest.mark.parametrize(
    "operators", [{"candidates": "torch", "beam_merge": "torch"}, {}, {**KERNELS, "lm_head": "fp8_rowwise"}]
)
def test_a_search_finds_what_a_cpu_finds(
    operators: dict[str, str], model: Path, build_cache: BuildCache, tmp_path: Path
) -> None:
    """Scores, in order: of two sequences that are nearly equal either may come first."""
    request: dict[str, Any] = {"prompts": PROMPTS, "n": 5, "width": 16}
    exact = compiled(tmp_path, SUGGEST, model, build_cache, "cpu", {}).trace(request)
    runtime = compiled(tmp_path, SUGGEST, model, build_cache, "cuda", operators)
    ours = runtime.trace(request)
    assert abs(ours["search.scores"] - exact["search.scores"]).max() < 0.2
    again = runtime.trace(request)
    assert all((again[name] == ours[name]).all() for name in ("search.tokens", "search.scores", "search.counts"))
    alone = runtime.trace({**request, "prompts": PROMPTS[1:2]})
    assert abs(alone["search.scores"][0] - ours["search.scores"][1]).max() < 0.05
