"""The ``encode_scores`` node: the reply's bytes, natively and by the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagserve._native import CpuNode
from dagserve.errors import InternalError, InvalidRequest
from dagserve.interface import Interface
from dagserve.nodes.encode import EncodeRerank, EncodeScores, EncodeTensors

MODELS = ("relevance", "", 'a"b\\c/d', "tab\tnew\nline\r\b\f\x00\x1f\x7f", "modèle 😀 \u2028")
ANY_FLOAT = st.integers(0, 2**32 - 1)


def native_node(model: str = "relevance", size: int = 1 << 20) -> Any:
    inputs = [("scores", "f32", [4096, 64], 1 << 20), ("cu_seqlens", "i32", [4097], 4 * 4097)]
    return CpuNode("encode_scores", {"model": model}, inputs, [("body", "u8", [size], size)], "")


def native(scores: npt.NDArray[np.float32], tokens: int = 12, **options: Any) -> bytes:
    return bytes(native_node(**options).run(inputs_of(scores, tokens))["body"])


def reference(scores: npt.NDArray[np.float32], tokens: int = 12, model: str = "relevance") -> bytes:
    return EncodeScores({"model": model}, Path()).run(inputs_of(scores, tokens))["body"].tobytes()


def inputs_of(scores: npt.NDArray[np.float32], tokens: int) -> dict[str, Any]:
    starts = np.arange(len(scores) + 1) if len(scores) else np.zeros(1)
    starts[-1] = tokens
    return {"scores": scores, "cu_seqlens": starts.astype(np.int32)}


def planned(interface: Interface, **sizes: int) -> int:
    """Bytes of the body at these sizes of the definition's symbols."""
    bound = interface.bounds["J"]
    return bound(sizes) if callable(bound) else bound


def test_the_documented_reply() -> None:
    expected = (
        b'{"scores":[[0.1,0.2]],"model":"relevance",'
        b'"usage":{"prompt_tokens":12,"completion_tokens":0,"total_tokens":12},"object":"scoring"}'
    )
    scores = np.array([[0.1, 0.2]], dtype=np.float32)
    assert native(scores) == expected
    assert reference(scores) == expected


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (1, 16), (32, 1), (0, 2)])
def test_native_equals_reference_and_is_json(model: str, shape: tuple[int, int]) -> None:
    scores = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    body = native(scores, 2**31 - 1, model=model)
    assert body == reference(scores, 2**31 - 1, model)
    reply = json.loads(body)
    assert reply["model"] == model
    assert reply["usage"] == {"prompt_tokens": 2**31 - 1, "completion_tokens": 0, "total_tokens": 2**31 - 1}
    assert np.array_equal(np.array(reply["scores"], dtype=np.float32).reshape(shape), scores)


def check_numbers(scores: npt.NDArray[np.float32]) -> None:
    body = native(scores)
    assert body == reference(scores)
    read = [
        np.float32(v) if v is not None else None for row in json.loads(body, parse_int=float)["scores"] for v in row
    ]
    for value, text in zip(scores.ravel(), read, strict=True):
        same = text is None if not np.isfinite(value) else text is not None and text.tobytes() == value.tobytes()
        assert same, value


def test_numbers_read_back_exactly() -> None:
    powers = [s * 10.0**e for e in range(-45, 38) for s in (1.0, -1.5, 9.999999)]
    integers = [float(2**k) for k in range(60)] + [16777217.0, 1e9, 123456790.0, 1e4, 1e5, 1e6, 12345678e3]
    special = [0.0, -0.0, 1e-45, 3.4028235e38, 1.17549435e-38, np.nan, np.inf, -np.inf, 0.001, 0.0001, 0.00012]
    check_numbers(np.array([powers + integers + special], dtype=np.float32))


@settings(max_examples=100, deadline=None)
@given(st.lists(ANY_FLOAT, min_size=1, max_size=60))
def test_any_bits_read_back_exactly(bits: list[int]) -> None:
    check_numbers(np.array([bits], dtype=np.uint32).view(np.float32))


def test_the_planned_size_always_suffices() -> None:
    widest = np.full((32, 16), -1.17549435e-38, dtype=np.float32)
    options = {"model": "\x01" * 40}
    size = planned(EncodeScores.interface(options, {}), B=32, N=16)
    assert len(native(widest, 2**31 - 1, model=options["model"], size=size)) <= size


def test_a_reply_over_its_bound_is_an_internal_error() -> None:
    scores = np.full((2, 3), 0.12345678, dtype=np.float32)
    exact = len(native(scores))
    assert native(scores, size=exact) == reference(scores)
    for size in range(1, exact):
        with pytest.raises(
            InternalError, match=rf"\[encode_scores\] the reply is longer than its bound of {size} bytes"
        ):
            native(scores, size=size)


# encode_rerank and encode_tensors


def rerank(scores: npt.NDArray[np.float32], column: int = 0) -> list[bytes]:
    """The body by native code and by the reference."""
    ports = [("scores", "f32", [64, 8], 4 * 64 * 8)]
    node = CpuNode("encode_rerank", {"column": column}, ports, [("body", "u8", [4096], 4096)], "")
    readable = EncodeRerank({"column": column}, Path())
    return [bytes(one.run({"scores": scores})["body"]) for one in (node, readable)]


@given(st.lists(st.floats(width=32), max_size=20))
def test_rerank_sorts_and_keeps_the_order_of_equals(values: list[float]) -> None:
    native_body, body = rerank(np.array(values, dtype=np.float32).reshape(-1, 1))
    assert native_body == body
    found = json.loads(body)
    assert sorted(entry["index"] for entry in found) == list(range(len(values)))
    for entry in found:
        value = values[entry["index"]]
        assert entry["score"] is None if not np.isfinite(value) else np.float32(entry["score"]) == np.float32(value)
    keys = [(np.isnan(values[e["index"]]), -values[e["index"]], e["index"]) for e in found]
    assert keys == sorted(keys, key=lambda key: (key[0], 0.0 if key[0] else key[1], key[2]))


def test_rerank_takes_its_column() -> None:
    scores = np.array([[0.1, 0.5], [0.2, 0.25], [0.3, 0.5]], dtype=np.float32)
    expected = b'[{"index":0,"score":0.5},{"index":2,"score":0.5},{"index":1,"score":0.25}]'
    assert rerank(scores, 1) == [expected, expected]
    for make in (
        lambda: CpuNode(
            "encode_rerank", {"column": 2}, [("scores", "f32", [4, 8], 128)], [("body", "u8", [99], 99)], ""
        ),
        lambda: EncodeRerank({"column": 2}, Path()),
    ):
        with pytest.raises(InvalidRequest, match="the request has 2 labels; column 2 is not there"):
            make().run({"scores": scores})


def test_tensors_are_kserve_json() -> None:
    values: dict[str, npt.NDArray[Any]] = {
        "scores": np.array([[0.5, np.nan], [np.inf, -1e-30]], dtype=np.float32),
        'to"kens': np.array([-(2**63), 2**63 - 1], dtype=np.int64),
        "cu_seqlens": np.array([0, 2**31 - 1], dtype=np.int32),
    }
    kinds = {"scores": "f32[batch,2]", 'to"kens': "i64[tokens]", "cu_seqlens": "i32[batch]"}
    interface = EncodeTensors.interface({"tensors": kinds, "model": "m"}, {})
    size = planned(interface, batch=2, tokens=2)
    ports = [
        (n, {"f": "f32", "i": f"i{v.itemsize * 8}"}[v.dtype.kind], list(v.shape), v.nbytes) for n, v in values.items()
    ]
    node = CpuNode("encode_tensors", {"model": "m"}, ports, [("body", "u8", [size], size)], "")
    body = bytes(node.run(values)["body"])
    assert body == bytes(EncodeTensors({"model": "m"}, Path()).run(values)["body"])
    reply = json.loads(body)
    assert reply["model_name"] == "m"
    assert [o["datatype"] for o in reply["outputs"]] == ["FP32", "INT64", "INT32"]
    assert [o["shape"] for o in reply["outputs"]] == [[2, 2], [2], [2]]
    assert reply["outputs"][0]["data"] == [0.5, None, None, -1e-30]
    assert reply["outputs"][1] == {"name": 'to"kens', "datatype": "INT64", "shape": [2], "data": [-(2**63), 2**63 - 1]}
    small = CpuNode("encode_tensors", {"model": "m"}, ports, [("body", "u8", [40], 40)], "")
    with pytest.raises(InternalError, match=r"\[encode_tensors\] the reply is longer than its bound of 40 bytes"):
        small.run(values)
    with pytest.raises(ValueError, match="tensors: x is u8; use one of f32, i32, i64"):
        EncodeTensors.interface({"tensors": {"x": "u8[batch]"}}, {"batch": 2})


def test_the_largest_bodies_fit_their_bounds() -> None:
    worst = np.float32(-1.17549435e-38)
    options = {"tensors": {"scores": "f32[batch,labels]", "ids": "i64[batch]"}, "model": "m"}
    size = planned(EncodeTensors.interface(options, {}), batch=9, labels=5)
    values = {"scores": np.full((9, 5), worst), "ids": np.full(9, -(2**63), dtype=np.int64)}
    assert len(EncodeTensors({"model": "m"}, Path()).run(values)["body"]) <= size
    size = planned(EncodeRerank.interface({"column": 0}, {}), B=100)
    assert len(EncodeRerank({"column": 0}, Path()).run({"scores": np.full((100, 1), worst)})["body"]) <= size
