"""What each HTTP endpoint's body may hold, and which input of the graph each field becomes.

Native code decodes bodies by these tables (``native/src/request_decoder.h``); :mod:`dagserve.runtime.request` is the
readable form of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from dagserve.attributes import Attribute
from dagserve.shapes import parse_dim

INPUTS = "inputs"
"""The endpoint that every graph has: each field is an input by its own name. ``dagserve run`` uses it."""

MODEL = "model"


@dataclass(frozen=True)
class Field:
    """One field of a body. A dot in ``path`` goes into an object: ``sampling_params.n``. Where there is a field of the
    object's own path too, that is what anything but an object stands for.

    Attributes:
        kind: ``input`` (becomes the graph's input ``input``), ``model`` (must be the served name), ``constant`` (must
            be ``expected``, a JSON scalar, because of ``reason``), ``fixed`` (may not be given), ``ignored``, or
            ``term``: values of a catalog's attribute of the kind ``expected``, which go to ``input`` as ``NAME=VALUE``.
        one_or_many: a value alone counts as a list of one.
        empty_is_absent: an empty list says no more than none does.
    """

    path: str
    kind: str = "input"
    input: str = ""
    one_or_many: bool = False
    empty_is_absent: bool = False
    expected: str = ""
    reason: str = ""
    description: str = ""


SCORE = (
    Field("query", input="query", description="Text put into the template's {query}."),
    Field("items", input="items", one_or_many=True, description="One text, or a list: one row of scores each."),
    Field("labels", input="labels", description="Label texts, each exactly one token."),
    Field("label_token_ids", input="label_token_ids", description="Vocabulary ids to score, instead of `labels`."),
    Field("apply_softmax", input="apply_softmax", description="Softmax over the labels, so that a row sums to 1."),
    Field(
        "item_first",
        "constant",
        expected="false",
        reason="the manifest's template fixes the order of query and item",
    ),
    Field("model", MODEL),
)
"""SGLang's ``/v1/score``."""

_OPEN_ENDED = "a search has a fixed number of steps and keeps the best sequences"

_ANY_ATTRIBUTE = "*"

_LISTS = (
    Field("allow", input="allow", description="Items that may be given, by id or by what they have; all if left out."),
    Field("allow.item", input="allow", description="Ids: the item is one of them."),
    Field(f"allow.{_ANY_ATTRIBUTE}", "term", input="allow_where", description="The item has one of these values."),
    Field(
        "deny",
        input="deny",
        empty_is_absent=True,
        description="Items that may not be given, by id or by what they have.",
    ),
    Field("deny.item", input="deny", empty_is_absent=True, description="Ids: the item is one of them."),
    Field(
        f"deny.{_ANY_ATTRIBUTE}",
        "term",
        input="deny_where",
        empty_is_absent=True,
        description="The item has one of these values.",
    ),
)
"""The service's own, in other services' shapes too."""

GENERATE = (
    Field("prompt", input="prompts", one_or_many=True),
    Field("prompts", input="prompts", one_or_many=True),
    Field("n", input="n"),
    Field("width", input="width"),
    Field("length_penalty", input="length_penalty"),
    *_LISTS,
    Field("return_tokens", input="return_tokens"),
    Field("return_scores", input="return_scores"),
    Field("model", MODEL),
)
"""dagserve's own ``/v1/generate``."""

COMPLETIONS = (
    Field("prompt", input="prompts", one_or_many=True),
    Field("n", input="n"),
    Field("best_of", input="width"),
    Field("use_beam_search", "constant", expected="true", reason=_OPEN_ENDED),
    Field("length_penalty", input="length_penalty"),
    Field("max_tokens", "constant", expected="STEPS", reason=_OPEN_ENDED),
    Field("temperature", "constant", expected="1", reason=_OPEN_ENDED),
    Field("top_p", "constant", expected="1", reason=_OPEN_ENDED),
    Field("stream", "constant", expected="false", reason=_OPEN_ENDED),
    Field("echo", "constant", expected="false", reason=_OPEN_ENDED),
    *_LISTS,
    Field("user", "ignored"),
    Field("seed", "ignored"),
    Field("model", MODEL),
)
"""vLLM's and OpenAI's ``/v1/completions`` with ``use_beam_search``."""

BEAMS = (
    Field("text", input="prompts", one_or_many=True),
    Field("sampling_params.beam_width", input="width"),
    Field("sampling_params.n", input="n"),
    Field("sampling_params.length_penalty", input="length_penalty"),
    Field("sampling_params.max_new_tokens", "constant", expected="STEPS", reason=_OPEN_ENDED),
    Field("sampling_params.temperature", "constant", expected="1", reason=_OPEN_ENDED),
    Field("stream", "constant", expected="false", reason=_OPEN_ENDED),
    *_LISTS,
    Field("rid", "ignored"),
)
"""SGLang's ``/generate`` with ``beam_width``."""


EMBEDDINGS = (
    Field("input", input="texts", one_or_many=True, description="One text, or a list: one vector each."),
    Field("encoding_format", "constant", expected='"float"', reason="vectors are written as numbers"),
    Field("dimensions", "constant", expected="DIMENSIONS", reason="the manifest fixes the dimensions"),
    Field("user", "ignored"),
    Field("model", MODEL),
)
"""OpenAI's ``/v1/embeddings``."""

CLASSIFY = (
    Field("input", input="texts", one_or_many=True, description="One text, or a list: one row of scores each."),
    Field("user", "ignored"),
    Field("model", MODEL),
)
"""vLLM's ``/classify``."""

RERANK = (
    Field("query", input="query", description="Text put into the template's {query}."),
    Field("texts", input="items", description="Texts put into {item}: one score each."),
    Field("return_text", "constant", expected="false", reason="the reply has the places of the texts"),
    Field("raw_scores", "constant", expected="false", reason="the manifest fixes the scores' reduction"),
)
"""text-embeddings-inference's ``/rerank``."""


@dataclass(frozen=True)
class Endpoint:
    """What a manifest's ``endpoint`` serves.

    Attributes:
        path: of the ``POST``.
        fields: of the body.
        required, optional: the graph's inputs, by name, with their form: ``text[batch]`` is any one-dimensional text.
        summary: for the API's documentation.
        encoder, style: the built-in node that writes its replies, and the ``style`` of that node's options, if any.
    """

    path: str
    fields: tuple[Field, ...]
    required: Mapping[str, str]
    optional: Mapping[str, str]
    summary: str
    encoder: str
    style: str = ""


_SERVICE = {"request_id": "text", "created": "i64"}
"""Inputs that HTTP fills itself: the request's id, and when it came in seconds since 1970."""

_LABELS = {"labels": "text[labels]", "label_token_ids": "i64[labels]", "apply_softmax": "bool"}
_SEARCH = {"n": "i64", "width": "i64", "length_penalty": "f32", "return_tokens": "bool", "return_scores": "bool"}
_ITEMS = dict.fromkeys(("allow", "deny", "allow_where", "deny_where"), "text[items]")
_PROMPTS = {"prompts": "text[prompts]"}

_TEXTS = {"texts": "text[batch]"}
_PAIRS = {"query": "text", "items": "text[batch]"}
_SEARCHED = {**_SEARCH, **_ITEMS}
_BEST = "The best continuations of prompts"

ENDPOINTS: Mapping[str, Endpoint] = {
    "score": Endpoint("/v1/score", SCORE, _PAIRS, _LABELS, "Score items against a query", "encode_scores"),
    "embeddings": Endpoint("/v1/embeddings", EMBEDDINGS, _TEXTS, {}, "A vector for each text", "encode_embeddings"),
    "classify": Endpoint("/classify", CLASSIFY, _TEXTS, _SERVICE, "The class of each text", "encode_classes"),
    "rerank": Endpoint("/rerank", RERANK, _PAIRS, _LABELS, "Order texts by a query", "encode_rerank"),
    "generate": Endpoint("/v1/generate", GENERATE, _PROMPTS, _SEARCHED, _BEST, "encode_sequences", "results"),
    "completions": Endpoint(
        "/v1/completions",
        COMPLETIONS,
        _PROMPTS,
        {**_SEARCHED, **_SERVICE},
        _BEST,
        "encode_sequences",
        "completions",
    ),
    "beams": Endpoint("/generate", BEAMS, _PROMPTS, _SEARCHED, _BEST, "encode_sequences", "beams"),
}
"""By the ``endpoint`` of a manifest."""


def endpoint_of(plan: Mapping[str, Any]) -> str:
    """The endpoint whose bodies an artifact takes: the manifest's, or :data:`INPUTS`."""
    return plan["endpoint"] or INPUTS


def fields_of(plan: Mapping[str, Any], endpoint: str) -> tuple[Field, ...]:
    """An endpoint's fields for one artifact: a field whose input the graph lacks is fixed by its manifest."""
    names = [spec["name"] for spec in plan["inputs"]]
    if endpoint == INPUTS:
        return tuple(Field(name, input=name) for name in names)
    fields = ENDPOINTS[endpoint].fields
    expanded = (f for field in fields for f in (_terms(field, plan) if field.kind == "term" else [field]))
    return tuple(_fitted(field, names, plan) for field in expanded)


def _terms(field: Field, plan: Mapping[str, Any]) -> list[Field]:
    """A field for each attribute of the catalogs that the input goes to; of several, for those that all have."""
    tensor = next((spec["tensor"] for spec in plan["inputs"] if spec["name"] == field.input), None)
    catalogs = [n for n in plan["nodes"] if n["op"] == "catalog" and n["inputs"].get(field.input) == tensor is not None]
    declared = [c["config"]["attributes"] for c in catalogs]
    found = (Attribute.of(text) for text in (declared[0] if declared else ()) if all(text in d for d in declared))
    path = field.path.removesuffix(_ANY_ATTRIBUTE)
    return [replace(field, path=path + a.name, expected=a.kind, one_or_many=True) for a in found]


_FIXED = {"STEPS": ("encode_sequences", "tokens"), "DIMENSIONS": ("encode_embeddings", "embeddings")}
"""Constants that a manifest fixes: the last dimension of what an encoder writes, by its op and port."""


def _last_dimension(plan: Mapping[str, Any], op: str, port: str) -> str:
    encoders = [node for node in plan["nodes"] if node["op"] == op]
    return str(plan["tensors"][encoders[0]["inputs"][port]]["shape"][-1]) if encoders else "0"


def _fitted(field: Field, names: list[str], plan: Mapping[str, Any]) -> Field:
    if field.kind == MODEL:
        return replace(field, expected=plan["name"])
    if field.expected in _FIXED:
        return replace(field, expected=_last_dimension(plan, *_FIXED[field.expected]))
    return replace(field, kind="fixed") if field.kind == "input" and field.input not in names else field


_JSON_TYPES = {"text": "string", "bool": "boolean", "f32": "number", "number": "number"}


def body_schema(plan: Mapping[str, Any], endpoint: str) -> dict[str, Any]:
    """The JSON Schema of an endpoint's bodies, for the API's documentation."""
    schema = _object()
    for field in fields_of(plan, endpoint):
        if field.kind == "fixed":
            continue
        *outer, name = field.path.split(".")
        place = schema
        for part in outer:
            place = _inside(place["properties"], part)
        place["properties"][name] = _value_schema(plan, field)
        if _is_required(plan, endpoint, field):
            place["required"].append(name)
    return schema


def _object() -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": {}, "required": []}


def _inside(properties: dict[str, Any], name: str) -> dict[str, Any]:
    """The schema of the object of that name, beside the other form of the value where it has one."""
    there = properties.setdefault(name, _object())
    if "anyOf" not in there and there.get("type") != "object":
        there = properties[name] = {"anyOf": [there, _object()]}
    found: dict[str, Any] = there["anyOf"][1] if "anyOf" in there else there
    return found


def _is_required(plan: Mapping[str, Any], endpoint: str, field: Field) -> bool:
    spec = next((s for s in plan["inputs"] if s["name"] == field.input), None)
    names = [f.path for f in fields_of(plan, endpoint) if f.input and f.input == field.input]
    return spec is not None and not spec["optional"] and spec["default"] is None and len(names) == 1


def _value_schema(plan: Mapping[str, Any], field: Field) -> dict[str, Any]:
    about = {"description": field.description or field.reason} if field.description or field.reason else {}
    if field.kind == "constant":
        return {**about, "const": json.loads(field.expected)}
    if field.kind == MODEL:
        return {"description": "The served model's name, if given.", "const": field.expected}
    if field.kind == "ignored":
        return {"description": "Accepted and not used."}
    spec = next(s for s in plan["inputs"] if s["name"] == field.input)
    tensor = plan["tensors"][spec["tensor"]]
    one = {"type": _JSON_TYPES.get(field.expected or tensor["dtype"], "integer")}
    if not tensor["shape"]:
        return {**about, **one}
    bounds = {s["name"]: s["bound"] for s in plan["symbols"]}
    many = {"type": "array", "items": one, "minItems": 0 if field.empty_is_absent else 1}
    many["maxItems"] = parse_dim(tensor["shape"][0]).size(bounds)
    return {**about, "oneOf": [one, many]} if field.one_or_many else {**about, **many}


def native_endpoints(plan: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """All endpoints of an artifact, as the native runtime reads them."""
    return {name: [asdict(f) for f in fields_of(plan, name)] for name in {INPUTS, endpoint_of(plan)}}
