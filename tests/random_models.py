"""Small random models in Hugging Face's own format, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-biased-llama3-rope": LlamaConfig(
        **SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE
    ),
    "llama-mha": LlamaConfig(**{**SIZES, "num_key_value_heads": 4}, tie_word_embeddings=False),
    "qwen2-untied": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3-tied-wide-heads": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
}

TEXT = ["the cat sat on the mat", "a good film, a bad film", "positive and negative reviews of 12 things", "yes no"]


def make_model(config: PretrainedConfig, seed: int = 0) -> Any:
    """A causal model with every parameter drawn anew, so that biases and norms count."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    return model


def write_model(folder: Path, config: PretrainedConfig, shard: str = "5GB") -> Any:
    """Saves a random model as safetensors and returns it."""
    model = make_model(config)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE of at most 512 tokens in which `` positive`` and `` negative`` are one token each."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXT, *[" positive negative good bad"] * 20], trainer)
    return tokenizer


def write_tiny_model(folder: Path) -> Path:
    """A model directory with weights, configuration and tokenizer."""
    write_model(folder, CONFIGS["llama-tied"])
    train_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
