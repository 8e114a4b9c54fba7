"""A linear layer in E4M3 as a Torch module, and the choice between it and a dense one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dagserve.kernels.fp8_linear.op import IMPLEMENTATIONS
from dagserve.kernels.fp8_linear.weights import aligned
from dagserve.kernels.quantize.op import ADD_NORM, NORM
from dagserve.kernels.quantize.op import IMPLEMENTATIONS as QUANTIZE


class Fp8Linear(nn.Module):
    """``nn.Linear`` over E4M3: its parameters are ``weight``, ``scale`` and, if any, ``bias``, see ``weights.py``.

    ``operators`` names the implementations of ``fp8_linear`` and ``quantize``. The result has ``dtype``.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, operators: Mapping[str, str]
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        self.product, chosen = IMPLEMENTATIONS[operators["fp8_linear"]], operators["quantize"]
        self.quantize, self.norm_quantize, self.add_norm_quantize = QUANTIZE[chosen], NORM[chosen], ADD_NORM[chosen]
        features, columns = aligned(out_features), aligned(in_features)
        self.weight = _fixed(torch.empty(features, columns, dtype=torch.float8_e4m3fn))
        self.scale = _fixed(torch.empty(features, dtype=torch.float32))
        self.bias = _fixed(torch.empty(out_features, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` -> ``[..., out_features]``."""
        out = self.after_quantize(*self.quantize(x.reshape(-1, self.in_features)))
        return out.reshape(*x.shape[:-1], self.out_features)

    def after_quantize(self, x: Tensor, scale: Tensor) -> Tensor:
        """``x: [T, in_features]`` in E4M3 and its ``scale: f32[T, 1]``, of a kernel that did something else as well."""
        missing = self.weight.shape[1] - self.in_features
        if missing:
            x = pad(x.view(torch.uint8), (0, missing)).view(torch.float8_e4m3fn)
        added = self.weight.shape[0] - self.out_features
        bias = pad(self.bias, (0, added)) if self.bias is not None and added else self.bias
        out = self.product(x, scale, self.weight, self.scale, bias, self.dtype)
        return out[:, : self.out_features] if added else out

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fp8Linear:
        """Follows the model to a device, not to a precision: ``model.to(dtype)`` would undo the format."""

        def moved(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            return applied if applied.dtype == tensor.dtype else tensor.to(applied.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self


def linear(
    group: str, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, operators: Mapping[str, str]
) -> nn.Linear | Fp8Linear:
    """A linear layer as ``operators`` has its group (``projections``, ``mlp``): ``dense`` or ``fp8_rowwise``."""
    if operators[group] == "fp8_rowwise":
        return Fp8Linear(in_features, out_features, bias, dtype, operators)
    return nn.Linear(in_features, out_features, bias, dtype=dtype)


def _fixed(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
