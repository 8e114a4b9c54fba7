"""What must hold of a graph after each pass. A failure here is a bug of that pass, never the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from dagserve.graph import Graph, is_borrowed

Check = Callable[[Graph], Iterator[str]]


class PassError(AssertionError):
    """A pass broke an invariant; the message names the pass."""


def verify(before: Graph, after: Graph, name: str, done: frozenset[str]) -> None:
    """Checks ``after``, the result of pass ``name`` on ``before``; ``done`` are the passes run so far, it included.

    Raises:
        PassError: an invariant does not hold.
    """
    # The rest of the checks look nodes up, so they need them to be there.
    problems = [*_kept(before, after)] or [*_consistent(after)]
    for needed, check in _AFTER.items():
        if needed in done and not problems and not after.diagnostics:
            problems += check(after)
    if problems:
        raise PassError(f"pass {name}: {'; '.join(problems)}")


def _kept(before: Graph, after: Graph) -> Iterator[str]:
    if after.diagnostics[: len(before.diagnostics)] != before.diagnostics:
        yield "diagnostics were lost"
    if after.manifest is not before.manifest:
        yield "the manifest was replaced"
    if sorted(n.name for n in after.nodes) != sorted(after.manifest.nodes):
        yield "nodes were lost or added"


def _consistent(graph: Graph) -> Iterator[str]:
    for name, tensor in graph.tensors.items():
        if tensor.name != name:
            yield f"tensor {tensor.name} is filed under {name}"
        for consumer in tensor.consumers:
            if graph.node(consumer.node).inputs.get(consumer.port) != name:
                yield f"{consumer.node}.{consumer.port} does not read {name}"
    for node in graph.nodes:
        for port, name in {**node.inputs, **node.outputs}.items():
            if name not in graph.tensors:
                yield f"{node.name}.{port} names no tensor: {name}"


def _resolved(graph: Graph) -> Iterator[str]:
    return (f"node {n.name} has no interface" for n in graph.nodes if n.interface is None)


def _connected(graph: Graph) -> Iterator[str]:
    yield from (f"output {name} is lost" for name in graph.manifest.outputs if name not in graph.outputs)
    for node in graph.nodes:
        assert node.interface is not None
        wanted = {p.name for p in node.interface.inputs if not p.optional}
        yield from (f"{node.name}.{port} is not connected" for port in sorted(wanted - node.inputs.keys()))


def _ordered(graph: Graph) -> Iterator[str]:
    place = {node.name: i for i, node in enumerate(graph.nodes)}
    for tensor in graph.tensors.values():
        late = (c.node for c in tensor.consumers if tensor.node and place[c.node] <= place[tensor.node])
        yield from (f"{node} runs before {tensor.node}" for node in late)


def _bounded(graph: Graph) -> Iterator[str]:
    for tensor in graph.tensors.values():
        yield from (f"{symbol} has no bound" for symbol in tensor.type.symbols if graph.bounds.get(symbol, 0) < 1)


def _placed(graph: Graph) -> Iterator[str]:
    places = {node.name: node.device for node in graph.nodes}
    wrong = (t.name for t in graph.tensors.values() if t.device != places.get(t.node, "cpu"))
    return (f"{name} is not where it is made" for name in wrong)


def _sized(graph: Graph) -> Iterator[str]:
    tensors = graph.tensors.values()
    return (f"{t.name} has no capacity" for t in tensors if t.capacity < 1 and not is_borrowed(graph, t))


_AFTER: Mapping[str, Check] = {
    "resolve_interfaces": _resolved,
    "resolve_producers": _connected,
    "order": _ordered,
    "derive_bounds": _bounded,
    "place_devices": _placed,
    "plan_buffers": _sized,
}
