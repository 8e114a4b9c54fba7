"""Passes that read tensor types, connect ports to tensors, and order the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import networkx as nx

from dagserve.errors import Diagnostic
from dagserve.graph import UNKNOWN, Consumer, Graph, GraphNode, Tensor, frozen
from dagserve.manifest import DEFAULT_MAX_BYTES, InputSpec, Text
from dagserve.manifest.source import did_you_mean, sentence
from dagserve.passes.definitions import has_unknown_key
from dagserve.shapes import DTYPES, TensorType, parse_type

MAX_RANK = 4
"""Most dimensions of a tensor in the native runtime."""

MAX_DIM = 2**31 - 1


def read_types(graph: Graph) -> Graph:
    """A tensor for every request input and declared node output, with its type read."""
    found: list[Diagnostic] = []
    tensors = [_input_tensor(graph, spec, found) for spec in graph.inputs]
    for node in graph.nodes:
        for port, text in node.spec.outputs.items():
            kind = _read_type(graph, text, found)
            size = DEFAULT_MAX_BYTES if kind.dtype == "text" else 0
            tensors.append(Tensor(f"{node.name}.{port}", kind, node.name, port, max_bytes=size, position=text.position))
    return graph.reporting(found, tensors=frozen({t.name: t for t in tensors}))


def _input_tensor(graph: Graph, spec: InputSpec, found: list[Diagnostic]) -> Tensor:
    kind = _read_type(graph, spec.type, found)
    if spec.max_bytes is not None and kind != UNKNOWN and kind.dtype != "text":
        message = f"input `{spec.name}` is {kind}, but `max_bytes` is for text only"
        found.append(
            graph.mistake(spec.max_bytes_position, message, "remove `max_bytes`; bounds size the rest", "size")
        )
    size = (spec.max_bytes or DEFAULT_MAX_BYTES) if kind.dtype == "text" else 0
    return Tensor(spec.name, kind, "", spec.name, max_bytes=size, position=spec.type.position)


def _read_type(graph: Graph, text: Text, found: list[Diagnostic]) -> TensorType:
    if not text.value:  # left out because it is broken
        return UNKNOWN
    try:
        kind = parse_type(text.value)
    except ValueError as error:
        fix = did_you_mean(text.value.partition("[")[0].strip(), DTYPES) if "dtype" in str(error) else ""
        found.append(graph.mistake(text.position, str(error), fix, "type"))
        return UNKNOWN
    problem = _type_problem(kind)
    if problem:
        found.append(graph.mistake(text.position, problem[0], problem[1], "type"))
    return UNKNOWN if problem else kind


def _type_problem(kind: TensorType) -> tuple[str, str] | None:
    if kind.dtype == "text" and len(kind.shape) > 1:
        return f"`{kind}` has {len(kind.shape)} dimensions", "texts are one string or a list: text or text[symbol]"
    if len(kind.shape) > MAX_RANK:
        return f"`{kind}` has {len(kind.shape)} dimensions", f"use at most {MAX_RANK}"
    for dim in kind.shape:
        if not dim.symbol and dim.add < 1:
            return f"`{kind}` has an empty dimension", "write a size of at least 1"
        if dim.add > MAX_DIM:
            return f"a dimension of `{kind}` is larger than {MAX_DIM}", "lower it"
    return None


def resolve_producers(graph: Graph) -> Graph:
    """Connects every input port and every output of the manifest to the tensor it names."""
    found = list(_name_clashes(graph))
    nodes: list[GraphNode] = []
    consumers: dict[str, list[Consumer]] = {name: [] for name in graph.tensors}
    for node in graph.nodes:
        inputs: dict[str, str] = {}
        for port, reference in node.spec.inputs.items():
            mistake = _reference_mistake(graph, reference) or _optional_mistake(graph, node, port, reference)
            found += [mistake] if mistake else []
            if reference.value in graph.tensors:
                inputs[port] = reference.value
                consumers[reference.value].append(Consumer(node.name, port, reference.position))
        outputs = {port: f"{node.name}.{port}" for port in node.spec.outputs}
        nodes.append(replace(node, inputs=frozen(inputs), outputs=frozen(outputs)))
    found += (m for text in graph.manifest.outputs.values() if (m := _output_mistake(graph, text)))
    return graph.reporting(
        found,
        nodes=tuple(nodes),
        tensors=frozen({n: replace(t, consumers=tuple(consumers[n])) for n, t in graph.tensors.items()}),
        outputs=frozen({n: t.value for n, t in graph.manifest.outputs.items() if _is_output(graph, t)}),
    )


def _name_clashes(graph: Graph) -> Iterator[Diagnostic]:
    for node in graph.nodes:
        if node.name in graph.manifest.inputs:
            message = f"`{node.name}` is both a request input and a node"
            yield graph.mistake(node.spec.position, message, "rename one of them", "name")


def _is_output(graph: Graph, text: Text) -> bool:
    return text.value in graph.tensors and bool(graph.tensors[text.value].node)


def _output_mistake(graph: Graph, text: Text) -> Diagnostic | None:
    tensor = graph.tensors.get(text.value)
    if tensor and not tensor.node:
        message = f"output `{text.value}` is a request input, not a result"
        return graph.mistake(text.position, message, "name a node's output, written node.port", "reference")
    return _reference_mistake(graph, text)


def _reference_mistake(graph: Graph, text: Text) -> Diagnostic | None:
    """What is wrong with a reference, or nothing when it is right or its mistake is told elsewhere."""
    name, dot, port = text.value.partition(".")
    if text.value in graph.tensors or _is_explained(graph, text):
        return None
    nodes = {node.name: node for node in graph.nodes}
    if name in nodes and dot:
        known = list(nodes[name].spec.outputs)
        fix = sentence(f"use one of {', '.join(known)}", did_you_mean(port, known))
        return graph.mistake(text.position, f"node `{name}` has no output `{port}`", fix, "reference")
    if name in nodes:
        known = [f"`{name}.{p}`" for p in nodes[name].spec.outputs]
        return graph.mistake(
            text.position, f"`{name}` is a node", f"name its output: {' or '.join(known)}", "reference"
        )
    if name in graph.manifest.inputs:
        return graph.mistake(text.position, f"input `{name}` has no ports", f"write `{name}`", "reference")
    what = f"no node `{name}` makes `{text.value}`" if dot else f"nothing makes `{text.value}`"
    fix = sentence(
        "declare a request input, or name a node's output as node.port", did_you_mean(text.value, graph.tensors)
    )
    return graph.mistake(text.position, what, fix, "reference")


def _is_explained(graph: Graph, text: Text) -> bool:
    """Whether another diagnostic says why the tensor is absent."""
    name, dot, port = text.value.partition(".")
    if graph.manifest.is_broken("nodes", name, "outputs", port) if dot else graph.manifest.is_broken("inputs", name):
        return True
    node = next((n for n in graph.nodes if n.name == name), None)
    if node is None or not dot:
        return False
    declared = {p.name for p in node.interface.outputs} if node.interface else set()
    return port in declared or (not node.spec.outputs and has_unknown_key(graph, node))


def _optional_mistake(graph: Graph, node: GraphNode, port: str, text: Text) -> Diagnostic | None:
    spec = graph.manifest.inputs.get(text.value)
    ports = {p.name: p for p in node.interface.inputs} if node.interface else {}
    if spec is None or spec.always_present or port not in ports or ports[port].optional:
        return None
    message = f"input `{spec.name}` is optional, but `{node.name}.{port}` needs it in every request"
    return graph.mistake(text.position, message, f"give `{spec.name}` a default, or make it required", "optional")


def order(graph: Graph) -> Graph:
    """Nodes in the order they run: topological, and among free choices the manifest's order."""
    network, index = graph.network(), {node.name: i for i, node in enumerate(graph.nodes)}
    cycles = [sorted(c, key=index.__getitem__) for c in nx.strongly_connected_components(network)]
    cycles = [c for c in cycles if len(c) > 1 or network.has_edge(c[0], c[0])]
    if cycles:
        return graph.reporting([_cycle_mistake(graph, network.subgraph(c), c[0]) for c in cycles])
    names = nx.lexicographical_topological_sort(network, key=index.__getitem__)
    return replace(graph, nodes=tuple(graph.node(name) for name in names))


def _cycle_mistake(graph: Graph, network: nx.MultiDiGraph, first: str) -> Diagnostic:
    paths = (nx.shortest_path(network, after, first) for after in network.successors(first))
    cycle = [first, *min(paths, key=lambda path: (len(path), path))]
    message = f"the nodes form a cycle: {' -> '.join(cycle)}"
    return graph.mistake(graph.node(first).spec.position, message, "remove one of these connections", "cycle")
