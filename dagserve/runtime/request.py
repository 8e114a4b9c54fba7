"""A request's body as inputs of the graph: the readable form of ``native/src/request_decoder.cc``."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from dagserve.endpoints import MODEL, Field, fields_of
from dagserve.errors import InvalidRequest, UnknownModel
from dagserve.shapes import INTEGER_RANGES, parse_dim

_LONGEST_SHOWN = 40
_F32_MAX = 2.0**128 - 2.0**104


class _Members(list[tuple[str, Any]]):
    """An object's members in order, duplicates included."""


def decode_body(body: bytes, plan: Mapping[str, Any], endpoint: str) -> dict[str, Any]:
    """The inputs a body stands for; those that it leaves out are absent.

    Raises:
        InvalidRequest: not JSON, or a field that is unknown, given twice, or of the wrong type.
        UnknownModel: another model's name.
    """
    value = _parse(body)
    if not isinstance(value, _Members):
        raise InvalidRequest("the body must be a JSON object")
    inputs: dict[str, Any] = {}
    given: set[str] = set()
    for path, item, field in _members(value, "", fields_of(plan, endpoint)):
        if path in given:
            raise InvalidRequest(f"{path} is given twice; give it once")
        given.add(path)
        if field.kind == "input":
            _take(field, item, plan, inputs)
        elif field.kind == "term":
            _take_terms(field, item, plan, inputs)
        else:
            _compare(field, item)
    for spec in plan["inputs"]:
        if spec["name"] not in inputs and not spec["optional"] and spec["default"] is None:
            name = next((f.path for f in fields_of(plan, endpoint) if f.input == spec["name"]), spec["name"])
            raise InvalidRequest(f"{name} is missing; give it")
    return inputs


def _parse(body: bytes) -> Any:
    def refuse(text: str) -> NoReturn:
        raise ValueError(f"{text} is not JSON")

    try:
        value = json.loads(body.decode("utf-8-sig"), object_pairs_hook=_Members, parse_constant=refuse)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair does not encode
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    return value


def _members(value: _Members, prefix: str, fields: Sequence[Field]) -> list[tuple[str, Any, Field]]:
    found: list[tuple[str, Any, Field]] = []
    objects: set[str] = set()
    for key, item in value:
        path = prefix + key
        if "." in key:  # a path, which only the table of fields has
            raise InvalidRequest(_unknown(path, prefix, fields))
        exact = next((f for f in fields if f.path == path), None)
        inside = any(f.path.startswith(path + ".") for f in fields)
        if inside and isinstance(item, _Members):
            if path in objects:
                raise InvalidRequest(f"{path} is given twice; give it once")
            objects.add(path)
            found += [] if exact is None else [(path, None, exact)]  # so that it is not given twice
            found += _members(item, path + ".", fields)
        elif exact is not None:
            found.append((path, item, exact))
        elif not inside:
            raise InvalidRequest(_unknown(path, prefix, fields))
        elif item is not None:
            raise InvalidRequest(f"{path} must be an object")
    return found


def _unknown(path: str, prefix: str, fields: Sequence[Field]) -> str:
    shown = path[: len(prefix) + _LONGEST_SHOWN]
    whole = next((f for f in fields if f.path + "." == prefix), None)
    if whole is not None and whole.kind == "fixed":
        return _fixed(whole)
    if whole is not None:
        there = [f"{f.path.removeprefix(prefix)} ({f.expected or 'text'})" for f in fields if f.path.startswith(prefix)]
        return f"unknown attribute {shown!r}; there is {', '.join(there)}"
    close = difflib.get_close_matches(shown, [f.path for f in fields], 1)
    return f"unknown field {shown!r}; " + (f"did you mean {close[0]!r}?" if close else "remove it")


def _fixed(field: Field) -> str:
    return f"{field.path} is fixed by this service's manifest; leave it out"


def _compare(field: Field, value: Any) -> None:
    if value is None or field.kind == "ignored":
        return
    if field.kind == "fixed":
        raise InvalidRequest(_fixed(field))
    if field.kind == MODEL:
        if not isinstance(value, str):
            raise InvalidRequest(f"{field.path} must be text")
        if value != field.expected:
            raise UnknownModel(f"model {value!r} is not served here; this is {field.expected!r}")
        return
    wanted = json.loads(field.expected)
    if isinstance(value, bool) != isinstance(wanted, bool) or value != wanted:
        raise InvalidRequest(f"{field.path} must be {field.expected}: {field.reason}")


def _take(field: Field, value: Any, plan: Mapping[str, Any], inputs: dict[str, Any]) -> None:
    spec = next(s for s in plan["inputs"] if s["name"] == field.input)
    tensor = plan["tensors"][spec["tensor"]]
    if value is None and (spec["optional"] or spec["default"] is not None):
        return
    if field.empty_is_absent and isinstance(value, list) and not isinstance(value, _Members) and not value:
        return
    if field.input in inputs:
        raise InvalidRequest(f"{field.path} is given under two names; give one of them")
    many = isinstance(value, list) and not isinstance(value, _Members)
    if not tensor["shape"]:
        _check(field.path, value, tensor["dtype"])
    elif many:
        for i, one in enumerate(value):
            _check(f"{field.path}[{i}]", one, tensor["dtype"])
        most = parse_dim(tensor["shape"][0]).size({s["name"]: s["bound"] for s in plan["symbols"]})
        if not 1 <= len(value) <= most:
            raise InvalidRequest(f"{field.path} has {len(value)} entries; it must have from 1 to {most}")
    elif field.one_or_many and value is not None and not isinstance(value, _Members):
        _check(field.path, value, tensor["dtype"])
        value = [value]
    else:
        raise InvalidRequest(f"{field.path} must be a list")
    inputs[field.input] = value


_KINDS = {"text": "text", "bool": "bool", "number": "f32"}


def _take_terms(field: Field, value: Any, plan: Mapping[str, Any], inputs: dict[str, Any]) -> None:
    """Appends ``NAME=VALUE`` for each value."""
    if value is None or (field.empty_is_absent and value == [] and not isinstance(value, _Members)):
        return
    spec = next(s for s in plan["inputs"] if s["name"] == field.input)
    tensor = plan["tensors"][spec["tensor"]]
    if isinstance(value, _Members):
        raise InvalidRequest(f"{field.path} must be one value or a list")
    terms = inputs.setdefault(field.input, [])
    for i, one in enumerate(value if isinstance(value, list) else [value]):
        place = f"{field.path}[{i}]" if isinstance(value, list) else field.path
        check_value(place, one, _KINDS[field.expected])
        terms.append(f"{field.path.rpartition('.')[2]}={_term(place, one)}")
    most = parse_dim(tensor["shape"][0]).size({s["name"]: s["bound"] for s in plan["symbols"]})
    if value == [] or len(terms) > most:
        raise InvalidRequest(f"{field.path}: all attributes have {len(terms)} values; it must be from 1 to {most}")


def _term(place: str, value: str | float | bool) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    with contextlib.suppress(OverflowError):
        if math.isfinite(float(value)):
            return repr(float(value))
    raise InvalidRequest(f"{place} must be a number that fits 64 bits")


def _check(place: str, value: Any, dtype: str) -> None:
    check_value(place, value, dtype)
    if dtype == "f32" and abs(value) > _F32_MAX:
        raise InvalidRequest(f"{place} must be a number that fits 32 bits")


def check_value(where: str, value: object, dtype: str) -> None:
    """Compares one element with its input's dtype.

    Raises:
        InvalidRequest: it is of another kind, or an integer that does not fit.
    """
    if dtype == "text":
        if not isinstance(value, str | bytes):
            raise InvalidRequest(f"{where} must be text")
    elif dtype == "bool":
        if not isinstance(value, bool):
            raise InvalidRequest(f"{where} must be true or false")
    elif dtype == "f32":
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(f"{where} must be a number")
    elif isinstance(value, bool) or not isinstance(value, int) or not _fits(value, dtype):
        raise InvalidRequest(f"{where} must be an integer of type {dtype}")


def _fits(value: int, dtype: str) -> bool:
    low, high = INTEGER_RANGES[dtype]
    return low <= value <= high
