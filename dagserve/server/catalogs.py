"""Changing a served catalog: uploaded, built in another process, then put in place at once, or not at all."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from dagserve.catalogs import Catalogs
from dagserve.errors import Cancelled, RequestError
from dagserve.server.errors import TooLarge, UnsupportedMediaType, documented_errors, error_response

SUFFIXES = {
    "application/x-ndjson": ".jsonl",
    "application/jsonl": ".jsonl",
    "application/octet-stream": ".jsonl",
    "application/vnd.apache.parquet": ".parquet",
}
"""The kind of file by its content type."""


def add_catalogs(app: FastAPI, catalogs: Catalogs) -> None:
    """``GET /v1/catalogs``, ``POST /v1/catalogs/{name}`` and ``POST /v1/catalogs/{name}/rollback``."""

    @app.get("/v1/catalogs", summary="The catalogs and their versions")
    async def listed() -> Response:
        return _json({"catalogs": [catalogs.state(name) for name in catalogs.names]})

    content = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in SUFFIXES}

    @app.post(
        "/v1/catalogs/{name}",
        summary="Put another catalog in the place of the current one",
        responses=documented_errors(),
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )
    async def install(name: str, request: Request) -> Response:
        _known(catalogs, name)
        try:
            with tempfile.TemporaryDirectory(prefix="dagserve-upload-") as folder:
                file = Path(folder) / f"catalog{_suffix(request)}"
                await _receive(request, file, catalogs.upload_limit(name))
                return _json(await asyncio.to_thread(catalogs.install, name, file))
        except RequestError as error:
            return error_response(error)
        except ClientDisconnect:
            return error_response(Cancelled("the client left while it sent the catalog"))

    @app.post(
        "/v1/catalogs/{name}/rollback",
        summary="Bring the version before the current one back",
        responses=documented_errors(),
    )
    async def rollback(name: str) -> Response:
        _known(catalogs, name)
        try:
            return _json(await asyncio.to_thread(catalogs.rollback, name))
        except RequestError as error:
            return error_response(error)


def _known(catalogs: Catalogs, name: str) -> None:
    if name not in catalogs.names:
        raise HTTPException(404, f"no catalog is called {name}; there is {', '.join(catalogs.names)}")


def _suffix(request: Request) -> str:
    kind = request.headers.get("content-type", "application/x-ndjson").partition(";")[0].strip().lower()
    if kind not in SUFFIXES:
        raise UnsupportedMediaType(f"content type {kind!r} is not taken; send one of {', '.join(SUFFIXES)}")
    return SUFFIXES[kind]


async def _receive(request: Request, file: Path, limit: int) -> None:
    size = 0
    with file.open("wb") as stream:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise TooLarge(f"the catalog is larger than {limit} bytes")
            stream.write(chunk)


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
