"""GGUF files of the Llama architecture, quantised ones included: tensors are dequantised to FP32 when read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from dagserve.checkpoint.base import Checkpoint, SourceTensor
from dagserve.checkpoint.gguf_tokenizer import tokenizer_json_from_gguf
from dagserve.errors import CheckpointError

GLOBAL_NAMES: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF tensor names of one layer (``blk.N.NAME.weight``) and the Hugging Face names they stand for."""


def open_gguf(source: Path) -> Checkpoint:
    """Opens a GGUF file of architecture ``llama``.

    Raises:
        CheckpointError: not a GGUF file, another architecture, or metadata that is missing.
    """
    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, IndexError) as error:
        raise CheckpointError(f"{source} is not a readable GGUF file: {error}") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(source, fields, {t.name for t in reader.tensors})
    tensors = {name: tensor for t in reader.tensors if (name := _name(t.name)) for tensor in [_tensor(name, t, config)]}
    return Checkpoint(source, config, tensors, tokenizer_json_from_gguf(fields))


def _config(source: Path, fields: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(
            f"{source} has architecture {architecture!r}; only llama is read from GGUF, use safetensors"
        )
    try:
        heads = fields["llama.attention.head_count"]
        return {
            "model_type": "llama",
            "vocab_size": len(fields["tokenizer.ggml.tokens"]),
            "hidden_size": fields["llama.embedding_length"],
            "intermediate_size": fields["llama.feed_forward_length"],
            "num_hidden_layers": fields["llama.block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
            "head_dim": fields.get("llama.attention.key_length", fields["llama.embedding_length"] // heads),
            "rms_norm_eps": round(float(fields["llama.attention.layer_norm_rms_epsilon"]), 12),
            "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
            "max_position_embeddings": fields["llama.context_length"],
            "tie_word_embeddings": "output.weight" not in names,
            "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        }
    except KeyError as error:
        raise CheckpointError(f"{source} lacks the GGUF field {error}") from error


def _name(name: str) -> str | None:
    """The Hugging Face name, the GGUF name where none is declared (reported as unexpected), None for derived data."""
    if name == "rope_freqs.weight":
        return None
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name


def _tensor(name: str, tensor: Any, config: Mapping[str, Any]) -> SourceTensor:
    shape = tuple(int(n) for n in reversed(tensor.shape))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    permuted = next((count for part, count in heads.items() if f"self_attn.{part}." in name), 0)
    return SourceTensor("f32", shape, partial(_read, tensor, shape, permuted))


def _read(tensor: Any, shape: tuple[int, ...], heads: int) -> npt.NDArray[np.float32]:
    """Dequantises; q and k rows, interleaved per head in GGUF, return to the half-split rotary layout."""
    values = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(shape)
    if not heads:
        return values
    split = values.reshape(heads, shape[0] // heads // 2, 2, *shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(shape)
