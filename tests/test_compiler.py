"""Compile: what an artifact holds, what the cache does, and what a fault in the middle leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
import torch
from conftest import MANIFEST
from random_models import CONFIGS, write_model

from dagserve.artifact import read_plan, replacing
from dagserve.build.cache import BuildCache
from dagserve.build.package import compare, sizes_at
from dagserve.compiler import compile_manifest
from dagserve.engine import Engine, check_fingerprint
from dagserve.errors import ArtifactError, BuildError, CheckpointError, ManifestError
from dagserve.inspect import verify_digests

ROOT = MANIFEST.parent.parent


def edited(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    text = MANIFEST.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "edited.yaml"
    path.write_text(text)
    return path


def test_the_plan_fits_its_schema_and_its_files(relevance_artifact: Path) -> None:
    plan = json.loads((relevance_artifact / "plan.json").read_text())
    schema = json.loads((ROOT / "schemas" / "artifact.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(plan, schema)
    assert plan["weights"]["bytes"] == (relevance_artifact / "weights.bin").stat().st_size
    for entry in plan["weights"]["tensors"].values():
        assert entry["offset"] % 64 == 0
    assert [n["name"] for n in plan["nodes"]] == ["tokenize", "resolve_labels", "score", "encode"]
    assert set(plan["descriptions"]) == {"runtime", "build", "validation"}
    assert set(plan["descriptions"]["validation"]["checks"]["score.backbone"]) == {"min", "mid", "max"}
    assert plan["memory"]["total"] > plan["weights"]["bytes"]


def test_weights_are_there_once(relevance_artifact: Path) -> None:
    """Packages hold no constants, and the head reads the embedding it is tied to."""
    plan = read_plan(relevance_artifact)
    heads = [p for p in plan["packages"] if p["name"] != "score.backbone"]
    assert all(p["constants"] == {"embed.weight": "embed.weight"} for p in heads)
    embedding = (relevance_artifact / "weights.bin").read_bytes()[:64]
    for package in plan["packages"]:
        assert embedding not in (relevance_artifact / package["path"]).read_bytes()


def test_an_unchanged_manifest_is_up_to_date(
    tiny_model: Path, build_cache: BuildCache, relevance_artifact: Path
) -> None:
    before = (relevance_artifact / "plan.json").stat().st_mtime_ns
    again = compile_manifest(MANIFEST, {"model": str(tiny_model)}, output=relevance_artifact, cache=build_cache)
    assert again.up_to_date
    assert (relevance_artifact / "plan.json").stat().st_mtime_ns == before


def test_the_second_compile_imports_no_torch(
    tiny_model: Path, relevance_artifact: Path, build_cache: BuildCache
) -> None:
    code = (
        "import sys; from pathlib import Path; from dagserve.compiler import compile_manifest;"
        "from dagserve.build.cache import BuildCache;"
        f"r = compile_manifest(Path({str(MANIFEST)!r}), {{'model': {str(tiny_model)!r}}},"
        f" output=Path({str(relevance_artifact)!r}), cache=BuildCache(Path({str(build_cache.root)!r})));"
        "print(r.up_to_date, 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["True", "False"]


def test_what_changes_is_built_and_packages_are_reused(
    tiny_model: Path, relevance_artifact: Path, build_cache: BuildCache, tmp_path: Path
) -> None:
    """New weights of the same structure, and a new template, reuse every package."""
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    reference = write_model(other, CONFIGS["llama-tied"])
    reference.model.norm.weight.data.mul_(2)
    reference.save_pretrained(other)
    stages: list[tuple[str, str]] = []
    manifest = edited(tmp_path, ("Sentiment:", "Mood:"))
    result = compile_manifest(
        manifest,
        {"model": str(other)},
        output=tmp_path / "a",
        cache=build_cache,
        progress=lambda task, stage, _: stages.append((task, stage)),
    )
    assert not result.up_to_date
    assert ("score.backbone", "cached") in stages
    request: dict[str, object] = {"query": "q", "items": ["a"]}
    with Engine.load(result.artifact) as engine, Engine.load(relevance_artifact) as old:
        assert json.loads(engine.run(request))["scores"] != json.loads(old.run(request))["scores"]


def test_a_changed_tokenizer_is_seen(tiny_model: Path, build_cache: BuildCache, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    output = tmp_path / "a"
    assert not compile_manifest(MANIFEST, {"model": str(model)}, output=output, cache=build_cache).up_to_date
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert not compile_manifest(MANIFEST, {"model": str(model)}, output=output, cache=build_cache).up_to_date


@pytest.mark.parametrize("moment", ["weights", "compile"])
def test_a_kill_in_the_middle_leaves_the_old_artifact(
    moment: str, tiny_model: Path, relevance_artifact: Path, tmp_path: Path
) -> None:
    output = tmp_path / "relevance.cpu"
    shutil.copytree(relevance_artifact, output)
    before = (output / "plan.json").read_bytes()
    manifest = edited(tmp_path, ("Sentiment:", "Mood:"))
    command = [sys.executable, "-m", "dagserve.cli", "compile", str(manifest), "--set", f"model={tiny_model}"]
    environment = {**os.environ, "DAGSERVE_CACHE": str(tmp_path / "empty-cache")}
    with (tmp_path / "log").open("w") as log:
        build = subprocess.Popen(
            [*command, "--output", str(output)],
            env=environment,
            stderr=log,
            start_new_session=True,
        )
        while f": {moment}" not in (tmp_path / "log").read_text():
            assert build.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        os.killpg(build.pid, signal.SIGKILL)
        build.wait()
    assert (output / "plan.json").read_bytes() == before
    with Engine.load(output) as engine:
        assert b'"scores"' in engine.run({"query": "q", "items": ["a"]})


def test_an_error_while_writing_leaves_the_old_directory(tmp_path: Path) -> None:
    target = tmp_path / "a"
    target.mkdir()
    (target / "x").write_text("old")

    def fail() -> None:
        with replacing(target) as scratch:
            (scratch / "x").write_text("new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (target / "x").read_text() == "old"
    with replacing(target) as scratch:
        (scratch / "x").write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (target / "x").read_text() == "new"


def test_a_leftover_of_a_killed_build_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".a.new-123"
    left.mkdir()
    with replacing(tmp_path / "a"):
        pass
    assert not left.exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "plan.json").unlink(), "dagserve compile"),
        (lambda root: (root / "plan.json").write_text("{"), "damaged"),
        (lambda root: (root / "plan.json").write_text('{"format": 9}'), "format"),
        (lambda root: (root / "weights.bin").write_bytes(b"x"), "weights.bin has 1 bytes"),
        (lambda root: (root / "packages/score.backbone/model.so").unlink(), "model.so is missing"),
        (lambda root: next((root / "tokenizers").glob("*.bin")).write_bytes(b"x"), "tokenizers"),
    ],
)
def test_a_damaged_artifact_is_refused(damage: object, message: str, relevance_artifact: Path, tmp_path: Path) -> None:
    root = tmp_path / "a"
    shutil.copytree(relevance_artifact, root)
    assert callable(damage)
    damage(root)
    with pytest.raises(ArtifactError, match=message):
        Engine.load(root)


def test_a_plan_that_does_not_fit_its_packages_is_refused(relevance_artifact: Path, tmp_path: Path) -> None:
    root = tmp_path / "a"
    shutil.copytree(relevance_artifact, root)
    plan = json.loads((root / "plan.json").read_text())
    del plan["packages"][0]["constants"]["layers.1.mlp.gate_up.weight"]
    (root / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(ArtifactError, match=r"layers\.1\.mlp\.gate_up\.weight"):
        Engine.load(root)


def test_an_artifact_of_another_machine_is_refused(relevance_artifact: Path) -> None:
    plan = read_plan(relevance_artifact)
    for what in ("torch", "isa"):
        other = {**plan, "fingerprint": {**plan["fingerprint"], what: "other"}}
        with pytest.raises(ArtifactError, match=f"built for {what} other"):
            check_fingerprint(other)


def test_an_unknown_operator_names_the_alternatives(tiny_model: Path, build_cache: BuildCache, tmp_path: Path) -> None:
    manifest = edited(tmp_path, ("{attention: torch}", "{attention: triton_packed_gqa}"))
    with pytest.raises(ManifestError, match="use torch"):
        compile_manifest(manifest, {"model": str(tiny_model)}, output=tmp_path / "a", cache=build_cache)


def test_a_length_over_the_models_is_refused(tiny_model: Path, build_cache: BuildCache, tmp_path: Path) -> None:
    manifest = edited(tmp_path, ("length: 512", "length: 513"))
    with pytest.raises(ManifestError, match="allows 513 tokens a text, its model 512"):
        compile_manifest(manifest, {"model": str(tiny_model)}, output=tmp_path / "a", cache=build_cache)


def test_a_label_of_several_tokens_is_refused(tiny_model: Path, build_cache: BuildCache, tmp_path: Path) -> None:
    manifest = edited(tmp_path, ('" negative"]', '" supercalifragilistic"]'))
    with pytest.raises(CheckpointError, match="supercalifragilistic"):
        compile_manifest(manifest, {"model": str(tiny_model)}, output=tmp_path / "a", cache=build_cache)
    assert not (tmp_path / "a").exists()


def test_weights_that_do_not_fit_are_all_listed(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"9 differences") as caught:
        compile_manifest(MANIFEST, {"model": str(model)}, output=tmp_path / "a", cache=BuildCache(tmp_path / "cache"))
    assert "missing: model.layers.2.mlp.up_proj.weight [96, 64]" in str(caught.value)


def test_comparison_with_eager_fails_when_it_should() -> None:
    good = [torch.ones(2, 2)]
    assert compare(good, good, 0.0, "x") == 0.0
    for bad in (torch.ones(2, 2) * 1.1, torch.ones(2, 3), torch.ones(2, 2).double(), torch.full((2, 2), torch.nan)):
        with pytest.raises(BuildError, match="x"):
            compare([bad], good, 1e-3, "x")


def test_shapes_of_the_checks() -> None:
    assert sizes_at("min", {"B": 9, "T": 2}) == {"B": 1, "T": 1}
    assert sizes_at("mid", {"B": 9, "T": 1}) == {"B": 5, "T": 1}
    assert sizes_at("max", {"B": 9, "T": 2}) == {"B": 9, "T": 2}


def test_options_that_do_not_fit_the_tokenizer_are_a_build_error(
    tiny_model: Path, build_cache: BuildCache, tmp_path: Path
) -> None:
    """What only compile can know about a node's options: an error with the node's name, and no artifact."""
    text = MANIFEST.read_text().replace("endpoint: score", "endpoint: rerank")
    begin, end = text.index("  encode:"), text.index("outputs: {response")
    encode = "  encode: {engine: cpu, op: encode_rerank, with: {column: 99}, inputs: {scores: score.scores}, "
    (tmp_path / "m.yaml").write_text(text[:begin] + encode + 'outputs: {body: "u8[body_bytes]"}}\n' + text[end:])
    with pytest.raises(BuildError, match="node `encode`: column 99 is out of range: there are at most 16 columns"):
        compile_manifest(
            tmp_path / "m.yaml", {"model": str(tiny_model)}, output=tmp_path / "artifact", cache=build_cache
        )
    assert not (tmp_path / "artifact").exists()


def test_the_documented_plan_is_one() -> None:
    """docs/plan.md's example, its comments taken out, satisfies the schema."""
    schema = json.loads((ROOT / "schemas" / "artifact.schema.json").read_text())
    found = re.search(r"```jsonc\n(.*?)```", (ROOT / "docs" / "plan.md").read_text(), re.DOTALL)
    assert found is not None
    jsonschema.validate(json.loads(re.sub(r"(^|\s)//.*$", "", found[1], flags=re.MULTILINE)), schema)


def test_another_device_is_refused(
    tmp_path: Path, relevance_artifact: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = edited(tmp_path, ("device: cpu", "device: cuda"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="target `cpu` is built on the GPU it is for, and here is none"):
        compile_manifest(manifest, {"model": str(tiny_model)}, output=tmp_path / "artifact")
    with pytest.raises(ArtifactError, match=r"device cuda.*dagserve run --reference"):
        check_fingerprint({**read_plan(relevance_artifact), "device": "cuda"})


def test_a_gpu_that_is_not_the_one_named_is_refused(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA L4, 8.9'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    manifest = edited(tmp_path, ("device: cpu", 'device: cuda\n    match: {name: H200, compute: "9.0"}'))
    with pytest.raises(BuildError, match=r"target `cpu` is for .*name H200.*; this machine has NVIDIA L4, compute 8.9"):
        compile_manifest(manifest, {"model": str(tiny_model)}, output=tmp_path / "artifact")


def test_verify_covers_every_file(tmp_path: Path, relevance_artifact: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(relevance_artifact, copy)
    assert verify_digests(copy) == len(read_plan(copy)["files"])
    with (copy / "weights.bin").open("r+b") as stream:
        stream.write(b"\xff")
    with pytest.raises(ArtifactError, match=r"weights\.bin"):
        verify_digests(copy)
