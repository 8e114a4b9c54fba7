"""What has to be built for a graph: weight files, packages and their checks, each with its cache key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagserve.build.cache import BuildCache
from dagserve.build.keys import device_fingerprint, digest, environment_fingerprint, module_digest, source_digest
from dagserve.build.run import Step
from dagserve.build.sources import CHECKPOINT, NO_WEIGHTS, ModelSource, import_weights
from dagserve.errors import ManifestError
from dagserve.graph import Graph, GraphNode
from dagserve.interface import BuildSpec, Implementation, Operators, PackageSpec, Port
from dagserve.manifest.tree import locate
from dagserve.passes.placement import unsuited

_PACKAGE = Path(__file__).resolve().parent.parent

_REFERENCE = "torch"
"""What every operator calls the implementation that fixes its semantics."""

KERNEL_CONFIGS = "DAGSERVE_KERNEL_CONFIGS"
"""As ``kernels/configs.py`` reads it: a folder of tile sizes, ``<op>/configs/<gpu>.json``."""


@dataclass(frozen=True)
class NodeBuild:
    """One AOTI node: its build specification, what its weights come from by option, the bound of each definition-local
    symbol, and how far its packages may be from eager."""

    node: GraphNode
    spec: BuildSpec
    operators: Mapping[str, str]
    sources: Mapping[str, ModelSource]
    bounds: Mapping[str, int]
    tolerance: float

    def package_name(self, package: PackageSpec) -> str:
        """The name of one of its packages in the artifact."""
        return f"{self.node.name}.{package.name}"

    @property
    def reference(self) -> dict[str, str]:
        """The operators that have an implementation in Torch, each with that."""
        return {name: _REFERENCE for name, choices in _available(self.node).items() if _REFERENCE in choices}

    def weights_name(self, package: PackageSpec) -> str:
        """The name of the step that writes a package's weights. Packages over one source share the file."""
        return f"weights {self.sources[package.weights].digest[:12]}"


@dataclass(frozen=True)
class BuildDesign:
    """All build steps of a graph. ``weight_steps`` first, then packages, then checks."""

    nodes: tuple[NodeBuild, ...]
    weight_steps: list[Step]
    precision: str
    shapes: tuple[str, ...]
    code: str
    environment: Mapping[str, str]
    device: str

    def package_steps(self, built: Mapping[str, Path]) -> list[Step]:
        """One step a package. The key has no weights in it: a new checkpoint of the same structure reuses packages."""
        return [self._package_step(n, p, built) for n in self.nodes for p in n.spec.packages]

    def verify_steps(self, built: Mapping[str, Path]) -> list[Step]:
        """One step a package: its comparison with eager on the real weights."""
        return [self._verify_step(n, p, built) for n in self.nodes for p in n.spec.packages]

    def _verify_step(self, build: NodeBuild, package: PackageSpec, built: Mapping[str, Path]) -> Step:
        step = self._package_step(build, package, built)
        extra = {"step": "verify", "package": str(built[step.name]), "tolerance": build.tolerance}
        key = digest([step.key, Path(step.job["weights"]).name, build.tolerance, self.shapes])
        return Step(f"{step.name} check", "checks", key, {**step.job, **extra, "shapes": list(self.shapes)})

    def _package_step(self, build: NodeBuild, package: PackageSpec, built: Mapping[str, Path]) -> Step:
        job = {
            "step": "compile",
            "name": build.package_name(package),
            "module": package.module,
            "arguments": dict(package.arguments),
            "inputs": [port_json(p) for p in package.inputs],
            "outputs": [port_json(p) for p in package.outputs],
            "compared": list(package.compared),
            "ranges": {name: list(limits) for name, limits in package.ranges.items()},
            "bounds": {s: build.bounds[s] for s in package_symbols(package)},
            "device": self.device,
            "reference": build.reference,
        }
        key = digest([job, self.code, module_digest(package.module), dict(self.environment)])
        weights = str(built[build.weights_name(package)])
        return Step(build.package_name(package), "packages", key, {**job, "weights": weights})


def port_json(port: Port) -> dict[str, str]:
    """A port as a job or the plan writes it."""
    return {"name": port.name, "type": str(port.type)}


def package_symbols(package: PackageSpec) -> tuple[str, ...]:
    """The shape symbols of a package's inputs, each once."""
    return tuple(dict.fromkeys(s for port in package.inputs for s in port.type.symbols))


def design_build(graph: Graph, cache: BuildCache) -> BuildDesign:
    """Plans the build of a checked graph.

    Raises:
        BuildError: the target is for a GPU that is not here.
        ManifestError: a length that a node's model cannot take, or an operator's implementation that does not fit it.
        CheckpointError: a model cannot be imported.
    """
    nodes = tuple(_design_node(graph, n, cache) for n in graph.nodes if n.engine == "aoti")
    target, precision = graph.target, graph.target.precision
    code = source_digest(_code_folders())
    validation = graph.manifest.validation
    return BuildDesign(
        nodes,
        _weight_steps(nodes, precision, code),
        precision,
        validation.shapes,
        code,
        environment_fingerprint() | (device_fingerprint(target.name, target.match) if target.device == "cuda" else {}),
        target.device,
    )


def _code_folders() -> list[Path]:
    """What a package is built by: code, and tile sizes that were found here (see ``dagserve tune-kernels``)."""
    own = os.environ.get(KERNEL_CONFIGS)
    folders = [_PACKAGE / name for name in ("build", "checkpoint", "nodes", "kernels")]
    return [*folders, Path(own)] if own else folders


def _design_node(graph: Graph, node: GraphNode, cache: BuildCache) -> NodeBuild:
    definition: Any = node.definition
    model = import_weights(CHECKPOINT, node.options.get(CHECKPOINT), cache)
    operators = _operators(graph, node, model.config)
    connected = frozenset(node.inputs)
    spec: BuildSpec = definition.build(node.options, model.config, graph.target.precision, operators, connected)
    _check_length(graph, node, model, spec.generated)
    others = {p.weights for p in spec.packages} - {CHECKPOINT}
    sources = {CHECKPOINT: model} | {name: import_weights(name, node.options[name], cache) for name in sorted(others)}
    sizes = {local: dim.size(graph.bounds) for local, dim in node.dims.items()}
    bounds = sizes | {local: n if isinstance(n, int) else n(sizes) for local, n in spec.bounds.items()}
    return NodeBuild(node, spec, operators, sources, bounds, _tolerance(graph, node, operators))


def _available(node: GraphNode) -> Operators:
    """The replaceable operators of a node; none where its definition declares none."""
    return getattr(node.definition, "operators", {})


def _tolerance(graph: Graph, node: GraphNode, operators: Mapping[str, str]) -> float:
    """That of the target's precision, or a larger one of an implementation that was chosen."""
    available = _available(node)
    named = {available[name][choice].tolerance for name, choice in operators.items()} - {""}
    tolerance = graph.manifest.validation.tolerance
    return max(tolerance[name] for name in {graph.target.precision, *named})


def _operators(graph: Graph, node: GraphNode, config: Mapping[str, Any]) -> dict[str, str]:
    """The target's choice for each operator the node has; where it makes none, the first that suits device and model.

    Raises:
        ManifestError: the target chooses what does not fit the model.
    """
    available = _available(node)
    return {name: _choice(graph, node, config, name, available[name]) for name in available}


def _choice(
    graph: Graph, node: GraphNode, config: Mapping[str, Any], name: str, choices: Mapping[str, Implementation]
) -> str:
    target = graph.target
    why = {n: unsuited(i, target) or i.misfit(config, target.precision) for n, i in choices.items()}
    suited = [n for n in choices if why[n] is None]
    chosen = target.operators.get(name, suited[0])
    if why[chosen] is not None:
        message = f"`{chosen}` of operator `{name}` does not fit node `{node.name}`: {why[chosen]}"
        position = locate(target.operators_tree, (name,))
        raise ManifestError([graph.mistake(position, message, f"use {', '.join(suited)}", "operator")])
    return chosen


def _check_length(graph: Graph, node: GraphNode, source: ModelSource, generated: int) -> None:
    longest = source.config.get("max_position_embeddings")
    if longest is not None and (wanted := node.options["max_length"] + generated) > longest:
        message = f"node `{node.name}` allows {wanted} tokens a text, its model {longest}"
        fix = f"lower max_length or the bound `length` to {longest}"
        raise ManifestError([graph.mistake(node.spec.position, message, fix, "length")])


def _weight_steps(nodes: tuple[NodeBuild, ...], precision: str, code: str) -> list[Step]:
    groups: dict[str, list[tuple[NodeBuild, PackageSpec]]] = {}
    for build in nodes:
        for package in build.spec.packages:
            groups.setdefault(build.weights_name(package), []).append((build, package))
    return [_weight_step(name, group, precision, code) for name, group in groups.items()]


def _weight_step(name: str, group: list[tuple[NodeBuild, PackageSpec]], precision: str, code: str) -> Step:
    first, package = group[0]
    source = first.sources[package.weights]
    job = {
        "step": "weights",
        "name": name,
        "config": dict(source.config),
        "mapping": first.spec.mapping if package.weights == CHECKPOINT else "",
        "modules": [{"name": b.package_name(p), "module": p.module, "arguments": dict(p.arguments)} for b, p in group],
    }
    key = digest([source.digest, job, precision, code])
    return Step(name, "weights", key, {**job, "source": "" if source is NO_WEIGHTS else str(source.path)})
