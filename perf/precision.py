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
from rich.console import Console

from dagserve.compiler import compile_manifest
from dagserve.engine import Engine
from demo.assets import Review, Unreachable, demo_model, demo_reviews
from demo.run import BATCH, LABELS, MANIFEST, QUERY, accuracy, area_under_curve, pick
from perf.environment import describe_environment
from perf.report import Grid, facts

RESULT = Path(__file__).parent / "results" / "precision.json"

MLP = {"mlp": "fp8_rowwise"}
POLICIES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "fp32": ("fp32", {}),
    "bf16": ("bf16", {}),
    "bf16, mlp in E4M3": ("bf16", MLP),
    "bf16, mlp and projections in E4M3": ("bf16", {**MLP, "projections": "fp8_rowwise"}),
}
"""Precision and operators of the target; the others are compared with the first."""


def scores(policy: str, model: str, reviews: Sequence[Review], folder: Path) -> list[float]:
    """The first label's probability for each review."""
    precision, operators = POLICIES[policy]
    target = f"precision: {precision}\n    operators: {json.dumps({'attention': 'torch', **operators})}\n"
    text = MANIFEST.read_text().replace("precision: fp32\n    operators: {attention: torch}\n", target)
    path = folder / "relevance.yaml"
    path.write_text(text)
    artifact = compile_manifest(path, {"model": model}, output=folder / precision / str(len(operators))).artifact
    rows: list[list[float]] = []
    with Engine.load(artifact) as engine:
        for start in range(0, len(reviews), BATCH):
            items = [review.text for review in reviews[start : start + BATCH]]
            request = {"query": QUERY, "items": items, "labels": list(LABELS), "apply_softmax": True}
            rows += json.loads(engine.run(request))["scores"]
    return [row[0] for row in rows]


def measure(model: str, reviews: Sequence[Review]) -> list[dict[str, Any]]:
    """A row for each policy."""
    positive = [review.rating > 0 for review in reviews]
    rows: list[dict[str, Any]] = []
    exact = np.zeros(0)
    with tempfile.TemporaryDirectory() as folder:
        for policy in POLICIES:
            found = scores(policy, model, reviews, Path(folder))
            exact = exact if rows else np.array(found)
            apart = np.abs(np.array(found) - exact)
            rows.append({"policy": policy, "auc": area_under_curve(found, positive)})
            rows[-1] |= {"accuracy": accuracy(found, positive)}
            rows[-1] |= {"largest_difference": float(apart.max()), "mean_difference": float(apart.mean())}
    return rows


def grid(rows: Sequence[Mapping[str, Any]]) -> Grid:
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
    return Grid("Scores against human ratings, and against fp32", columns, cells)


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
    options.json.write_text(
        json.dumps({"environment": environment, "reviews": len(reviews), "rows": rows}, indent=1) + "\n"
    )
    head = ["# Precision", "", *facts(environment), f"- Reviews: {len(reviews)}", ""]
    options.json.with_suffix(".md").write_text("\n".join([*head, grid(rows).markdown()]))
    grid(rows).print(Console())


if __name__ == "__main__":
    main()
