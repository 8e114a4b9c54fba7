"""A made-up catalog and a model that knows its semantic ids, for ``manifests/retrieve.yaml``.

The demo model gets 24 more tokens, ``<a_0>`` to ``<c_7>``: kinds, colours and materials. Each begins as the mean of its
word's embeddings, so that an untrained model already ranks items a little; a real one is trained on its catalog.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer

from demo.assets import Unreachable, demo_model
from demo.peer import load_transformers

LEVELS = {
    "a": ("shoes", "coat", "lamp", "table", "bag", "shirt", "clock", "chair"),
    "b": ("red", "blue", "green", "black", "white", "yellow", "brown", "grey"),
    "c": ("leather", "wood", "cotton", "metal", "glass", "wool", "plastic", "paper"),
}
"""The words that stand behind each level's tokens, in their order."""

MISSING = 3
"""Every third combination is not for sale."""

SOLD_OUT = 5
"""Every fifth one is not in stock."""


def token(level: str, code: int) -> str:
    """``<a_3>``."""
    return f"<{level}_{code}>"


def catalog() -> list[dict[str, str | bool]]:
    """The items: id, semantic id and attributes."""
    codes = [list(enumerate(words)) for words in LEVELS.values()]
    return [
        {
            "item": " ".join(word for _, word in reversed(path)),
            "text": "".join(token(level, code) for level, (code, _) in zip(LEVELS, path, strict=True)),
            "colour": path[1][1],
            "stock": number % SOLD_OUT > 0,
        }
        for number, path in enumerate(product(*codes))
        if number % MISSING
    ]


def extend(model: Any, tokenizer: Tokenizer) -> None:
    """Adds the tokens to a model and its tokenizer."""
    words = {token(level, i): word for level, names in LEVELS.items() for i, word in enumerate(names)}
    pieces = {name: tokenizer.encode(" " + word, add_special_tokens=False).ids for name, word in words.items()}
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in words])
    model.resize_token_embeddings(max(model.config.vocab_size, tokenizer.get_vocab_size()), mean_resizing=False)
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        for name, ids in pieces.items():
            weight[tokenizer.token_to_id(name)] = weight[torch.tensor(ids)].mean(dim=0)


def main() -> None:
    """Writes ``model/`` and ``items.jsonl``."""
    parser = argparse.ArgumentParser(prog="python -m demo.retrieval", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    try:
        source = str(demo_model())
    except Unreachable as error:
        raise SystemExit(f"demo: {error}") from error
    model, tokenizer = load_transformers(source)
    extend(model, tokenizer)
    (folder / "model").mkdir(parents=True, exist_ok=True)
    # The output head is the embeddings, which are there by their own name.
    tensors = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(tensors, folder / "model" / "model.safetensors")
    config = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    (folder / "model" / "config.json").write_text(json.dumps(config, default=str))
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    items = catalog()
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    print(f"{folder}: a model with {sum(map(len, LEVELS.values()))} more tokens, and {len(items)} items")


if __name__ == "__main__":
    main()
