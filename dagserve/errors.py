"""The closed set of errors a user can meet.

Every error says what is wrong and how to fix it. ``assert`` is for our own bugs; these are for everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class DagserveError(Exception):
    """Base of all errors dagserve raises on purpose."""


@dataclass(frozen=True, order=True)
class Diagnostic:
    """One mistake in a manifest: ``file:line:col: what is wrong; how to fix``.

    Line and column count from 1 and point at the value (or key) that is wrong.
    """

    file: str
    line: int
    column: int
    message: str
    fix: str = ""
    code: str = field(default="", compare=False)

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}:{self.column}: {self.message}"
        return f"{text}; {self.fix}" if self.fix else text


class ManifestError(DagserveError):
    """A manifest that cannot be compiled, with all its mistakes in file order."""

    def __init__(self, diagnostics: list[Diagnostic]) -> None:
        self.diagnostics = sorted(diagnostics)
        super().__init__("\n".join(str(d) for d in self.diagnostics))


class CheckpointError(DagserveError):
    """A model that cannot be imported: the message lists every parameter that is missing, unexpected or misshapen."""


class BuildError(DagserveError):
    """A package that could not be built, or whose output differs from the reference."""


class TuningError(DagserveError):
    """Kernels that cannot be tuned here."""


class ArtifactError(DagserveError):
    """An artifact that is missing, damaged, or made for another machine or version."""


class RequestError(DagserveError):
    """A request that did not produce a reply. ``node`` names where it failed, empty outside the graph."""

    kind = "internal"

    def __init__(self, message: str, node: str = "") -> None:
        self.node = node
        super().__init__(message)


class InvalidRequest(RequestError):
    """The request itself is wrong; the message says which field and how to fix it."""

    kind = "invalid_request"


class UnknownModel(RequestError):
    """The request names a model that is not served here."""

    kind = "model_not_found"


class Overloaded(RequestError):
    """No permit came free within the bounded wait; try again later."""

    kind = "overloaded"


class DeadlineExceeded(RequestError):
    """The request could not start before its deadline; it never reached the device."""

    kind = "deadline_exceeded"


class Cancelled(RequestError):
    """The caller left before the request started."""

    kind = "cancelled"


class Draining(RequestError):
    """The runtime is shutting down and takes no new requests."""

    kind = "draining"


class InternalError(RequestError):
    """A node failed in a way the request cannot explain; the cause is in the message."""

    kind = "internal"
