"""The packed decoder and its operators against transformers and the readable references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import CONFIGS, make_model
from tolerances import E4M3_LOGITS, LOGITS, SCORES
from torch import Tensor

from dagserve.build.weights import TORCH_DTYPES, make_module, make_parameter
from dagserve.checkpoint import open_checkpoint
from dagserve.interface import ParameterMapping
from dagserve.kernels.attention.padded import Packing, packed_attention
from dagserve.kernels.attention.reference import packed_attention as reference_attention
from dagserve.kernels.rms_norm.reference import rms_norm
from dagserve.nodes.beam import BeamSearch, CatalogSearch
from dagserve.nodes.decoder import (
    DTYPES,
    Backbone,
    LogProbabilityHead,
    MapHead,
    ProbabilityHead,
    SoftmaxHead,
    parameter_mapping,
)
from dagserve.nodes.operators import REFERENCE
from dagserve.nodes.prefill import Embed, Score

LENGTHS = [7, 1, 63, 2, 111]


def load(module: torch.nn.Module, reference: Any, mapping: ParameterMapping) -> torch.nn.Module:
    state = reference.state_dict()
    for name, parameter in module.named_parameters():
        parameter.data = make_parameter(mapping[name], state, parameter)
    return module.eval()


def pack(lengths: list[int]) -> tuple[Tensor, Tensor]:
    return torch.tensor([0, *lengths]).cumsum(0).int(), torch.arange(max(lengths), dtype=torch.int32)


def tokens(lengths: list[int], vocabulary: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocabulary, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("precision", DTYPES)
def test_every_last_token_matches_transformers(name: str, precision: str) -> None:
    reference = make_model(CONFIGS[name])
    config = CONFIGS[name].to_dict()
    mapping = parameter_mapping(config)
    texts = tokens(LENGTHS, config["vocab_size"])
    arguments: tuple[Any, ...] = (config, precision, REFERENCE)
    backbone = load(Backbone(*arguments), reference, mapping)
    head = load(LogProbabilityHead(*arguments), reference, mapping)
    labels = torch.arange(config["vocab_size"])
    with torch.no_grad():
        ours = head(backbone(torch.cat(texts), *pack(LENGTHS)), labels)
        theirs = torch.stack([reference(t[None]).logits[0, -1].log_softmax(-1) for t in texts])
    scale = theirs.abs().max() if precision == "bf16" else 1.0
    assert ((ours - theirs).abs().max() / scale) < LOGITS[precision]


def test_the_demo_model_matches_transformers(demo_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = open_checkpoint(demo_model)
    reference = AutoModelForCausalLM.from_pretrained(demo_model.parent, gguf_file=demo_model.name, dtype=torch.float32)
    mapping = parameter_mapping(checkpoint.config)
    arguments: tuple[Any, ...] = (checkpoint.config, "fp32", REFERENCE)
    backbone = load(Backbone(*arguments), reference, mapping)
    head = load(SoftmaxHead(*arguments), reference, mapping)
    texts = tokens([5, 33, 1], 49152)
    with torch.no_grad():
        hidden = backbone(torch.cat(texts), *pack([5, 33, 1]))
        ours = head.label_logits(hidden, torch.arange(49152))  # type: ignore[operator]
        theirs = torch.stack([reference(t[None]).logits[0, -1] for t in texts])
    assert (ours - theirs).abs().max() < LOGITS["fp32"]


class Rounded(torch.nn.Module):
    """A linear whose weights and inputs are rounded to E4M3, row by row, and back."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = self.rounded(linear.weight), linear.bias

    @staticmethod
    def rounded(x: Tensor) -> Tensor:
        step = x.abs().amax(-1, keepdim=True) / 448
        return (x / step).to(torch.float8_e4m3fn).float() * step

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(self.rounded(x), self.weight, self.bias)


FP8_GROUPS = {
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "projections": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "lm_head": ("lm_head",),
}


@pytest.mark.parametrize("groups", [("mlp",), ("mlp", "lm_head"), ("mlp", "projections", "lm_head")])
@pytest.mark.parametrize("name", CONFIGS)
def test_linears_in_e4m3_match_transformers_with_rounded_ones(name: str, groups: tuple[str, ...]) -> None:
    reference = make_model(CONFIGS[name])
    config = CONFIGS[name].to_dict()
    mapping = parameter_mapping(config)
    operators = {**REFERENCE, **dict.fromkeys(groups, "fp8_rowwise")}
    arguments: tuple[Any, ...] = (config, "fp32", operators)
    backbone = load(Backbone(*arguments), reference, mapping)
    head = load(LogProbabilityHead(*arguments), reference, mapping)
    texts = tokens(LENGTHS, config["vocab_size"])
    exact = torch.stack([reference(t[None]).logits[0, -1].log_softmax(-1) for t in texts])
    for path, module in list(reference.named_modules()):
        parent, _, last = path.rpartition(".")
        if any(last in FP8_GROUPS[group] for group in groups):
            setattr(reference.get_submodule(parent), last, Rounded(module))
    with torch.no_grad():
        ours = head(backbone(torch.cat(texts), *pack(LENGTHS)), torch.arange(config["vocab_size"]))
        theirs = torch.stack([reference(t[None]).logits[0, -1].log_softmax(-1) for t in texts])
    assert (ours - theirs).abs().max() < E4M3_LOGITS
    assert (ours - theirs).abs().median() < 0.1 * (exact - theirs).abs().median()  # the difference that rounding makes


SEARCH: dict[str, Any] = {"width": 6, "steps": 3, "returned": 5, "length_penalty": 1.0, "unrolled": False}


@pytest.mark.parametrize(
    ("node", "options"),
    [
        (Score, {"reduce": "probability", "values": None, "shared_prefix": "exact"}),
        (Score, {"reduce": "softmax", "values": None, "shared_prefix": "off"}),
        (Embed, {"dimensions": 64, "pool": "mean", "normalize": True, "shared_prefix": "exact"}),
        (BeamSearch, {**SEARCH, "stop_tokens": [2], "min_tokens": 0}),
        (CatalogSearch, {**SEARCH, "normalize": "vocabulary"}),
        (CatalogSearch, {**SEARCH, "normalize": "catalog"}),
    ],
)
def test_no_index_leaves_its_range_where_all_integers_are_zero(node: Any, options: dict[str, Any]) -> None:
    """Inductor runs a GPU's kernels on such inputs while it compiles them, and a wrong index ends the process."""
    sizes = dict(zip("TBLSNPWRFMUC", (60, 4, 9, 7, 4, 3, 6, 5, 8, 4, 5, 4), strict=True))
    config = {**CONFIGS["qwen3-tied-wide-heads"].to_dict(), "num_hidden_layers": 1}
    for package in node.build({**options, "max_length": 64}, config, "fp32", REFERENCE, frozenset()).packages:
        module = make_module(package.module, dict(package.arguments))
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape)
        inputs = [
            torch.zeros([d.size(sizes) for d in p.type.shape], dtype=TORCH_DTYPES[p.type.dtype]) for p in package.inputs
        ]
        with torch.no_grad():
            module(*inputs)


def test_heads_agree_with_plain_torch() -> None:
    reference = make_model(CONFIGS["llama-biased-llama3-rope"])
    config = CONFIGS["llama-biased-llama3-rope"].to_dict()
    arguments: tuple[Any, ...] = (config, "fp32", REFERENCE)
    mapping = parameter_mapping(config)
    hidden = torch.randn(5, config["hidden_size"], generator=torch.Generator().manual_seed(1))
    labels, values = torch.tensor([4, 9, 4]), [1.0, -2.0, 0.5]
    logits = hidden @ reference.lm_head.weight.T
    expected = {
        SoftmaxHead(*arguments): logits[:, labels].softmax(-1),
        LogProbabilityHead(*arguments): logits.log_softmax(-1)[:, labels],
        ProbabilityHead(*arguments): logits.softmax(-1)[:, labels],
        MapHead(config, "fp32", REFERENCE, values): logits[:, labels].softmax(-1) @ torch.tensor(values)[:, None],
    }
    for head, wanted in expected.items():
        with torch.no_grad():
            actual = load(head, reference, mapping)(hidden, labels)
        assert actual.shape == wanted.shape
        assert (actual - wanted).abs().max() < SCORES["fp32"]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    heads=st.sampled_from([(4, 4), (6, 2), (9, 3), (14, 2)]),
    head_dim=st.sampled_from([16, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_padded_attention_equals_the_reference(
    lengths: list[int], heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    q, k, v = (torch.randn(total, h, head_dim, generator=generator).to(dtype) for h in (heads[0], heads[1], heads[1]))
    cu_seqlens, iota = pack(lengths)
    actual = packed_attention(q, k, v, Packing.of(cu_seqlens, total, iota))
    expected = reference_attention(q, k, v, cu_seqlens)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert actual.dtype == dtype
    assert (actual.float() - expected.float()).abs().max() < tolerance


def test_a_sequence_does_not_see_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, 2, 16, generator=generator) for _ in range(3))
    cu_seqlens, iota = pack([4, 5])
    before = packed_attention(q, k, v, Packing.of(cu_seqlens, 9, iota))
    k[:4], v[:4] = float("nan"), float("nan")
    after = packed_attention(q, k, v, Packing.of(cu_seqlens, 9, iota))
    torch.testing.assert_close(after[4:], before[4:], rtol=0, atol=0)


def test_rms_norm_matches_torch() -> None:
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    weight = torch.linspace(-1, 2, 33)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (33,), weight, 1e-5))
