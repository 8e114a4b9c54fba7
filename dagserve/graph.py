"""The frozen graph: nodes with their definitions and options, and the tensors between them.

:func:`build_graph` makes the skeleton of a manifest; :data:`dagserve.passes.PASSES` fill it in and check it.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

import networkx as nx

from dagserve.errors import Diagnostic
from dagserve.interface import REGISTERED, Interface, NodeDefinition
from dagserve.manifest import InputSpec, Manifest, NodeSpec, Position, Target
from dagserve.manifest.source import START, did_you_mean, sentence
from dagserve.shapes import Dim, TensorType

V = TypeVar("V")

UNKNOWN = TensorType("")
"""The type of a tensor whose type text has a mistake; it fits everything, so that the mistake is told once."""

OFFSET_BYTES = 8

SERVED_DEVICE = "cpu"
"""The device whose artifacts the native runtime runs."""


def unserved_device(device: str) -> str:
    """What can be done with an artifact for another device."""
    return f"device {device} is not served by this version; `dagserve run --reference` runs such an artifact"


def frozen(values: Mapping[str, V]) -> Mapping[str, V]:
    """A read-only copy that keeps the order."""
    return MappingProxyType(dict(values))


@dataclass(frozen=True)
class Consumer:
    """An input port that reads a tensor, and the place in the manifest that connects it."""

    node: str
    port: str
    position: Position = field(default=START, compare=False)


@dataclass(frozen=True)
class Tensor:
    """A request input, named ``query``, or an output of a node, named ``node.port``.

    ``type`` is in the manifest's symbols. ``node`` is the producer, empty for a request input. ``capacity`` is in bytes
    at the bounds: of the payload for ``text``, of all elements otherwise; 0 until buffers are planned.
    """

    name: str
    type: TensorType
    node: str
    port: str
    consumers: tuple[Consumer, ...] = ()
    device: str = "cpu"
    max_bytes: int = 0
    capacity: int = 0
    position: Position = field(default=START, compare=False)

    @property
    def known(self) -> bool:
        """Whether the type could be read."""
        return self.type != UNKNOWN

    def offsets_bytes(self, bounds: Mapping[str, int]) -> int:
        """Bytes of a text tensor's ``i64[rows+1]`` offsets at the bounds; 0 for other dtypes."""
        return (self.type.numel(bounds) + 1) * OFFSET_BYTES if self.type.dtype == "text" else 0


@dataclass(frozen=True)
class GraphNode:
    """One node. Fields after ``spec`` are empty until the pass that resolves them has run.

    ``options`` holds every option of the definition, with defaults filled in (``None`` where there is none).
    ``inputs`` and ``outputs`` map connected ports to tensor names. ``dims`` maps the definition's own symbols to the
    manifest's dimensions. ``binds`` are the manifest symbols whose value this node decides at run time.
    ``bounds_read`` are the manifest bounds the definition looked at.
    """

    spec: NodeSpec
    definition: type[NodeDefinition] | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: frozen({}))
    interface: Interface | None = None
    inputs: Mapping[str, str] = field(default_factory=lambda: frozen({}))
    outputs: Mapping[str, str] = field(default_factory=lambda: frozen({}))
    dims: Mapping[str, Dim] = field(default_factory=lambda: frozen({}))
    binds: tuple[str, ...] = ()
    device: str = "cpu"
    bounds_read: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The node's name in the manifest."""
        return self.spec.name

    @property
    def engine(self) -> str:
        """``cpu`` or ``aoti``."""
        return self.spec.engine.value

    @property
    def op(self) -> str:
        """The definition as the manifest names it."""
        return self.spec.op.value


@dataclass(frozen=True)
class Transfer:
    """A tensor read on another device than the one it is made on: a copy and a point of synchronisation."""

    tensor: str
    source: str
    destination: str


@dataclass(frozen=True)
class Graph:
    """A manifest's graph for its chosen target. ``nodes`` are in the order they run once ``order`` has run.

    ``bounds`` holds the largest value of every symbol: the manifest's and those that nodes state themselves.
    """

    manifest: Manifest
    nodes: tuple[GraphNode, ...]
    tensors: Mapping[str, Tensor] = field(default_factory=lambda: frozen({}))
    outputs: Mapping[str, str] = field(default_factory=lambda: frozen({}))
    bounds: Mapping[str, int] = field(default_factory=lambda: frozen({}))
    diagnostics: tuple[Diagnostic, ...] = ()

    @property
    def target(self) -> Target:
        """The target the graph is for."""
        return self.manifest.targets.get(self.manifest.target) or Target("")

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        """The request inputs in manifest order; the tensor of each has its name."""
        return tuple(self.manifest.inputs.values())

    def node(self, name: str) -> GraphNode:
        """The node of that name.

        Raises:
            KeyError: there is none.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def network(self) -> nx.MultiDiGraph:
        """Nodes by name, and an edge for each tensor from its producer to each consumer, keyed by tensor and port."""
        network = nx.MultiDiGraph()
        network.add_nodes_from(node.name for node in self.nodes)
        for tensor in self.tensors.values():
            for consumer in tensor.consumers if tensor.node else ():
                network.add_edge(tensor.node, consumer.node, key=(tensor.name, consumer.port))
        return network

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Copies between devices, each once, in tensor order; results are wanted on the host."""
        return tuple(dict.fromkeys(self._crossings()))

    def _crossings(self) -> Iterator[Transfer]:
        returned = set(self.outputs.values())
        for tensor in self.tensors.values():
            devices = [self.node(c.node).device for c in tensor.consumers]
            devices += ["cpu"] if tensor.name in returned else []
            for device in devices:
                if device != tensor.device:
                    yield Transfer(tensor.name, tensor.device, device)

    @property
    def memory_bytes(self) -> tuple[int, int]:
        """Bytes of the tensors of one context, and of one request slot, which holds the inputs and the reply."""
        in_slot = {spec.name for spec in self.inputs} | set(self.outputs.values())
        sizes = {t.name: t.capacity + t.offsets_bytes(self.bounds) for t in self.tensors.values()}
        slot = sum(sizes[name] for name in in_slot)
        return sum(sizes.values()) - slot, slot

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the manifest asks for and this version does not do."""
        found = [unserved_device(self.target.device)] if self.target.device != SERVED_DEVICE else []
        found += [
            f"node `{node.name}` runs in Python: its requests wait for one lock; for prototypes, see docs/nodes.md"
            for node in self.nodes
            if runs_python(node)
        ]
        validation = self.manifest.validation
        for name, value in (("metric", validation.metric), ("performance", validation.performance)):
            if value is not None:
                found.append(f"validation.{name} is kept in the artifact, but this version does not enforce it")
        return tuple(found)

    def reporting(self, found: list[Diagnostic], **changes: Any) -> Graph:
        """A copy with changes and further diagnostics."""
        return replace(self, diagnostics=(*self.diagnostics, *found), **changes)

    def mistake(self, at: Position, message: str, fix: str = "", code: str = "") -> Diagnostic:
        """A diagnostic in this graph's manifest."""
        return self.manifest.source.diagnostic(at, message, fix, code)


def build_graph(manifest: Manifest, diagnostics: tuple[Diagnostic, ...] = ()) -> Graph:
    """The skeleton: nodes in manifest order, nothing resolved. ``diagnostics`` are those found while reading."""
    return Graph(manifest, tuple(map(GraphNode, manifest.nodes.values())), diagnostics=diagnostics)


def load_definition(op: str) -> type[NodeDefinition]:
    """The definition of a registered name or ``package.module:Class``.

    Raises:
        ValueError: there is none; the message says what to write.
    """
    module_name, colon, name = REGISTERED.get(op, op).partition(":")
    if not colon:
        fix = sentence(f"use one of {', '.join(REGISTERED)}, or package.module:Class", did_you_mean(op, REGISTERED))
        raise ValueError(f"unknown op `{op}`; {fix}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything while it is imported
        fix = sentence("check the name and that it is installed", _similar_module(module_name))
        raise ValueError(f"cannot import `{module_name}`: {error}; {fix}") from error
    found = getattr(module, name, None)
    if not _is_definition(found):
        known = [n for n, value in vars(module).items() if _is_definition(value)]
        fix = sentence(f"use one of {', '.join(known)}" if known else "name a class", did_you_mean(name, known))
        raise ValueError(f"`{module_name}` has no node definition `{name}`; {fix}")
    return cast(type[NodeDefinition], found)


def native_op(op: str) -> str:
    """The registered name of a definition, however a manifest names it; any other op as it is."""
    return next((name for name, path in REGISTERED.items() if op == path), op)


def is_borrowed(graph: Graph, tensor: Tensor) -> bool:
    """Whether a tensor is memory of the node that makes it, so that a context has no buffer for it."""
    interface = graph.node(tensor.node).interface if tensor.node else None
    return interface is not None and any(p.borrowed for p in interface.outputs if p.name == tensor.port)


def definition_file(node: GraphNode) -> Path:
    """The file of a node's definition."""
    assert node.definition is not None
    return Path(inspect.getfile(node.definition)).resolve()


def library_of(node: GraphNode) -> Path | None:
    """The shared library that runs a cpu node, if it is one of the user's."""
    name = getattr(node.definition, "library", None)
    return definition_file(node).parent / name if name else None


def runs_python(node: GraphNode) -> bool:
    """Whether a cpu node's definition runs it itself, in Python."""
    native = native_op(node.op) in REGISTERED or getattr(node.definition, "library", None)
    return node.engine == "cpu" and not native


def _is_definition(value: object) -> bool:
    members = ("engine", "options", "interface")
    return isinstance(value, type) and value is not NodeDefinition and all(hasattr(value, m) for m in members)


def _similar_module(name: str) -> str:
    parent = sys.modules.get(name.rpartition(".")[0])
    siblings = pkgutil.iter_modules(getattr(parent, "__path__", []), f"{parent.__name__}.") if parent else ()
    return did_you_mean(name, [module.name for module in siblings])
