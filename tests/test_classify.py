"""Classification: an MLP head from a file against Torch, a sequence classification model against transformers, HTTP."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MANIFEST
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import SIZES, train_tokenizer
from safetensors.torch import save_file
from test_embed import TEXTS, compiled, expected
from test_server import serving
from tokenizers import Tokenizer
from tolerances import SCORES
from torch import nn
from transformers import AutoModelForSequenceClassification, Qwen3Config

from dagserve._native import CpuNode
from dagserve.build.cache import BuildCache
from dagserve.compiler import compile_manifest
from dagserve.engine import Engine
from dagserve.errors import CheckpointError
from dagserve.nodes.classify import head_layers
from dagserve.nodes.encode import EncodeClasses
from dagserve.runtime import ReferenceRuntime

CLASSIFY = MANIFEST.parent / "classify.yaml"


def head_of(*sizes: int) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())][:-1])


def test_a_head_over_the_pooled_hidden_state(tmp_path: Path, tiny_model: Path, build_cache: BuildCache) -> None:
    head = head_of(64, 24, 2)
    save_file(head.state_dict(), tmp_path / "head.safetensors")
    made = compiled(
        tmp_path, tiny_model, build_cache, CLASSIFY,
        ("models/head.safetensors", str(tmp_path / "head.safetensors")),
        ("labels: [positive, negative], pool", "labels: [positive, negative], activation: tanh, pool"),
    )  # fmt: skip
    with Engine.load(made) as engine, serving(engine) as client:
        reply = client.post("/classify", json={"input": TEXTS}, headers={"X-Request-Id": "r-1"})
        assert reply.status_code == 200, reply.text
        schema = client.get("/openapi.json").json()["paths"]["/classify"]
        assert engine.run({"texts": TEXTS}) == ReferenceRuntime(made).run({"texts": TEXTS})
    body = reply.json()
    assert body["id"] == "classify-r-1"
    assert body["created"] > 1_700_000_000
    assert "post" in schema
    for entry, text in zip(body["data"], TEXTS, strict=True):
        with torch.no_grad():
            wanted = head(torch.from_numpy(expected(tiny_model, text, "mean", 64))).softmax(dim=-1)
        assert entry["probs"] == pytest.approx(wanted.tolist(), abs=SCORES["fp32"] * 10)
        assert entry["label"] == ["positive", "negative"][int(wanted.argmax())]
        assert entry["num_classes"] == 2


def test_a_sequence_classification_model(tmp_path: Path, build_cache: BuildCache) -> None:
    """Its own ``score.weight`` and transformers' logits; a pad token is what makes transformers take the last one."""
    config = Qwen3Config(**{**SIZES, "head_dim": 32, "num_labels": 3, "pad_token_id": 0})
    torch.manual_seed(0)
    model: Any = AutoModelForSequenceClassification.from_config(config).eval()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    train_tokenizer().save(str(folder / "tokenizer.json"))
    labels = "labels: [a, b, c]"
    made = compiled(
        tmp_path, folder, build_cache, CLASSIFY,
        ('head: "${head}", labels: [positive, negative], pool: mean', f"{labels}, function: none"),
        ("labels: [positive, negative]", labels), ("f32[batch,2]", "f32[batch,3]"),
        ('  head: {default: models/head.safetensors, description: "linear layers over the pooled hidden state, '
         'as nn.Sequential saves them"}\n', ""),
    )  # fmt: skip
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with Engine.load(made) as engine:
        scores = engine.trace({"texts": TEXTS})["classify.scores"]
    for row, text in zip(scores, TEXTS, strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([tokenizer.encode(text).ids])).logits[0]
        assert row.tolist() == pytest.approx(wanted.tolist(), abs=1e-3)


BRANCHES = """
apiVersion: dagserve/v1
name: two-heads
bounds: {batch: 8, tokens: 512, length: 128}
variables: {model: {default: m, description: "the model"}}
inputs: {texts: {type: "text[batch]", max_bytes: 4096}}
nodes:
  tokenize:
    engine: cpu
    op: tokenize
    with: {tokenizer: "${model}", template: "{text}"}
    inputs: {text: texts}
    outputs: {tokens: "i64[tokens]", cu_seqlens: "i32[batch+1]"}
  embed:
    engine: aoti
    op: dagserve.nodes.prefill:Embed
    with: {checkpoint: "${model}", normalize: false, dimensions: 64}
    inputs: {tokens: tokenize.tokens, cu_seqlens: tokenize.cu_seqlens}
    outputs: {embeddings: "f32[batch,64]"}
  topic:
    engine: aoti
    op: dagserve.nodes.classify:ClassifyEmbeddings
    with: {head: TOPIC, dimensions: 64, labels: [a, b, c]}
    inputs: {embeddings: embed.embeddings}
    outputs: {scores: "f32[batch,3]"}
  tone:
    engine: aoti
    op: dagserve.nodes.classify:ClassifyEmbeddings
    with: {head: TONE, dimensions: 64, labels: [x, y], function: sigmoid}
    inputs: {embeddings: embed.embeddings}
    outputs: {scores: "f32[batch,2]"}
  encode:
    engine: cpu
    op: encode_tensors
    with: {tensors: {topic: "f32[B,3]", tone: "f32[B,2]"}}
    inputs: {topic: topic.scores, tone: tone.scores}
    outputs: {body: "u8[bytes]"}
outputs: {response: encode.body}
targets: {cpu: {concurrency: {runners: 1, contexts: 2, in_flight: 4}}}
admission: {max_queued: 4, max_wait_ms: 2000, deadline_ms: 10000}
"""


def test_two_heads_over_one_embedding(tmp_path: Path, tiny_model: Path, build_cache: BuildCache) -> None:
    heads = {"TOPIC": head_of(64, 3), "TONE": head_of(64, 16, 2)}
    text = BRANCHES
    for name, head in heads.items():
        save_file(head.state_dict(), tmp_path / f"{name}.safetensors")
        text = text.replace(name, str(tmp_path / f"{name}.safetensors"))
    (tmp_path / "m.yaml").write_text(text)
    made = compile_manifest(tmp_path / "m.yaml", {"model": str(tiny_model)}, output=tmp_path / "a", cache=build_cache)
    with Engine.load(made.artifact) as engine:
        assert engine.run({"texts": TEXTS}) == ReferenceRuntime(made.artifact).run({"texts": TEXTS})
        values = engine.trace({"texts": TEXTS})
    hidden = torch.tensor(values["embed.embeddings"])
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(values["topic.scores"]), heads["TOPIC"](hidden).softmax(dim=-1))
        first, second = heads["TONE"][0], heads["TONE"][2]
        wanted = second(torch.relu(first(hidden))).sigmoid()
        torch.testing.assert_close(torch.tensor(values["tone.scores"]), wanted)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"0.weight": (8, 63)}, r"0 has weight \[8, 63\] and bias \[\]; a linear layer over 64 numbers"),
        ({"0.weight": (8, 64), "1.weight": (8,)}, r"1 has weight \[8\]"),
        ({"0.weight": (8, 64), "0.bias": (7,)}, r"bias \[7\]"),
        ({"0.weight": (3, 64)}, "gives 3 numbers a text; 2 labels are named: make them agree"),
        ({"0.weight": (2, 64), "0.scale": (2,)}, "0.scale is no weight or bias of a linear layer"),
        ({"0.bias": (2,)}, r"0 has weight \[\] and bias \[2\]"),
    ],
)
def test_heads_that_do_not_fit(tensors: dict[str, tuple[int, ...]], message: str, tmp_path: Path) -> None:
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, tmp_path / "h.safetensors")
    with pytest.raises(CheckpointError, match=message):
        head_layers(str(tmp_path / "h.safetensors"), 64, 2)


def test_layers_come_in_natural_order(tmp_path: Path) -> None:
    tensors = {f"net.{i}.weight": torch.zeros(n, m) for i, (n, m) in {10: (2, 5), 9: (5, 6), 0: (6, 64)}.items()}
    save_file(tensors, tmp_path / "h.safetensors")
    assert [layer["name"] for layer in head_layers(str(tmp_path / "h.safetensors"), 64, 2)] == [
        "net.0",
        "net.9",
        "net.10",
    ]


def test_a_head_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no file .*none: give a \.safetensors file"):
        head_layers(str(tmp_path / "none"), 64, 2)


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.floats(width=32) | st.sampled_from([0.5, 0.5]), min_size=3, max_size=3), min_size=1, max_size=4
    ),
    request_id=st.none() | st.text(max_size=8),
    created=st.none() | st.integers(0, 2**40),
)
def test_both_encoders_write_the_same(rows: list[list[float]], request_id: str | None, created: int | None) -> None:
    config = {"labels": ['a"', "é", "c"], "model": "m\n"}
    inputs: dict[str, Any] = {
        "scores": np.array(rows, dtype=np.float32),
        "cu_seqlens": np.arange(len(rows) + 1, dtype=np.int32) * 7,
        "request_id": request_id,
        "created": None if created is None else np.array(created),
    }
    ports: list[Any] = [("scores", "f32", [4, 3], 48), ("cu_seqlens", "i32", [5], 20)]
    ports += [("request_id", "text", [], 64), ("created", "i64", [], 8)]
    native = CpuNode("encode_classes", config, ports, [("body", "u8", [4096], 4096)], ".")
    ours = native.run(inputs)["body"].tobytes()
    assert ours == EncodeClasses(config, Path()).run(inputs)["body"].tobytes()
    assert len(json.loads(ours)["data"]) == len(rows)
