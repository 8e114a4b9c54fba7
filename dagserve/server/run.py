"""Runs the service under uvicorn: load, listen, drain on the first signal, quit on the second."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from types import FrameType

import uvicorn

from dagserve.engine import Engine
from dagserve.errors import ArtifactError, DagserveError
from dagserve.server.app import Service, create_app

KEEP_ALIVE_S = 75
BACKLOG = 2048


class DrainingServer(uvicorn.Server):
    """uvicorn that answers admitted requests before it stops: /ready turns 503 first."""

    def __init__(self, config: uvicorn.Config, service: Service, engine: Engine, drain_s: float) -> None:
        super().__init__(config)
        self._service, self._engine, self._drain_s = service, engine, drain_s
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """First signal: drain, then exit with 0. Second: exit at once with 128 + the signal, connections cut."""
        if self._service.draining:
            os._exit(128 + sig)
        self._service.draining = True
        # A handler runs between two steps of the loop, which must be woken to see a new task.
        asyncio.get_running_loop().call_soon_threadsafe(self._start_draining)

    def _start_draining(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        self._engine.catalogs.stop()
        await asyncio.to_thread(self._engine.drain, self._drain_s)
        self.should_exit = True


def serve(artifact: Path, host: str, port: int, *, drain_s: float = 30.0) -> int:
    """Serves an artifact until a signal; returns the exit status.

    Raises:
        ArtifactError: the artifact cannot be loaded, or serves no HTTP endpoint.
        DagserveError: the address cannot be listened on.
    """
    listener = _listen(host, port)
    with Engine.load(artifact) as engine, listener:
        if engine.plan["endpoint"] is None:
            raise ArtifactError(f"{artifact} has no HTTP endpoint; add an `endpoint` to its manifest")
        app = create_app(engine, engine.catalogs)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_keep_alive=KEEP_ALIVE_S, lifespan="off"
        )
        address = listener.getsockname()
        print(f"dagserve: {engine.plan['name']} on http://{address[0]}:{address[1]}", flush=True)
        server = DrainingServer(config, app.state.service, engine, drain_s)
        server.run(sockets=[listener])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio turns Nagle's delay off only for sockets that name their protocol.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        raise DagserveError(f"cannot listen on {host}:{port} ({error}); choose another --host or --port") from error
    return listener
