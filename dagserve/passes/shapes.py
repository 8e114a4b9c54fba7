"""Passes that match port types with tensor types, and give every symbol a largest value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from dagserve.errors import Diagnostic
from dagserve.graph import UNKNOWN, Graph, GraphNode, Tensor, frozen
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
    nodes: list[GraphNode] = []
    for node in graph.nodes:
        graph, unified = _unify_node(graph, node, found)
        nodes.append(unified)
    return graph.reporting(found, nodes=tuple(nodes))


def _unify_node(graph: Graph, node: GraphNode, found: list[Diagnostic]) -> tuple[Graph, GraphNode]:
    """The node with its dimensions settled, and the graph with mistaken types of its outputs put right."""
    if node.interface is None:
        return graph, node
    dims: Dims = {}
    complete = _is_complete(graph, node)
    for port in node.interface.inputs:
        tensor = graph.tensors.get(node.inputs.get(port.name, ""))
        if tensor and tensor.known and not _repeats(port, tensor) and not _matches(port.type, tensor.type, dims):
            found.append(_input_mistake(graph, node, port, tensor, dims))
            complete = False
    for port in node.interface.outputs:
        tensor = graph.tensors.get(node.outputs.get(port.name, ""))
        if tensor and tensor.known and not _matches(port.type, tensor.type, dims):
            found.append(_output_mistake(graph, node, port, tensor, dims))
            corrected = replace(tensor, type=_corrected(port, dims))
            graph = replace(graph, tensors=frozen({**graph.tensors, tensor.name: corrected}))
    binds = [dims[s].symbol for s in dims if s in _free_symbols(graph, node, dims) and dims[s].symbol]
    return graph, replace(node, dims=frozen(dims), binds=tuple(dict.fromkeys(binds)) if complete else ())


def _corrected(port: Port, dims: Mapping[str, Dim]) -> TensorType:
    """The type a mistaken declaration should have had, so that readers of the tensor are not blamed for it."""
    return _settled(port.type, dims) if dims.keys() >= set(port.type.symbols) else UNKNOWN


def _is_complete(graph: Graph, node: GraphNode) -> bool:
    """Whether every input of the node is known, so that a free symbol really is decided by the node."""
    assert node.interface is not None
    required = {port.name for port in node.interface.inputs if not port.optional}
    connected = all(graph.tensors[name].known for name in node.inputs.values())
    return connected and node.inputs.keys() == node.spec.inputs.keys() and required <= node.inputs.keys()


def _free_symbols(graph: Graph, node: GraphNode, dims: Mapping[str, Dim]) -> set[str]:
    """The definition's symbols that no connected input settles."""
    assert node.interface is not None
    tensors = ((port, graph.tensors.get(node.inputs.get(port.name, ""))) for port in node.interface.inputs)
    shaping = (port for port, tensor in tensors if tensor and not _repeats(port, tensor))
    return dims.keys() - {symbol for port in shaping for symbol in port.type.symbols}


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
    wanted = _article(_settled(port.type, dims)) + (" or one text for every row" if port.broadcast else "")
    fix = sentence(f"connect {wanted}", _suggestion(graph, node, port, tensor, dims))
    return graph.mistake(node.spec.inputs[port.name].position, message, fix, "shape")


def _suggestion(graph: Graph, node: GraphNode, port: Port, tensor: Tensor, dims: Dims) -> str:
    """A tensor that fits: the one named like the port, or the only one, or one named like the wrong one."""
    others = (t for t in graph.tensors.values() if t.known and t.node != node.name)
    fitting = {t.name: t.port for t in others if _matches(port.type, t.type, dict(dims))}
    likely = [name for name, port_name in fitting.items() if port_name == port.name] or list(fitting)
    return f"did you mean `{likely[0]}`?" if len(likely) == 1 else did_you_mean(tensor.name, likely)


def _article(kind: TensorType) -> str:
    return f"{'an' if kind.dtype[0] in 'if' else 'a'} {kind}"


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
        known = {local: dim.size(bounds) for local, dim in node.dims.items() if not dim.symbol or dim.symbol in bounds}
        for local, stated in (node.interface.bounds if node.interface else {}).items():
            size = stated(_Largest(known)) if callable(stated) else stated
            _add_bound(graph, node, local, size, bounds, found)
    found += _two_owners(graph)
    found += _unbounded(graph, bounds)
    return graph.reporting(found, bounds=frozen(bounds))


class _Largest(dict[str, int]):
    """Bounds by symbol; one that is a mistake, told elsewhere, counts as 1."""

    def __missing__(self, symbol: str) -> int:
        return 1


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
        free = _free_symbols(graph, node, node.dims) if node.binds else set()
        for local in sorted(free, key=list(node.dims).index):
            symbol = node.dims[local].symbol
            if symbol in owners:
                message = (
                    f"`{symbol}` is the size of {owners[symbol]}, but node `{node.name}` decides another size here"
                )
                yield graph.mistake(_place_of(graph, node, local), message, "use a symbol of its own", "bound")
            elif symbol:
                owners[symbol] = f"an output of node `{node.name}`"


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
