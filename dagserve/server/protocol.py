"""``POST /v1/score`` in SGLang's shape: the body's fields, checked one by one, become the graph's inputs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from dagserve.errors import InvalidRequest
from dagserve.server.errors import UnknownModel


class ScoreRequest(BaseModel):
    """Score each item against the query.

    Without softmax, a score is the full-vocabulary probability of the label after the prompt.
    """

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"query": "q", "items": ["a", "b"]}]})

    query: StrictStr = Field(description="Text put into the template's {query}.")
    items: list[StrictStr] | StrictStr = Field(description="One text, or a list: one row of scores each.")
    label_token_ids: list[StrictInt] | None = Field(None, description="Vocabulary ids to score; or give `labels`.")
    labels: list[StrictStr] | None = Field(None, description="Label texts, each exactly one token.")
    apply_softmax: StrictBool | None = Field(None, description="Softmax over the labels, so that a row sums to 1.")
    item_first: StrictBool = Field(False, description="Must be false: the manifest's template fixes the order.")
    model: StrictStr | None = Field(None, description="The served model's name, if given.")


class Usage(BaseModel):
    """Tokens of the request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ScoreReply(BaseModel):
    """One row of scores for each item, one score for each label; a score that is not finite is null."""

    scores: list[list[float | None]]
    model: str
    usage: Usage
    object: str = "scoring"


class ErrorDetail(BaseModel):
    """What went wrong."""

    type: str
    message: str
    node: str | None = None
    retry_after_ms: int | None = None


class ErrorReply(BaseModel):
    """Every error has this form."""

    error: ErrorDetail


def decode_score(body: bytes, model: str, input_names: frozenset[str]) -> dict[str, object]:
    """A request body as inputs of the graph.

    Raises:
        InvalidRequest: not JSON, or a field that is unknown, missing or of the wrong type; the message names it.
        UnknownModel: another model's name.
    """
    value = _parse(body)
    request = _validate(value)
    if request.item_first:
        raise InvalidRequest("item_first must be false: the manifest's template fixes the order of query and item")
    if request.model not in (None, model):
        raise UnknownModel(f"model {request.model!r} is not served here; this is {model!r}")
    items = [request.items] if isinstance(request.items, str) else request.items
    optional = {
        "labels": request.labels,
        "label_token_ids": request.label_token_ids,
        "apply_softmax": request.apply_softmax,
    }
    given = {name: v for name, v in optional.items() if v is not None}
    for name in given.keys() - input_names:
        raise InvalidRequest(f"{name} is fixed by this service's manifest; leave it out")
    return {"query": request.query, "items": items, **given}


def _parse(body: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object with `query` and `items`")
    return value


def _validate(value: dict[str, Any]) -> ScoreRequest:
    try:
        return ScoreRequest.model_validate(value)
    except ValidationError as error:
        raise InvalidRequest(_describe(value, error.errors(include_url=False)[0])) from error


def _describe(value: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """The first mistake, with its path such as ``items[3]``."""
    location = [part for part in first["loc"] if part in value or isinstance(part, int)]
    path = "".join(f"[{p}]" if isinstance(p, int) else str(p) for p in location) or str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(path, ScoreRequest.model_fields, 1)
        return f"unknown field {path!r}" + (f"; did you mean {close[0]!r}?" if close else "; remove it")
    if first["type"] == "missing":
        return f"{path} is missing; give it"
    return _describe_type(path, value)


def _describe_type(path: str, value: Mapping[str, Any]) -> str:
    name = path.partition("[")[0]
    if name in ("query", "items"):
        place, wanted = _text_place(name, value[name])
        return f"{place} must be {wanted}; token ids are not taken, send texts"
    kinds = {
        "label_token_ids": "a list of integers",
        "labels": "a list of texts",
        "apply_softmax": "true or false",
        "item_first": "true or false",
        "model": "text",
    }
    return f"{path} must be {kinds[name] if path == name else kinds[name].removeprefix('a list of ').rstrip('s')}"


def _text_place(name: str, value: object) -> tuple[str, str]:
    if name == "items" and isinstance(value, list):
        index = next((i for i, item in enumerate(value) if not isinstance(item, str)), 0)
        return f"items[{index}]", "text"
    return name, "text" if name == "query" else "a text or a list of texts"
