"""What every source of a model offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of a checkpoint, read when asked for.

    ``dtype`` is ``f32``, ``f16`` or ``bf16``; ``read`` returns an array of ``shape``, ``uint16`` bits for ``bf16``.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], npt.NDArray[Any]]


@dataclass(frozen=True)
class Checkpoint:
    """A model in Hugging Face terms, whatever file it came from.

    Attributes:
        source: the directory or file.
        config: the content of ``config.json``, or its equivalent.
        tensors: by Hugging Face parameter name.
        tokenizer_json: the content of ``tokenizer.json``, or None where the source has none.
    """

    source: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, SourceTensor]
    tokenizer_json: bytes | None


def bf16_to_f32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Widens ``bf16`` bit patterns exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounds to nearest even, as hardware does; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
