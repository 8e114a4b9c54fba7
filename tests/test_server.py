"""The HTTP service over a real engine and over one that fails on purpose, on loopback."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import uvicorn
from conftest import MANIFEST
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from dagserve import errors
from dagserve.artifact import read_plan
from dagserve.engine import Engine
from dagserve.errors import RequestError
from dagserve.server.app import Backend, create_app
from dagserve.server.errors import REPLIES

SCHEMA = json.loads((MANIFEST.parent.parent / "schemas" / "http.schema.json").read_text())
GOOD: dict[str, Any] = {"query": "q", "items": ["a", "b"]}


def fits(name: str, value: object) -> None:
    jsonschema.validate(value, {"$ref": f"#/$defs/{name}", "$defs": SCHEMA["$defs"]})


@contextmanager
def serving(engine: Backend) -> Iterator[httpx.Client]:
    """uvicorn in a thread on a free port."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(engine, getattr(engine, "catalogs", None))
    config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with httpx.Client(base_url=address, timeout=60, trust_env=False) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


class Scripted:
    """An engine that does what a test says."""

    def __init__(self, plan: dict[str, Any], act: Callable[[], Any]) -> None:
        self.plan, self.act = plan, act
        self.body_limit = 1 << 20
        self.calls: list[tuple[bytes, float | None]] = []
        self.cancelled = 0

    async def submit_body(self, body: bytes, deadline_s: float | None = None, request_id: str = "") -> bytes:  # noqa: ARG002
        self.calls.append((body, deadline_s))
        try:
            result = self.act()
            return await result if asyncio.iscoroutine(result) else result  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def stats(self) -> dict[str, Any]:
        tier = {"capacity": 1, "used": 0, "waiting": 0}
        return {
            "tiers": {"in_flight": tier},
            "counters": {"admitted": 3},
            "decode": {"runs": 1, "seconds": 0.25},
            "nodes": {"n": {"runs": 2, "seconds": 0.5, "engine": "cpu"}},
        }


@pytest.fixture(scope="module")
def plan(relevance_artifact: Path) -> dict[str, Any]:
    return read_plan(relevance_artifact)


@pytest.fixture(scope="module")
def client(relevance_artifact: Path) -> Iterator[httpx.Client]:
    with Engine.load(relevance_artifact) as engine, serving(engine) as opened:
        yield opened


def post(client: httpx.Client, body: object, **headers: str) -> httpx.Response:
    return client.post("/v1/score", json=body, headers=headers)


def test_the_reply_has_sglangs_shape(client: httpx.Client) -> None:
    fits("ScoreRequest", GOOD)
    reply = post(client, GOOD)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    fits("ScoreReply", reply.json())
    assert [len(row) for row in reply.json()["scores"]] == [2, 2]
    softmax = post(client, {**GOOD, "apply_softmax": True}).json()["scores"]
    assert all(sum(row) == pytest.approx(1, abs=1e-6) for row in softmax)


def test_http_gives_the_engines_own_bytes(client: httpx.Client, relevance_artifact: Path) -> None:
    with Engine.load(relevance_artifact) as engine:
        for extra in ({}, {"apply_softmax": True}, {"labels": ["a"]}, {"label_token_ids": [5, 6]}):
            body = {**GOOD, **extra}
            assert post(client, body).content == engine.run(body)


def test_one_text_is_a_list_of_one(client: httpx.Client) -> None:
    assert post(client, {**GOOD, "items": "a"}).json()["scores"] == [post(client, GOOD).json()["scores"][0]]


def test_the_models_own_name_is_taken(client: httpx.Client) -> None:
    assert post(client, {**GOOD, "model": "relevance", "item_first": False}).status_code == 200


BAD: list[tuple[object, str]] = [
    ([], "must be a JSON object"),
    ({}, "query is missing"),
    ({"query": "q"}, "items is missing"),
    ({**GOOD, "query": 3}, "query must be text"),
    ({**GOOD, "query": [1, 2]}, "token ids are not taken"),
    ({**GOOD, "items": [[1, 2]]}, "items[0] must be text"),
    ({**GOOD, "items": ["a", None]}, "items[1] must be text"),
    ({**GOOD, "items": {}}, "items must be a text or a list of texts"),
    ({**GOOD, "items": []}, "items has 0 entries"),
    ({**GOOD, "items": ["a"] * 33}, "items has 33 entries; it must have from 1 to 32"),
    ({**GOOD, "items": ["a b " * 400]}, "over max_length 512"),
    ({**GOOD, "query": "x" * 9000}, "query has more than 8192 bytes"),
    ({**GOOD, "label_token_ids": "x"}, "label_token_ids must be a list of integers"),
    ({**GOOD, "label_token_ids": [1, "x"]}, "label_token_ids[1] must be an integer"),
    ({**GOOD, "label_token_ids": [99999]}, "outside the vocabulary"),
    ({**GOOD, "label_token_ids": []}, "label_token_ids has 0 entries"),
    ({**GOOD, "labels": ["a"], "label_token_ids": [1]}, "labels"),
    ({**GOOD, "labels": ["a", "no such token at all"]}, "labels[1]"),
    ({**GOOD, "labels": [3]}, "labels[0] must be text"),
    ({**GOOD, "apply_softmax": "yes"}, "apply_softmax must be true or false"),
    ({**GOOD, "item_first": True}, "item_first must be false"),
    ({**GOOD, "querry": "x"}, "did you mean 'query'"),
    ({**GOOD, "zzz": 1}, "unknown field 'zzz'; remove it"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_body_is_a_400_that_names_the_field(body: object, message: str, client: httpx.Client) -> None:
    reply = post(client, body)
    assert reply.status_code == 400
    fits("ErrorReply", reply.json())
    assert reply.json()["error"]["type"] == "invalid_request"
    assert message in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"query": NaN}',
        b'{"query": "\\ud800", "items": ["a"]}',
        b'{"query": "\xff", "items": []}',
    ],
    ids=range(5),
)
def test_what_is_not_json_is_a_400(content: bytes, client: httpx.Client) -> None:
    reply = client.post("/v1/score", content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert "not valid JSON" in reply.json()["error"]["message"]


def test_huge_integers_are_refused(client: httpx.Client) -> None:
    content = b'{"query": "q", "items": ["a"], "label_token_ids": [' + b"9" * 400 + b"]}"
    reply = client.post("/v1/score", content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 400


def test_a_key_given_twice_is_refused(client: httpx.Client) -> None:
    content = b'{"query": "x", "query": "q", "items": ["a", "b"]}'
    reply = client.post("/v1/score", content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "query is given twice; give it once"


def test_other_statuses_of_a_wrong_request(client: httpx.Client) -> None:
    unknown = post(client, {**GOOD, "model": "other"})
    text = client.post("/v1/score", content=b"x", headers={"content-type": "text/plain"})
    for reply, status, kind in (
        (unknown, 404, "model_not_found"),
        (text, 415, "unsupported_media_type"),
        (client.get("/nowhere"), 404, "not_found"),
        (client.get("/v1/score"), 405, "method_not_allowed"),
    ):
        assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)
        fits("ErrorReply", reply.json())
    assert "'relevance'" in unknown.json()["error"]["message"]


def test_a_body_over_the_limit_is_a_413_also_when_its_length_is_not_told(client: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 65536

    for content in (b" " * 1_300_000, chunks()):
        reply = client.post("/v1/score", content=content, headers={"content-type": "application/json"})
        assert reply.status_code == 413
        assert reply.json()["error"]["type"] == "too_large"


@pytest.mark.parametrize("value", ["x", "-1", "0", "nan", ""])
def test_a_bad_deadline_header_is_a_400(value: str, client: httpx.Client) -> None:
    assert post(client, GOOD, **{"X-Request-Deadline-Ms": value}).status_code == 400


def test_a_deadline_header_may_shorten_but_not_lengthen(plan: dict[str, Any]) -> None:
    engine = Scripted(plan, lambda: b"{}")
    with serving(engine) as client:
        for value in ("50", "1e9", "inf"):
            assert post(client, GOOD, **{"X-Request-Deadline-Ms": value}).status_code == 200
        post(client, GOOD)
    assert [deadline for _, deadline in engine.calls] == [0.05, 10.0, 10.0, 10.0]


def test_request_ids_are_echoed_or_made(client: httpx.Client) -> None:
    assert post(client, GOOD, **{"X-Request-Id": "abc"}).headers["x-request-id"] == "abc"
    assert len(post(client, []).headers["x-request-id"]) == 32


@pytest.mark.parametrize("kind", [k for k in REPLIES if k.__module__ == "dagserve.errors"], ids=lambda k: k.__name__)
def test_every_error_has_its_status_and_form(kind: type[RequestError], plan: dict[str, Any]) -> None:
    def fail() -> bytes:
        raise kind("what went wrong; how to fix it", "score")

    with serving(Scripted(plan, fail)) as client:
        reply = post(client, GOOD)
    expected = REPLIES[kind]
    assert reply.status_code == expected.status
    fits("ErrorReply", reply.json())
    error = reply.json()["error"]
    assert (error["type"], error["node"]) == (kind.kind, "score")
    assert error["message"] == "what went wrong; how to fix it"
    assert ("retry-after" in reply.headers) == (expected.retry_after_s is not None) == ("retry_after_ms" in error)


def test_a_fault_of_our_own_is_a_typed_500(plan: dict[str, Any]) -> None:
    def fail() -> bytes:
        raise ZeroDivisionError

    with serving(Scripted(plan, fail)) as client:
        reply = post(client, GOOD)
    assert reply.status_code == 500
    fits("ErrorReply", reply.json())
    assert reply.json()["error"]["type"] == "internal"


def test_many_clients_each_get_their_own_answer(client: httpx.Client) -> None:
    bodies = [{"query": f"q{i}", "items": [f"text {j}" for j in range(i % 7 + 1)]} for i in range(32)]
    expected = [post(client, body).content for body in bodies]
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(lambda body: post(client, body).content, bodies)) == expected


def test_a_batch_equals_its_singles(client: httpx.Client) -> None:
    items = [f"text {i} " * (i % 5 + 1) for i in range(16)]
    whole = post(client, {"query": "q", "items": items}).json()["scores"]
    for item, row in zip(items, whole, strict=True):
        assert post(client, {"query": "q", "items": [item]}).json()["scores"][0] == pytest.approx(row, abs=1e-5)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
FIELDS = st.sampled_from(["query", "items", "labels", "label_token_ids", "apply_softmax", "item_first", "model", "x"])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ANY_JSON
    | st.dictionaries(FIELDS, ANY_JSON, max_size=6)
    | st.builds(lambda v: {**GOOD, **v}, st.dictionaries(FIELDS, ANY_JSON))
)
def test_any_json_is_answered_or_refused(client: httpx.Client, body: object) -> None:
    reply = client.post(
        "/v1/score", content=json.dumps(body).encode(errors="replace"), headers={"content-type": "application/json"}
    )
    assert reply.status_code in (200, 400, 404)
    fits("ScoreReply" if reply.status_code == 200 else "ErrorReply", reply.json())


def test_health_is_answered_while_every_context_is_busy(client: httpx.Client) -> None:
    large = {"query": "q", "items": ["\x01" * 100] * 32}
    with ThreadPoolExecutor(8) as pool:
        busy = [pool.submit(post, client, large) for _ in range(16)]
        answered = 0
        while not all(f.done() for f in busy):
            assert client.get("/health").json() == {"status": "ok"}
            answered += 1
        assert {f.result().status_code for f in busy} == {200}
    assert answered >= 3


def test_a_client_that_leaves_cancels_its_request(plan: dict[str, Any]) -> None:
    engine = Scripted(plan, lambda: asyncio.sleep(60))
    with serving(engine) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/score", json=GOOD, timeout=0.2)
        end = time.monotonic() + 10
        while not engine.cancelled and time.monotonic() < end:
            time.sleep(0.01)
        assert engine.cancelled == 1
        assert "dagserve_http_disconnects_total 1.0" in client.get("/metrics").text


def test_a_client_that_leaves_while_it_sends_is_no_failure(plan: dict[str, Any]) -> None:
    with serving(Scripted(plan, lambda: b"{}")) as client:
        with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as sender:
            head = (
                b"POST /v1/score HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
            )
            sender.sendall(head + b'{"query":')
        end = time.monotonic() + 10
        while "dagserve_http_disconnects_total 1.0" not in (text := client.get("/metrics").text):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert 'status="499"' in text
        assert 'status="500"' not in text


def test_draining_says_so(plan: dict[str, Any]) -> None:
    app = create_app(Scripted(plan, lambda: b"{}"))
    app.state.service.draining = True
    transport = httpx.ASGITransport(app=app)

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return [await client.get("/ready"), await client.post("/v1/score", json=GOOD), await client.get("/health")]

    ready, score, health = asyncio.run(ask())
    assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
    assert (score.status_code, score.json()["error"]["type"]) == (503, "draining")
    assert health.status_code == 200


def test_metrics_count_right(relevance_artifact: Path) -> None:
    with Engine.load(relevance_artifact) as engine, serving(engine) as client:
        for body in (GOOD, GOOD, {}):
            post(client, body)
        text = client.get("/metrics").text
    samples = {
        (s.name, *sorted(s.labels.values())): s.value for f in text_string_to_metric_families(text) for s in f.samples
    }
    assert samples["dagserve_http_requests_total", "200"] == 2
    assert samples["dagserve_http_requests_total", "400"] == 1
    assert samples["dagserve_http_request_seconds_count",] == 3
    assert samples["dagserve_node_runs_total", "aoti", "score"] == 2 + 2  # two of the warm-up
    assert samples["dagserve_requests_completed_total",] == 2 + 2
    assert samples["dagserve_tier_capacity", "in_flight"] == 8
    assert samples["dagserve_tier_capacity", "contexts"] == 2
    assert samples["dagserve_tier_used", "in_flight"] == 0


def test_openapi_documents_every_error(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    responses = document["paths"]["/v1/score"]["post"]["responses"]
    assert set(responses) >= {str(r.status) for k, r in REPLIES.items() if k is not errors.Cancelled} | {"200"}
    assert {"ErrorReply", "ScoreReply"} <= set(document["components"]["schemas"])
    body = document["paths"]["/v1/score"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == set(SCHEMA["$defs"]["ScoreRequest"]["properties"])
    assert client.get("/docs").status_code == 200
    assert client.get("/v1/models").json()["data"][0]["id"] == "relevance"
    assert client.get("/ready").json() == {"status": "ready"}
