"""The compiler's passes: a visible tuple of ``Graph -> Graph`` functions, verified after each one.

A pass never stops at a user's mistake: it adds diagnostics to the graph and works on with what is right, so that all
mistakes are shown together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from dagserve.errors import ManifestError
from dagserve.graph import Graph, build_graph
from dagserve.manifest import read_manifest
from dagserve.passes.contract import check_endpoint, check_values
from dagserve.passes.definitions import load_definitions, resolve_interfaces, resolve_options
from dagserve.passes.placement import check_match, check_operators, check_tiers, place_devices, plan_buffers
from dagserve.passes.shapes import derive_bounds, unify_shapes
from dagserve.passes.usage import check_unused
from dagserve.passes.verify import PassError, verify
from dagserve.passes.wiring import order, read_types, resolve_producers

__all__ = ["PASSES", "Pass", "PassError", "check_manifest", "run_passes"]

Pass = Callable[[Graph], Graph]

PASSES: tuple[Pass, ...] = (
    load_definitions,
    resolve_options,
    resolve_interfaces,
    read_types,
    resolve_producers,
    order,
    unify_shapes,
    derive_bounds,
    check_values,
    check_endpoint,
    place_devices,
    check_match,
    check_tiers,
    check_operators,
    check_unused,
    plan_buffers,
)

_NOTHING: Mapping[str, str] = MappingProxyType({})


def run_passes(graph: Graph, passes: tuple[Pass, ...] = PASSES) -> Graph:
    """Runs the passes in order and checks the graph after each.

    Raises:
        ManifestError: the manifest has mistakes; all of them are in it.
        PassError: a pass broke an invariant.
    """
    done: frozenset[str] = frozenset()
    for one in passes:
        before, graph = graph, one(graph)
        done |= {one.__name__}
        verify(before, graph, one.__name__, done)
    if graph.diagnostics:
        raise ManifestError(list(graph.diagnostics))
    return graph


def check_manifest(
    path: str | Path,
    variables: Mapping[str, str] = _NOTHING,
    target: str | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> Graph:
    """Reads a manifest and checks all that can be checked without building: the front door of ``dagserve check``.

    ``variables`` are the values of ``--set``; ``target`` is the target to plan for, the first when left out;
    ``environment`` is the process's when left out. Imports the modules of the node definitions, but not torch.

    >>> check_manifest("manifests/relevance.yaml").tensors["tokenize.tokens"].capacity
    32768

    Raises:
        ManifestError: with every mistake, of form and of meaning, in file order.
    """
    reading = read_manifest(path, variables=variables, environment=environment, target=target)
    if reading.manifest is None:
        raise ManifestError(list(reading.diagnostics))
    return run_passes(build_graph(reading.manifest, reading.diagnostics))
