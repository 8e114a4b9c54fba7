"""What each HTTP endpoint's body may hold, and which input of the graph each field becomes.

Native code decodes bodies by these tables (``native/src/request_decoder.h``); :mod:`dagserve.runtime.request` is the
readable form of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

INPUTS = "inputs"
"""The endpoint that every graph has: each field is an input by its own name. ``dagserve run`` uses it."""

MODEL = "model"


@dataclass(frozen=True)
class Field:
    """One field of a body. A dot in ``path`` goes into an object: ``sampling_params.n``.

    Attributes:
        kind: ``input`` (becomes the graph's input ``input``), ``model`` (must be the served name), ``constant`` (must
            be ``expected``, a JSON scalar, because of ``reason``), ``fixed`` (may not be given) or ``ignored``.
        one_or_many: a value alone counts as a list of one.
    """

    path: str
    kind: str = "input"
    input: str = ""
    one_or_many: bool = False
    expected: str = ""
    reason: str = ""


SCORE = (
    Field("query", input="query"),
    Field("items", input="items", one_or_many=True),
    Field("labels", input="labels"),
    Field("label_token_ids", input="label_token_ids"),
    Field("apply_softmax", input="apply_softmax"),
    Field(
        "item_first",
        "constant",
        expected="false",
        reason="the manifest's template fixes the order of query and item",
    ),
    Field("model", MODEL),
)
"""SGLang's ``/v1/score``."""

ENDPOINTS: Mapping[str, tuple[Field, ...]] = {"score": SCORE}
"""Fields by the ``endpoint`` of a manifest."""


def endpoint_of(plan: Mapping[str, Any]) -> str:
    """The endpoint whose bodies an artifact takes: the manifest's, or :data:`INPUTS`."""
    return plan["endpoint"] or INPUTS


def fields_of(plan: Mapping[str, Any], endpoint: str) -> tuple[Field, ...]:
    """An endpoint's fields for one artifact: a field whose input the graph lacks is fixed by its manifest."""
    names = [spec["name"] for spec in plan["inputs"]]
    if endpoint == INPUTS:
        return tuple(Field(name, input=name) for name in names)
    return tuple(_fitted(field, names, plan["name"]) for field in ENDPOINTS[endpoint])


def _fitted(field: Field, names: list[str], model: str) -> Field:
    if field.kind == MODEL:
        return replace(field, expected=model)
    return replace(field, kind="fixed") if field.kind == "input" and field.input not in names else field


def native_endpoints(plan: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """All endpoints of an artifact, as the native runtime reads them."""
    return {name: [asdict(f) for f in fields_of(plan, name)] for name in {INPUTS, endpoint_of(plan)}}
