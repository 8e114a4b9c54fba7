"""A tree that fits the schema -> the frozen model. Values that did not fit have been taken out before."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from dagserve.manifest.model import (
    Admission,
    Bound,
    Concurrency,
    InputSpec,
    Manifest,
    Metric,
    NodeSpec,
    Performance,
    Target,
    Text,
    Validation,
)
from dagserve.manifest.source import Position, Source
from dagserve.manifest.tree import Entry, Items, Path, Scalar, Table, Tree, locate, locate_key, plain
from dagserve.manifest.yaml import resolve_plain

T = TypeVar("T")


def build(tree: Table, source: Source, target: str | None, broken: frozenset[Path]) -> Manifest:
    """The model of a tree without violations."""
    targets = {e.key: _target(e) for e in _entries(tree, "targets")}
    endpoint = tree.get("endpoint")
    return Manifest(
        name=_text(tree, "name").value,
        endpoint=Text(str(plain(endpoint)), endpoint.position, locate_key(tree, "endpoint")) if endpoint else None,
        bounds=_frozen({e.key: Bound(plain(e.value), e.value.position) for e in _entries(tree, "bounds")}),
        inputs=_frozen({e.key: _input(e) for e in _entries(tree, "inputs")}),
        nodes=_frozen({e.key: _node(e) for e in _entries(tree, "nodes")}),
        outputs=_texts(tree, "outputs"),
        targets=_frozen(targets),
        target=target if target in targets else next(iter(targets), ""),
        admission=_admission(_section(tree, "admission")),
        validation=_validation(_section(tree, "validation")),
        source=source,
        broken=broken,
        outputs_position=locate_key(tree, "outputs"),
    )


def freeze(value: Any) -> Any:
    """Lists become tuples and mappings read-only, all the way down."""
    if isinstance(value, Mapping):
        return MappingProxyType({k: freeze(v) for k, v in value.items()})
    return tuple(map(freeze, value)) if isinstance(value, list | tuple) else value


def _frozen(values: dict[str, T]) -> Mapping[str, T]:
    return MappingProxyType(values)


def _section(table: Table, key: str) -> Table:
    value = table.get(key)
    return value if isinstance(value, Table) else Table((), locate(table, (key,)))


def _entries(table: Table, key: str) -> tuple[Entry, ...]:
    return _section(table, key).entries


def _text(table: Table, key: str) -> Text:
    """The text of a key; empty where the key was left out because it is broken."""
    value = table.get(key)
    return Text(str(plain(value)) if value else "", locate(table, (key,)), locate_key(table, key))


def _texts(table: Table, key: str) -> Mapping[str, Text]:
    section = _section(table, key)
    return _frozen({e.key: _text(section, e.key) for e in section})


def _plain(table: Table, *keys: str) -> dict[str, Any]:
    """The keys that are present, as plain values."""
    return {e.key: plain(e.value) for e in table if e.key in keys}


def _input(entry: Entry) -> InputSpec:
    table = _table(entry.value)
    type_text, default = _text(table, "type"), table.get("default")
    return InputSpec(
        name=entry.key,
        type=type_text,
        default=_default(default, type_text.value) if default else None,
        position=entry.key_position,
        default_position=locate(table, ("default",)),
        max_bytes_position=locate(table, ("max_bytes",)),
        **_plain(table, "optional", "max_bytes", "description"),
    )


def _default(tree: Tree, type_text: str) -> Any:
    """A default; one that came whole from a variable is a number where the input is not text."""
    if isinstance(tree, Items):
        return tuple(_default(v, type_text) for v in tree.values)
    if isinstance(tree, Scalar) and tree.substituted and not type_text.strip().startswith("text"):
        return resolve_plain(str(tree.value))
    return plain(tree)


def _table(tree: Tree) -> Table:
    return tree if isinstance(tree, Table) else Table((), tree.position)


def _node(entry: Entry) -> NodeSpec:
    table = _table(entry.value)
    options = _section(table, "with")
    return NodeSpec(
        name=entry.key,
        engine=_text(table, "engine"),
        op=_text(table, "op"),
        options=freeze(plain(options)),
        options_tree=options,
        inputs=_texts(table, "inputs"),
        outputs=_texts(table, "outputs"),
        position=entry.key_position,
        inputs_position=_key_or(table, "inputs", entry.key_position),
        outputs_position=_key_or(table, "outputs", entry.key_position),
    )


def _key_or(table: Table, key: str, other: Position) -> Position:
    return locate_key(table, key) if table.get(key) else other


def _target(entry: Entry) -> Target:
    table = _table(entry.value)
    values = _plain(table, "device", "match", "precision", "operators")
    values = {k: freeze(v) for k, v in values.items()}
    return Target(
        name=entry.key,
        concurrency=_concurrency(_section(table, "concurrency")),
        position=entry.key_position,
        operators_tree=_section(table, "operators"),
        **{"match": _frozen({}), "operators": _frozen({}), **values},
    )


def _concurrency(table: Table) -> Concurrency:
    values = _plain(table, "runners", "contexts", "in_flight")
    runners = values.get("runners", 1)
    contexts = values.get("contexts", runners)
    return Concurrency(
        runners=runners,
        contexts=contexts,
        in_flight=values.get("in_flight", 4 * contexts),
        runners_position=locate(table, ("runners",)),
        contexts_position=locate(table, ("contexts",)),
    )


def _admission(table: Table) -> Admission:
    return Admission(**_plain(table, "max_queued", "max_wait_ms", "deadline_ms"))


def _validation(table: Table) -> Validation:
    values = _plain(table, "reference", "shapes", "inputs")
    metric, performance = _section(table, "metric"), _section(table, "performance")
    tolerance = {"fp32": 1e-4, "bf16": 5e-2, "fp8": 0.4, **plain(_section(table, "tolerance"))}
    return Validation(
        tolerance=_frozen(tolerance),
        metric=Metric(**plain(metric)) if table.get("metric") and {"name", "data"} <= plain(metric).keys() else None,
        performance=Performance(**plain(performance)) if table.get("performance") else None,
        inputs_tree=table.get("inputs"),
        **{k: freeze(v) for k, v in values.items()},
    )
