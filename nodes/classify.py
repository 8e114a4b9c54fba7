"""Classification nodes: an MLP head over pooled hidden states, with its model or alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from dagserve.checkpoint import open_file
from dagserve.errors import CheckpointError
from dagserve.interface import BuildSpec, Call, Interface, Operators, Option, PackageSpec, Port
from dagserve.nodes.prefill import SHARED_PREFIX, Embed, Score, packed_ports

ACTIVATIONS = ("relu", "gelu", "silu", "tanh")
FUNCTIONS = ("softmax", "sigmoid", "none")

_LABELS: Mapping[str, Any] = {
    "type": "array",
    "items": {"type": "string", "minLength": 1},
    "minItems": 1,
    "uniqueItems": True,
}
_HEAD_OPTIONS = (
    Option("labels", _LABELS, required=True),
    Option("activation", {"enum": list(ACTIVATIONS)}, default="relu"),
    Option("function", {"enum": list(FUNCTIONS)}, default="softmax"),
)


class Classify:
    """AOTI node: one packed prefill, one pooled vector a text, and an MLP head over it.

    The head is a safetensors file (see :func:`head_layers`), or ``score.weight`` of a sequence classification model.
    """

    engine: ClassVar[str] = "aoti"
    operators: ClassVar[Operators] = Score.operators
    precisions: ClassVar[tuple[str, ...]] = Score.precisions
    options: ClassVar[tuple[Option, ...]] = (
        Option("checkpoint", {"type": "string", "minLength": 1}, required=True),
        Option("head", {"type": "string", "minLength": 1}),
        *_HEAD_OPTIONS,
        Option("pool", {"enum": ["last", "mean"]}, default="last"),
        SHARED_PREFIX,
        Option("max_length", {"type": "integer", "minimum": 1}),
    )

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """``tokens: i64[T]``, ``cu_seqlens: i32[B+1]`` -> ``scores: f32[B,N]``, ``N`` the number of ``labels``."""
        return Interface(packed_ports(options), (Port.of("scores", f"f32[B,{len(options['labels'])}]"),))

    @staticmethod
    def build(
        options: Mapping[str, Any],
        config: Mapping[str, Any],
        precision: str,
        operators: Mapping[str, str],
        connected: Set[str],
    ) -> BuildSpec:
        """The package of :class:`Embed`, and that of the head.

        Raises:
            CheckpointError: the head does not fit the model or the labels.
        """
        size, labels = config["hidden_size"], len(options["labels"])
        pooled = {**options, "dimensions": size, "normalize": False}
        plain = Embed.build(pooled, config, precision, operators, connected)
        layers = (
            [{"name": "score", "in": size, "out": labels, "bias": False}]
            if options["head"] is None
            else head_layers(options["head"], size, labels)
        )
        call = Call("head", ("local:embeddings",), ("port:scores",))
        return replace(
            plain,
            packages=(*plain.packages, _classifier(options, layers, "head" if options["head"] else "checkpoint")),
            calls=(replace(plain.calls[0], outputs=("local:embeddings",)), call),
        )


class ClassifyEmbeddings:
    """AOTI node: the head of :class:`Classify` alone, fed by an :class:`Embed` that several heads may share."""

    engine: ClassVar[str] = "aoti"
    options: ClassVar[tuple[Option, ...]] = (
        Option("head", {"type": "string", "minLength": 1}, required=True),
        Option("dimensions", {"type": "integer", "minimum": 1}, required=True),
        *_HEAD_OPTIONS,
    )

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """``embeddings: f32[B,D]``, ``D`` the option ``dimensions`` -> ``scores: f32[B,N]``, one a label."""
        inputs = (Port.of("embeddings", f"f32[B,{options['dimensions']}]"),)
        return Interface(inputs, (Port.of("scores", f"f32[B,{len(options['labels'])}]"),))

    @staticmethod
    def build(
        options: Mapping[str, Any],
        config: Mapping[str, Any],  # noqa: ARG004
        precision: str,  # noqa: ARG004
        operators: Mapping[str, str],  # noqa: ARG004
        connected: Set[str],  # noqa: ARG004
    ) -> BuildSpec:
        """One package.

        Raises:
            CheckpointError: the head does not fit ``dimensions`` or the labels.
        """
        layers = head_layers(options["head"], options["dimensions"], len(options["labels"]))
        package = _classifier(options, layers, "head")
        return BuildSpec((package,), (Call("head", ("port:embeddings",), ("port:scores",)),), (), "", {})


def _classifier(options: Mapping[str, Any], layers: Sequence[Mapping[str, Any]], weights: str) -> PackageSpec:
    arguments = {"layers": list(layers), "activation": options["activation"], "function": options["function"]}
    embeddings = Port.of("embeddings", f"f32[B,{layers[0]['in']}]")
    scores = Port.of("scores", f"f32[B,{layers[-1]['out']}]")
    module = "dagserve.nodes.heads:ClassificationHead"
    return PackageSpec("head", module, arguments, (embeddings,), (scores,), weights=weights)


def head_layers(file: str, size: int, labels: int) -> list[dict[str, Any]]:
    """The linear layers of a head's safetensors file, in the natural order of their names (``0``, ``2``, ``10``).

    Every tensor is a layer's ``NAME.weight: [out, in]`` or its ``NAME.bias: [out]``, as ``state_dict()`` of an
    ``nn.Sequential`` of linear layers has them.

    Raises:
        CheckpointError: another tensor, or layers that do not go from ``size`` to ``labels`` one after the other.
    """
    shapes = {name: t.shape for name, t in open_file(Path(file).expanduser()).tensors.items()}
    names = sorted({name.rpartition(".")[0] for name in shapes}, key=_natural)
    layers, width = [], size
    for name in names:
        weight, bias = shapes.pop(f"{name}.weight", ()), shapes.pop(f"{name}.bias", None)
        if len(weight) != 2 or weight[1] != width or bias not in (None, weight[:1]):
            parts = f"weight {list(weight)} and bias {list(bias or ())}"
            raise CheckpointError(f"{file}: {name} has {parts}; a linear layer over {width} numbers is needed there")
        layers.append({"name": name, "in": width, "out": weight[0], "bias": bias is not None})
        width = weight[0]
    if shapes:
        raise CheckpointError(f"{file}: {next(iter(shapes))} is no weight or bias of a linear layer; leave it out")
    if width != labels or not layers:
        given = f"{file} gives {width if layers else 0} numbers a text"
        raise CheckpointError(f"{given}; {labels} labels are named: make them agree")
    return layers


def _natural(name: str) -> list[tuple[int, str]]:
    """``layers.10`` after ``layers.9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
