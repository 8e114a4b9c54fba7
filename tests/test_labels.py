"""The ``resolve_labels`` node: native and reference give the same ids and the same messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagserve._native import CpuNode
from dagserve.errors import InvalidRequest
from dagserve.nodes.labels import ResolveLabels
from dagserve.tokenizer import write_tables
from dagserve.tokenizer.vocabulary import byte_alphabet

CONFIG = {"tables": "t.bin", "tokenizer": "t.json", "default_ids": [258, 7], "vocab_size": 260}
BOUND = 4

Run = Callable[[Mapping[str, Any]], Mapping[str, Any]]

ONE_TOKEN = "a label must be exactly one token (most words need a leading space)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte vocabulary (ids 1-256) with two merges and one special token."""
    vocab = {"<s>": 0, **{c: 1 + byte for byte, c in enumerate(byte_alphabet())}, "Ġy": 257, "Ġye": 258, "no": 259}
    vocab.pop(byte_alphabet()[0x80])
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    document = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "<s>", "special": True, "normalized": False, **flags}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": vocab, "merges": ["Ġ y", "Ġy e", "n o"]},
    }
    (tmp_path / "t.json").write_text(json.dumps(document))
    write_tables((tmp_path / "t.json").read_bytes(), tmp_path / "t.bin")
    return tmp_path


def native_node(folder: Path, **changes: Any) -> Any:
    ports = [("labels", "text", [BOUND], 64), ("label_token_ids", "i64", [BOUND], 8 * BOUND)]
    outputs = [("label_ids", "i64", [BOUND], 8 * BOUND)]
    return CpuNode("resolve_labels", {**CONFIG, **changes}, ports, outputs, str(folder))


@pytest.fixture(params=["native", "reference"])
def run(request: pytest.FixtureRequest, folder: Path) -> Run:
    if request.param == "native":
        found: Run = native_node(folder).run
        return found
    return ResolveLabels(CONFIG, folder).run


@pytest.mark.parametrize(
    ("inputs", "ids"),
    [
        ({}, [258, 7]),
        ({"labels": None, "label_token_ids": None}, [258, 7]),
        ({"labels": [" ye", "no", "a"]}, [258, 259, 98]),
        ({"labels": [b" y"]}, [257]),
        ({"labels": ["no", "no"]}, [259, 259]),
        ({"labels": ["a"] * BOUND}, [98] * BOUND),
        ({"label_token_ids": [0, 259, 5]}, [0, 259, 5]),
    ],
)
def test_labels_become_ids(run: Run, inputs: Mapping[str, Any], ids: list[int]) -> None:
    label_ids = run(inputs)["label_ids"]
    assert label_ids.dtype == np.int64
    assert label_ids.tolist() == ids


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"labels": ["a"], "label_token_ids": [1]}, "labels and label_token_ids are both given; give one"),
        ({"labels": []}, "labels is empty; give at least one, or leave it out"),
        ({"label_token_ids": []}, "label_token_ids is empty; give at least one, or leave it out"),
        ({"labels": ["a", "ab"]}, f"labels[1] is 2 tokens; {ONE_TOKEN}"),
        ({"labels": [""]}, f"labels[0] is 0 tokens; {ONE_TOKEN}"),
        ({"labels": ["<s>"]}, f"labels[0] is 3 tokens; {ONE_TOKEN}"),
        ({"labels": [" ye", "x" * 60]}, f"labels[1] is 60 tokens; {ONE_TOKEN}"),
        ({"labels": ["ab", b"a\xff"]}, "labels[1] is not valid UTF-8 at byte 1; send UTF-8 text"),
        ({"label_token_ids": [1, -1]}, "label_token_ids[1] is -1, outside the vocabulary; use 0 to 259"),
        ({"label_token_ids": [260]}, "label_token_ids[0] is 260, outside the vocabulary; use 0 to 259"),
        ({"label_token_ids": [-(2**63)]}, f"label_token_ids[0] is {-(2**63)}, outside the vocabulary; use 0 to 259"),
    ],
)
def test_mistakes_are_named(run: Run, inputs: Mapping[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        run(inputs)
    assert str(error.value) == f"[resolve_labels] {message}"


def test_a_dropped_byte_leaves_one_token(run: Run) -> None:
    """U+0400 is the bytes D0 80; the vocabulary lacks 80, so Hugging Face keeps one token."""
    assert run({"labels": ["\u0400"]})["label_ids"].tolist() == [1 + 0xD0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"default_ids": [260]}, "default_ids are out of range"),
        ({"default_ids": [-1]}, "default_ids are out of range"),
        ({"default_ids": [1] * (BOUND + 1)}, "more default labels than the bound of label_ids"),
        ({"vocab_size": "many"}, "node option 'vocab_size' is missing or of another type"),
    ],
)
def test_wrong_options_fail_at_load(folder: Path, changes: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native_node(folder, **changes)
