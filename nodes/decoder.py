"""The decoder-only model as Torch modules over packed tokens: Llama, Qwen2 and Qwen3 families.

Parameter names are this project's; :func:`parameter_mapping` declares where each comes from in a Hugging Face
checkpoint. Modules are built for export only: no K/V cache, no dropout, no Python on the request path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from dagserve.interface import Made
from dagserve.kernels.attention.op import IMPLEMENTATIONS as ATTENTION
from dagserve.kernels.attention.padded import Packing
from dagserve.kernels.fp8_linear.linear import Fp8Linear, linear
from dagserve.kernels.fp8_linear.weights import pack, scale
from dagserve.kernels.rms_norm.op import ADD as ADD_RMS_NORM
from dagserve.kernels.rms_norm.op import IMPLEMENTATIONS as RMS_NORM
from dagserve.kernels.rope.op import IMPLEMENTATIONS as ROPE
from dagserve.kernels.rope.reference import inverse_frequencies, rotation
from dagserve.kernels.silu_mul_quantize.op import IMPLEMENTATIONS as SILU_MUL_QUANTIZE

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}

FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class DecoderConfig:
    """The structure of one model, from a Hugging Face ``config.json``."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool

    @staticmethod
    def of(config: Mapping[str, Any]) -> DecoderConfig:
        """Reads ``config.json``.

        Raises:
            ValueError: a family or feature that is not supported, by name.
        """
        family = config.get("model_type", "")
        if family not in FAMILIES:
            raise ValueError(f"model_type {family!r} is not supported: use one of {', '.join(FAMILIES)}")
        _refuse_unsupported(config)
        bias = bool(config.get("attention_bias", False))
        heads = config["num_attention_heads"]
        rope = config.get("rope_parameters") or {}
        return DecoderConfig(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            rope_scaling=_rope_scaling(config),
            qkv_bias=family == "qwen2" or bias,
            output_bias=family != "qwen2" and bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            tied=bool(config.get("tie_word_embeddings", False)),
        )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported: the MLP is SiLU-gated")
    if config.get("use_sliding_window"):
        raise ValueError("use_sliding_window is not supported: attention is full causal")


def _rope_scaling(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_scaling type {kind!r} is not supported: use default or llama3")
    return dict(scaling)


def parameter_mapping(config: Mapping[str, Any]) -> dict[str, str | Made]:
    """Declares, for every parameter of :class:`Backbone` and the heads, where it is in a Hugging Face checkpoint.

    Linears over the same input are one: ``qkv`` of query, key and value heads in this order, ``gate_up`` of the MLP.
    """
    c = DecoderConfig.of(config)
    head = "model.embed_tokens.weight" if c.tied else "lm_head.weight"
    mapping: dict[str, str | Made] = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not c.tied:
        mapping["lm_head.weight"] = head
    mapping |= _linear_mapping("fp8_head", {head: c.vocab_size}, c.hidden_size, bias=False)
    if any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or ()):
        mapping["score.weight"] = "score.weight"
    for i in range(c.num_layers):
        mapping |= _layer_mapping(c, f"layers.{i}", f"model.layers.{i}")
    return mapping


def _layer_mapping(c: DecoderConfig, ours: str, theirs: str) -> dict[str, str | Made]:
    queries, keys, inner = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
    projections = {f"{attention}.{p}_proj": keys if p in "kv" else queries for p in "qkv"}
    gate_up = {f"{mlp}.{p}_proj": inner for p in ("gate", "up")}
    mapping: dict[str, str | Made] = {
        f"{ours}.attention_norm.weight": f"{theirs}.input_layernorm.weight",
        f"{ours}.mlp_norm.weight": f"{theirs}.post_attention_layernorm.weight",
    }
    for name, parts, columns, bias in (
        ("attention.qkv", projections, c.hidden_size, c.qkv_bias),
        ("attention.o", {f"{attention}.o_proj": c.hidden_size}, queries, c.output_bias),
        ("mlp.gate_up", gate_up, c.hidden_size, c.mlp_bias),
        ("mlp.down", {f"{mlp}.down_proj": c.hidden_size}, inner, c.mlp_bias),
    ):
        mapping |= _linear_mapping(f"{ours}.{name}", parts, columns, bias)
    if c.qk_norm:
        mapping |= {f"{ours}.attention.{p}_norm.weight": f"{attention}.{p}_norm.weight" for p in "qk"}
    return mapping


def _linear_mapping(ours: str, parts: Mapping[str, int], columns: int, bias: bool) -> dict[str, str | Made]:
    """A linear made of ``parts``, output channels by name in a checkpoint; ``scale`` is there where it is in E4M3."""
    rows = tuple(parts.values())
    weights = tuple(name.removesuffix(".weight") + ".weight" for name in parts)
    shapes = tuple((n, columns) for n in rows)
    mapping: dict[str, str | Made] = {
        f"{ours}.weight": Made(weights, shapes, pack),
        f"{ours}.scale": Made(weights, shapes, scale),
    }
    if bias:
        mapping[f"{ours}.bias"] = Made(tuple(f"{name}.bias" for name in parts), tuple((n,) for n in rows), pack)
    return mapping


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, size: int, eps: float, operators: Mapping[str, str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.norm, self.add_norm = RMS_NORM[operators["rms_norm"]], ADD_RMS_NORM[operators["rms_norm"]]

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size]`` -> the same."""
        return self.norm(x, self.weight, self.eps)

    def after_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``norm(s)`` and ``s`` for ``s = x + residual``, all ``[T, size]``."""
        return self.add_norm(x, residual, self.weight, self.eps)


def after_norm(layer: nn.Linear | Fp8Linear, norm: RMSNorm, x: Tensor) -> Tensor:
    """``layer(norm(x))``; a linear in E4M3 quantises in the pass of its norm."""
    if isinstance(layer, Fp8Linear):
        return layer.after_quantize(*layer.norm_quantize(x, norm.weight, norm.eps))
    out: Tensor = layer(norm(x))
    return out


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions and, for Qwen3, RMSNorm on each query and key head."""

    def __init__(self, c: DecoderConfig, dtype: torch.dtype, operators: Mapping[str, str]) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.qkv = linear("projections", c.hidden_size, queries + 2 * keys, c.qkv_bias, dtype, operators)
        self.o = linear("projections", queries, c.hidden_size, c.output_bias, dtype, operators)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, operators) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, operators) if c.qk_norm else None
        self.eps = c.rms_norm_eps
        self.attention, self.rope = ATTENTION[operators["attention"]], ROPE[operators["rope"]]

    def project(self, x: Tensor, norm: RMSNorm, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``x: [T, hidden_size]``, ``cos, sin: f32[T, head_dim]`` -> rotated q, rotated k, and v.

        q: ``[T, num_heads, head_dim]``; k and v: ``[T, num_kv_heads, head_dim]``.
        """
        heads = after_norm(self.qkv, norm, x).view(x.shape[0], self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = torch.split(heads, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        weights = (None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm))
        return *self.rope(q, k, *weights, cos, sin, self.eps), v


class GatedMLP(nn.Module):
    """SiLU-gated MLP behind its norm, with the residual sums before and after it."""

    def __init__(self, c: DecoderConfig, dtype: torch.dtype, operators: Mapping[str, str]) -> None:
        super().__init__()
        self.gate_up = linear("mlp", c.hidden_size, 2 * c.intermediate_size, c.mlp_bias, dtype, operators)
        self.down = linear("mlp", c.intermediate_size, c.hidden_size, c.mlp_bias, dtype, operators)
        self.silu_mul_quantize = SILU_MUL_QUANTIZE[operators["silu_mul_quantize"]]

    def forward(self, x: Tensor, residual: Tensor, norm: RMSNorm) -> Tensor:
        """``s + mlp(norm(s))`` for ``s = residual + x``; all ``[T, hidden_size]``."""
        if isinstance(self.gate_up, Fp8Linear) and isinstance(self.down, Fp8Linear):
            *quantized, summed = self.gate_up.add_norm_quantize(x, residual, norm.weight, norm.eps)
            gated = self.silu_mul_quantize(self.gate_up.after_quantize(*quantized))
            return summed + self.down.after_quantize(*gated)
        normed, summed = norm.after_sum(x, residual)
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        out: Tensor = summed + self.down(nn.functional.silu(gate) * up)
        return out


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, c: DecoderConfig, dtype: torch.dtype, operators: Mapping[str, str]) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, operators)
        self.attention = SelfAttention(c, dtype, operators)
        self.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, operators)
        self.mlp = GatedMLP(c, dtype, operators)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, packing: Packing) -> Tensor:
        """``[T, hidden_size]`` -> the same."""
        return self.with_keys(x, cos, sin, packing)[0]

    def with_keys(self, x: Tensor, cos: Tensor, sin: Tensor, packing: Packing) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`forward`, with k and v, ``[T, num_kv_heads, head_dim]`` each."""
        q, k, v = self.project(x, cos, sin)
        out = self.attention.attention(q, k, v, packing)
        return self.after_attention(x, out.flatten(1)), k, v

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`SelfAttention.project`."""
        return self.attention.project(x, self.attention_norm, cos, sin)

    def after_attention(self, x: Tensor, heads: Tensor) -> Tensor:
        """The rest of the layer; ``heads``: ``[T, num_heads * head_dim]``, what attention gave."""
        out: Tensor = self.mlp(self.attention.o(heads), x, self.mlp_norm)
        return out


class Backbone(nn.Module):
    """Packed prefill up to the final norm of each sequence's last token.

    With a ``shared_prefix`` sequence 0 is what all others begin with: it gives no result, and may be empty.
    """

    def __init__(
        self, config: Mapping[str, Any], precision: str, operators: Mapping[str, str], shared_prefix: bool = False
    ) -> None:
        super().__init__()
        self.shared_prefix = shared_prefix
        c = DecoderConfig.of(config)
        dtype = DTYPES[precision]
        self.embed = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, dtype, operators) for _ in range(c.num_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, operators)
        self.to(dtype)
        frequencies = inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def blocks(self) -> list[Layer]:
        """The layers in order."""
        return cast(list[Layer], list(self.layers))

    def forward(self, tokens: Tensor, cu_seqlens: Tensor, iota: Tensor, prefix_iota: Tensor | None = None) -> Tensor:
        """Runs one prefill.

        Args:
            tokens: ``i64[T]``, packed.
            cu_seqlens: ``i32[B+1]``, or ``i32[B+2]`` with a shared prefix.
            iota: ``i32[L]``, 0..max_seqlen-1, the prefix not counted.
            prefix_iota: ``i32[S]``, 0..S-1 for a prefix of S tokens, at least 1; only with a shared prefix.

        Returns:
            ``[B, hidden_size]``, the normed hidden state of each sequence's last token.
        """
        packing = self.packing(tokens, cu_seqlens, iota, prefix_iota)
        last: Tensor = self.norm(self.hidden(tokens, packing)[packing.last])
        return last

    def packing(self, tokens: Tensor, cu_seqlens: Tensor, iota: Tensor, prefix_iota: Tensor | None) -> Packing:
        """How the batch is packed."""
        if prefix_iota is None:
            return Packing.of(cu_seqlens, tokens.shape[0], iota)
        return Packing.shared(cu_seqlens, tokens.shape[0], iota, prefix_iota)

    def hidden(self, tokens: Tensor, packing: Packing) -> Tensor:
        """``[T, hidden_size]`` after the last layer, before the final norm."""
        x: Tensor = self.embed(tokens)
        cos, sin = rotation(packing.positions, self.get_buffer("inverse_frequencies"))
        for layer in self.layers:
            x = layer(x, cos, sin, packing)
        return x

    def example(self, sizes: Mapping[str, int], generator: torch.Generator) -> tuple[Tensor, ...]:
        """Random tokens in ``B`` sequences, one of them ``L`` long; ``T`` is brought into its possible range first.

        With a shared prefix the sequences come after one of at most ``S`` tokens, empty where ``T`` has none to spare.
        """
        batch = sizes["B"]
        prefix = [min(sizes["S"], sizes["T"] - batch)] if self.shared_prefix else []
        total = sizes["T"] - sum(prefix)
        longest = min(sizes["L"], total - batch + 1)
        lengths = [longest] + [1] * (batch - 1)
        left = min(total, batch * longest) - sum(lengths)
        for i in range(1, batch):
            extra = min(left, longest - 1)
            lengths[i] += extra
            left -= extra
        tokens = torch.randint(self.embed.num_embeddings, (sum(prefix + lengths),), generator=generator)
        cu_seqlens = torch.tensor([0, *prefix, *lengths]).cumsum(0).int()
        iotas = [torch.arange(n, dtype=torch.int32) for n in (longest, *(max(1, p) for p in prefix))]
        return tokens, cu_seqlens, *iotas


class Embedding(Backbone):
    """One vector a text: the last token's hidden state, or the mean of all, cut and brought to length 1 in FP32."""

    def __init__(
        self,
        config: Mapping[str, Any],
        precision: str,
        operators: Mapping[str, str],
        dimensions: int,
        pool: str,
        normalize: bool,
        shared_prefix: bool = False,
    ) -> None:
        super().__init__(config, precision, operators, shared_prefix)
        self.dimensions, self.pool, self.normalize = dimensions, pool, normalize

    def forward(self, tokens: Tensor, cu_seqlens: Tensor, iota: Tensor, prefix_iota: Tensor | None = None) -> Tensor:
        """As :meth:`Backbone.forward`; ``f32[B, dimensions]``."""
        packing = self.packing(tokens, cu_seqlens, iota, prefix_iota)
        hidden = self.hidden(tokens, packing)
        if self.pool == "last":
            pooled = self.norm(hidden[packing.last]).float()
        else:
            normed = self.norm(hidden)
            count = (packing.last - packing.pad[:, 0] + 1)[:, None, None]
            total = torch.where(iota[None, :, None] < count, normed[packing.pad].float(), 0.0).sum(dim=1)
            if packing.prefix is not None and prefix_iota is not None:
                before = (prefix_iota < cu_seqlens[1])[:, None]
                total = total + torch.where(before, normed[packing.prefix].float(), 0.0).sum(dim=0)
            pooled = total / (packing.positions[packing.last] + 1)[:, None]
        cut = pooled[:, : self.dimensions]
        lengths = cut.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        out: Tensor = cut / lengths if self.normalize else cut.clone()
        return out


class OutputHead(nn.Module):
    """A head over the output embedding.

    With tied embeddings its weight is ``embed.weight``; in E4M3 it is a copy, for tokens are still looked up in that.
    """

    def __init__(self, config: Mapping[str, Any], precision: str, operators: Mapping[str, str]) -> None:
        super().__init__()
        c = DecoderConfig.of(config)
        self.vocabulary, self.hidden_size, self.dtype = c.vocab_size, c.hidden_size, DTYPES[precision]
        choices = {"lm_head": "dense", **operators}  # a head that reads some rows alone has no choice
        weight = linear("lm_head", c.hidden_size, c.vocab_size, False, self.dtype, choices)
        self.name = "fp8_head" if isinstance(weight, Fp8Linear) else "embed" if c.tied else "lm_head"
        self.add_module(self.name, weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., hidden_size]`` -> ``[..., vocab_size]`` in the model's dtype."""
        layer = self.get_submodule(self.name)
        return layer(hidden) if isinstance(layer, Fp8Linear) else hidden @ self.get_parameter(f"{self.name}.weight").t()

    def rows(self, tokens: Tensor) -> Tensor:
        """``[n, hidden_size]`` in the model's dtype, the weights of some tokens."""
        weight = self.get_parameter(f"{self.name}.weight")[tokens]
        if self.name != "fp8_head":
            return weight
        scales = self.get_parameter(f"{self.name}.scale")[tokens]
        return (weight.float() * scales[:, None])[:, : self.hidden_size].to(self.dtype)


class _Head(OutputHead):
    """A head that scores labels."""

    def example(self, sizes: Mapping[str, int], generator: torch.Generator) -> tuple[Tensor, ...]:
        """Random hidden states of the scale a final norm gives, and random label ids."""
        states = torch.randn(sizes["B"], self.hidden_size, generator=generator).to(self.dtype)
        return states, torch.randint(self.vocabulary, (self.labels(sizes),), generator=generator)

    def labels(self, sizes: Mapping[str, int]) -> int:
        """Number of labels of an example."""
        return sizes["N"]

    def label_logits(self, hidden: Tensor, label_ids: Tensor) -> Tensor:
        """``f32[B, N]``: only the labels' rows of the head are read."""
        return (hidden @ self.rows(label_ids).t()).float()


class SoftmaxHead(_Head):
    """Softmax over the labels."""

    def forward(self, hidden: Tensor, label_ids: Tensor) -> Tensor:
        """``hidden: [B, H]``, ``label_ids: i64[N]`` -> ``f32[B, N]``."""
        return self.label_logits(hidden, label_ids).softmax(dim=-1)


class MapHead(_Head):
    """Expected value of fixed ``values`` under the softmax over the labels."""

    def __init__(
        self, config: Mapping[str, Any], precision: str, operators: Mapping[str, str], values: Sequence[float]
    ) -> None:
        super().__init__(config, precision, operators)
        self.register_buffer("values", torch.tensor(values, dtype=torch.float32), persistent=False)

    def labels(self, sizes: Mapping[str, int]) -> int:  # noqa: ARG002
        """One label per value."""
        return int(self.get_buffer("values").shape[0])

    def forward(self, hidden: Tensor, label_ids: Tensor) -> Tensor:
        """``hidden: [B, H]``, ``label_ids: i64[N]`` -> ``f32[B, 1]``."""
        weights = self.label_logits(hidden, label_ids).softmax(dim=-1)
        return (weights * self.get_buffer("values")).sum(dim=-1, keepdim=True)


class LogProbabilityHead(_Head):
    """Log-probability of each label over the full vocabulary, in FP32."""

    def forward(self, hidden: Tensor, label_ids: Tensor) -> Tensor:
        """``hidden: [B, H]``, ``label_ids: i64[N]`` -> ``f32[B, N]``."""
        logits = self.logits(hidden).float()
        return logits[:, label_ids] - logits.logsumexp(dim=-1, keepdim=True)


class ProbabilityHead(LogProbabilityHead):
    """Probability of each label over the full vocabulary, in FP32."""

    def forward(self, hidden: Tensor, label_ids: Tensor) -> Tensor:
        """``hidden: [B, H]``, ``label_ids: i64[N]`` -> ``f32[B, N]``."""
        return super().forward(hidden, label_ids).exp()
