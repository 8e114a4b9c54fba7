"""Prefill-Only model nodes. Torch code is in :mod:`dagserve.nodes.decoder`, imported only when a package is built."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, ClassVar

from dagserve.errors import CheckpointError
from dagserve.interface import BuildSpec, Call, Check, Interface, Operators, Option, PackageSpec, Port, When
from dagserve.nodes.operators import PREFILL

REDUCTIONS = ("softmax", "probability", "log_probability", "map")
"""``softmax`` over the labels; full-vocabulary ``probability`` and ``log_probability`` of each label; ``map``: the
expected value of fixed ``values`` under the labels' softmax."""

_MODULE = "dagserve.nodes.decoder"
_HEADS: Mapping[str, str] = {
    "softmax": "SoftmaxHead",
    "probability": "ProbabilityHead",
    "log_probability": "LogProbabilityHead",
    "map": "MapHead",
}


SHARED_PREFIX = Option("shared_prefix", {"enum": ["off", "exact"]}, default="off")
"""``exact``: the texts come from a ``share_prefix`` node, and what they all begin with is computed once."""


def packed_ports(options: Mapping[str, Any]) -> tuple[Port, Port]:
    """``tokens`` and ``cu_seqlens`` of packed texts, which have a row more with a shared prefix."""
    rows = "B+2" if _is_shared(options) else "B+1"
    return Port.of("tokens", "i64[T]"), Port.of("cu_seqlens", f"i32[{rows}]")


def packed_operands(options: Mapping[str, Any]) -> tuple[tuple[Port, ...], tuple[str, ...], Mapping[str, int]]:
    """What a backbone's package takes: its ports, the operands of a call, and the bounds of their own symbols."""
    tokens, cu_seqlens = packed_ports(options)
    longest, iota = options["max_length"], Port.of("iota", "i32[L]")
    if not _is_shared(options):
        return (tokens, cu_seqlens, iota), ("port:tokens", "port:cu_seqlens", "iota:cu_seqlens"), {"L": longest}
    operands = ("port:tokens", "port:cu_seqlens", "iota:cu_seqlens:rest", "iota:cu_seqlens:first")
    return (tokens, cu_seqlens, iota, Port.of("prefix_iota", "i32[S]")), operands, {"L": longest, "S": longest}


def packed_checks(options: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Check, ...]:
    """That ``tokens`` and ``cu_seqlens`` are packed texts within ``max_length``, of tokens the model has."""
    packed: dict[str, Any] = {"tokens": "tokens", "cu_seqlens": "cu_seqlens", "max_length": options["max_length"]}
    return (
        Check("packed", {**packed, **({"shared": 1} if _is_shared(options) else {})}),
        Check("range", {"tensor": "tokens", "low": 0, "high": config["vocab_size"]}),
    )


def _is_shared(options: Mapping[str, Any]) -> bool:
    return bool(options.get("shared_prefix") == "exact")


class Score:
    """AOTI node: one packed prefill, each row's last hidden state, label rows of the LM head, a reduction."""

    engine: ClassVar[str] = "aoti"
    operators: ClassVar[Operators] = PREFILL
    precisions: ClassVar[tuple[str, ...]] = ("fp32", "bf16")
    options: ClassVar[tuple[Option, ...]] = (
        Option("checkpoint", {"type": "string", "minLength": 1}, required=True),
        Option("reduce", {"enum": list(REDUCTIONS)}, default="softmax"),
        Option("values", {"type": "array", "items": {"type": "number"}, "minItems": 1}),
        SHARED_PREFIX,
        Option("max_length", {"type": "integer", "minimum": 1}),
    )

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """``tokens: i64[T]``, ``cu_seqlens: i32[B+1]``, ``label_ids: i64[N]`` -> ``scores: f32[B,N]``.

        With ``shared_prefix: exact`` the two packed inputs are those of a ``share_prefix`` node.

        A connected ``apply_softmax: bool`` chooses per request: true is ``softmax``, false is ``probability``.
        With ``reduce: map`` the output is ``f32[B,1]`` and the labels must be as many as ``values``.
        """
        mapped = options.get("reduce") == "map"
        if mapped != bool(options.get("values")):
            raise ValueError("`values` goes with `reduce: map`: give both, or neither")
        labels = str(len(options["values"])) if mapped else "N"
        inputs = (
            *packed_ports(options),
            Port.of("label_ids", f"i64[{labels}]"),
            Port.of("apply_softmax", "bool", optional=True),
        )
        return Interface(inputs, (Port.of("scores", "f32[B,1]" if mapped else "f32[B,N]"),))

    @staticmethod
    def build(
        options: Mapping[str, Any],
        config: Mapping[str, Any],
        precision: str,
        operators: Mapping[str, str],
        connected: Set[str],
    ) -> BuildSpec:
        """One backbone package, and one small head package per reduction the node can be asked for.

        Args:
            options: the node's ``with:`` block.
            config: the checkpoint's ``config.json``.
            precision: ``fp32`` or ``bf16``.
            operators: the target's choice for each operator.
            connected: the input ports that have a tensor.
        """
        per_request = "apply_softmax" in connected
        arguments = {"config": dict(config), "precision": precision, "operators": dict(operators)}
        hidden = f"{'f32' if precision == 'fp32' else 'bf16'}[B,{config['hidden_size']}]"
        ports, operands, sizes = packed_operands(options)
        own = {**arguments, "shared_prefix": _is_shared(options)}
        backbone = PackageSpec("backbone", f"{_MODULE}:Backbone", own, ports, (Port.of("hidden", hidden),))
        reductions = ("softmax", "probability") if per_request else (options["reduce"],)
        heads = tuple(_head(reduction, options, arguments, hidden) for reduction in reductions)
        first = Call("backbone", operands, ("local:hidden",))
        default = int(options["reduce"] == "softmax")
        calls = tuple(
            Call(
                head.name,
                ("local:hidden", "port:label_ids"),
                ("port:scores",),
                When("apply_softmax", int(head.name == "softmax"), default) if per_request else None,
            )
            for head in heads
        )
        checks = (
            *packed_checks(options, config),
            Check("range", {"tensor": "label_ids", "low": 0, "high": config["vocab_size"]}),
        )
        return BuildSpec((backbone, *heads), (first, *calls), checks, f"{_MODULE}:parameter_mapping", sizes)


class Embed:
    """AOTI node: one packed prefill, one vector a text: pooled, cut to its first dimensions, of length 1."""

    engine: ClassVar[str] = "aoti"
    operators: ClassVar[Operators] = Score.operators
    precisions: ClassVar[tuple[str, ...]] = Score.precisions
    options: ClassVar[tuple[Option, ...]] = (
        Option("checkpoint", {"type": "string", "minLength": 1}, required=True),
        Option("dimensions", {"type": "integer", "minimum": 1}, required=True),
        Option("pool", {"enum": ["last", "mean"]}, default="last"),
        Option("normalize", {"type": "boolean"}, default=True),
        SHARED_PREFIX,
        Option("max_length", {"type": "integer", "minimum": 1}),
    )

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """``tokens: i64[T]``, ``cu_seqlens: i32[B+1]`` -> ``embeddings: f32[B,D]``, ``D`` the option ``dimensions``."""
        return Interface(packed_ports(options), (Port.of("embeddings", f"f32[B,{options['dimensions']}]"),))

    @staticmethod
    def build(
        options: Mapping[str, Any],
        config: Mapping[str, Any],
        precision: str,
        operators: Mapping[str, str],
        connected: Set[str],  # noqa: ARG004
    ) -> BuildSpec:
        """One package.

        Raises:
            CheckpointError: the model's vectors have fewer dimensions.
        """
        if options["dimensions"] > config["hidden_size"]:
            raise CheckpointError(
                f"dimensions is {options['dimensions']}; the model's vectors have {config['hidden_size']}: lower it"
            )
        arguments: dict[str, Any] = {"config": dict(config), "precision": precision, "operators": dict(operators)}
        arguments |= {name: options[name] for name in ("dimensions", "pool", "normalize")}
        arguments |= {"shared_prefix": _is_shared(options)}
        embeddings = Port.of("embeddings", f"f32[B,{options['dimensions']}]")
        ports, operands, sizes = packed_operands(options)
        package = PackageSpec("embed", f"{_MODULE}:Embedding", arguments, ports, (embeddings,))
        call = Call("embed", operands, ("port:embeddings",))
        mapping = f"{_MODULE}:parameter_mapping"
        return BuildSpec((package,), (call,), packed_checks(options, config), mapping, sizes)


def _head(reduction: str, options: Mapping[str, Any], arguments: Mapping[str, Any], hidden: str) -> PackageSpec:
    mapped = reduction == "map"
    extra = {"values": options["values"]} if mapped else {}
    labels = str(len(options["values"])) if mapped else "N"
    inputs = (Port.of("hidden", hidden), Port.of("label_ids", f"i64[{labels}]"))
    scores = Port.of("scores", "f32[B,1]" if mapped else "f32[B,N]")
    return PackageSpec(reduction, f"{_MODULE}:{_HEADS[reduction]}", {**arguments, **extra}, inputs, (scores,))
