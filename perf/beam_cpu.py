"""Beam search on a CPU: the node beside ``transformers.generate(num_beams=...)`` with the same model, in one run.

For each width, the same prompts by both sides in turn, one thread each, and how many results are the same. Differences
are kept in the JSON: transformers keeps a completed sequence only where it ranks among the first beams, breaks ties
otherwise, and at width 1 is greedy: it ends at the first stop token, where ours goes on to find better ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dagserve.compiler import compile_manifest
from dagserve.engine import Engine
from demo.assets import Unreachable, demo_model, demo_reviews
from demo.peer import load_transformers
from perf.environment import describe_environment
from perf.report import Grid, timed, write_result

MANIFEST = Path(__file__).parent.parent / "manifests" / "suggest.yaml"
RESULT = Path(__file__).parent / "results" / "beam_cpu.json"
WIDTHS = (1, 4, 16)
STEPS = 4
RETURNED = 5
WORDS = 8


def prompts(count: int) -> list[str]:
    """The first words of reviews."""
    return [" ".join(review.text.split()[:WORDS]) for review in demo_reviews() if len(review.text.split()) > WORDS][
        :count
    ]


def transformers_search(model: Any, tokenizer: Any, prompt: str, width: int) -> list[list[int]]:
    """Token lists of the best sequences."""
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=min(width, RETURNED),
            max_new_tokens=STEPS,
            do_sample=False,
            length_penalty=1.0,
            pad_token_id=0,
        )
    stop = model.generation_config.eos_token_id
    return [up_to(stop, row.tolist()) for row in out[:, ids.shape[1] :]]


def up_to(stop: int, tokens: list[int]) -> list[int]:
    """A sequence without what fills it up after its stop token."""
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


def measure(engine: Engine, model: Any, tokenizer: Any, texts: Sequence[str], width: int) -> dict[str, Any]:
    """Medians of both sides in milliseconds, and the prompts whose sequences differ."""
    ours_s, theirs_s, different = [], [], []
    for text in texts:
        request = {"prompts": [text], "width": width, "n": min(width, RETURNED), "return_tokens": True}
        body, seconds = timed(lambda request=request: engine.run(request))  # type: ignore[misc]
        ours_s.append(seconds)
        theirs, seconds = timed(lambda text=text: transformers_search(model, tokenizer, text, width))  # type: ignore[misc]
        theirs_s.append(seconds)
        ours = [s["tokens"] for s in json.loads(body)["results"][0]["sequences"]]
        if ours != theirs:
            different.append({"prompt": text, "ours": ours, "theirs": theirs})
    return {
        "width": width,
        "ours_ms": statistics.median(ours_s) * 1000,
        "theirs_ms": statistics.median(theirs_s) * 1000,
        "different": different,
    }


def grid(rows: Sequence[dict[str, Any]], count: int) -> Grid:
    """The table of a result."""
    cells = tuple(
        (
            str(r["width"]),
            f"{r['ours_ms']:.0f}",
            f"{r['theirs_ms']:.0f}",
            f"{r['theirs_ms'] / r['ours_ms']:.2f}",
            f"{count - len(r['different'])} of {count}",
        )
        for r in rows
    )
    return Grid(
        f"{STEPS} steps, prompts of {WORDS} words: median ms a request, one thread",
        ("width", "dagserve", "transformers", "times", "same sequences"),
        cells,
    )


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(prog="python -m perf.beam_cpu", description=__doc__)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--artifact", type=Path, help="a compiled manifests/suggest.yaml; compiled when left out")
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args()
    try:
        source, texts = str(demo_model()), prompts(arguments.prompts)
    except Unreachable as error:
        raise SystemExit(f"perf: {error}") from error
    artifact = arguments.artifact or compile_manifest(MANIFEST, {"model": source}).artifact
    model, tokenizer = load_transformers(source)
    torch.set_num_threads(1)
    result: dict[str, Any] = {"environment": describe_environment("perf.beam_cpu", sys.argv[1:])}
    with Engine.load(artifact) as engine:
        result["widths"] = [measure(engine, model, tokenizer, texts, width) for width in WIDTHS]
    tables = [grid(result["widths"], len(texts))]
    write_result("Beam search on a CPU", result, tables, arguments.json)


if __name__ == "__main__":
    main()
