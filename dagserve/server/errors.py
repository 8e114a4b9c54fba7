"""One table from error classes to HTTP: it answers requests and it writes the API's documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import Request, Response
from starlette.exceptions import HTTPException

from dagserve import errors
from dagserve.errors import RequestError


class TooLarge(RequestError):
    """The body is larger than any request that fits the bounds."""

    kind = "too_large"


class UnsupportedMediaType(RequestError):
    """The body is not declared as JSON."""

    kind = "unsupported_media_type"


@dataclass(frozen=True)
class Reply:
    """Status of an error, what it means, and after how many seconds a retry is sensible (None: never as it is)."""

    status: int
    description: str
    retry_after_s: int | None = None


REPLIES: Mapping[type[RequestError], Reply] = {
    errors.InvalidRequest: Reply(400, "The request is wrong; the message names the field and the fix."),
    errors.UnknownModel: Reply(404, "The model is not served here, or the path does not exist."),
    TooLarge: Reply(413, "The body is larger than the bounds allow."),
    UnsupportedMediaType: Reply(415, "The body is not application/json."),
    errors.Overloaded: Reply(429, "Too many requests in flight and waiting.", retry_after_s=1),
    errors.Cancelled: Reply(499, "The client left before the request started."),
    errors.InternalError: Reply(500, "A node failed; the message has the cause."),
    errors.Draining: Reply(503, "The service is starting or shutting down.", retry_after_s=1),
    errors.DeadlineExceeded: Reply(504, "The request could not start before its deadline."),
}

_HTTP_KINDS: Mapping[int, str] = {404: "not_found", 405: "method_not_allowed"}


def error_body(kind: str, message: str, node: str = "", retry_after_s: int | None = None) -> bytes:
    """``{"error": {"type", "message", "node"?, "retry_after_ms"?}}``."""
    error: dict[str, Any] = {"type": kind, "message": message}
    if node:
        error["node"] = node
    if retry_after_s is not None:
        error["retry_after_ms"] = retry_after_s * 1000
    return orjson.dumps({"error": error})


def error_response(error: RequestError) -> Response:
    """The reply to a request that failed."""
    reply = REPLIES[next(kind for kind in type(error).__mro__ if kind in REPLIES)]
    headers = {} if reply.retry_after_s is None else {"Retry-After": str(reply.retry_after_s)}
    body = error_body(error.kind, str(error), error.node, reply.retry_after_s)
    return Response(body, reply.status, headers, "application/json")


async def on_request_error(_: Request, error: Exception) -> Response:
    """FastAPI's handler for this project's errors."""
    assert isinstance(error, RequestError)
    return error_response(error)


async def on_http_exception(_: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the same form as every other error."""
    assert isinstance(error, HTTPException)
    kind = _HTTP_KINDS.get(error.status_code, "http_error")
    return Response(error_body(kind, str(error.detail)), error.status_code, error.headers, "application/json")


def documented_errors() -> dict[int | str, dict[str, Any]]:
    """The table as FastAPI's ``responses``."""
    schema = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorReply"}}}
    return {r.status: {"description": r.description, "content": schema} for r in REPLIES.values() if r.status != 499}
