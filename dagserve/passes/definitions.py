"""Passes that find each node's definition, check its options and ask it for its ports."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import replace
from typing import Any

from dagserve.errors import Diagnostic
from dagserve.graph import Graph, GraphNode, frozen, load_definition
from dagserve.interface import NodeDefinition
from dagserve.manifest.builder import freeze
from dagserve.manifest.schema import coerce, violations
from dagserve.manifest.source import did_you_mean, sentence
from dagserve.manifest.tree import plain


def load_definitions(graph: Graph) -> Graph:
    """Imports every op and compares its engine with the manifest's."""
    found: list[Diagnostic] = []
    nodes = tuple(replace(node, definition=_definition(graph, node, found)) for node in graph.nodes)
    return graph.reporting(found, nodes=nodes)


def _definition(graph: Graph, node: GraphNode, found: list[Diagnostic]) -> type[NodeDefinition] | None:
    if not node.op:
        return None
    try:
        definition = load_definition(node.op)
    except ValueError as error:
        message, _, fix = str(error).partition("; ")
        found.append(graph.mistake(node.spec.op.position, message, fix, "op"))
        return None
    if node.engine and definition.engine != node.engine:
        message = f"node `{node.name}` has engine {node.engine}, but `{node.op}` runs on {definition.engine}"
        found.append(
            graph.mistake(node.spec.engine.position, message, f"write `engine: {definition.engine}`", "engine")
        )
    return definition


def resolve_options(graph: Graph) -> Graph:
    """Checks every ``with`` block against the definition's options and fills in defaults.

    ``max_length`` that is left out is the bound named ``length``, else ``tokens``.
    """
    found: list[Diagnostic] = []
    nodes = tuple(_with_options(graph, node, found) for node in graph.nodes)
    return graph.reporting(found, nodes=nodes)


def _with_options(graph: Graph, node: GraphNode, found: list[Diagnostic]) -> GraphNode:
    if node.definition is None:
        return node
    options = node.definition.options
    schema = {
        "type": "object",
        "properties": {o.name: o.schema for o in options},
        "required": [o.name for o in options if o.required],
        "additionalProperties": False,
    }
    path = ("nodes", node.name, "with")
    tree = coerce(node.spec.options_tree, schema)
    wrong = violations(tree, schema, graph.manifest.source, path)
    broken = [v for v in wrong if graph.manifest.is_broken(*path, *map(str, v.path[:1]))]
    found += [replace(v.diagnostic, code="option") for v in wrong if v not in broken and not _cut(graph, node)]
    if wrong or graph.manifest.is_broken(*path):
        return replace(node, definition=None)
    values = {**{o.name: o.default for o in options}, **plain(tree)}
    read: frozenset[str] = frozenset()
    if "max_length" in values and values["max_length"] is None:
        name = next((b for b in ("length", "tokens") if b in graph.manifest.bounds), "")
        values["max_length"] = graph.manifest.bounds[name].value if name else None
        read = frozenset({name} if name else ())
    return replace(node, options=frozen({k: freeze(v) for k, v in values.items()}), bounds_read=read)


def _cut(graph: Graph, node: GraphNode) -> bool:
    """Whether an unknown key of the node was left out, which may have been ``with`` misspelt."""
    return not node.spec.options_tree.entries and has_unknown_key(graph, node)


def has_unknown_key(graph: Graph, node: GraphNode) -> bool:
    """Whether a key directly under the node already has a diagnostic."""
    return any(len(path) == 3 and path[:2] == ("nodes", node.name) for path in graph.manifest.broken)


class _ReadBounds(Mapping[str, int]):
    """Bounds that remember which were looked up by name."""

    def __init__(self, bounds: Mapping[str, int]) -> None:
        self._bounds = bounds
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> int:
        value = self._bounds[name]
        self.read.add(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._bounds)

    def __len__(self) -> int:
        return len(self._bounds)

    def values(self) -> ValuesView[int]:
        return self._bounds.values()

    def items(self) -> ItemsView[str, int]:
        return self._bounds.items()


def resolve_interfaces(graph: Graph) -> Graph:
    """Asks each definition for its ports, and compares them with the ports the manifest names."""
    found: list[Diagnostic] = []
    bounds = frozen({name: bound.value for name, bound in graph.manifest.bounds.items()})
    nodes = tuple(_with_interface(graph, node, bounds, found) for node in graph.nodes)
    return graph.reporting(found, nodes=nodes, bounds=bounds)


def _with_interface(graph: Graph, node: GraphNode, bounds: Mapping[str, int], found: list[Diagnostic]) -> GraphNode:
    if node.definition is None:
        return node
    seen = _ReadBounds(bounds)
    try:
        interface = node.definition.interface(node.options, seen)
    except ValueError as error:
        found.append(graph.mistake(node.spec.options_tree.position, f"node `{node.name}`: {error}", code="option"))
        return node
    node = replace(node, interface=interface, bounds_read=node.bounds_read | seen.read)
    found += _port_mistakes(graph, node)
    return node


def _port_mistakes(graph: Graph, node: GraphNode) -> Iterator[Diagnostic]:
    assert node.interface is not None
    yield from _unknown_ports(graph, node, "input")
    yield from _unknown_ports(graph, node, "output")
    quiet = has_unknown_key(graph, node)
    for port in node.interface.inputs if not quiet else ():
        if not port.optional and _is_missing(graph, node, "inputs", port.name, node.spec.inputs):
            fix = f"add `{port.name}: <input or node.port>` of type {port.type}"
            message = f"input `{port.name}` of node `{node.name}` is not connected"
            yield graph.mistake(node.spec.inputs_position, message, fix, "port")
    for port in node.interface.outputs if not quiet else ():
        if _is_missing(graph, node, "outputs", port.name, node.spec.outputs):
            message = f"node `{node.name}` does not declare its output `{port.name}`"
            fix = f"add `{port.name}: <type>` of the form {port.type}"
            yield graph.mistake(node.spec.outputs_position, message, fix, "port")


def _unknown_ports(graph: Graph, node: GraphNode, kind: str) -> Iterator[Diagnostic]:
    written, known = _ports(node, kind)
    free = [name for name in known if name not in written]
    for name, text in written.items():
        if name not in known:
            fix = sentence(f"use one of {', '.join(known)}", did_you_mean(name, free))
            yield graph.mistake(text.key_position, f"node `{node.name}` has no {kind} `{name}`", fix, "port")


def _ports(node: GraphNode, kind: str) -> tuple[Mapping[str, Any], list[str]]:
    assert node.interface is not None
    if kind == "input":
        return node.spec.inputs, [port.name for port in node.interface.inputs]
    return node.spec.outputs, [port.name for port in node.interface.outputs]


def _is_missing(graph: Graph, node: GraphNode, key: str, port: str, written: Mapping[str, Any]) -> bool:
    """Whether a port is absent and no other diagnostic explains why: a broken value or a misspelt name."""
    _, known = _ports(node, key.removesuffix("s"))
    misspelt = any(name not in known and did_you_mean(name, [port]) for name in written)
    return port not in written and not misspelt and not graph.manifest.is_broken("nodes", node.name, key, port)
