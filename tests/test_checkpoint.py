"""Model import against transformers' own files and faults in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from random_models import CONFIGS, write_model

from dagserve.build.weights import check_parameters, convert, make_module
from dagserve.checkpoint import Checkpoint, SourceTensor, open_checkpoint, resolve_source
from dagserve.checkpoint.base import bf16_to_f32, f32_to_bf16
from dagserve.errors import CheckpointError
from dagserve.interface import ParameterMapping
from dagserve.nodes.decoder import DecoderConfig, parameter_mapping
from dagserve.nodes.operators import REFERENCE


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path, CONFIGS["qwen2-untied"], shard="100KB")
    return tmp_path


def parameters(folder: Path) -> tuple[Checkpoint, ParameterMapping, dict[str, torch.nn.Parameter]]:
    checkpoint = open_checkpoint(folder)
    arguments = {"config": dict(checkpoint.config), "precision": "fp32", "operators": dict(REFERENCE)}
    modules = [make_module(f"dagserve.nodes.decoder:{name}", arguments) for name in ("Backbone", "SoftmaxHead")]
    return checkpoint, parameter_mapping(checkpoint.config), {n: p for m in modules for n, p in m.named_parameters()}


def test_sharded_files_give_every_tensor(tmp_path: Path) -> None:
    reference = write_model(tmp_path, CONFIGS["qwen3-tied-wide-heads"], shard="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tensors = open_checkpoint(tmp_path).tensors
    state = reference.state_dict()
    assert set(tensors) == set(state) - {"lm_head.weight"}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.read(), state[name].numpy())


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_of_every_family_is_mapped(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS[name])
    checkpoint, mapping, wanted = parameters(tmp_path)
    check_parameters(checkpoint, mapping, wanted)
    of_e4m3 = {p for p in mapping if p.endswith(".scale") or p.startswith("fp8_head")}
    assert set(mapping) - of_e4m3 == set(wanted)
    sources = [(s,) if isinstance(s, str) else s.sources for s in mapping.values()]
    assert {name for names in sources for name in names} == set(checkpoint.tensors)


def test_all_differences_are_listed(model: Path) -> None:
    checkpoint, mapping, wanted = parameters(model)
    tensors = dict(checkpoint.tensors)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = SourceTensor("f32", (3,), lambda: np.zeros(3, np.float32))
    tensors["model.layers.9.mlp.up_proj.weight"] = SourceTensor("f32", (1,), lambda: np.zeros(1, np.float32))
    with pytest.raises(CheckpointError) as caught:
        check_parameters(Checkpoint(model, checkpoint.config, tensors, None), mapping, wanted)
    text = str(caught.value)
    assert "3 differences" in text
    assert "missing: model.norm.weight [64]" in text
    assert "wrong shape: model.layers.0.self_attn.q_proj.bias is [3], the model needs [64]" in text
    assert "unexpected: model.layers.9.mlp.up_proj.weight [1]" in text


def test_a_tied_head_saved_anyway_is_ignored(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama-tied"])
    checkpoint, mapping, wanted = parameters(tmp_path)
    tensors = {**checkpoint.tensors, "lm_head.weight": checkpoint.tensors["model.embed_tokens.weight"]}
    check_parameters(Checkpoint(tmp_path, checkpoint.config, tensors, None), mapping, wanted)


def damage_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def test_a_missing_shard_is_named(model: Path) -> None:
    gone = sorted(model.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=gone.name):
        open_checkpoint(model)


def test_a_cut_file_is_refused(model: Path) -> None:
    path = sorted(model.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="cut off"):
        open_checkpoint(model)


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, b"\x10\0\0\0\0\0\0\0not json at all!"])
def test_a_file_that_is_no_safetensors_is_refused(model: Path, content: bytes) -> None:
    sorted(model.glob("*.safetensors"))[0].write_bytes(content)
    with pytest.raises(CheckpointError, match="safetensors"):
        open_checkpoint(model)


def test_a_directory_without_config_says_so(model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        open_checkpoint(model)


def test_a_directory_without_weights_says_so(model: Path) -> None:
    for path in model.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        open_checkpoint(model)


@pytest.mark.parametrize("spec", ["./nowhere", "/no/such/dir", "nowhere.gguf", "a b/c"])
def test_a_source_that_is_not_there_says_what_to_give(spec: str) -> None:
    with pytest.raises(CheckpointError, match="--set model=PATH"):
        resolve_source(spec)


def test_a_hub_id_out_of_reach_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="--set model=PATH"):
        resolve_source("no-such-org/no-such-model")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"not a model" * 10)
    with pytest.raises(CheckpointError, match="GGUF"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "llama, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
    ],
)
def test_features_that_are_not_there_are_refused_by_name(model: Path, change: dict[str, object], message: str) -> None:
    config = open_checkpoint(damage_config(model, **change)).config
    with pytest.raises(ValueError, match=message):
        DecoderConfig.of(config)


def test_bf16_rounds_as_torch_does() -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 100_000, dtype=np.uint32)
    values = bits.view(np.float32)
    ours = f32_to_bf16(values)
    theirs = torch.from_numpy(values).bfloat16()
    known = ~np.isnan(values)
    np.testing.assert_array_equal(ours[known], theirs.view(torch.int16).numpy().view(np.uint16)[known])
    assert np.isnan(bf16_to_f32(ours[~known])).all()
    np.testing.assert_array_equal(bf16_to_f32(ours[known]), theirs.float().numpy()[known])


@pytest.mark.parametrize(("stored", "wanted"), [("bf16", "f32"), ("bf16", "bf16"), ("f16", "bf16"), ("f32", "bf16")])
def test_stored_dtypes_are_converted_exactly(stored: str, wanted: str) -> None:
    torch_dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    values = torch.randn(50, generator=torch.Generator().manual_seed(0)).to(torch_dtypes[stored])
    raw = values.view(torch.int16).numpy().view(np.uint16) if stored == "bf16" else values.numpy()
    result = convert(SourceTensor(stored, (50,), lambda: raw), wanted)
    expected = values.to(torch_dtypes[wanted])
    expected_raw = expected.view(torch.int16).numpy().view(np.uint16) if wanted == "bf16" else expected.numpy()
    np.testing.assert_array_equal(result, expected_raw)


def test_gguf_matches_transformers(demo_model: Path) -> None:
    """Dequantised tensors, the undone q/k permutation included, and the configuration."""
    from transformers import AutoModelForCausalLM

    checkpoint = open_checkpoint(demo_model)
    loaded = AutoModelForCausalLM.from_pretrained(demo_model.parent, gguf_file=demo_model.name, dtype=torch.float32)
    state = loaded.state_dict()
    config = DecoderConfig.of(checkpoint.config)
    assert set(checkpoint.tensors) == set(state) - {"lm_head.weight"}
    assert (config.rope_theta, config.tied, config.head_dim) == (100000.0, True, 64)
    for part in ("layers.0.self_attn.q_proj", "layers.29.self_attn.k_proj", "norm"):
        name = f"model.{part}.weight"
        np.testing.assert_array_equal(checkpoint.tensors[name].read(), state[name].numpy())


def test_opening_leaves_the_directory_as_it_was(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy") / "m"
    shutil.copytree(model, copy)
    for tensor in open_checkpoint(model).tensors.values():
        tensor.read()
    for path in copy.iterdir():
        assert path.read_bytes() == (model / path.name).read_bytes()
