"""Triton's interpreter for tests of kernels without a GPU, with conversions between floating types as a GPU has them.

The interpreter's own (Triton 3.6) truncate FP32 to BF16, and of FP32 to FP8 lose the carry and do not saturate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

MARKS = [pytest.mark.gpu] if torch.cuda.is_available() else []
"""For ``pytestmark``: the same tests run in the interpreter, or on the GPU with ``make test-gpu``."""

NUMPY_MAY_WARN = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow|All-NaN):RuntimeWarning")
"""The interpreter computes in NumPy, which warns where a GPU gives NaN or infinity."""

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8e4nv": torch.float8_e4m3fn}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def exact_conversions() -> None:
    """Lets the interpreter round to nearest even, and saturate in E4M3. Without effect where there is a GPU."""
    if DEVICE == "cpu":
        from triton.runtime import interpreter

        interpreter._convert_float = _convert


def poison_new_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors by ``new_empty``, as the kernels' launchers have them, start as NaN, or as large integers."""
    empty = Tensor.new_empty

    def poisoned(self: Tensor, *arguments: Any, **options: Any) -> Tensor:
        new = empty(self, *arguments, **options)
        return new.fill_(float("nan") if new.dtype.is_floating_point else 2**30 + 7)

    monkeypatch.setattr(Tensor, "new_empty", poisoned)


def _convert(data: npt.NDArray[Any], source: Any, target: Any, _rounding: Any) -> npt.NDArray[Any]:
    bits = torch.from_numpy(np.ascontiguousarray(data).view(f"i{data.itemsize}" if data.itemsize > 1 else "u1"))
    values = bits.view(_TYPES[source.name]).float()
    if target.name == "fp8e4nv":
        values = values.clamp(-E4M3_MAX, E4M3_MAX)
    converted = values.to(_TYPES[target.name])
    return converted.view(_BITS[converted.itemsize]).numpy().view(f"u{converted.itemsize}").reshape(data.shape)
