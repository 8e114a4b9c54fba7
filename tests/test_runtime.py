"""The native runtime against the Python artifact runtime and transformers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tolerances import SCORES
from transformers import AutoModelForCausalLM

from dagserve.build.cache import BuildCache
from dagserve.compiler import compile_manifest
from dagserve.engine import Engine
from dagserve.errors import InvalidRequest, RequestError
from dagserve.runtime import ReferenceRuntime

WORDS = ["cat", "good", "bad", "film", "日本語", "é́", "🎉", "\n\n", "  ", "<|end|>", "0123", "don't", "\x00", "x" * 30]


@pytest.fixture(scope="module")
def engine(relevance_artifact: Path) -> Iterator[Engine]:
    with Engine.load(relevance_artifact) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def reference(relevance_artifact: Path) -> ReferenceRuntime:
    return ReferenceRuntime(relevance_artifact)


def random_request(source: random.Random) -> dict[str, object]:
    def text(most: int) -> str:
        return " ".join(source.choice(WORDS) for _ in range(source.randint(0, most)))

    request: dict[str, object] = {"query": text(5), "items": [text(12) for _ in range(source.randint(1, 32))]}
    if source.random() < 0.5:
        request["apply_softmax"] = source.random() < 0.5
    kind = source.randrange(3)
    if kind == 0:
        request["label_token_ids"] = [source.randrange(300) for _ in range(source.randint(1, 16))]
    elif kind == 1:
        request["labels"] = source.choices([" positive", " negative", "a", "b"], k=source.randint(1, 16))
    return request


def plain(value: Any) -> Any:
    """A traced value as bytes, whichever runtime it is from."""
    if isinstance(value, np.ndarray | np.generic):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, list):
        return [plain(v) for v in value]
    return value.encode() if isinstance(value, str) else value


@pytest.mark.parametrize("seed", range(25))
def test_every_tensor_is_byte_identical_to_the_python_runtime(
    seed: int, engine: Engine, reference: ReferenceRuntime
) -> None:
    request = random_request(random.Random(seed))
    native, readable = engine.trace(request), reference.trace(request)
    assert native.keys() == readable.keys()
    for name in native:
        assert plain(native[name]) == plain(readable[name]), name
    assert engine.run(request) == reference.run(request)


BAD: list[dict[str, object]] = [
    {},
    {"query": "q"},
    {"query": "q", "items": []},
    {"query": "q", "items": ["x"] * 33},
    {"query": "q", "items": "not a list"},
    {"query": 3, "items": ["x"]},
    {"query": None, "items": ["x"]},
    {"query": "q", "items": ["x", 3]},
    {"query": "q", "items": ["x"], "unknown": 1},
    {"query": "q" * 9000, "items": ["x"]},
    {"query": "q", "items": ["y" * 40000] * 2},
    {"query": "q", "items": ["a b " * 400]},
    {"query": "q", "items": ["a b " * 60] * 32},
    {"query": "q", "items": ["fine", "\ud800 lone"]},
    {"query": b"\xff", "items": ["x"]},
    {"query": "q", "items": ["x"], "apply_softmax": 1},
    {"query": "q", "items": ["x"], "apply_softmax": "true"},
    {"query": "q", "items": ["x"], "label_token_ids": []},
    {"query": "q", "items": ["x"], "label_token_ids": [1] * 17},
    {"query": "q", "items": ["x"], "label_token_ids": [-1]},
    {"query": "q", "items": ["x"], "label_token_ids": [512]},
    {"query": "q", "items": ["x"], "label_token_ids": [2**63]},
    {"query": "q", "items": ["x"], "label_token_ids": [1.5]},
    {"query": "q", "items": ["x"], "label_token_ids": [True]},
    {"query": "q", "items": ["x"], "label_token_ids": [1], "labels": [" positive"]},
    {"query": "q", "items": ["x"], "labels": ["two tokens"]},
    {"query": "q", "items": ["x"], "labels": ["<|end|>"]},
    {"query": "q", "items": ["x"], "labels": [""]},
]


@pytest.mark.parametrize("request_", BAD, ids=range(len(BAD)))
def test_both_runtimes_refuse_a_bad_request_alike(
    request_: dict[str, object], engine: Engine, reference: ReferenceRuntime
) -> None:
    messages = []
    for run in (engine.run, reference.run):
        with pytest.raises(InvalidRequest) as caught:
            run(request_)
        messages.append((str(caught.value), caught.value.node))
    assert messages[0] == messages[1]
    assert len(messages[0][0]) > 10


ANY = st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.lists(st.text(max_size=9) | st.integers())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(["query", "items", "labels", "label_token_ids", "apply_softmax", "z"]), ANY))
def test_any_request_is_answered_or_refused(
    engine: Engine, reference: ReferenceRuntime, values: dict[str, object]
) -> None:
    outcomes = []
    for run in (engine.run, reference.run):
        try:
            outcomes.append(run(values))
        except InvalidRequest as error:
            outcomes.append(str(error).encode())
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("softmax", [True, False])
def test_scores_match_transformers(softmax: bool, engine: Engine, tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    items = ["a good film", "", "bad " * 40, "日本語", "x"]
    labels = [tokenizer.encode(t).ids[0] for t in (" positive", " negative")]
    reply = json.loads(engine.run({"query": "Is it?", "items": items, "apply_softmax": softmax}))
    for item, row in zip(items, reply["scores"], strict=True):
        ids = tokenizer.encode(f"Is it?\n\nReview: {item}\nSentiment:").ids
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        expected = logits[labels].softmax(0) if softmax else logits.softmax(0)[labels]
        assert max(abs(a - b) for a, b in zip(row, expected.tolist(), strict=True)) < SCORES["fp32"]
    total = sum(len(tokenizer.encode(f"Is it?\n\nReview: {item}\nSentiment:").ids) for item in items)
    assert reply["usage"] == {"prompt_tokens": total, "completion_tokens": 0, "total_tokens": total}


def test_a_batch_equals_its_singles(engine: Engine) -> None:
    items = [f"text {i} " * (i % 9 + 1) for i in range(32)]
    whole = json.loads(engine.run({"query": "q", "items": items}))["scores"]
    singles = [json.loads(engine.run({"query": "q", "items": [item]}))["scores"][0] for item in items]
    np.testing.assert_allclose(whole, singles, atol=SCORES["fp32"], rtol=0)


def test_labels_and_ids_are_the_same(engine: Engine, tiny_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    ids = [tokenizer.encode(t).ids[0] for t in (" negative", "a", " positive")]
    by_text = engine.run({"query": "q", "items": ["x"], "labels": [" negative", "a", " positive"]})
    assert by_text == engine.run({"query": "q", "items": ["x"], "label_token_ids": ids})
    assert by_text != engine.run({"query": "q", "items": ["x"]})


def test_many_threads_get_their_own_answers(engine: Engine, reference: ReferenceRuntime) -> None:
    requests = [random_request(random.Random(1000 + i)) for i in range(24)]
    expected = [reference.run(r) for r in requests]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(4):
            assert list(pool.map(engine.run, requests)) == expected


def test_the_bounds_themselves_are_served(engine: Engine) -> None:
    """32 rows, 4,096 tokens in all, and one row of 512 tokens: the largest shapes, exactly."""
    overhead = json.loads(engine.run({"query": "", "items": [""]}))["usage"]["prompt_tokens"]
    longest = engine.run({"query": "", "items": ["\x01" * (512 - overhead)]})
    assert json.loads(longest)["usage"]["prompt_tokens"] == 512
    with pytest.raises(InvalidRequest, match="512"):
        engine.run({"query": "", "items": ["\x01" * (513 - overhead)]})
    full = engine.run({"query": "", "items": ["\x01" * (128 - overhead)] * 32})
    assert json.loads(full)["usage"]["prompt_tokens"] == 4096
    assert len(json.loads(full)["scores"]) == 32


def test_an_error_does_not_spoil_the_next_request(engine: Engine) -> None:
    good: dict[str, object] = {"query": "q", "items": ["a", "b"]}
    before = engine.run(good)
    for bad in BAD:
        with pytest.raises(RequestError):
            engine.run(bad)
    assert engine.run(good) == before


def test_a_request_uses_one_thread_whatever_the_process_set(relevance_artifact: Path) -> None:
    """A second OpenMP thread would split sums otherwise, so that bytes would depend on the process."""

    def threads_started(torch_threads: int) -> int:
        code = (
            "import os, pathlib, torch\n"
            "from dagserve.engine import Engine\n"
            "tasks = lambda: len(os.listdir('/proc/self/task'))\n"
            f"torch.set_num_threads({torch_threads})\n"
            "before = tasks()\n"
            f"with Engine.load(pathlib.Path({str(relevance_artifact)!r})) as e:\n"
            "    for _ in range(8): e.run({'query': 'q' * 40, 'items': ['x' * 30] * 30})\n"
            "    print(tasks() - before)\n"
        )
        return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    assert threads_started(1) == threads_started(4)


def test_nodes_and_kernels_are_not_needed_to_serve(relevance_artifact: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "class Gone:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.startswith(('dagserve.nodes', 'dagserve.kernels')): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Gone())\n"
        "from dagserve.engine import Engine\n"
        f"with Engine.load(pathlib.Path({str(relevance_artifact)!r})) as e:\n"
        "    print(e.run({'query': 'q', 'items': ['x']}).decode()[:10], 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ['{"scores":', "False"]


def test_truncated_and_separate_parts_through_both_runtimes(
    tiny_model: Path, build_cache: BuildCache, tmp_path: Path
) -> None:
    """Fields cut and encoded on their own: the reply counts what is gone, the same in both runtimes and in
    transformers."""
    with_cut = 'truncate: {item: {side: right, max_tokens: 5}}, tokenization: separate, template: "'
    text = (Path(__file__).parent.parent / "manifests" / "relevance.yaml").read_text()
    text = text.replace('template: "', with_cut)
    text = text.replace('cu_seqlens: "i32[batch+1]"}', 'cu_seqlens: "i32[batch+1]", truncated: "i32[batch]"}')
    text = text.replace(
        "cu_seqlens: tokenize.cu_seqlens}\n    outputs: {body",
        "cu_seqlens: tokenize.cu_seqlens, truncated: tokenize.truncated}\n    outputs: {body",
    )
    (tmp_path / "m.yaml").write_text(text)
    made = compile_manifest(
        tmp_path / "m.yaml", {"model": str(tiny_model)}, output=tmp_path / "artifact", cache=build_cache
    )
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    request: dict[str, object] = {"query": "good film", "items": ["a", "bad bad bad cat 日本語 0123"]}
    count = len(tokenizer.encode("bad bad bad cat 日本語 0123", add_special_tokens=False).ids)
    with Engine.load(made.artifact) as engine:
        reply = engine.run(request)
        assert reply == ReferenceRuntime(made.artifact).run(request)
        rows = engine.trace(request)["tokenize.tokens"]
    assert 0 < count - 5 <= json.loads(reply)["usage"]["truncated_tokens"] <= count - 2
    query = tokenizer.encode("good film", add_special_tokens=False).ids
    assert rows[: len(query)].tolist() == query


@pytest.mark.parametrize(
    ("node", "inputs"),
    [
        ("op: encode_rerank, with: {column: 1}", "{scores: score.scores}"),
        (
            'op: encode_tensors, with: {tensors: {scores: "f32[batch,labels]", ids: "i64[labels]"}}',
            "{scores: score.scores, ids: resolve_labels.label_ids}",
        ),
    ],
)
def test_other_replies_through_both_runtimes(
    node: str, inputs: str, tiny_model: Path, build_cache: BuildCache, tmp_path: Path
) -> None:
    text = (Path(__file__).parent.parent / "manifests" / "relevance.yaml").read_text()
    text = text.replace("endpoint: score", "endpoint: rerank") if "rerank" in node else text
    begin, end = text.index("  encode:"), text.index("outputs: {response")
    encode = f'  encode: {{engine: cpu, {node}, inputs: {inputs}, outputs: {{body: "u8[body_bytes]"}}}}\n'
    (tmp_path / "m.yaml").write_text(text[:begin] + encode + text[end:])
    made = compile_manifest(
        tmp_path / "m.yaml", {"model": str(tiny_model)}, output=tmp_path / "artifact", cache=build_cache
    )
    request: dict[str, object] = {"query": "good", "items": ["a", "bad film", "cat"], "apply_softmax": True}
    with Engine.load(made.artifact) as engine:
        body = engine.run(request)
        scores = engine.trace(request)["score.scores"]
    assert body == ReferenceRuntime(made.artifact).run(request)
    reply = json.loads(body)
    if "rerank" in node:
        assert [entry["index"] for entry in reply] == np.argsort(-scores[:, 1], kind="stable").tolist()
    else:
        assert np.array_equal(np.float32(reply["outputs"][0]["data"]), scores.ravel())
