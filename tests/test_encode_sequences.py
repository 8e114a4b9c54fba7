"""The ``encode_sequences`` node: tokens as JSON, natively, by the reference and by the library's decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_tokenizer import trained
from test_tokenizer_parts import PARTS, document_of
from tokenizers import Tokenizer

from dagserve._native import CpuNode
from dagserve.errors import InternalError
from dagserve.nodes.encode_sequences import STYLES, EncodeSequences
from dagserve.tokenizer import write_tables

P, R, N = 3, 5, 4
SHAPES: dict[str, tuple[str, list[int]]] = {
    "tokens": ("i64", [P, R, N]),
    "lengths": ("i32", [P, R]),
    "scores": ("f32", [P, R]),
    "counts": ("i32", [P]),
    "cu_seqlens": ("i32", [P + 1]),
    "step_scores": ("f32", [P, R, N]),
    "cumulative": ("f32", [P, R]),
    "finished": ("bool", [P, R]),
    "return_tokens": ("bool", []),
    "return_scores": ("bool", []),
    "request_id": ("text", []),
    "created": ("i64", []),
}
WIDTH = {"i64": 8, "i32": 4, "f32": 4, "bool": 1}
FALLBACK = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
DOCUMENTS = {
    "byte level": trained(digits=False),
    "byte fallback": document_of({**PARTS["byte fallback"], "decoder": FALLBACK}),
}


class Pair:
    """The native node and its readable form over one tokenizer."""

    def __init__(self, folder: Path, document: bytes | str, style: str, size: int = 1 << 16) -> None:
        content = document.encode() if isinstance(document, str) else document
        (folder / "t.json").write_bytes(content)
        write_tables(content, folder / "t.bin")
        config = {"tables": "t.bin", "tokenizer": "t.json", "style": style, "model": 'mo"del\n'}
        ports = [
            (name, dtype, shape, 4096 if dtype == "text" else WIDTH[dtype] * int(np.prod(shape, dtype=int)))
            for name, (dtype, shape) in SHAPES.items()
        ]
        self.native = CpuNode("encode_sequences", config, ports, [("body", "u8", [size], size)], str(folder))
        self.reference = EncodeSequences(config, folder)
        self.library = Tokenizer.from_str(content.decode())

    def run(self, inputs: dict[str, Any]) -> bytes:
        body = bytes(self.native.run(inputs)["body"])
        assert body == self.reference.run(inputs)["body"].tobytes()
        return body


def inputs_of(seed: int, vocabulary: int, **changes: Any) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    prompts, width, steps = random.integers(1, P + 1), random.integers(1, R + 1), random.integers(1, N + 1)
    scores = random.standard_normal((3, prompts, width, steps)).astype(np.float32)
    return {
        "tokens": random.integers(0, vocabulary, (prompts, width, steps)),
        "lengths": random.integers(0, steps + 1, (prompts, width)).astype(np.int32),
        "scores": np.where(random.random((prompts, width)) < 0.1, -np.inf, scores[0, :, :, 0]).astype(np.float32),
        "counts": random.integers(0, width + 1, prompts).astype(np.int32),
        "cu_seqlens": np.concatenate([[0], random.integers(1, 9, prompts).cumsum()]).astype(np.int32),
        "step_scores": scores[1],
        "cumulative": scores[2, :, :, 0].copy(),
        "finished": random.random((prompts, width)) < 0.5,
        "return_tokens": bool(random.integers(2)),
        "return_scores": bool(random.integers(2)),
        "request_id": 'a"\\\x01é',
        "created": 1_700_000_000,
        **changes,
    }


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_native_and_reference_agree_and_text_is_the_librarys(name: str, style: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, DOCUMENTS[name], style)
    vocabulary = pair.library.get_vocab_size()
    for seed in range(150):
        inputs = inputs_of(seed, vocabulary + 5)  # a model may have more rows than its tokenizer has tokens
        if seed % 3 == 0:
            for absent in ("step_scores", "cumulative", "finished", "request_id", "created", "return_tokens"):
                inputs.pop(absent)
        reply = json.loads(pair.run(inputs))
        rows = [
            inputs["tokens"][p, i, : inputs["lengths"][p, i]].tolist()
            for p in range(len(inputs["counts"]))
            for i in range(inputs["counts"][p])
        ]
        assert texts_of(reply, style) == [pair.library.decode(row) for row in rows]


def texts_of(reply: Any, style: str) -> list[str]:
    if style == "results":
        return [s["text"] for result in reply["results"] for s in result["sequences"]]
    if style == "completions":
        return [choice["text"] for choice in reply["choices"]]
    replies = reply if isinstance(reply, list) else [reply]
    return [s["text"] for one in replies for s in one["meta_info"]["beam_results"]]


SMALL: dict[str, Any] = {
    "tokens": np.array([[[5, 6, 7], [8, 9, 0]]]),
    "lengths": np.array([[3, 2]], dtype=np.int32),
    "scores": np.array([[-0.5, -np.inf]], dtype=np.float32),
    "counts": np.array([2], dtype=np.int32),
    "cu_seqlens": np.array([0, 4], dtype=np.int32),
    "step_scores": np.array([[[-0.1, -0.2, -0.3], [-1, -2, 0]]], dtype=np.float32),
    "cumulative": np.array([[-0.6, -3]], dtype=np.float32),
    "finished": np.array([[True, False]]),
}


def test_the_documented_replies(tmp_path: Path) -> None:
    both = {**SMALL, "return_tokens": True, "return_scores": True}
    reply = json.loads(Pair(tmp_path, DOCUMENTS["byte level"], "results").run(both))
    first, second = reply["results"][0]["sequences"]
    assert reply["usage"] == {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}
    assert (reply["object"], reply["model"], reply["results"][0]["found"]) == ("generation", 'mo"del\n', 2)
    assert (first["tokens"], first["score"], first["cumulative"]) == ([5, 6, 7], -0.5, -0.6)
    assert (second["tokens"], second["score"], second["step_scores"]) == ([8, 9], None, [-1, -2])
    reply = json.loads(Pair(tmp_path, DOCUMENTS["byte level"], "completions").run({**SMALL, "request_id": "x"}))
    assert (reply["id"], reply["object"], reply["created"]) == ("cmpl-x", "text_completion", 0)
    assert [c["finish_reason"] for c in reply["choices"]] == ["stop", "length"]
    reply = json.loads(Pair(tmp_path, DOCUMENTS["byte level"], "beams").run(SMALL))
    assert reply["text"] == reply["meta_info"]["beam_results"][0]["text"]
    assert [b["beam_score"] for b in reply["meta_info"]["beam_results"]] == [-0.5, None]


@pytest.mark.parametrize(
    ("port", "place", "value"),
    [
        ("counts", 0, -1),
        ("counts", 0, 3),
        ("lengths", (0, 0), -1),
        ("lengths", (0, 1), 4),
        ("tokens", (0, 0, 0), -1),
        ("tokens", (0, 1, 0), -(2**62)),
    ],
)
def test_what_is_out_of_range_is_an_error(port: str, place: Any, value: int, tmp_path: Path) -> None:
    pair = Pair(tmp_path, DOCUMENTS["byte level"], "results")
    inputs = {**SMALL, port: SMALL[port].copy()}
    inputs[port][place] = value
    for node in (pair.native, pair.reference):
        with pytest.raises(InternalError, match="prompt 0 has a count, length or token out of range"):
            node.run(inputs)


@pytest.mark.parametrize("style", STYLES)
def test_a_reply_over_its_bound_is_an_error_and_nothing_is_written_behind_it(style: str, tmp_path: Path) -> None:
    size = len(Pair(tmp_path, DOCUMENTS["byte level"], style).run(SMALL))
    assert len(Pair(tmp_path, DOCUMENTS["byte level"], style, size).run(SMALL)) == size
    for room in (1, size // 2, size - 1):
        with pytest.raises(InternalError, match="raise bytes_per_token"):
            Pair(tmp_path, DOCUMENTS["byte level"], style, room).native.run(SMALL)
