"""The replaceable operators of the decoder's nodes and what each implementation needs. Nothing here imports Torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dagserve.interface import Implementation, Operators
from dagserve.kernels import HEAD_SIZES

MOST_GROUPS = 16
"""Most query heads of one K/V head in the smallest tile."""

FP8_COMPUTE = 8.9
"""The least compute capability with E4M3 matrix products."""


def _heads(config: Mapping[str, Any], precision: str) -> str | None:  # noqa: ARG001
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    groups = heads // (config.get("num_key_value_heads") or heads)
    if size not in HEAD_SIZES:
        return f"the model's head_dim is {size}; it must be one of {', '.join(map(str, HEAD_SIZES))}"
    if groups > MOST_GROUPS:
        return f"{groups} of the model's query heads share one K/V head; a tile has {MOST_GROUPS}"
    return None


def _bf16(config: Mapping[str, Any], precision: str) -> str | None:  # noqa: ARG001
    return None if precision == "bf16" else f"its results are bf16, and the target's precision is {precision}"


_CUDA = ("cuda",)
_TRITON = {"triton": Implementation(_CUDA), "torch": Implementation()}
_FUSED = {"torch": Implementation(), "triton": Implementation(_CUDA)}  # Inductor fuses Torch's with what is around it
_LINEAR = {"dense": Implementation(), "fp8_rowwise": Implementation(compute=FP8_COMPUTE, tolerance="fp8")}

_LINEARS: Operators = {
    "projections": _LINEAR,
    "mlp": _LINEAR,
    "fp8_linear": {
        "cublas": Implementation(_CUDA, FP8_COMPUTE, _bf16),
        "triton": Implementation(_CUDA, FP8_COMPUTE),
        "torch": Implementation(),
    },
    "quantize": _TRITON,
    "silu_mul_quantize": _TRITON,
}

PREFILL: Operators = {
    "attention": {"triton_packed_gqa": Implementation(_CUDA, misfit=_heads), "torch": Implementation()},
    "rms_norm": _FUSED,
    "rope": _FUSED,
    **_LINEARS,
}
"""Of nodes that run one prefill."""

BEAM: Operators = {
    **PREFILL,
    "shared_prefix_attention": {"triton": Implementation(_CUDA, misfit=_heads), "torch": Implementation()},
    "lm_head": _LINEAR,
    "candidates": _TRITON,
    "beam_merge": _TRITON,
    "suffix_reorder": _TRITON,
}
"""Of a beam search."""

CATALOG: Operators = {name: choices for name, choices in BEAM.items() if name not in ("candidates", "beam_merge")}
"""Of the search of a catalog, which takes its candidates from the trie."""

REFERENCE: Mapping[str, str] = {
    **{name: "torch" for name in BEAM if "torch" in BEAM[name]},
    **{name: "dense" for name in BEAM if "dense" in BEAM[name]},
}
"""The implementation of each operator that fixes what it computes."""
