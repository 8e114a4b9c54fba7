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
from dagserve.errors import InternalError
from dagserve.nodes.encode import EncodeScores

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
    (size,) = EncodeScores.interface(options, {"batch": 32, "labels": 16}).bounds.values()
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
