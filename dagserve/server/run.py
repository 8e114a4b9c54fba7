"""Runs the service under uvicorn: load, listen, drain on the first signal, quit on the second."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import FrameType

import uvicorn

from dagserve.engine import Engine
from dagserve.errors import ArtifactError, DagserveError
from dagserve.server.app import create_app

KEEP_ALIVE_S = 75
BACKLOG = 2048
_POLL_S = 0.02


class DrainingServer(uvicorn.Server):
    """uvicorn that answers admitted requests before it stops listening: /ready turns 503 first."""

    def __init__(self, config: uvicorn.Config, engine: Engine, drain_s: float) -> None:
        super().__init__(config)
        self._engine, self._drain_s = engine, drain_s
        self._signals = 0
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: quit at once."""
        self._signals += 1
        if self._signals > 1 or self._draining is not None:
            super().handle_exit(sig, frame)
            self.force_exit = True
            return
        self._draining = asyncio.get_running_loop().create_task(self._drain(sig, frame))

    async def _drain(self, sig: int, frame: FrameType | None) -> None:
        app = self.config.app
        app.state.service.draining = True  # type: ignore[union-attr]
        await asyncio.to_thread(self._engine.drain, self._drain_s)
        await asyncio.sleep(_POLL_S)  # replies of the last requests leave
        super().handle_exit(sig, frame)


def serve(artifact: Path, host: str, port: int, *, drain_s: float = 30.0) -> int:
    """Serves an artifact until a signal; returns the exit status.

    Raises:
        ArtifactError: the artifact cannot be loaded, or serves no HTTP endpoint.
        DagserveError: the address cannot be listened on.
    """
    listener = _listen(host, port)
    with Engine.load(artifact) as engine, listener:
        if engine.plan["endpoint"] is None:
            raise ArtifactError(f"{artifact} has no HTTP endpoint; add `endpoint: score` to its manifest")
        config = uvicorn.Config(
            create_app(engine), log_level="warning", access_log=False, timeout_keep_alive=KEEP_ALIVE_S, lifespan="off"
        )
        address = listener.getsockname()
        print(f"dagserve: {engine.plan['name']} on http://{address[0]}:{address[1]}", flush=True)
        server = DrainingServer(config, engine, drain_s)
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
