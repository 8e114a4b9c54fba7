"""An artifact, loaded and running: what the service, the command line and tests submit requests to."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dagserve import errors
from dagserve._native import Runtime
from dagserve.artifact import read_plan
from dagserve.build.keys import host_isa
from dagserve.catalogs import Catalogs
from dagserve.endpoints import endpoint_of, native_endpoints
from dagserve.errors import ArtifactError, InvalidRequest, RequestError
from dagserve.shapes import parse_dim

_CODES: Sequence[type[RequestError]] = (
    errors.InternalError,
    errors.InvalidRequest,
    errors.Overloaded,
    errors.DeadlineExceeded,
    errors.Cancelled,
    errors.Draining,
    errors.InternalError,
    errors.UnknownModel,
)
"""Error of each native status code."""

_TORCH_LIBRARIES = ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so", "libtorch.so")
_WARM_UP_DEADLINE_S = 600.0


def load_torch_libraries() -> None:
    """Loads torch's shared libraries without importing torch, which would cost seconds at start.

    Raises:
        ArtifactError: torch is not installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ArtifactError("torch is not installed: packages need its libraries; pip install 'torch>=2.11,<2.14'")
    folder = Path(spec.origin).parent / "lib"
    for name in _TORCH_LIBRARIES:
        if (folder / name).exists():
            ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)


def check_fingerprint(plan: Mapping[str, Any]) -> None:
    """Packages hold machine code and use torch's C interface, so both must be those of the build.

    Raises:
        ArtifactError: another device, torch or instruction set.
    """
    if plan["device"] != "cpu":
        raise ArtifactError(
            f"the artifact is for device {plan['device']}, which this version does not serve; "
            "`dagserve run --reference` runs it, and a target with `device: cpu` is served"
        )
    here = {"torch": importlib.metadata.version("torch"), "isa": host_isa()}
    for what, value in here.items():
        built = plan["fingerprint"][what]
        if built != value:
            raise ArtifactError(
                f"the artifact was built for {what} {built}, this is {value}; compile the manifest again"
            )


def native_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The plan with every dimension as ``(symbol index or -1, integer)``, as the native runtime reads it."""
    symbols = {s["name"]: i for i, s in enumerate(plan["symbols"])}

    def dims(shape: Sequence[str]) -> list[tuple[int, int]]:
        parsed = [parse_dim(d) for d in shape]
        return [(symbols[d.symbol] if d.symbol else -1, d.add) for d in parsed]

    def shaped(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [{**item, "shape": dims(item["shape"])} for item in items]

    packages = [{**p, "inputs": shaped(p["inputs"]), "outputs": shaped(p["outputs"])} for p in plan["packages"]]
    return {**plan, "tensors": shaped(plan["tensors"]), "packages": packages}


class Engine:
    """A loaded artifact. ``run`` blocks; ``submit`` is for one asyncio event loop; both are safe beside each other.

    No Python runs between submitting and the reply: a body is copied into a native request slot, and native threads
    decode it, run the graph and write the reply.
    """

    def __init__(self, root: Path, plan: dict[str, Any], runtime: Runtime) -> None:
        self.root, self.plan = root, plan
        self._runtime = runtime
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        self.catalogs = Catalogs(root, plan, runtime)

    @staticmethod
    def load(artifact: Path) -> Engine:
        """Loads an artifact and warms every package up.

        Raises:
            ArtifactError: it is damaged, or made for another machine or torch.
        """
        plan = read_plan(artifact)
        check_fingerprint(plan)
        load_torch_libraries()
        try:
            runtime = Runtime(native_plan(plan), str(artifact), native_endpoints(plan))
        except (RuntimeError, ValueError) as error:
            raise ArtifactError(str(error)) from error
        engine = Engine(artifact, plan, runtime)
        engine._warm_up()
        return engine

    def _warm_up(self) -> None:
        """One request for each call that a request can choose, so that none pays for lazy loading."""
        choices = {
            self.plan["tensors"][c["when"]["tensor"]]["name"]
            for n in self.plan["nodes"]
            for c in n.get("calls", ())
            if "tensor" in c.get("when", {})
        }
        for value in (False, True) if choices else (None,):
            request = {**smallest_request(self.plan), **dict.fromkeys(choices, value)}
            with contextlib.suppress(InvalidRequest):  # a node may want more than one short text
                self._runtime.run(request, _WARM_UP_DEADLINE_S)

    def run(self, inputs: Mapping[str, object], deadline_s: float | None = None) -> bytes:
        """Runs one request and returns the bytes of its ``response``. Call it from any thread but an event loop's.

        Args:
            inputs: by input name: ``str``, ``list[str]``, numbers or lists of them; None or absent uses the default.
            deadline_s: seconds until the request must have started; the manifest's when left out.

        Raises:
            RequestError: one of its subclasses, see :mod:`dagserve.errors`.
        """
        return self._runtime.run(dict(inputs), deadline_s)

    def trace(self, inputs: Mapping[str, object]) -> dict[str, Any]:
        """Runs one request and returns the value of every tensor of the graph: numpy arrays, bytes for text."""
        return self._runtime.trace(dict(inputs))

    def run_body(self, body: bytes) -> bytes:
        """Runs one request given as the JSON body of the artifact's endpoint, as HTTP does. Blocks.

        Without an endpoint the body is an object of inputs by name.

        Raises:
            RequestError: as :meth:`run`; also where the body is not JSON or a field is wrong.
        """
        return self._runtime.run_body(endpoint_of(self.plan), body)

    @property
    def body_limit(self) -> int:
        """Largest body in bytes: every input full and every byte escaped, and room for the fields themselves."""
        return self._runtime.body_limit

    async def submit(self, inputs: Mapping[str, object], deadline_s: float | None = None) -> bytes:
        """Like :meth:`run` without blocking the event loop. Cancelling the task cancels the request."""
        return await self._reply(self._attach(), self._runtime.submit(dict(inputs), deadline_s))

    async def submit_body(self, body: bytes, deadline_s: float | None = None, request_id: str = "") -> bytes:
        """Like :meth:`run_body` without blocking the event loop. Cancelling the task cancels the request.

        With a ``request_id`` the graph's absent inputs ``request_id`` (text) and ``created`` (i64) become it and the
        seconds since 1970.
        """
        loop = self._attach()
        ticket = self._runtime.submit_body(endpoint_of(self.plan), body, deadline_s, request_id)
        return await self._reply(loop, ticket)

    async def _reply(self, loop: asyncio.AbstractEventLoop, ticket: int) -> bytes:
        future: asyncio.Future[bytes] = loop.create_future()
        self._pending[ticket] = future
        try:
            return await future
        except asyncio.CancelledError:
            self._runtime.cancel(ticket)
            raise

    def _attach(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            self._loop = loop
            loop.add_reader(self._runtime.fileno(), self._deliver)
        if loop is not self._loop:
            raise RuntimeError("an Engine serves one event loop at a time; load another one for this loop")
        return loop

    def _deliver(self) -> None:
        """Hands finished requests to those who wait; called by the loop when the native side has some."""
        for ticket, code, body, node in self._runtime.completions():
            future = self._pending.pop(ticket, None)
            if future is None or future.done():
                continue
            if code == 0:
                future.set_result(body)
            else:
                future.set_exception(_CODES[code](body.decode(errors="replace"), node))

    def stats(self) -> dict[str, Any]:
        """Tiers, counters and per-node totals since the start; seconds and counts."""
        return self._runtime.stats()

    def memory(self) -> dict[str, int]:
        """Bytes the runtime holds: ``context`` (each), ``slot`` (each), and the number of ``slots``."""
        return self._runtime.memory()

    def drain(self, timeout_s: float) -> bool:
        """Takes no new requests and waits for admitted ones; False when some were left. Blocks."""
        return self._runtime.drain(timeout_s)

    def close(self) -> None:
        """Ends what has not started and joins the native threads."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._runtime.fileno())
        self._runtime.close()
        self.catalogs.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def smallest_request(plan: Mapping[str, Any]) -> dict[str, object]:
    """A request of one row and one short text for every input that must be given."""
    request: dict[str, object] = {}
    for spec in plan["inputs"]:
        tensor = plan["tensors"][spec["tensor"]]
        if not spec["optional"] and spec["default"] is None:
            value: object = "a" if tensor["dtype"] == "text" else 0
            request[spec["name"]] = [value] if tensor["shape"] else value
    return request
