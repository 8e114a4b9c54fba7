"""Bodies decoded natively: the same inputs as the readable decoder gives, and messages that name the field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagserve.build.cache import BuildCache
from dagserve.compiler import compile_manifest
from dagserve.endpoints import endpoint_of, fields_of
from dagserve.engine import Engine
from dagserve.errors import InvalidRequest, RequestError, UnknownModel
from dagserve.runtime import ReferenceRuntime
from dagserve.runtime.request import decode_body

GOOD: dict[str, Any] = {"query": "q", "items": ["a", "b"]}

ECHO = """
apiVersion: dagserve/v1
name: echo
bounds: {rows: 4}
inputs:
  whole: {type: "i32[rows]"}
  real: {type: "f32[rows]"}
  long: {type: "i64[rows]"}
nodes:
  encode:
    engine: cpu
    op: encode_tensors
    with: {tensors: {whole: "i32[rows]", real: "f32[rows]", long: "i64[rows]"}}
    inputs: {whole: whole, real: real, long: long}
    outputs: {body: "u8[bytes]"}
outputs: {response: encode.body}
targets: {cpu: {}}
"""


@pytest.fixture(scope="module")
def engine(relevance_artifact: Path) -> Iterator[Engine]:
    with Engine.load(relevance_artifact) as loaded:
        yield loaded


def outcome(run: Any, body: bytes) -> Any:
    """The reply, or the type of error."""
    try:
        return run(body)
    except RequestError as error:
        return type(error)


def refused(engine: Engine, body: bytes | str | dict[str, Any]) -> str:
    content = json.dumps(body) if isinstance(body, dict) else body
    with pytest.raises(InvalidRequest) as caught:
        engine.run_body(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    return str(caught.value)


def test_a_body_gives_what_its_inputs_give(engine: Engine) -> None:
    for extra in ({}, {"apply_softmax": True}, {"labels": ["a"]}, {"label_token_ids": [5, 6], "labels": None}):
        assert engine.run_body(json.dumps({**GOOD, **extra, "model": None}).encode()) == engine.run({**GOOD, **extra})


@pytest.mark.parametrize(
    "text", ["", "a", '\x00\x1f"\\/\b\f\n\r\t', "é", "日本語", "😀", "\ud7ff\ue000", "\U0010ffff", "x" * 100], ids=ascii
)
@pytest.mark.parametrize("escaped", [True, False])
def test_text_arrives_as_it_was_sent(text: str, escaped: bool, engine: Engine) -> None:
    body = json.dumps({"query": text, "items": [text, "b", text]}, ensure_ascii=escaped).encode()
    assert engine.run_body(body) == engine.run({"query": text, "items": [text, "b", text]})


CASES: list[tuple[bytes, str]] = [
    (b"", "the body is not valid JSON: it is empty"),
    (b"   ", "the body is not valid JSON: it is empty"),
    (b"[]", "the body must be a JSON object"),
    (b"3", "the body must be a JSON object"),
    (b"null", "the body must be a JSON object"),
    (b"[" * 5000, "the body must be a JSON object"),
    (b'{"query":"q","items":' + b"[" * 50000, "the body is not valid JSON"),
    (b'{"query":"q","items":' + b"[" * 9000 + b"]" * 9000 + b"}", "items[0] must be text"),
    (b'{"a":' * 5000 + b"1" + b"}" * 5000, "unknown field 'a'"),
    (b"{", "the body is not valid JSON"),
    (b'{"query":"q","items":["a"]', "the body is not valid JSON"),
    (b'{"query":"q","items":["a"]}x', "the body is not valid JSON"),
    (b'{"query":"q","items":["a"]}{}', "text follows the object"),
    (b'{"query":"q" "items":["a"]}', "the body is not valid JSON"),
    (b'{"query":"q","items":["a",]}', "items[1]"),
    (b'{"query":"q","items":["a" "b"]}', "items"),
    (b'{"query":"q","items":["a"],}', "not valid JSON"),
    (b'{"query":NaN,"items":["a"]}', "at or after query"),
    (b'{"query":"q","items":["a"],"label_token_ids":[Infinity]}', "label_token_ids[0]"),
    (b'{"query":"q","items":["a"],"label_token_ids":[1e999]}', "label_token_ids[0] must be an integer of type i64"),
    (b'{"query":"q","items":["a"],"label_token_ids":[1.0]}', "label_token_ids[0] must be an integer of type i64"),
    (b'{"query":"q","items":["a"],"label_token_ids":[9223372036854775808]}', "label_token_ids[0] must be an integer"),
    (b'{"query":"q","items":["a"],"label_token_ids":[true]}', "label_token_ids[0] must be an integer of type i64"),
    (b'{"query":"q","items":["a"],"label_token_ids":5}', "label_token_ids must be a list of integers"),
    (b'{"query":"q","items":["a","\\ud800"]}', "at items[1]: a string has a wrong escape or half of a surrogate pair"),
    (b'{"query":"\\udc00","items":["a"]}', "at or after query: a string has a wrong escape or half of a surrogate"),
    (b'{"query":"q","items":["a","\\x"]}', "items[1]"),
    (b'{"query":"q","items":["a","b","\xff"]}', "at byte 31, items[2]: the text is not UTF-8"),
    (b'{"query":"q","items":["\xed\xa0\x80"]}', "at byte 23, items[0]: the text is not UTF-8"),
    (b'{"query":"\xc3","items":["a"]}', "at byte 10, query: the text is not UTF-8"),
    (b'{"query":"q","items":["a\nb"]}', "at byte 24, items[0]: a control character is not escaped"),
    (b'{"query":"q","items":["a', "a string is not closed"),
    (b'{"query":"a","query":"b","items":["a"]}', "query is given twice; give it once"),
    (b'{"qu\\u0065ry":"a","query":"b","items":["a"]}', "query is given twice; give it once"),
    (b'{"query":"q","items":["a"],"apply_softmax":1}', "apply_softmax must be true or false"),
    (b'{"query":"q","items":["a"],"apply_softmax":truex}', "apply_softmax"),
    (b'{"query":"q","items":["a"],"apply_softmax":nul}', "apply_softmax"),
    (b'{"query":"q","items":["a"],"item_first":true}', "item_first must be false: the manifest's template fixes"),
    (b'{"query":"q","items":["a"],"item_first":0}', "item_first must be false"),
    (b'{"query":"q","items":["a"],"model":3}', "model must be text"),
    (b'{"query":"q","itemss":["a"]}', "unknown field 'itemss'; did you mean 'items'?"),
    (b'{"query":"q","\\n":["a"]}', "unknown field '\n'; remove it"),
    (b'{"query":"q","items":"a","zzzzzzzz":[{"a":[1,2,{"b":3}]}]}', "unknown field 'zzzzzzzz'; remove it"),
    (b'{"query":null,"items":["a"]}', "query must be text"),
    (b'{"query":"q","items":null}', "items must be a text or a list of texts"),
    (b'{"query":"q","items":5}', "items must be text; token ids are not taken"),
    (b'{"query":"q","items":["a"' + b',"a"' * 40 + b"]}", "items has 41 entries; it must have from 1 to 32"),
    (b'{"query":"' + b"x" * 9000 + b'","items":["a"]}', "query has more than 8192 bytes of text"),
    (b'{"query":"q","items":["' + b"x" * 70000 + b'"]}', "items has more than 65536 bytes of text"),
]


@pytest.mark.parametrize(("body", "message"), CASES, ids=range(len(CASES)))
def test_a_wrong_body_names_its_field(body: bytes, message: str, engine: Engine) -> None:
    assert message in refused(engine, body)
    assert outcome(lambda b: engine.run(decode_body(b, engine.plan, "score")), body) is InvalidRequest
    assert engine.run_body(json.dumps(GOOD).encode()) == engine.run(GOOD), "the next request is well"


def test_a_body_over_the_limit_is_refused(engine: Engine) -> None:
    assert "the body is larger than" in refused(engine, b" " * (engine.body_limit + 1))
    within = json.dumps(GOOD).encode()
    assert engine.run_body(within + b" " * (engine.body_limit - len(within))) == engine.run(GOOD)


def test_another_model_is_an_error_of_its_own(engine: Engine) -> None:
    with pytest.raises(UnknownModel, match="model 'other' is not served here; this is 'relevance'"):
        engine.run_body(json.dumps({**GOOD, "model": "other"}).encode())
    with pytest.raises(UnknownModel, match=f"model '{'日' * 13}' is not served here"):  # cut between characters
        engine.run_body(json.dumps({**GOOD, "model": "日" * 20}).encode())


def test_invalid_requests_are_counted_apart(engine: Engine) -> None:
    before = engine.stats()["counters"]
    refused(engine, b"{}")
    after = engine.stats()["counters"]
    assert after["invalid"] - before["invalid"] == 1
    assert after["failed"] == before["failed"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
EDITS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=3)
QUIET = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow)
BODIES = st.fixed_dictionaries(
    {"query": st.text(max_size=8) | JSON, "items": st.lists(st.text(max_size=6), max_size=4) | JSON},
    optional={
        "labels": st.lists(st.sampled_from(["a", "b", "zz"]), max_size=3) | JSON,
        "label_token_ids": st.lists(st.integers(0, 9), max_size=3) | JSON,
        "apply_softmax": st.booleans() | JSON,
        "item_first": st.just(False) | JSON,
        "model": st.just("relevance") | JSON,
    },
)


@settings(max_examples=400, deadline=None, suppress_health_check=QUIET)
@given(body=BODIES, escaped=st.booleans())
def test_native_and_readable_decoders_agree(body: dict[str, Any], escaped: bool, engine: Engine) -> None:
    content = json.dumps(body, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    expected = outcome(lambda b: engine.run(decode_body(b, engine.plan, "score")), content)
    assert outcome(engine.run_body, content) == expected


@settings(max_examples=600, deadline=None, suppress_health_check=QUIET)
@given(body=BODIES, edits=EDITS, cut=st.integers(0, 3))
def test_damaged_bodies_agree(body: dict[str, Any], edits: list[tuple[int, int]], cut: int, engine: Engine) -> None:
    content = bytearray(json.dumps(body).encode("utf-8", "surrogatepass"))
    for place, value in edits:
        content[place % len(content)] = value
    damaged = bytes(content[: len(content) - cut])
    expected = outcome(lambda b: engine.run(decode_body(b, engine.plan, "score")), damaged)
    assert outcome(engine.run_body, damaged) == expected


def test_run_takes_the_body_of_http(relevance_artifact: Path, engine: Engine) -> None:
    body = json.dumps({"query": "q", "items": "a", "model": "relevance", "item_first": False}).encode()
    assert ReferenceRuntime(relevance_artifact).run_body(body) == engine.run_body(body)
    assert endpoint_of(engine.plan) == "score"
    assert {f.path: f.kind for f in fields_of(engine.plan, "score")}["labels"] == "input"


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory, build_cache: BuildCache) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("echo")
    (folder / "echo.yaml").write_text(ECHO)
    artifact = compile_manifest(folder / "echo.yaml", output=folder / "echo", cache=build_cache).artifact
    with Engine.load(artifact) as loaded:
        yield loaded


NUMBERS: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"whole": [2**31 - 1, -(2**31)], "real": [1e38, -0.0], "long": [2**63 - 1, -(2**63)]}, None),
    ({"real": [1, 2.5]}, None),
    ({"whole": [2**31, 0]}, "whole[0] must be an integer of type i32"),
    ({"whole": [0, -(2**31) - 1]}, "whole[1] must be an integer of type i32"),
    ({"long": [0, 2**63]}, "long[1] must be an integer of type i64"),
    ({"long": [0, 2**64]}, "long[1] must be an integer of type i64"),
    ({"real": [0, 1e39]}, "real[1] must be a number that fits 32 bits"),
    ({"real": [0, 10**400]}, "real[1]"),
    ({"real": ["1", 2]}, "real[0] must be a number"),
    ({"real": [True, 2]}, "real[0] must be a number"),
    ({"whole": [[1], 2]}, "whole[0] must be an integer"),
    ({"whole": [1, 2, 3]}, "rows"),
    ({"whole": 5}, "whole must be a list of integers"),
    ({"whole": None}, "whole must be a list of integers"),
    ({"extra": 5}, "unknown field 'extra'"),
]


@pytest.mark.parametrize(("change", "message"), NUMBERS, ids=range(len(NUMBERS)))
def test_numbers_keep_their_value_or_are_refused(change: dict[str, Any], message: str | None, echo: Engine) -> None:
    """Without an endpoint the fields are the graph's inputs."""
    request = {"whole": [1, 2], "real": [0.1, 0.2], "long": [3, 4], **change}
    if message is not None:
        assert message in refused(echo, request)
        return
    outputs = {o["name"]: o["data"] for o in json.loads(echo.run_body(json.dumps(request).encode()))["outputs"]}
    assert outputs["whole"] == request["whole"]
    assert outputs["long"] == request["long"]
    assert np.array_equal(np.float32(outputs["real"]), np.float32(request["real"]))
