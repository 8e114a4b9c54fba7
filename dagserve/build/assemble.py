"""Writes the artifact directory from a checked graph and its build results."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dagserve.artifact import FORMAT, PLAN
from dagserve.build.cache import BuildCache
from dagserve.build.catalogs import build_tables
from dagserve.build.design import BuildDesign, NodeBuild
from dagserve.build.keys import digest, file_digest, module_digest
from dagserve.build.sources import import_tokenizer
from dagserve.errors import BuildError
from dagserve.graph import Graph, GraphNode, definition_file, is_borrowed, library_of, native_op, runs_python
from dagserve.interface import Call, Check, PackageSpec, Port, TokenizerFiles
from dagserve.manifest import print_manifest
from dagserve.shapes import Dim, TensorType
from dagserve.tokenizer import VERSION as TOKENIZER_TABLES
from dagserve.tokenizer import encode_label, text_error, write_tables

ALIGNMENT = 64


def artifact_key(graph: Graph, design: BuildDesign) -> str:
    """Covers all that decides the artifact: the manifest as it stands with its variables, models, code, machine."""
    return digest(
        [
            [FORMAT, TOKENIZER_TABLES],
            importlib.metadata.version("dagserve"),
            print_manifest(graph.manifest),
            graph.manifest.source.text,
            graph.target.name,
            [[b.node.name, {option: s.digest for option, s in b.sources.items()}] for b in design.nodes],
            [[n.name, *map(file_digest, _own_files(n))] for n in graph.nodes],
            [module_digest(p.module) for b in design.nodes for p in b.spec.packages],
            [design.code, dict(design.environment), [b.tolerance for b in design.nodes], design.shapes],
        ]
    )


def _own_files(node: GraphNode) -> list[Path]:
    """Files outside this project that a cpu node is made of."""
    library = library_of(node)
    if library is not None and not library.is_file():
        raise BuildError(f"node `{node.name}`: its library {library} is not there; build it first")
    own = runs_python(node) or library is not None
    named = [Path(node.options[name]).expanduser() for name in getattr(node.definition, "files", ())]
    for path in named:
        if not path.is_file():
            raise BuildError(f"node `{node.name}`: there is no file {path}")
    tokenizer = node.options.get("tokenizer") or ""
    if tokenizer.endswith(".json") and Path(tokenizer).expanduser().is_file():
        named.append(Path(tokenizer).expanduser())
    return [*([library] if library else []), *([definition_file(node)] if own else []), *named]


@dataclass
class ArtifactTokenizers:
    """Tokenizers put into an artifact, each once: the compiler's answer to :class:`dagserve.interface.Assets`."""

    root: Path
    cache: BuildCache
    model_name: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    request_inputs: Mapping[str, str] = field(default_factory=dict)

    def tokenizer(self, spec: str) -> TokenizerFiles:
        """Writes the tables and the ``tokenizer.json`` they come from."""
        source = import_tokenizer(spec, self.cache)
        stem = f"tokenizers/{source.digest[:16]}"
        (self.root / "tokenizers").mkdir(exist_ok=True)
        said = write_tables(source.tokenizer_json, self.root / f"{stem}.bin")
        (self.root / f"{stem}.json").write_bytes(source.tokenizer_json)
        return TokenizerFiles(f"{stem}.bin", f"{stem}.json", said.vocab_size, said.normalized_tokens, text_error(said))

    def catalog(self, file: str, tokenizer: str | None, limits: Mapping[str, Any]) -> str:
        """Writes the tables of a catalog."""
        source = import_tokenizer(tokenizer, self.cache).tokenizer_json if tokenizer else None
        content = build_tables(Path(file).expanduser(), limits, source).file
        (self.root / "catalogs").mkdir(exist_ok=True)
        name = f"catalogs/{hashlib.sha256(content).hexdigest()[:16]}.bin"
        (self.root / name).write_bytes(content)
        return name

    def label_id(self, spec: str, text: str) -> int:
        """The id of a text of one token."""
        return encode_label(import_tokenizer(spec, self.cache).tokenizer_json, text)


def write_artifact(
    root: Path, graph: Graph, design: BuildDesign, built: Mapping[str, Path], key: str, cache: BuildCache
) -> None:
    """Fills an empty directory: files first, ``plan.json`` last."""
    weights, prefixes = _write_weights(root, design, built)
    packages = [_write_package(root, b, p, built, prefixes) for b in design.nodes for p in b.spec.packages]
    assets = ArtifactTokenizers(root, cache, graph.manifest.name)
    plan: dict[str, Any] = {
        "format": FORMAT,
        "name": graph.manifest.name,
        "target": graph.target.name,
        "device": graph.target.device,
        "endpoint": graph.manifest.endpoint.value if graph.manifest.endpoint else None,
        "fingerprint": {"key": key, "precision": design.precision, **design.environment},
        "symbols": _symbols(graph, design),
        "tensors": _tensors(graph),
        "inputs": _inputs(graph),
        "nodes": [_node(graph, n, design, packages, assets) for n in graph.nodes],
        "outputs": [{"name": n, "tensor": _index(graph, t)} for n, t in graph.outputs.items()],
        "packages": packages,
        "weights": weights,
        "concurrency": _concurrency(graph),
        "admission": _admission(graph),
        "memory": _memory(graph, weights),
        "descriptions": _descriptions(graph, design, built),
    }
    (root / "manifest.yaml").write_text(graph.manifest.source.text)
    plan["files"] = {str(p.relative_to(root)): p.stat().st_size for p in sorted(root.rglob("*")) if p.is_file()}
    plan["fingerprint"]["digests"] = {name: file_digest(root / name) for name in plan["files"]}
    (root / PLAN).write_text(json.dumps(plan, indent=1))


def _write_weights(root: Path, design: BuildDesign, built: Mapping[str, Path]) -> tuple[dict[str, Any], dict[str, str]]:
    """One ``weights.bin``: linked where there is one model, joined where there are several, names then prefixed."""
    target = root / "weights.bin"
    names = [step.name for step in design.weight_steps]
    records = {n: json.loads((built[n] / "index.json").read_text()) for n in names}
    prefixes = {n: "" if len(names) == 1 else f"model{i}/" for i, n in enumerate(names)}
    tensors: dict[str, Any] = {}
    if len(names) == 1:
        _link(built[names[0]] / "weights.bin", target)
    else:
        with target.open("wb") as stream:
            for name in names:
                stream.write(b"\0" * (-stream.tell() % ALIGNMENT))
                start = stream.tell()
                with (built[name] / "weights.bin").open("rb") as part:
                    shutil.copyfileobj(part, stream)
                for entry in records[name]["tensors"].values():
                    entry["offset"] += start
    for name in names:
        tensors |= {prefixes[name] + t: e for t, e in records[name]["tensors"].items()}
    return {"path": "weights.bin", "bytes": target.stat().st_size, "tensors": tensors}, prefixes


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _write_package(
    root: Path,
    build: NodeBuild,
    package: PackageSpec,
    built: Mapping[str, Path],
    prefixes: Mapping[str, str],
) -> dict[str, Any]:
    name = build.package_name(package)
    path = f"packages/{name}/model.so"
    (root / path).parent.mkdir(parents=True)
    for built_file in (built[name] / "model.so", *sorted(built[name].glob("*.cubin"))):
        _link(built_file, (root / path).parent / built_file.name)
    record = json.loads((built[name] / "package.json").read_text())
    prefix = prefixes[build.weights_name(package)]
    return {
        "name": name,
        "path": path,
        "inputs": [_package_port(p, build) for p in package.inputs],
        "outputs": [_package_port(p, build) for p in package.outputs],
        "constants": {fqn: prefix + weight for fqn, weight in record["constants"].items()},
        "seconds": record["seconds"],
    }


def _package_port(port: Port, build: NodeBuild) -> dict[str, Any]:
    shape = [_manifest_dim(d, build) for d in port.type.shape]
    return {"name": port.name, "dtype": port.type.dtype, "shape": [str(d) for d in shape]}


def _manifest_dim(dim: Dim, build: NodeBuild) -> Dim:
    """A definition-local dimension in the manifest's symbols; symbols of packages alone get the node's name."""
    if not dim.symbol:
        return dim
    known = build.node.dims.get(dim.symbol)
    return Dim(known.symbol, known.add + dim.add) if known else Dim(_own_symbol(build, dim.symbol), dim.add)


def _own_symbol(build: NodeBuild, symbol: str) -> str:
    return f"{build.node.name}__{symbol}"


def _symbols(graph: Graph, design: BuildDesign) -> list[dict[str, Any]]:
    symbols = dict(graph.bounds)
    for build in design.nodes:
        symbols |= {_own_symbol(build, s): build.bounds[s] for s in build.spec.bounds}
    return [{"name": name, "bound": bound} for name, bound in symbols.items()]


def _shape(kind: TensorType) -> list[str]:
    return [str(d) for d in kind.shape]


def _tensors(graph: Graph) -> list[dict[str, Any]]:
    return [
        {
            "name": t.name,
            "dtype": t.type.dtype,
            "shape": _shape(t.type),
            "capacity": t.capacity,
            "device": t.device,
            **({"borrowed": True} if is_borrowed(graph, t) else {}),
        }
        for t in graph.tensors.values()
    ]


def _index(graph: Graph, tensor: str) -> int:
    return list(graph.tensors).index(tensor)


def _inputs(graph: Graph) -> list[dict[str, Any]]:
    return [
        {
            "name": spec.name,
            "tensor": _index(graph, spec.name),
            "optional": spec.optional,
            "default": list(spec.default) if isinstance(spec.default, tuple) else spec.default,
        }
        for spec in graph.inputs
    ]


def _node(
    graph: Graph, node: GraphNode, design: BuildDesign, packages: list[dict[str, Any]], assets: ArtifactTokenizers
) -> dict[str, Any]:
    assert node.interface is not None
    record: dict[str, Any] = {
        "name": node.name,
        "engine": node.engine,
        "op": node.op,
        "inputs": {
            p.name: _index(graph, node.inputs[p.name]) if p.name in node.inputs else None for p in node.interface.inputs
        },
        "outputs": {p.name: _index(graph, node.outputs[p.name]) for p in node.interface.outputs},
    }
    build = next((b for b in design.nodes if b.node.name == node.name), None)
    if build is None:
        return record | _cpu_node(graph, node, assets)
    names = [p["name"] for p in packages]
    locals_ = list(
        dict.fromkeys(o for c in build.spec.calls for o in (*c.inputs, *c.outputs) if o.startswith("local:"))
    )
    return record | {
        "checks": [_check(c, record) for c in build.spec.checks],
        "calls": [_call(c, build, record, names, locals_) for c in build.spec.calls],
        "state": _state_bytes(build),
    }


def _cpu_node(graph: Graph, node: GraphNode, assets: ArtifactTokenizers) -> dict[str, Any]:
    """What a cpu node's record has beside its ports: its config, and what runs it where that is not dagserve itself."""
    assets.sizes = {local: dim.size(graph.bounds) for local, dim in node.dims.items()}
    assets.request_inputs = {p: t for p, t in node.inputs.items() if not graph.tensors[t].node}
    configure = getattr(node.definition, "configure", None)
    try:
        config = dict(node.options) if configure is None else configure(node.options, assets)
    except ValueError as error:
        raise BuildError(f"node `{node.name}`: {error}") from error
    record: dict[str, Any] = {"op": native_op(node.op), "config": config}
    if runs_python(node):
        return record | {"python": True}
    if (library := library_of(node)) is None:
        return record
    (assets.root / "nodes").mkdir(exist_ok=True)
    shutil.copyfile(library, assets.root / "nodes" / library.name)
    name = getattr(node.definition, "native_op", None) or node.op.rpartition(":")[2]
    return record | {"library": f"nodes/{library.name}", "native_op": name}


def _check(check: Check, node: Mapping[str, Any]) -> dict[str, Any]:
    ports = {k: node["inputs"][v] if isinstance(v, str) else v for k, v in check.arguments.items()}
    return {"kind": check.kind, **ports}


def _call(
    call: Call, build: NodeBuild, node: Mapping[str, Any], names: list[str], locals_: list[str]
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "package": names.index(f"{build.node.name}.{call.package}"),
        "inputs": [_operand(o, build, node, node["inputs"], locals_) for o in call.inputs],
        "outputs": [_operand(o, build, node, node["outputs"], locals_) for o in call.outputs],
    }
    if call.when is not None:
        local = call.when.port.startswith("local:")
        what = {"local": locals_.index(call.when.port)} if local else {"tensor": node["inputs"][call.when.port]}
        record["when"] = {**what, "equals": call.when.equals, "default": call.when.default}
    return record


def _operand(
    operand: str, build: NodeBuild, node: Mapping[str, Any], ports: Mapping[str, Any], locals_: list[str]
) -> dict[str, Any]:
    kind, _, name = operand.partition(":")
    if kind == "local":
        return {"local": locals_.index(operand)}
    if kind == "iota":
        port, _, rows = name.partition(":")
        only = {"rows": rows} if rows else {}
        return {"iota": {"max_length_of": node["inputs"][port], "bound": build.bounds["L"], **only}}
    if kind == "scalar":
        port, _, default = name.partition(":")
        return {"scalar": {"tensor": node["inputs"][port], "default": float(default)}}
    if kind == "row":
        port, ends, row = name.split(":")
        return {"row": {"tensor": node["inputs"][port], "ends": node["inputs"][ends], "index": int(row)}}
    if kind == "count":
        return {"count": _count(node, name.split(":"))}
    return {"tensor": ports[name]}


def _count(node: Mapping[str, Any], parts: list[str]) -> dict[str, Any]:
    record: dict[str, Any] = {"tensor": node["inputs"][parts[0]], "default": int(parts[1])}
    if len(parts) > 2:
        record["at_most"] = {"tensor": node["inputs"][parts[2]], "default": int(parts[3])}
    return record


def _state_bytes(build: NodeBuild) -> dict[str, int]:
    """Largest bytes a request keeps inside a node, by name."""
    return {
        name: math.prod(build.bounds[part] if part in build.bounds else int(part) for part in product.split("*"))
        for name, product in build.spec.state.items()
    }


def _concurrency(graph: Graph) -> dict[str, int]:
    tiers = graph.target.concurrency
    return {"runners": tiers.runners, "contexts": tiers.contexts, "in_flight": tiers.in_flight}


def _admission(graph: Graph) -> dict[str, int]:
    a = graph.manifest.admission
    return {"max_queued": a.max_queued, "max_wait_ms": a.max_wait_ms, "deadline_ms": a.deadline_ms}


def _memory(graph: Graph, weights: Mapping[str, Any]) -> dict[str, int]:
    """Bytes planned: tensors of one context, of one request slot (inputs and reply), and all of them with the weights.

    Workspaces of nodes and what packages allocate while they run come on top.
    """
    context, slot = graph.memory_bytes
    tiers, admission = graph.target.concurrency, graph.manifest.admission
    slots = 2 * tiers.in_flight + admission.max_queued
    total = context * tiers.contexts + slot * slots + weights["bytes"]
    return {
        "context": context,
        "contexts": tiers.contexts,
        "slot": slot,
        "slots": slots,
        "weights": weights["bytes"],
        "total": total,
    }


def _descriptions(graph: Graph, design: BuildDesign, built: Mapping[str, Path]) -> dict[str, Any]:
    """The three descriptions that a model definition fixes: runtime, build, validation."""
    validation = graph.manifest.validation
    indices = [json.loads((built[s.name] / "index.json").read_text()) for s in design.weight_steps]
    return {
        "runtime": {
            "topology": [n.name for n in graph.nodes],
            "engines": {n.name: n.engine for n in graph.nodes},
            "tensors": {t.name: str(t.type) for t in graph.tensors.values()},
            "bounds": dict(graph.bounds),
            "concurrency": _concurrency(graph),
            "transfers": [[t.tensor, t.source, t.destination] for t in graph.transfers],
        },
        "build": {
            "target": graph.target.name,
            "precision": design.precision,
            "operators": {b.node.name: dict(b.operators) for b in design.nodes},
            "models": {
                b.node.name: {o: b.node.options[o] for o in b.sources if b.node.options.get(o)} for b in design.nodes
            },
            "parameters": [index["mapping"] for index in indices],
            "padding_bytes": sum(added for index in indices for added in index["padding"].values()),
        },
        "validation": {
            "reference": validation.reference,
            "tolerance": {b.node.name: b.tolerance for b in design.nodes},
            "checks": {
                b.package_name(p): json.loads((built[f"{b.package_name(p)} check"] / "checks.json").read_text())
                for b in design.nodes
                for p in b.spec.packages
            },
            "inputs": [dict(request) for request in validation.inputs],
        },
    }
