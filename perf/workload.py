"""The requests every side is given: real reviews of similar length, the demo's query and labels."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from demo.assets import demo_reviews
from demo.run import LABELS, QUERY

CHARACTERS = 120
BODIES = 8


@dataclass(frozen=True)
class Workload:
    """Request bodies of ``items`` texts each, sent in turn."""

    items: int
    bodies: tuple[bytes, ...]
    mean_characters: float


def make_workload(items: int, texts: Path | None = None) -> Workload:
    """Bodies from a file of one text a line, or from the reviews whose length is closest to :data:`CHARACTERS`.

    Raises:
        Unreachable: the reviews cannot be had.
    """
    chosen = read_texts(texts) if texts else similar_reviews(items * BODIES)
    count = max(1, min(BODIES, len(chosen) // items))
    rows = [[chosen[(start * items + i) % len(chosen)] for i in range(items)] for start in range(count)]
    mean = statistics.fmean(len(text) for row in rows for text in row)
    return Workload(items, tuple(encode_body(row) for row in rows), mean)


def similar_reviews(count: int) -> list[str]:
    """The reviews closest in length to :data:`CHARACTERS`, in file order."""
    texts = [review.text for review in demo_reviews()]
    nearest = sorted(range(len(texts)), key=lambda i: abs(len(texts[i]) - CHARACTERS))[:count]
    return [texts[i] for i in sorted(nearest)]


def read_texts(path: Path) -> list[str]:
    """The lines of a file that are not blank."""
    texts = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    if not texts:
        raise SystemExit(f"{path} holds no text; write one a line")
    return texts


def encode_body(items: Sequence[str]) -> bytes:
    """A ``POST /v1/score`` body."""
    return orjson.dumps({"query": QUERY, "items": list(items), "labels": LABELS, "apply_softmax": True})


def prompt_template(artifact: Path) -> list[dict[str, str]]:
    """The parts of the artifact's template: each a ``literal`` or the name of a ``field``."""
    plan = json.loads((artifact / "plan.json").read_text())
    parts: list[dict[str, str]] = next(n["config"]["template"] for n in plan["nodes"] if n["op"] == "tokenize")
    return parts
