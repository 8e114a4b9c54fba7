"""The same task in transformers, one prompt at a time in FP32."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from dagserve.build.cache import BuildCache, default_cache_root
from dagserve.build.sources import import_tokenizer


def load_transformers(model: str) -> tuple[Any, Tokenizer]:
    """The model by transformers' own loader, and its tokenizer."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    path = Path(model)
    options = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = path.parent if path.suffix == ".gguf" else path
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        loaded.eval()  # type: ignore[no-untyped-call]
    source = import_tokenizer(model, BuildCache(default_cache_root()))
    return loaded, Tokenizer.from_str(source.tokenizer_json.decode())


def transformers_scores(model: str, texts: Sequence[str], labels: Sequence[str]) -> tuple[list[float], float]:
    """Softmax over the labels for each prompt: the first label's share, and the seconds it took."""
    loaded, tokenizer = load_transformers(model)
    ids = [tokenizer.encode(label).ids[0] for label in labels]
    scores = []
    started = time.perf_counter()
    with torch.inference_mode():
        for text in texts:
            tokens = torch.tensor([tokenizer.encode(text, add_special_tokens=False).ids])
            logits = loaded(tokens, logits_to_keep=1).logits[0, -1]
            scores.append(float(logits[ids].softmax(0)[0]))
    return scores, time.perf_counter() - started
