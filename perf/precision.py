"""What each precision policy does to the scores of a real model: ``python -m perf.precision``, on any CPU.

``manifests/relevance.yaml`` with the demo's model is compiled once for each policy and scores the same human-rated
reviews. E4M3 is emulated as it is on a GPU: weights with a scale for each output channel, activations with one for each
token. Nothing here is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dagserve.compiler import compile_manifest
from dagserve.engine import Engine
from demo.assets import Review, Unreachable, demo_model, demo_reviews
from demo.run import BATCH, MANIFEST, accuracy, area_under_curve, pick, request_of
from perf.environment import describe_environment
from perf.report import Grid, write_result

RESULT = Path(__file__).parent / "results" / "precision.json"

MLP = {"mlp": "fp8_rowwise"}
POLICIES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "fp32": ("fp32", {}),
    "bf16": ("bf16", {}),
    "bf16, mlp in E4M3": ("bf16", MLP),
    "bf16, mlp and projections in E4M3": ("bf16", {**MLP, "projections": "fp8_rowwise"}),
}
"""Precision and operators of the target; the others are compared with the first."""


def scores(policy: str, model: str, reviews: Sequence[Review]) -> list[float]:
    """The first label's probability for each review."""
    precision, operators = POLICIES[policy]
    target = f"precision: {precision}\n    operators: {json.dumps({'attention': 'torch', **operators})}\n"
    text = MANIFEST.read_text().replace("precision: fp32\n    operators: {attention: torch}\n", target)
    texts = [review.text for review in reviews]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "relevance.yaml"
        path.write_text(text)
        artifact = compile_manifest(path, {"model": model}, output=Path(folder) / "artifact").artifact
        with Engine.load(artifact) as engine:
            replies = [engine.run(request_of(texts[i : i + BATCH])) for i in range(0, len(texts), BATCH)]
    return [row[0] for reply in replies for row in json.loads(reply)["scores"]]


def measure(model: str, reviews: Sequence[Review]) -> list[dict[str, Any]]:
    """A row for each policy."""
    positive = [review.rating > 0 for review in reviews]
    found = {policy: scores(policy, model, reviews) for policy in POLICIES}
    exact = np.array(found[next(iter(POLICIES))])
    apart = {policy: np.abs(np.array(values) - exact) for policy, values in found.items()}
    return [
        {
            "policy": policy,
            "auc": area_under_curve(values, positive),
            "accuracy": accuracy(values, positive),
            "largest_difference": float(apart[policy].max()),
            "mean_difference": float(apart[policy].mean()),
        }
        for policy, values in found.items()
    ]


def grid(rows: Sequence[Mapping[str, Any]], reviews: int) -> Grid:
    """The table of a result."""
    cells = tuple(
        (
            row["policy"],
            f"{row['auc']:.4f}",
            f"{row['accuracy']:.4f}",
            f"{row['largest_difference']:.1e}",
            f"{row['mean_difference']:.1e}",
        )
        for row in rows
    )
    columns = ("policy", "AUC", "accuracy", "largest difference of a score", "mean")
    return Grid(f"Scores of {reviews} reviews against human ratings, and against fp32", columns, cells)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.precision", description=__doc__)
    parser.add_argument("--reviews", type=int, default=600)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    try:
        model, reviews = str(demo_model()), pick(demo_reviews(), options.reviews)
    except Unreachable as error:
        raise SystemExit(f"perf: {error}") from error
    environment = describe_environment("perf.precision", sys.argv[1:])
    rows = measure(model, reviews)
    result = {"environment": environment, "reviews": len(reviews), "rows": rows}
    write_result("Precision", result, [grid(rows, len(reviews))], options.json)


if __name__ == "__main__":
    main()
