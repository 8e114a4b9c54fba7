"""Models of true shape with random weights: ``python -m perf.models qwen3-0.6b FOLDER [--layers N]``.

A checkpoint in Hugging Face's format, in BF16, with a byte-level tokenizer of a few tokens. Times do not depend on the
weights' values, results do.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config

_COMMON: Mapping[str, Any] = {
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "eos_token_id": 151645,
    "bos_token_id": None,
}

CONFIGS: Mapping[str, PretrainedConfig] = {
    "qwen3-0.6b": Qwen3Config(
        **_COMMON,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "qwen2.5-0.5b": Qwen2Config(
        **_COMMON,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
    ),
}
"""The published shapes of Qwen3-0.6B and Qwen2.5-0.5B."""


def config_of(name: str, layers: int | None = None) -> PretrainedConfig:
    """The configuration, with fewer layers where that is wanted."""
    config = CONFIGS[name].to_dict()
    if layers is not None:
        config |= {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    made: PretrainedConfig = type(CONFIGS[name])(**config)
    return made


def write_model(folder: Path, name: str, layers: int | None = None) -> None:
    """Writes ``config.json``, ``model.safetensors`` and ``tokenizer.json``."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name, layers), dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CONFIGS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    options = parser.parse_args()
    write_model(options.folder, options.name, options.layers)
    print(options.folder)


if __name__ == "__main__":
    main()
