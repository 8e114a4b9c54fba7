"""The application: handlers only read, submit and pass on. Nothing here decodes JSON, tokenizes or runs."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import dagserve
from dagserve.catalogs import Catalogs
from dagserve.endpoints import ENDPOINTS, body_schema
from dagserve.errors import Cancelled, Draining, InternalError, InvalidRequest, RequestError
from dagserve.server.catalogs import add_catalogs
from dagserve.server.errors import (
    TooLarge,
    UnsupportedMediaType,
    documented_errors,
    error_response,
    on_http_exception,
    on_request_error,
)
from dagserve.server.metrics import Metrics
from dagserve.server.protocol import REPLIES, ErrorReply

DEADLINE_HEADER = "X-Request-Deadline-Ms"
REQUEST_ID_HEADER = "X-Request-Id"
LONGEST_REQUEST_ID = 128

_log = logging.getLogger(__name__)


class Backend(Protocol):
    """What the service needs of an engine; see :class:`dagserve.engine.Engine`."""

    plan: dict[str, Any]

    @property
    def body_limit(self) -> int:
        """Largest body in bytes."""
        ...

    async def submit_body(self, body: bytes, deadline_s: float | None = None, request_id: str = "") -> bytes:
        """The reply to the JSON body of a request."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """Tiers, counters and nodes."""
        ...


class Service:
    """State of one running service. ``draining`` makes /ready say so and refuses new requests."""

    def __init__(self, engine: Backend, catalogs: Catalogs | None = None) -> None:
        self.engine = engine
        self.model: str = engine.plan["name"]
        self.deadline_s: float = engine.plan["admission"]["deadline_ms"] / 1000
        self.metrics = Metrics(engine.stats, catalogs)
        self.draining = False

    async def answer(self, request: Request) -> Response:
        """Reads a body, submits it, and passes the engine's bytes on."""
        started = time.perf_counter()
        request_id = read_request_id(request)
        response = await self._answer(request, request_id)
        response.headers[REQUEST_ID_HEADER] = request_id
        self.metrics.requests.labels(str(response.status_code)).inc()
        self.metrics.latency.observe(time.perf_counter() - started)
        return response

    async def _answer(self, request: Request, request_id: str) -> Response:
        try:
            if self.draining:
                raise Draining("the service is draining and takes no new requests")
            body = await read_body(request, self.engine.body_limit)
            reply = await self._submit(request, body, read_deadline(request, self.deadline_s), request_id)
        except RequestError as error:
            return error_response(error)
        except ClientDisconnect:
            self.metrics.disconnects.inc()
            return error_response(Cancelled("the client left while it sent the body"))
        except Exception as error:  # whatever it is, the client gets a typed reply and the log the traceback
            _log.exception("a request failed unexpectedly")
            return error_response(InternalError(f"unexpected {type(error).__name__}; the server's log has more"))
        return Response(reply, media_type="application/json")

    async def _submit(self, request: Request, body: bytes, deadline_s: float, request_id: str) -> bytes:
        """Waits for the reply or for the client to leave, whichever is first."""
        work = asyncio.ensure_future(self.engine.submit_body(body, deadline_s, request_id))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.metrics.disconnects.inc()
                raise Cancelled("the client left before the reply")
            return work.result()
        finally:
            gone.cancel()
            work.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, limit: int) -> bytes:
    """Reads a JSON body of at most ``limit`` bytes.

    Raises:
        UnsupportedMediaType: another content type.
        TooLarge: over the limit, whether or not the header says so.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedMediaType(f"content type {kind!r} is not taken; send application/json")
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise TooLarge(f"the body is larger than {limit} bytes; send fewer or shorter texts")
        chunks.append(chunk)
    return b"".join(chunks)


def read_request_id(request: Request) -> str:
    """The header's id where it is printable ASCII of at most 128 characters, else a new one."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    usable = 0 < len(given) <= LONGEST_REQUEST_ID and given.isascii() and given.isprintable()
    return given if usable else uuid.uuid4().hex


def read_deadline(request: Request, longest_s: float) -> float:
    """Seconds until the request must have started: the header's, but not more than the manifest's.

    Raises:
        InvalidRequest: the header is not a positive number of milliseconds.
    """
    text = request.headers.get(DEADLINE_HEADER)
    if text is None:
        return longest_s
    try:
        seconds = float(text) / 1000
    except ValueError:
        seconds = float("nan")
    if not seconds > 0:
        raise InvalidRequest(f"{DEADLINE_HEADER} must be a positive number of milliseconds, not {text!r}")
    return min(seconds, longest_s)


def create_app(engine: Backend, catalogs: Catalogs | None = None) -> FastAPI:
    """The application for one engine, and for the catalogs that may be changed while it runs.

    Its :class:`Service` is ``app.state.service``.
    """
    service = Service(engine, catalogs)
    app = FastAPI(
        title=f"dagserve: {service.model}",
        version=dagserve.__version__,
        exception_handlers={RequestError: on_request_error, HTTPException: on_http_exception},
    )
    app.state.service = service
    _add_endpoint(app, service)
    _add_state(app, service)
    if catalogs is not None and catalogs.names:
        add_catalogs(app, catalogs)
    return app


def _add_endpoint(app: FastAPI, service: Service) -> None:
    # The body is read by hand, so that its size is bounded while it arrives; the schema is declared beside it.
    plan = service.engine.plan
    endpoint = ENDPOINTS[plan["endpoint"]]
    schema = body_schema(plan, plan["endpoint"])
    documented: dict[int | str, dict[str, Any]] = documented_errors()
    documented[400]["model"] = ErrorReply
    app.add_api_route(
        endpoint.path,
        service.answer,
        methods=["POST"],
        summary=endpoint.summary,
        responses={200: {"model": REPLIES[plan["endpoint"]]}, **documented},
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
    )


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health", summary="The process is alive")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/ready", summary="Requests are taken", responses={503: {"description": "Draining."}})
    async def ready() -> Response:
        status = "draining" if service.draining else "ready"
        return _json({"status": status}, 503 if service.draining else 200)

    @app.get("/metrics", summary="Prometheus metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models", summary="The served model")
    async def models() -> Response:
        return _json({"object": "list", "data": [{"id": service.model, "object": "model", "owned_by": "dagserve"}]})


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
