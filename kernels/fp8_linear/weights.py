"""Offline conversion of a decoder's weights: packed linears, and E4M3 with a scale for each output channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dagserve.kernels.quantize.reference import quantize

ALIGNMENT = 16
"""FP8 products want input and output sizes that are multiples of this."""

POLICIES: Mapping[str, frozenset[str]] = {
    "none": frozenset(),
    "mlp": frozenset({"gate_up", "down"}),
    "mlp+lm_head": frozenset({"gate_up", "down", "lm_head"}),
    "all": frozenset({"qkv", "o", "gate_up", "down", "lm_head"}),
}
"""Which groups of linears are FP8. Norms, attention, softmax and sums stay in their own precision."""

PACKED: Mapping[str, tuple[str, ...]] = {
    "attention.qkv": ("attention.q", "attention.k", "attention.v"),
    "attention.o": ("attention.o",),
    "mlp.gate_up": ("mlp.gate", "mlp.up"),
    "mlp.down": ("mlp.down",),
}
"""A layer's linears after packing, and those they are made of, by output channel in this order."""


@dataclass(frozen=True)
class Fp8Weight:
    """One linear's weight.

    Attributes:
        values: ``[N, K]`` in E4M3, both multiples of 16; what was added is zero.
        scale: ``f32[N]``.
        padding: how many numbers were added.
    """

    values: Tensor
    scale: Tensor
    padding: int


@dataclass(frozen=True)
class Converted:
    """A decoder's parameters after conversion, and how many numbers were added to align each FP8 weight, where any."""

    parameters: Mapping[str, Tensor]
    padding: Mapping[str, int]


def aligned(size: int) -> int:
    """The next multiple of 16."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def quantize_weight(weight: Tensor) -> Fp8Weight:
    """``weight: [N, K]`` in any precision, with a scale for each of its rows."""
    features, columns = weight.shape
    padded = pad(weight, (0, aligned(columns) - columns, 0, aligned(features) - features))
    values, scale = quantize(padded)
    return Fp8Weight(values, scale.squeeze(1), padded.numel() - weight.numel())


def pack(parameters: Mapping[str, Tensor], sources: Sequence[str], kind: str) -> Tensor | None:
    """``weight`` or ``bias`` of several linears as one; None where they have none, zeros where only some do."""
    weights = [parameters[f"{name}.weight"] for name in sources]
    found = [parameters.get(f"{name}.{kind}") for name in sources]
    if all(tensor is None for tensor in found):
        return None
    pairs = zip(found, weights, strict=True)
    return torch.cat([weight.new_zeros(weight.shape[0]) if tensor is None else tensor for tensor, weight in pairs])


def convert(parameters: Mapping[str, Tensor], policy: str, num_layers: int) -> Converted:
    """Packs a decoder's linears and quantises those that the policy names; all else stays as it is.

    With tied embeddings an FP8 head is a copy, for a token's embedding is still read from ``embed.weight``.

    Args:
        parameters: by the names of ``dagserve.nodes.decoder``, ``layers.0.mlp.gate.weight``.
        policy: one of :data:`POLICIES`.
        num_layers: of the decoder.

    Returns:
        The same with ``layers.0.mlp.gate_up.weight`` for gate and up, and ``…scale`` beside each weight in E4M3.

    Raises:
        ValueError: there is no such policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"there is no FP8 policy {policy!r}: use one of {', '.join(POLICIES)}")
    left, done, padding = dict(parameters), dict[str, Tensor](), dict[str, int]()
    linears = {f"layers.{i}.{name}": _under(f"layers.{i}", PACKED[name]) for i in range(num_layers) for name in PACKED}
    head = "lm_head" if "lm_head.weight" in parameters else "embed"
    if "lm_head" in POLICIES[policy]:
        linears["lm_head"] = (head,)
    for name, sources in linears.items():
        weight, bias = (pack(parameters, sources, kind) for kind in ("weight", "bias"))
        assert weight is not None
        if name.rpartition(".")[2] in POLICIES[policy]:
            fp8 = quantize_weight(weight)
            weight, done[f"{name}.scale"] = fp8.values, fp8.scale
            padding |= {name: fp8.padding} if fp8.padding else {}
        done[f"{name}.weight"] = weight
        done |= {} if bias is None else {f"{name}.bias": bias}
        for source in set(sources) - {"embed"}:
            left.pop(f"{source}.weight", None)
            left.pop(f"{source}.bias", None)
    return Converted(left | done, padding)


def _under(prefix: str, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)
