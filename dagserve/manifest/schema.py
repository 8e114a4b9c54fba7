"""A tree against a JSON Schema, with violations told in the manifest's own words and places."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

from dagserve.errors import Diagnostic
from dagserve.manifest.source import Position, Source, did_you_mean, sentence
from dagserve.manifest.tree import Items, Path, Scalar, Table, Tree, find, locate, locate_key, plain
from dagserve.manifest.yaml import resolve_plain

_KINDS = {
    "string": "text",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "empty",
}


@cache
def manifest_schema() -> Mapping[str, Any]:
    """The JSON Schema of manifests, as installed with the package."""
    text = files("dagserve").joinpath("schemas", "manifest.schema.json").read_text(encoding="utf-8")
    schema: Mapping[str, Any] = json.loads(text)
    return schema


@dataclass(frozen=True)
class Violation:
    """A diagnostic, and the path of the value that cannot be used because of it."""

    path: Path
    diagnostic: Diagnostic


def violations(tree: Tree, schema: Mapping[str, Any], source: Source, prefix: Path = ()) -> list[Violation]:
    """Everything in the tree that breaks the schema, at most one violation for each value or key.

    ``prefix`` is the tree's own path in the manifest, used in messages.
    """
    found: dict[Path, Violation] = {}
    errors = sorted(_VALIDATOR(schema).iter_errors(plain(tree)), key=lambda e: (e.validator != "type", e.validator))
    for error in errors:
        for violation in _explain(error, tree, source, prefix):
            found.setdefault(violation.path, violation)
    return list(found.values())


def coerce(tree: Tree, schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> Tree:
    """Reads values that came whole from a ``${variable}`` as numbers or booleans where the schema takes no text."""
    root = root or schema
    schema = _resolve(schema, root)
    if isinstance(tree, Scalar):
        takes = _types(schema)
        if tree.substituted and takes and "string" not in takes:
            return replace(tree, value=resolve_plain(str(tree.value)))
        return tree
    if isinstance(tree, Items):
        item = schema.get("items", {})
        return replace(tree, values=tuple(coerce(v, item, root) for v in tree.values))
    known, other = schema.get("properties", {}), schema.get("additionalProperties", {})
    other = other if isinstance(other, Mapping) else {}
    return replace(tree, entries=tuple(replace(e, value=coerce(e.value, known.get(e.key, other), root)) for e in tree))


def _resolve(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(schema, Mapping):
        return {}
    reference = schema.get("$ref", "")
    name = reference.removeprefix("#/$defs/")
    return root["$defs"][name] if reference.startswith("#/$defs/") else schema


def _types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    kinds = schema.get("type", ())
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def _explain(error: ValidationError, tree: Tree, source: Source, prefix: Path) -> Iterator[Violation]:
    path = tuple(error.absolute_path)
    if "propertyNames" in error.absolute_schema_path:
        key = str(error.instance)
        fix = f"write {_describe_pattern(error.schema)}"
        at = locate_key(_at(tree, path), key)
        yield _violation(
            source, at, (*path, key), f"`{_short(key)}` is not a name for `{_name((*prefix, *path))}`", fix
        )
    elif error.validator == "additionalProperties":
        yield from _unknown_keys(error, path, tree, source, prefix)
    elif error.validator == "required":
        yield from _missing_keys(error, path, tree, source, prefix)
    else:
        message, fix = _value_message(error, _name((*prefix, *path)))
        yield _violation(source, locate(tree, path), path, message, fix)


def _violation(source: Source, at: Position, path: Path, message: str, fix: str) -> Violation:
    return Violation(path, source.diagnostic(at, message, fix, "schema"))


def _at(tree: Tree, path: Path) -> Tree:
    return find(tree, path) or tree


def _unknown_keys(error: ValidationError, path: Path, tree: Tree, source: Source, prefix: Path) -> Iterator[Violation]:
    known = list(error.schema.get("properties", {}))
    table = _at(tree, path)
    assert isinstance(table, Table)
    for entry in table:
        if entry.key not in known:
            free = [k for k in known if table.get(k) is None]
            fix = sentence(f"use one of {', '.join(known)}", did_you_mean(entry.key, free or known))
            message = f"unknown key `{_short(entry.key)}` in {_place((*prefix, *path))}"
            yield _violation(source, entry.key_position, (*path, entry.key), message, fix)


def _missing_keys(error: ValidationError, path: Path, tree: Tree, source: Source, prefix: Path) -> Iterator[Violation]:
    table = _at(tree, path)
    assert isinstance(table, Table)
    known = error.schema.get("properties", {})
    for key in error.schema["required"]:
        misspelt = any(e.key not in known and did_you_mean(e.key, [key]) for e in table)
        if table.get(key) is None and not misspelt:
            example = _example(known.get(key, {}))
            message = f"{_place((*prefix, *path))} has no `{key}`"
            yield _violation(source, table.position, (*path, key), message, f"add `{key}: {example}`")


def _value_message(error: ValidationError, name: str) -> tuple[str, str]:
    explain = _MESSAGES.get(str(error.validator), _other)
    message, fix = explain(name, error.instance, error.validator_value, error.schema)
    return message, error.schema.get("x-fix", {}).get(error.validator, fix)


def _type_message(name: str, value: Any, kinds: Any, schema: Mapping[str, Any]) -> tuple[str, str]:
    wanted = [_KINDS[k] for k in _types({"type": kinds})]
    message = f"`{name}` is {_kind(value)}, but must be {' or '.join(wanted)}"
    if "string" in _types({"type": kinds}) and isinstance(value, int | float):
        return message, f'quote it: "{json.dumps(value)}"'
    return message, f"write {wanted[0]}, for example `{_example(schema)}`"


def _enum_message(name: str, value: Any, choices: Any, schema: Mapping[str, Any]) -> tuple[str, str]:  # noqa: ARG001
    names = [str(c) for c in choices]
    return f"`{name}` is `{_short(value)}`", sentence(f"use one of {', '.join(names)}", did_you_mean(str(value), names))


def _other(name: str, value: Any, wanted: Any, schema: Mapping[str, Any]) -> tuple[str, str]:
    fix = _describe_pattern(schema) or f"it must satisfy {json.dumps(wanted)}"
    return f"`{name}` does not fit: {_short(value)}", fix


Explain = Callable[[str, Any, Any, Mapping[str, Any]], tuple[str, str]]

_MESSAGES: Mapping[str, Explain] = {
    "type": _type_message,
    "enum": _enum_message,
    "const": lambda n, v, w, _: (f"`{n}` is `{_short(v)}`", f"write `{w}`"),
    "minimum": lambda n, v, w, _: (f"`{n}` is {_short(v)}, but must be at least {w}", "raise it"),
    "maximum": lambda n, v, w, _: (f"`{n}` is {_short(v)}, but must be at most {w}", "lower it"),
    "exclusiveMinimum": lambda n, v, w, _: (f"`{n}` is {_short(v)}, but must be greater than {w}", "raise it"),
    "minLength": lambda n, _v, _w, s: (f"`{n}` is empty", f"write text, for example `{_example(s)}`"),
    "maxLength": lambda n, _v, w, _: (f"`{n}` is longer than {w} characters", "shorten it"),
    "minItems": lambda n, _v, w, _: (f"`{n}` has fewer than {w} items", f"list at least {w}"),
    "minProperties": lambda n, _v, w, _: (f"`{n}` is empty", "add one" if w == 1 else f"add at least {w}"),
    "maxProperties": lambda n, v, w, _: (
        f"`{n}` has {len(v)} entries, but may have at most {w}",
        f"leave out {len(v) - w}",
    ),
    "uniqueItems": lambda n, _v, _w, _s: (f"`{n}` lists a value twice", "keep one"),
    "pattern": lambda n, v, _w, s: (
        f"`{n}` is `{_short(v)}`, which is not of the right form",
        f"write for example `{_example(s)}`",
    ),
}


def _name(path: Path) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".")


def _place(path: Path) -> str:
    return f"`{_name(path)}`" if path else "the manifest"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _kind(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool | int | float):
        return f"`{_short(value)}`"
    return "text" if isinstance(value, str) else "a list" if isinstance(value, list) else "a mapping"


def _describe_pattern(schema: Mapping[str, Any]) -> str:
    description: str = schema.get("description", "")
    return description[:1].lower() + description[1:].rstrip(".")


def _example(schema: Any) -> str:
    schema = _resolve(schema, manifest_schema())
    for key in ("examples", "enum"):
        if schema.get(key):
            return _short(schema[key][0])
    if "const" in schema:
        return _short(schema["const"])
    return {"integer": "1", "number": "0.5", "boolean": "true", "array": "[...]", "object": "{...}"}.get(
        (_types(schema) or ("string",))[0], "text"
    )


def _is_integer(checker: object, value: object) -> bool:  # noqa: ARG001
    return isinstance(value, int) and not isinstance(value, bool)


def _pattern(validator: object, pattern: str, value: object, schema: object) -> Iterator[ValidationError]:  # noqa: ARG001
    # A search would let `$` accept a trailing newline.
    if isinstance(value, str) and (value.endswith("\n") or not re.search(pattern, value)):
        yield ValidationError("pattern")


_VALIDATOR: Any = extend(
    Draft202012Validator,
    {"pattern": _pattern},
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)
