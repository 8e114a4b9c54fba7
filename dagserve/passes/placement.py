"""Passes about a target: where things are, how many run at once, and how large buffers are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from dagserve.errors import Diagnostic
from dagserve.graph import Graph, Tensor, frozen, is_borrowed
from dagserve.interface import Implementation
from dagserve.manifest import Target
from dagserve.manifest.source import did_you_mean, sentence
from dagserve.manifest.tree import locate, locate_key
from dagserve.shapes import DTYPE_BYTES

MAX_TENSOR_BYTES = 2**40
"""Largest buffer of one tensor, in bytes; more is taken for a slip in the bounds."""


def place_devices(graph: Graph) -> Graph:
    """CPU nodes on the host, aoti nodes on the target's device; a tensor is where its producer makes it."""
    device = graph.target.device
    nodes = tuple(replace(n, device=device if n.engine == "aoti" else "cpu") for n in graph.nodes)
    places = {n.name: n.device for n in nodes}
    tensors = {name: replace(t, device=places.get(t.node, "cpu")) for name, t in graph.tensors.items()}
    return replace(graph, nodes=nodes, tensors=frozen(tensors))


def check_match(graph: Graph) -> Graph:
    """Only a CUDA device can be matched by name and compute capability."""
    return graph.reporting(
        [
            graph.mistake(t.position, f"target `{t.name}` has `match` with `device: {t.device}`", fix, "match")
            for t in graph.manifest.targets.values()
            for fix in ["`match` chooses among cuda devices: remove it, or write `device: cuda`"]
            if t.match and t.device != "cuda"
        ]
    )


def check_tiers(graph: Graph) -> Graph:
    """On every target ``runners <= contexts <= in_flight``: the rest of a larger tier could never be used."""
    return graph.reporting([m for target in graph.manifest.targets.values() for m in _tier_mistakes(graph, target)])


def _tier_mistakes(graph: Graph, target: Target) -> list[Diagnostic]:
    tiers = target.concurrency
    found = []
    if tiers.runners > tiers.contexts:
        message = f"target `{target.name}` has {tiers.runners} runners for {tiers.contexts} contexts"
        fix = f"write at most `runners: {tiers.contexts}`, or raise contexts"
        found.append(graph.mistake(tiers.runners_position, message, fix, "tier"))
    if tiers.contexts > tiers.in_flight:
        message = f"target `{target.name}` has {tiers.contexts} contexts for {tiers.in_flight} requests in flight"
        fix = f"write at most `contexts: {tiers.in_flight}`, or raise in_flight"
        found.append(graph.mistake(tiers.contexts_position, message, fix, "tier"))
    return found


def check_operators(graph: Graph) -> Graph:
    """On every target each operator is one of a node's, and its choice one of the node's for the target's device."""
    if any(node.definition is None for node in graph.nodes):
        return graph  # what it would have is not known
    available: dict[str, Mapping[str, Implementation]] = {}
    for node in graph.nodes:
        available |= getattr(node.definition, "operators", {})
    return graph.reporting(
        [
            mistake
            for target in graph.manifest.targets.values()
            for name, choice in target.operators.items()
            for mistake in _operator_mistakes(graph, target, name, choice, available)
        ]
    )


def _operator_mistakes(
    graph: Graph, target: Target, name: str, choice: str, available: Mapping[str, Mapping[str, Implementation]]
) -> Iterator[Diagnostic]:
    if name not in available:
        message = f"target `{target.name}` chooses operator `{name}`, which no node has"
        fix = sentence(f"use {', '.join(available)}" if available else "remove it", did_you_mean(name, available))
        yield graph.mistake(locate_key(target.operators_tree, name), message, fix, "operator")
        return
    suited = [n for n, i in available[name].items() if unsuited(i, target) is None]
    if choice not in available[name]:
        message = f"operator `{name}` has no implementation `{choice}`"
        fix = sentence(f"use {', '.join(suited)}", did_you_mean(choice, suited))
        yield graph.mistake(locate(target.operators_tree, (name,)), message, fix, "operator")
    elif (why := unsuited(available[name][choice], target)) is not None:
        message = f"`{choice}` of operator `{name}` cannot run on target `{target.name}`: {why}"
        yield graph.mistake(locate(target.operators_tree, (name,)), message, f"use {', '.join(suited)}", "operator")


def unsuited(implementation: Implementation, target: Target) -> str | None:
    """Why a target's device cannot run an implementation, None where it can as far as the manifest says."""
    if target.device not in implementation.devices:
        return f"it is for {' and '.join(implementation.devices)}, and the target's device is {target.device}"
    compute = target.match.get("compute")
    if compute is not None and float(compute) < implementation.compute:
        return f"it needs compute capability {implementation.compute}, and the target's is {compute}"
    return None


def plan_buffers(graph: Graph) -> Graph:
    """The capacity in bytes of every tensor at the bounds."""
    tensors = {name: replace(t, capacity=_capacity(graph, t)) for name, t in graph.tensors.items()}
    too_large = [t for t in tensors.values() if t.capacity > MAX_TENSOR_BYTES]
    # One bound that is a slip shows in many buffers: the first tells it.
    return graph.reporting([_size_mistake(graph, t) for t in too_large[:1]], tensors=frozen(tensors))


def _capacity(graph: Graph, tensor: Tensor) -> int:
    if not tensor.known or any(s not in graph.bounds for s in tensor.type.symbols) or is_borrowed(graph, tensor):
        return 0
    if tensor.type.dtype == "text":
        return tensor.max_bytes
    return tensor.type.numel(graph.bounds) * DTYPE_BYTES[tensor.type.dtype]


def _size_mistake(graph: Graph, tensor: Tensor) -> Diagnostic:
    symbols = tensor.type.symbols
    fix = f"lower the bounds of {', '.join(symbols)}" if symbols else "lower its dimensions"
    return graph.mistake(tensor.position, f"`{tensor.name}` takes {tensor.capacity} bytes at the bounds", fix, "size")
