"""The HTTP service: FastAPI and uvicorn over an :class:`dagserve.engine.Engine`."""

from dagserve.server.app import create_app
from dagserve.server.run import serve

__all__ = ["create_app", "serve"]
