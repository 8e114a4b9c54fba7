"""What QK norm and rotation are tuned and timed on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dagserve.kernels.rope.reference import inverse_frequencies, qk_norm_rope, rotation
from dagserve.kernels.rope.triton import _qk_norm_rope
from dagserve.kernels.rows import TOKENS
from dagserve.kernels.tuning import Problem, Tiles, Trial, relative_difference

TOLERANCE = 1e-2
"""Of BF16 results from the reference, relative to all of them."""

EPS = 1e-6
LONGEST = 512


@dataclass(frozen=True)
class Case:
    """``tokens`` of a packed QKV projection; with ``norm`` as Qwen3 has it."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    norm: bool
    write: bool = False

    @property
    def name(self) -> str:
        """For a table."""
        more = ("" if self.norm else ", no norm") + (", K/V write" if self.write else "")
        return f"{self.tokens} tokens, {self.heads}/{self.kv_heads} heads of {self.head_dim}{more}"

    def inputs(self, device: str) -> dict[str, Any]:
        """The operator's arguments in BF16, q, k and v columns of one matrix, cos and sin in FP32."""
        generator = torch.Generator(device).manual_seed(self.head_dim)
        sizes = [h * self.head_dim for h in (self.heads, self.kv_heads, self.kv_heads)]
        rows = torch.randn(self.tokens, sum(sizes), device=device, generator=generator).bfloat16()
        q, k, v = (x.view(self.tokens, -1, self.head_dim) for x in torch.split(rows, sizes, dim=1))
        positions = torch.arange(self.tokens, device=device) % LONGEST
        cos, sin = rotation(positions, inverse_frequencies(self.head_dim, 1e6, None).to(device))
        weights = torch.randn(2, self.head_dim, device=device, generator=generator).bfloat16()
        q_weight, k_weight = weights if self.norm else (None, None)
        inputs = {"q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight, "cos": cos, "sin": sin, "eps": EPS}
        if self.write:
            kept = torch.zeros(2, self.tokens, self.kv_heads, self.head_dim, dtype=torch.bfloat16, device=device)
            inputs |= {"v": v, "keys": kept[0], "values": kept[1]}
            inputs["rows"] = torch.randperm(self.tokens, device=device, generator=generator)
        return inputs


MODELS = ((14, 2, 64, False), (16, 8, 128, True))
"""Heads of Qwen2.5-0.5B and of Qwen3-0.6B, and whether there is a norm."""

CASES = tuple(
    Case(tokens, *model, write=write) for write in (False, True) for model in MODELS for tokens in (1, *TOKENS.values())
)

SMALL = (Case(3, 4, 2, 64, norm=True), Case(3, 4, 2, 64, norm=False, write=True))

BUCKETS = tuple((most, Case(count, *model)) for model in MODELS for most, count in TOKENS.items())


def candidates() -> list[Tiles]:
    """Tokens and heads of a program, and its warps: so few that a thread reads several neighbours of a head at once."""
    return [
        {"TOKENS": tokens, "HEADS": heads, "warps": warps}
        for tokens, heads, warps in itertools.product((1, 4, 8, 16), (1, 2, 4), (1, 2, 4))
        if warps == 1 or tokens >= 4 * warps
    ]


def problems(buckets: Sequence[tuple[int, Case]] = BUCKETS) -> list[Problem]:
    """Buckets by tokens and head size."""
    return [
        Problem(
            case.name,
            {"tokens_at_most": most, "head_dim_at_most": case.head_dim},
            {"tokens": case.tokens, "head_dim": case.head_dim},
            candidates(),
            partial(_prepare, case),
        )
        for most, case in buckets
    ]


def _prepare(case: Case, device: str) -> Trial:
    inputs = case.inputs(device)

    def call(c: Tiles) -> Any:
        return _qk_norm_rope(**inputs, each_tokens=c["TOKENS"], each_heads=c["HEADS"], warps=c["warps"])

    return Trial(call, difference(inputs), TOLERANCE)


def difference(inputs: dict[str, Any]) -> Callable[[tuple[Tensor, Tensor]], float]:
    """Of q and k, the larger one."""
    names = ("q", "k", "q_weight", "k_weight", "cos", "sin", "eps")
    expected = qk_norm_rope(**{name: inputs[name] for name in names})
    return lambda result: max(relative_difference(ours, e) for ours, e in zip(result, expected, strict=True))
