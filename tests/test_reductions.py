"""Every reduction and precision through the compiler and the native runtime, against transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import MANIFEST
from random_models import CONFIGS, write_model
from tokenizers import Tokenizer
from tolerances import SCORES
from transformers import AutoModelForCausalLM

from dagserve.build.cache import BuildCache
from dagserve.compiler import compile_manifest
from dagserve.engine import Engine
from dagserve.errors import InternalError
from dagserve.runtime import ReferenceRuntime

ITEMS = ["a good film", "bad", "", "x " * 50, "日本語"]
VALUES = [1.0, -2.5]


def manifest(folder: Path, reduce: str, precision: str) -> Path:
    """relevance.yaml with one fixed reduction; ``map`` has its labels fixed too, one for each value."""
    changes = [
        ("reduce: softmax", f"reduce: {reduce}"),
        (", apply_softmax: apply_softmax}", "}"),
        ("  apply_softmax: {type: bool, default: false}\n", ""),
        ("precision: fp32", f"precision: {precision}"),
    ]
    if reduce == "map":
        changes += [
            ("reduce: map", f"reduce: map, values: {VALUES}"),
            (", labels: 16}", "}"),
            ('  labels: {type: "text[labels]", optional: true, max_bytes: 1024}\n', ""),
            ('  label_token_ids: {type: "i64[labels]", optional: true}\n', ""),
            ("    inputs: {labels: labels, label_token_ids: label_token_ids}\n", ""),
            ("i64[labels]", "i64[2]"),
            ("[batch,labels]", "[batch,1]"),
        ]
    text = MANIFEST.read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "m.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("reduce", "precision"),
    [("log_probability", "fp32"), ("map", "fp32"), ("softmax", "bf16")],
)
def test_a_reduction_matches_transformers(
    reduce: str, precision: str, tiny_model: Path, build_cache: BuildCache, tmp_path: Path
) -> None:
    path = manifest(tmp_path, reduce, precision)
    artifact = compile_manifest(path, {"model": str(tiny_model)}, output=tmp_path / "a", cache=build_cache).artifact
    with Engine.load(artifact) as engine:
        request: dict[str, object] = {"query": "q", "items": ITEMS}
        body = engine.run(request)
        assert ReferenceRuntime(artifact).run(request) == body
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    labels = [tokenizer.encode(t).ids[0] for t in (" positive", " negative")]
    rows = json.loads(body)["scores"]
    for item, row in zip(ITEMS, rows, strict=True):
        ids = tokenizer.encode(f"q\n\nReview: {item}\nSentiment:").ids
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        expected = {
            "softmax": logits[labels].softmax(0),
            "log_probability": logits.log_softmax(0)[labels],
            "map": logits[labels].softmax(0) @ torch.tensor(VALUES)[:, None],
        }[reduce]
        tolerance = 1e-4 if reduce == "log_probability" else SCORES[precision] * max(map(abs, VALUES))
        assert (torch.tensor(row) - expected).abs().max() < tolerance


def test_another_family_end_to_end(build_cache: BuildCache, tiny_model: Path, tmp_path: Path) -> None:
    """Qwen3 with sharded files, compiled, run natively, beside transformers."""
    folder = tmp_path / "qwen3"
    folder.mkdir()
    model = write_model(folder, CONFIGS["qwen3-tied-wide-heads"], shard="100KB")
    shutil.copy(tiny_model / "tokenizer.json", folder)
    path = manifest(tmp_path, "softmax", "fp32")
    artifact = compile_manifest(path, {"model": str(folder)}, output=tmp_path / "a", cache=build_cache).artifact
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    labels = [tokenizer.encode(t).ids[0] for t in (" positive", " negative")]
    with Engine.load(artifact) as engine:
        rows = json.loads(engine.run({"query": "q", "items": ITEMS}))["scores"]
    for item, row in zip(ITEMS, rows, strict=True):
        ids = tokenizer.encode(f"q\n\nReview: {item}\nSentiment:").ids
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0, -1][labels].softmax(0)
        assert (torch.tensor(row) - expected).abs().max() < SCORES["fp32"]


def test_a_package_that_fails_is_a_typed_error_and_the_process_lives(relevance_artifact: Path, tmp_path: Path) -> None:
    """With our own checks taken out of the plan, the package meets an id outside the vocabulary."""
    root = tmp_path / "a"
    shutil.copytree(relevance_artifact, root)
    plan = json.loads((root / "plan.json").read_text())
    node = next(n for n in plan["nodes"] if n["name"] == "score")
    node["checks"] = []
    labels = next(n for n in plan["nodes"] if n["name"] == "resolve_labels")
    labels["config"]["vocab_size"] = 2**40
    (root / "plan.json").write_text(json.dumps(plan))
    with Engine.load(root) as engine:
        good = engine.run({"query": "q", "items": ["x"]})
        for _ in range(3):
            with pytest.raises(InternalError, match="package failed") as caught:
                engine.run({"query": "q", "items": ["x"], "label_token_ids": [2**39]})
            assert caught.value.node == "score"
        assert engine.run({"query": "q", "items": ["x"]}) == good
        assert engine.stats()["tiers"]["runners"]["used"] == 0
