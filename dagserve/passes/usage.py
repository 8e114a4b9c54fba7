"""The pass that looks for parts of the manifest that do nothing."""

from __future__ import annotations

from collections.abc import Iterator

import networkx as nx

from dagserve.errors import Diagnostic
from dagserve.graph import Graph

_HIDES_USE = {"syntax", "variable", "op", "option", "port", "reference", "name"}
_HIDES_SYMBOLS = {*_HIDES_USE, "type", "shape", "bound"}
_PARTS = {"inputs", "nodes", "outputs", "bounds"}


def check_unused(graph: Graph) -> Graph:
    """Inputs, nodes and bounds that no output depends on.

    Looked for only when every reference is right: a misspelt one makes what it should have named look unused.
    """
    codes = {d.code for d in graph.diagnostics}
    if codes & _HIDES_USE or any(path[0] in _PARTS or len(path) == 1 for path in graph.manifest.broken):
        return graph
    found = [*_unused_nodes(graph), *_unused_inputs(graph)]
    if not codes & _HIDES_SYMBOLS:
        found += _unused_bounds(graph)
    return graph.reporting(found)


def _useful(graph: Graph) -> set[str]:
    network = graph.network()
    ends = {graph.tensors[name].node for name in graph.outputs.values()}
    return ends.union(*(nx.ancestors(network, end) for end in ends))


def _unused_nodes(graph: Graph) -> Iterator[Diagnostic]:
    useful = _useful(graph)
    for node in graph.nodes:
        if node.name not in useful:
            message = f"no output depends on node `{node.name}`"
            yield graph.mistake(node.spec.position, message, "remove it, or use one of its outputs", "unused")


def _unused_inputs(graph: Graph) -> Iterator[Diagnostic]:
    for spec in graph.inputs:
        if not graph.tensors[spec.name].consumers:
            message = f"no node reads input `{spec.name}`"
            yield graph.mistake(spec.position, message, "remove it, or connect it to a node", "unused")


def _unused_bounds(graph: Graph) -> Iterator[Diagnostic]:
    used = {s for tensor in graph.tensors.values() for s in tensor.type.symbols}
    used.update(*(node.bounds_read for node in graph.nodes))
    for name, bound in graph.manifest.bounds.items():
        if name not in used:
            message = f"no type uses the bound `{name}`"
            yield graph.mistake(bound.position, message, "remove it, or use the symbol in a type", "unused")
