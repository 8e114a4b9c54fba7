"""Heads over pooled hidden states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}


class ClassificationHead(nn.Module):
    """Linear layers with an activation between each two, then a function over the labels; all in FP32.

    Args:
        layers: of each its name in the weights, ``in``, ``out`` and whether it has a ``bias``.
        activation: between layers, a key of :data:`ACTIVATIONS`.
        function: ``softmax`` over the labels, ``sigmoid`` of each, or ``none``.
    """

    def __init__(self, layers: Sequence[Mapping[str, Any]], activation: str, function: str) -> None:
        super().__init__()
        for layer in layers:
            _place(self, layer["name"].split("."), nn.Linear(layer["in"], layer["out"], bias=layer["bias"]))
        self.names = [layer["name"] for layer in layers]
        self.activation, self.function = ACTIVATIONS[activation], function

    def forward(self, embeddings: Tensor) -> Tensor:
        """``f32[B, in]`` -> ``f32[B, labels]``."""
        x = embeddings
        for i, name in enumerate(self.names):
            x = cast(Tensor, self.get_submodule(name)(self.activation(x) if i else x))
        if self.function == "softmax":
            return x.softmax(dim=-1)
        return x.sigmoid() if self.function == "sigmoid" else x


def _place(root: nn.Module, path: Sequence[str], layer: nn.Module) -> None:
    """Puts a layer where a dotted name says."""
    for part in path[:-1]:
        if part not in dict(root.named_children()):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.add_module(path[-1], layer)
