"""Manifests: YAML with places -> variables -> schema -> a frozen :class:`Manifest`.

>>> load_manifest("manifests/relevance.yaml").bounds["batch"].value
32
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import cast

from dagserve.errors import Diagnostic, ManifestError
from dagserve.manifest import tree as trees
from dagserve.manifest.builder import build
from dagserve.manifest.model import (
    DEFAULT_MAX_BYTES,
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
from dagserve.manifest.printer import print_manifest
from dagserve.manifest.schema import Violation, coerce, manifest_schema, violations
from dagserve.manifest.source import Position, Source, did_you_mean, read_source, sentence
from dagserve.manifest.variables import substitute
from dagserve.manifest.yaml import read_tree

__all__ = [
    "DEFAULT_MAX_BYTES",
    "Admission",
    "Bound",
    "Concurrency",
    "InputSpec",
    "Manifest",
    "Metric",
    "NodeSpec",
    "Performance",
    "Position",
    "Reading",
    "Target",
    "Text",
    "Validation",
    "load_manifest",
    "manifest_schema",
    "print_manifest",
    "read_manifest",
]

_NOTHING: Mapping[str, str] = MappingProxyType({})
_SECTIONS = ("inputs", "nodes", "outputs", "bounds", "targets")


@dataclass(frozen=True)
class Reading:
    """A manifest as far as it can be understood, and the mistakes found on the way.

    ``manifest`` is nothing where a whole section is missing or of another kind, so that nothing more can be said.
    """

    manifest: Manifest | None
    diagnostics: tuple[Diagnostic, ...]


def load_manifest(
    path: str | Path,
    *,
    variables: Mapping[str, str] = _NOTHING,
    environment: Mapping[str, str] | None = None,
    target: str | None = None,
) -> Manifest:
    """Reads a manifest and checks its form; what it means is checked by :func:`dagserve.passes.check_manifest`.

    ``variables`` are the values of ``--set``; ``environment`` is the process's when left out; ``target`` is the target
    to compile for, the first when left out.

    Raises:
        ManifestError: with every mistake found.
    """
    reading = read_manifest(path, variables=variables, environment=environment, target=target)
    if reading.diagnostics or reading.manifest is None:
        raise ManifestError(list(reading.diagnostics))
    return reading.manifest


def read_manifest(
    path: str | Path,
    *,
    variables: Mapping[str, str] = _NOTHING,
    environment: Mapping[str, str] | None = None,
    target: str | None = None,
) -> Reading:
    """As :func:`load_manifest`, but returns the mistakes with the part of the manifest that can be understood.

    Raises:
        ManifestError: the file cannot be read, or is not one YAML mapping.
    """
    source = read_source(path)
    tree, diagnostics = read_tree(source)
    tree, found = substitute(tree, source, variables, os.environ if environment is None else environment)
    diagnostics += found
    unset = {(d.line, d.column) for d in found}
    tree = cast(trees.Table, coerce(tree, manifest_schema()))
    wrong = violations(tree, manifest_schema(), source)
    # A value whose variable is missing has been reported; that the empty text then breaks the schema is no news.
    diagnostics += [v.diagnostic for v in wrong if (v.diagnostic.line, v.diagnostic.column) not in unset]
    diagnostics += _unknown_target(tree, source, target)
    if any(_is_section(v) for v in wrong):
        return Reading(None, tuple(diagnostics))
    broken = frozenset(v.path for v in wrong) | _at_positions(tree, unset)
    for violation_path in broken:
        tree = cast(trees.Table, trees.without(tree, violation_path))
    return Reading(build(tree, source, target, broken), tuple(diagnostics))


def _is_section(violation: Violation) -> bool:
    return len(violation.path) == 1 and violation.path[0] in _SECTIONS


def _at_positions(tree: trees.Tree, positions: set[tuple[int, int]], path: trees.Path = ()) -> frozenset[trees.Path]:
    """Paths of the scalars at these places."""
    if isinstance(tree, trees.Table):
        parts = (_at_positions(e.value, positions, (*path, e.key)) for e in tree)
        return frozenset().union(*parts)
    if isinstance(tree, trees.Items):
        return frozenset().union(*(_at_positions(v, positions, (*path, i)) for i, v in enumerate(tree.values)))
    return frozenset({path} if (tree.position.line, tree.position.column) in positions else ())


def _unknown_target(tree: trees.Table, source: Source, target: str | None) -> list[Diagnostic]:
    section = tree.get("targets")
    if target is None or not isinstance(section, trees.Table) or section.get(target):
        return []
    names = [e.key for e in section]
    fix = sentence(f"use one of {', '.join(names)}", did_you_mean(target, names))
    at = trees.locate_key(tree, "targets")
    return [source.diagnostic(at, f"no target `{target}`", fix, "target")] if names else []
