"""What FP8 linears are tuned and timed on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dagserve.kernels.fp8_linear.reference import fp8_linear
from dagserve.kernels.fp8_linear.triton import _fp8_linear
from dagserve.kernels.quantize.reference import quantize
from dagserve.kernels.tuning import Problem, Tiles, Trial, relative_difference

TOLERANCE = 1e-2
"""Of BF16 results from the reference, relative to all of them: FP8 products of Hopper keep fewer bits than FP32."""

LINEARS: Mapping[str, tuple[int, int]] = {
    "qwen3 qkv": (4096, 1024),
    "qwen3 o": (1024, 2048),
    "qwen3 gate_up": (6144, 1024),
    "qwen3 down": (1024, 3072),
    "qwen3 lm_head": (151936, 1024),
    "qwen2.5 qkv": (1152, 896),
    "qwen2.5 o": (896, 896),
    "qwen2.5 gate_up": (9728, 896),
    "qwen2.5 down": (896, 4864),
    "qwen2.5 lm_head": (151936, 896),
}
"""Output and input features of Qwen3-0.6B and Qwen2.5-0.5B, packed."""

TOKENS = (1, 50, 100, 400, 500, 1605, 4000)


@dataclass(frozen=True)
class Case:
    """A linear over ``tokens`` rows."""

    linear: str
    tokens: int
    features: int
    columns: int

    @property
    def name(self) -> str:
        """For a table."""
        return f"{self.linear}, M={self.tokens}, N={self.features}, K={self.columns}"

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``x, x_scale, weight, weight_scale``."""
        generator = torch.Generator(device).manual_seed(self.tokens)
        x, x_scale = quantize(torch.randn(self.tokens, self.columns, device=device, generator=generator))
        weight, scale = quantize(torch.randn(self.features, self.columns, device=device, generator=generator))
        return x, x_scale, weight, scale.squeeze(1)


CASES = tuple(Case(name, tokens, *LINEARS[name]) for name in LINEARS for tokens in TOKENS)

SMALL = (Case("small", 5, 32, 48),)

BUCKETS = tuple(
    (most, Case(name, count, *LINEARS[name]))
    for name in LINEARS
    for most, count in ((16, 1), (64, 50), (128, 100), (512, 400), (2048, 1605), (4096, 4000))
    if most <= 512 or "lm_head" not in name
)
"""A head sees a row for each beam or text, never a whole prefill."""

FEW_FEATURES = 4096
"""Up to here the tiles of few tokens do not fill the device, and K is split."""


def candidates(tokens: int, features: int) -> list[Tiles]:
    """Tiles worth a try for so many tokens."""
    splits = (1, 2, 4) if features <= FEW_FEATURES and tokens <= 512 else (1,)
    if tokens <= 16:
        shapes = [(16, 64, 128), (16, 64, 256), (16, 128, 128)]
    elif tokens <= 64:
        shapes = [(16, 64, 128), (32, 64, 128), (64, 64, 128), (64, 128, 128)]
    elif tokens <= 128:
        shapes = [(32, 64, 128), (64, 64, 128), (128, 64, 128), (128, 128, 128)]
    elif tokens <= 512:
        shapes = [(64, 64, 128), (64, 128, 128), (128, 64, 128), (128, 128, 128)]
    else:
        shapes = [(64, 128, 128), (128, 128, 128), (128, 256, 64), (128, 256, 128), (256, 128, 64), (256, 128, 128)]
    found: list[Tiles] = []
    stages_worth = (3, 5) if tokens <= 128 else (3, 4)
    for (rows, channels, depth), split, stages in itertools.product(shapes, splits, stages_worth):
        warps = 8 if rows * channels >= 128 * 128 else 4
        tile = {"BLOCK_M": rows, "BLOCK_N": channels, "BLOCK_K": depth, "SPLIT": split}
        found.append({**tile, "warps": warps, "stages": stages})
    return found


def problems(buckets: Sequence[tuple[int, Case]] = BUCKETS) -> list[Problem]:
    """Buckets by tokens for each linear; others have the default's tiles."""
    return [
        Problem(
            case.name,
            {"tokens_at_most": most, "features": case.features, "columns": case.columns},
            {"tokens": case.tokens, "features": case.features, "columns": case.columns},
            candidates(case.tokens, case.features),
            partial(_prepare, case),
        )
        for most, case in buckets
    ]


def _prepare(case: Case, device: str) -> Trial:
    inputs = case.inputs(device)

    def call(c: Tiles) -> Tensor:
        tiles = (c["BLOCK_M"], c["BLOCK_N"], c["BLOCK_K"], c["SPLIT"], c["warps"], c["stages"])
        out: Tensor = _fp8_linear(*inputs, None, torch.bfloat16, *tiles)
        return out

    expected = fp8_linear(*inputs, None, torch.bfloat16)
    return Trial(call, partial(relative_difference, expected=expected), TOLERANCE)
