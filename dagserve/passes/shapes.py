"""Passes that match port types with tensor types, and give every symbol a largest value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from dagserve.errors import Diagnostic
from dagserve.graph import Graph, GraphNode, Tensor, frozen
from dagserve.interface import Port
from dagserve.manifest import Position
from dagserve.manifest.source import did_you_mean, sentence
from dagserve.shapes import Dim, TensorType

Dims = dict[str, Dim]


def unify_shapes(graph: Graph) -> Graph:
    """Matches every port with its tensor: dtypes, ranks and dimensions.

    A definition's symbol stands for one dimension of the manifest on all ports of a node, ``+integer`` included: port
    ``i32[B+1]`` on tensor ``i32[batch+1]`` makes ``B`` the manifest's ``batch``.
    """
    found: list[Diagnostic] = []
    nodes = tuple(_unify_node(graph, node, found) for node in graph.nodes)
    return graph.reporting(found, nodes=nodes)


def _unify_node(graph: Graph, node: GraphNode, found: list[Diagnostic]) -> GraphNode:
    if node.interface is None:
        return node
    dims: Dims = {}
    for port in node.interface.inputs:
        tensor = graph.tensors.get(node.inputs.get(port.name, ""))
        if tensor and tensor.known and not _repeats(port, tensor) and not _matches(port.type, tensor.type, dims):
            found.append(_input_mistake(graph, node, port, tensor, dims))
    given = {s for port in _shaping_inputs(graph, node) for s in port.type.symbols}
    for port in node.interface.outputs:
        tensor = graph.tensors.get(node.outputs.get(port.name, ""))
        if tensor and tensor.known and not _matches(port.type, tensor.type, dims):
            found.append(_output_mistake(graph, node, port, tensor, dims))
    binds = (d.symbol for s, d in dims.items() if s not in given and d.symbol)
    return replace(node, dims=frozen(dims), binds=tuple(dict.fromkeys(binds)))


def _shaping_inputs(graph: Graph, node: GraphNode) -> Iterator[Port]:
    """Connected input ports that are not one text repeated for every row."""
    assert node.interface is not None
    for port in node.interface.inputs:
        tensor = graph.tensors.get(node.inputs.get(port.name, ""))
        if tensor and not _repeats(port, tensor):
            yield port


def _repeats(port: Port, tensor: Tensor) -> bool:
    return port.broadcast and tensor.type == TensorType(port.type.dtype)


def _matches(wanted: TensorType, given: TensorType, dims: Dims) -> bool:
    """Whether a port takes a type; on success ``dims`` also holds the symbols that it settles."""
    if wanted.dtype != given.dtype or len(wanted.shape) != len(given.shape):
        return False
    trial = dict(dims)
    if not all(_matches_dim(w, g, trial) for w, g in zip(wanted.shape, given.shape, strict=True)):
        return False
    dims.update(trial)
    return True


def _matches_dim(wanted: Dim, given: Dim, dims: Dims) -> bool:
    if not wanted.symbol:
        return wanted == given
    rest = Dim(given.symbol, given.add - wanted.add)
    if rest.add < (0 if rest.symbol else 1):
        return False
    return dims.setdefault(wanted.symbol, rest) == rest


def _settled(wanted: TensorType, dims: Mapping[str, Dim]) -> TensorType:
    """A port's type with the manifest's dimensions in place of the symbols that are settled."""
    return TensorType(wanted.dtype, tuple(_settled_dim(dim, dims) for dim in wanted.shape))


def _settled_dim(dim: Dim, dims: Mapping[str, Dim]) -> Dim:
    known = dims.get(dim.symbol)
    return Dim(known.symbol, known.add + dim.add) if known else dim


def _wants(port: Port, dims: Mapping[str, Dim]) -> str:
    settled = _settled(port.type, dims)
    return f"{port.type}" if settled == port.type else f"{port.type} (here {settled})"


def _input_mistake(graph: Graph, node: GraphNode, port: Port, tensor: Tensor, dims: Dims) -> Diagnostic:
    message = f"`{node.name}.{port.name}` takes {_wants(port, dims)}, but `{tensor.name}` is {tensor.type}"
    fitting = [t.name for t in graph.tensors.values() if t.known and _fits(port, t, dims, node)]
    fix = sentence(f"connect {_article(_settled(port.type, dims))}", did_you_mean_tensor(tensor.name, fitting))
    return graph.mistake(node.spec.inputs[port.name].position, message, fix, "shape")


def _fits(port: Port, tensor: Tensor, dims: Dims, node: GraphNode) -> bool:
    return tensor.node != node.name and _matches(port.type, tensor.type, dict(dims))


def did_you_mean_tensor(name: str, fitting: list[str]) -> str:
    """A suggestion when exactly one tensor fits, or one that fits has a similar name."""
    return f"did you mean `{fitting[0]}`?" if len(fitting) == 1 else did_you_mean(name, fitting)


def _article(kind: TensorType) -> str:
    return f"{'an' if kind.dtype.startswith('i') else 'a'} {kind}"


def _output_mistake(graph: Graph, node: GraphNode, port: Port, tensor: Tensor, dims: Dims) -> Diagnostic:
    message = f"`{tensor.name}` is declared {tensor.type}, but `{node.op}` makes {_wants(port, dims)}"
    unsettled = set(port.type.symbols) - dims.keys()
    fix = f"declare {_settled(port.type, dims)}" + (
        f" with a symbol for {', '.join(sorted(unsettled))}" if unsettled else ""
    )
    return graph.mistake(tensor.position, message, fix, "shape")


def derive_bounds(graph: Graph) -> Graph:
    """Adds the bounds that nodes state themselves; every symbol then has exactly one owner and a largest value.

    A symbol's owner is the request, where it stands in an input's type, or the node that decides it at run time.
    """
    found: list[Diagnostic] = []
    bounds = dict(graph.bounds)
    for node in graph.nodes:
        for local, size in (node.interface.bounds if node.interface else {}).items():
            _add_bound(graph, node, local, size, bounds, found)
    found += _two_owners(graph)
    found += _unbounded(graph, bounds)
    return graph.reporting(found, bounds=frozen(bounds))


def _add_bound(
    graph: Graph, node: GraphNode, local: str, size: int, bounds: dict[str, int], found: list[Diagnostic]
) -> None:
    dim = node.dims.get(local)
    if dim is None:
        return
    at = _place_of(graph, node, local)
    if not dim.symbol:
        message = f"node `{node.name}` decides this size at run time, up to {size}; it is not always {dim.add}"
        found.append(graph.mistake(at, message, "write a symbol in its place", "bound"))
        return
    stated = graph.manifest.bounds.get(dim.symbol)
    if stated is None:
        bounds[dim.symbol] = max(size - dim.add, 1)
    elif stated.value < size - dim.add:
        message = f"bound `{dim.symbol}` is {stated.value}, but node `{node.name}` makes up to {size - dim.add}"
        found.append(
            graph.mistake(stated.position, message, "raise it, or remove it: the node states its own", "bound")
        )


def _place_of(graph: Graph, node: GraphNode, local: str) -> Position:
    """The place of the first output type that holds the definition's symbol."""
    assert node.interface is not None
    places = (graph.tensors[node.outputs[p.name]].position for p in node.interface.outputs
              if local in p.type.symbols and p.name in node.outputs)  # fmt: skip
    return next(places, node.spec.position)


def _two_owners(graph: Graph) -> Iterator[Diagnostic]:
    owners = {s: f"request input `{t.name}`" for t in graph.tensors.values() if not t.node for s in t.type.symbols}
    for node in graph.nodes:
        decided = [(local, d.symbol) for local, d in node.dims.items() if d.symbol in node.binds]
        for local, symbol in decided:
            if local not in _free_symbols(graph, node):
                continue
            if symbol in owners:
                message = (
                    f"`{symbol}` is the size of {owners[symbol]}, but node `{node.name}` decides another size here"
                )
                yield graph.mistake(_place_of(graph, node, local), message, "use a symbol of its own", "bound")
            owners.setdefault(symbol, f"an output of node `{node.name}`")


def _free_symbols(graph: Graph, node: GraphNode) -> set[str]:
    given = {s for port in _shaping_inputs(graph, node) for s in port.type.symbols}
    return set(node.dims) - given


def _unbounded(graph: Graph, bounds: Mapping[str, int]) -> Iterator[Diagnostic]:
    if any(path[0] == "bounds" or len(path) == 1 for path in graph.manifest.broken):
        return
    told = set(bounds)
    for tensor in graph.tensors.values():
        for symbol in tensor.type.symbols:
            if symbol not in told and not _may_be_derived(graph, tensor):
                fix = sentence(f"add `{symbol}: <largest value>` under `bounds`", did_you_mean(symbol, graph.bounds))
                yield graph.mistake(tensor.position, f"symbol `{symbol}` has no upper bound", fix, "bound")
            told.add(symbol)


def _may_be_derived(graph: Graph, tensor: Tensor) -> bool:
    """Whether the producer has a mistake that hides the bounds it would state."""
    if not tensor.node:
        return False
    node = graph.node(tensor.node)
    return node.interface is None or not all(s in node.dims for s in node.interface.bounds)
