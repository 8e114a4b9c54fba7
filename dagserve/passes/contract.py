"""Passes about the request: values the manifest gives for inputs, and what the endpoint's protocol asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dagserve.endpoints import ENDPOINTS
from dagserve.errors import Diagnostic
from dagserve.graph import Graph, GraphNode, Tensor
from dagserve.manifest.source import did_you_mean, sentence
from dagserve.manifest.tree import Entry, Items, Table, plain
from dagserve.shapes import INTEGER_RANGES, TensorType


def check_values(graph: Graph) -> Graph:
    """Defaults of inputs and the requests under ``validation.inputs`` fit the inputs' types and bounds."""
    return graph.reporting([*_default_mistakes(graph), *_sample_mistakes(graph)])


def _default_mistakes(graph: Graph) -> Iterator[Diagnostic]:
    for spec in graph.inputs:
        tensor = graph.tensors[spec.name]
        if spec.default is None or not tensor.known:
            continue
        problem = value_problem(spec.default, tensor, graph.bounds)
        if problem:
            message = f"the default of `{spec.name}` ({tensor.type}) {problem[0]}"
            yield graph.mistake(spec.default_position, message, problem[1], "default")
        elif spec.optional:
            message = f"input `{spec.name}` is optional and has a default"
            yield graph.mistake(
                spec.default_position, message, "keep one: with a default it is never absent", "default"
            )


def value_problem(value: Any, tensor: Tensor, bounds: Mapping[str, int]) -> tuple[str, str] | None:
    """Why a value does not fit a request input, and what would; nothing when it fits."""
    kind = tensor.type
    if len(kind.shape) > 1:
        return "has more than one dimension", "give values of scalars and lists only"
    if isinstance(value, tuple | list) != bool(kind.shape):
        return ("is one value", "write a list") if kind.shape else ("is a list", "write one value")
    values = list(value) if kind.shape else [value]
    if not all(_is_kind(v, kind) for v in values):
        return f"is not {_kind(kind)}", f"write {_kind(kind)}"
    if kind.dtype == "text" and (size := sum(len(v.encode()) for v in values)) > tensor.max_bytes:
        return f"has {size} bytes", f"shorten it to `max_bytes`, {tensor.max_bytes}"
    return _length_problem(len(values), kind, bounds) if kind.shape else None


def _length_problem(length: int, kind: TensorType, bounds: Mapping[str, int]) -> tuple[str, str] | None:
    dim = kind.shape[0]
    if not dim.symbol:
        return None if length == dim.add else (f"has {length} values", f"write {dim.add}")
    if dim.symbol not in bounds or dim.add < length <= dim.size(bounds):
        return None
    return f"has {length} values", f"write {dim.add + 1} to {dim.size(bounds)}"


def _is_kind(value: Any, kind: TensorType) -> bool:
    if kind.dtype in ("text", "bool"):
        return isinstance(value, str if kind.dtype == "text" else bool)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    low, high = INTEGER_RANGES.get(kind.dtype, (0, 0))
    return kind.dtype not in INTEGER_RANGES or (isinstance(value, int) and low <= value <= high)


def _kind(kind: TensorType) -> str:
    if kind.dtype in INTEGER_RANGES:
        low, high = INTEGER_RANGES[kind.dtype]
        return f"an integer from {low} to {high}"
    return {"text": "text", "bool": "true or false"}.get(kind.dtype, "a number")


def _sample_mistakes(graph: Graph) -> Iterator[Diagnostic]:
    samples = graph.manifest.validation.inputs_tree
    for sample in samples.values if isinstance(samples, Items) else ():
        assert isinstance(sample, Table)
        yield from _missing_values(graph, sample)
        for entry in sample:
            yield from _entry_mistake(graph, entry)


def _missing_values(graph: Graph, sample: Table) -> Iterator[Diagnostic]:
    misspelt = any(entry.key not in graph.manifest.inputs for entry in sample)
    for spec in graph.inputs if not misspelt else ():
        if not spec.optional and spec.default is None and sample.get(spec.name) is None:
            message = f"this request has no `{spec.name}`"
            yield graph.mistake(sample.position, message, f"add `{spec.name}`, or give the input a default", "sample")


def _entry_mistake(graph: Graph, entry: Entry) -> Iterator[Diagnostic]:
    if entry.key not in graph.manifest.inputs:
        names = list(graph.manifest.inputs)
        fix = sentence(f"use one of {', '.join(names)}", did_you_mean(entry.key, names))
        if not graph.manifest.is_broken("inputs", entry.key):
            yield graph.mistake(entry.key_position, f"there is no input `{entry.key}`", fix, "sample")
        return
    tensor = graph.tensors[entry.key]
    problem = value_problem(plain(entry.value), tensor, graph.bounds) if tensor.known else None
    if problem:
        message = f"the value of `{entry.key}` ({tensor.type}) {problem[0]}"
        yield graph.mistake(entry.value.position, message, problem[1], "sample")


def check_endpoint(graph: Graph) -> Graph:
    """What the manifest's ``endpoint`` asks: its required inputs, and an output ``response`` of bytes.

    The endpoint's optional inputs may be there too. Any other input needs a default or ``optional``, since no request
    of this protocol carries it.
    """
    return graph.reporting(list(_endpoint_mistakes(graph))) if graph.manifest.endpoint else graph


def _endpoint_mistakes(graph: Graph) -> Iterator[Diagnostic]:
    named = graph.manifest.endpoint
    assert named is not None
    endpoint = ENDPOINTS[named.value]
    for name, kind in endpoint.required.items():
        if name not in graph.manifest.inputs and not graph.manifest.is_broken("inputs", name):
            fix = sentence(
                f'add `{name}: {{type: "{kind}"}}` under `inputs`', did_you_mean(name, graph.manifest.inputs)
            )
            yield graph.mistake(named.position, f"endpoint {named.value} needs an input `{name}`", fix, "endpoint")
    for spec in graph.inputs:
        yield from _endpoint_input(graph, graph.tensors[spec.name], named.value)
    yield from _endpoint_response(graph, named.value)


def _endpoint_input(graph: Graph, tensor: Tensor, name: str) -> Iterator[Diagnostic]:
    spec, endpoint = graph.manifest.inputs[tensor.name], ENDPOINTS[name]
    wanted = {**endpoint.required, **endpoint.optional}.get(tensor.name, "")
    if wanted and tensor.known and not _same_form(tensor.type, wanted):
        message = f"endpoint {name} gives `{tensor.name}` as {wanted}, but it is {tensor.type}"
        yield graph.mistake(tensor.position, message, f'write `type: "{wanted}"`', "endpoint")
    left_out = not spec.optional and spec.default is None
    if tensor.name not in endpoint.required and left_out and not graph.manifest.is_broken("inputs", spec.name):
        message = f"a request to endpoint {name} may come without `{spec.name}`"
        yield graph.mistake(spec.position, message, "add `optional: true` or a default", "endpoint")


def _same_form(kind: TensorType, wanted: str) -> bool:
    """Whether the dtype is the same, and the shape a single symbol where one is wanted."""
    dtype, listed, _ = wanted.partition("[")
    shape = [bool(dim.symbol) and not dim.add for dim in kind.shape]
    return kind.dtype == dtype and shape == ([True] if listed else [])


def _endpoint_response(graph: Graph, name: str) -> Iterator[Diagnostic]:
    text = graph.manifest.outputs.get("response")
    if text is None:
        if not graph.manifest.is_broken("outputs", "response"):
            fix = sentence(
                "add `response: <node.port>` of type u8[symbol]", did_you_mean("response", graph.manifest.outputs)
            )
            message = f"endpoint {name} needs an output `response`"
            yield graph.mistake(graph.manifest.outputs_position, message, fix, "endpoint")
        return
    tensor = graph.tensors.get(graph.outputs.get("response", ""))
    if tensor and tensor.known and (tensor.type.dtype, len(tensor.type.shape)) != ("u8", 1):
        message = f"endpoint {name} returns bytes, u8[symbol], but `{tensor.name}` is {tensor.type}"
        yield graph.mistake(text.position, message, "name an output such as that of encode_scores", "endpoint")
        return
    producer = next((node for node in graph.nodes if tensor and node.name == tensor.node), None)
    if producer is not None:
        yield from _endpoint_encoder(graph, producer, name)


def _endpoint_encoder(graph: Graph, node: GraphNode, name: str) -> Iterator[Diagnostic]:
    """A built-in encoder of another endpoint's replies; nodes of one's own and raw tensors may go anywhere."""
    wanted, style = ENDPOINTS[name], node.options.get("style", "")
    fits = [n for n, e in ENDPOINTS.items() if e.encoder == node.op and style in (e.style, "")]
    if not fits or name in fits:
        return
    written = f"`{node.op}` with `style: {style}`" if style else f"`{node.op}`"
    message = f"{written} writes replies of endpoint {' or '.join(fits)}, and the endpoint is {name}"
    right = f"style: {wanted.style}" if node.op == wanted.encoder else f"op: {wanted.encoder}"
    yield graph.mistake(node.spec.op.position, message, f"write `{right}`, or `endpoint: {fits[0]}`", "endpoint")
