"""What a manifest says, frozen. Positions take no part in comparison, so two spellings of one manifest are equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dagserve.manifest.source import START, Position, Source
from dagserve.manifest.tree import Path, Table

DEFAULT_MAX_BYTES = 65536


@dataclass(frozen=True)
class Text:
    """A piece of text and where it stands; ``key_position`` is the place of its key."""

    value: str
    position: Position = field(default=START, compare=False)
    key_position: Position = field(default=START, compare=False)


@dataclass(frozen=True)
class Bound:
    """The largest value of a symbol."""

    value: int
    position: Position = field(default=START, compare=False)


@dataclass(frozen=True)
class InputSpec:
    """One input of a request. ``default`` is nothing, a scalar, or a tuple of scalars."""

    name: str
    type: Text
    optional: bool = False
    default: Any = None
    max_bytes: int | None = None
    description: str = ""
    position: Position = field(default=START, compare=False)
    default_position: Position = field(default=START, compare=False)
    max_bytes_position: Position = field(default=START, compare=False)

    @property
    def always_present(self) -> bool:
        """Whether the graph sees a value in every request."""
        return not self.optional or self.default is not None


@dataclass(frozen=True)
class NodeSpec:
    """One node as written. ``options`` is the ``with`` block, with places of its values."""

    name: str
    engine: Text
    op: Text
    options: Mapping[str, Any]
    inputs: Mapping[str, Text]
    outputs: Mapping[str, Text]
    options_tree: Table = field(default=Table((), START), compare=False)
    position: Position = field(default=START, compare=False)
    inputs_position: Position = field(default=START, compare=False)
    outputs_position: Position = field(default=START, compare=False)


@dataclass(frozen=True)
class Concurrency:
    """The three tiers: executions of one package, requests inside the graph, requests admitted."""

    runners: int = 1
    contexts: int = 1
    in_flight: int = 4
    runners_position: Position = field(default=START, compare=False)
    contexts_position: Position = field(default=START, compare=False)


@dataclass(frozen=True)
class Target:
    """One machine the manifest is compiled for. ``operators`` maps an operator to its chosen implementation."""

    name: str
    device: str = "cpu"
    match: Mapping[str, str] = field(default_factory=dict)
    precision: str = "fp32"
    operators: Mapping[str, str] = field(default_factory=dict)
    concurrency: Concurrency = Concurrency()
    position: Position = field(default=START, compare=False)
    operators_tree: Table = field(default=Table((), START), compare=False)


@dataclass(frozen=True)
class Admission:
    """What happens beyond ``in_flight``. Times are in milliseconds."""

    max_queued: int = 64
    max_wait_ms: int = 100
    deadline_ms: int = 1000


@dataclass(frozen=True)
class Metric:
    """A business metric over labelled requests, and the largest accepted loss against the reference."""

    name: str
    data: str
    max_drop: float = 0.01


@dataclass(frozen=True)
class Performance:
    """End-to-end gates over HTTP; nothing means no gate."""

    in_flight: int = 1
    min_qps: float | None = None
    max_mean_ms: float | None = None
    max_p99_ms: float | None = None


@dataclass(frozen=True)
class Validation:
    """How a compiled artifact is judged. ``tolerance`` is the largest difference, by precision."""

    reference: str = "torch_eager"
    shapes: tuple[str, ...] = ("min", "mid", "max")
    inputs: tuple[Mapping[str, Any], ...] = ()
    tolerance: Mapping[str, float] = field(default_factory=dict)
    metric: Metric | None = None
    performance: Performance | None = None
    inputs_tree: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class Manifest:
    """A manifest with variables filled in. ``target`` is the chosen target's name.

    ``broken`` holds paths of values that were left out because a diagnostic already covers them; it is empty in a
    manifest that :func:`dagserve.manifest.load_manifest` returns.
    """

    name: str
    endpoint: Text | None
    bounds: Mapping[str, Bound]
    inputs: Mapping[str, InputSpec]
    nodes: Mapping[str, NodeSpec]
    outputs: Mapping[str, Text]
    targets: Mapping[str, Target]
    target: str
    admission: Admission
    validation: Validation
    source: Source = field(compare=False)
    broken: frozenset[Path] = field(default=frozenset(), compare=False)
    outputs_position: Position = field(default=START, compare=False)

    def is_broken(self, *path: str) -> bool:
        """Whether the value at this path, or something around it, already has a diagnostic."""
        return any(path[:n] in self.broken for n in range(1, len(path) + 1))
