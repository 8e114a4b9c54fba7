"""The frozen model as YAML again, with variables filled in and defaults written out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dagserve.manifest.model import InputSpec, Manifest, NodeSpec, Target, Text, Validation

# What YAML does not allow raw in a quoted scalar, or would fold.
_SPECIAL = re.compile(r"[^\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")


def print_manifest(manifest: Manifest) -> str:
    """YAML that loads as an equal manifest.

    >>> print_manifest(load_manifest("manifests/relevance.yaml")).splitlines()[1]
    'name: "relevance"'
    """
    lines: list[str] = []
    for key, value in _document(manifest).items():
        if isinstance(value, dict) and key in ("inputs", "nodes", "targets"):
            lines += [f"{key}:", *(f"  {_flow_key(name)}: {_flow(item)}" for name, item in value.items())]
        else:
            lines.append(f"{key}: {_flow(value)}")
    return "\n".join(lines) + "\n"


def _document(m: Manifest) -> dict[str, Any]:
    document: dict[str, Any] = {"apiVersion": "dagserve/v1", "name": m.name}
    if m.endpoint:
        document["endpoint"] = m.endpoint.value
    document["bounds"] = {name: bound.value for name, bound in m.bounds.items()}
    document["inputs"] = {name: _input(spec) for name, spec in m.inputs.items()}
    document["nodes"] = {name: _node(spec) for name, spec in m.nodes.items()}
    document["outputs"] = _texts(m.outputs)
    document["targets"] = {name: _target(target) for name, target in m.targets.items()}
    admission = m.admission
    document["admission"] = {k: getattr(admission, k) for k in ("max_queued", "max_wait_ms", "deadline_ms")}
    document["validation"] = _validation(m.validation)
    return document


def _texts(texts: Mapping[str, Text]) -> dict[str, str]:
    return {key: text.value for key, text in texts.items()}


def _present(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if v is not None}


def _input(spec: InputSpec) -> dict[str, Any]:
    values = {"type": spec.type.value, "optional": spec.optional, "default": spec.default, "max_bytes": spec.max_bytes}
    return _present({**values, "description": spec.description})


def _node(spec: NodeSpec) -> dict[str, Any]:
    values = {"engine": spec.engine.value, "op": spec.op.value, "with": spec.options}
    return {**values, "inputs": _texts(spec.inputs), "outputs": _texts(spec.outputs)}


def _target(target: Target) -> dict[str, Any]:
    values = {k: getattr(target, k) for k in ("device", "match", "precision", "operators")}
    tiers = {k: getattr(target.concurrency, k) for k in ("runners", "contexts", "in_flight")}
    return {**values, "concurrency": tiers}


def _validation(v: Validation) -> dict[str, Any]:
    values = {k: getattr(v, k) for k in ("reference", "shapes", "inputs", "tolerance")}
    parts = {k: vars(part) for k in ("metric", "performance") if (part := getattr(v, k))}
    return {**values, **{k: _present(dict(part)) for k, part in parts.items()}}


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_flow_key(k)}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):
        return _quoted(value.replace("${", "$${"))
    return json.dumps(value)


def _flow_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z_]\w*", key, re.ASCII) else _quoted(key)


def _quoted(text: str) -> str:
    return _SPECIAL.sub(lambda m: f"\\u{ord(m[0]):04x}", json.dumps(text, ensure_ascii=False))
