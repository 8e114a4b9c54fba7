"""``make demo``: get a real model and real reviews, compile, serve, send requests, print scores beside human ratings.

Area under the ROC curve and accuracy over the same prompts are printed beside those of transformers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx

from dagserve.compiler import compile_manifest
from dagserve.errors import DagserveError
from demo.assets import Review, Unreachable, demo_model, demo_reviews

MANIFEST = Path(__file__).parent.parent / "manifests" / "relevance.yaml"
QUERY = "Is this review of a product positive or negative?"
LABELS = (" positive", " negative")
BATCH = 15
IN_FLIGHT = 2
SHOWN = 6
START_TIMEOUT_S = 60


def pick(reviews: Sequence[Review], count: int) -> list[Review]:
    """The first ``count`` snippets with a clear rating, half of them positive, in file order."""
    clear = [r for r in reviews if abs(r.rating) >= 1 and len(r.text) <= 300]
    half = count // 2
    chosen = [*[r for r in clear if r.rating > 0][:half], *[r for r in clear if r.rating < 0][: count - half]]
    return [r for r in reviews if r in chosen]


def area_under_curve(scores: Sequence[float], positive: Sequence[bool]) -> float:
    """Probability that a positive review scores above a negative one; ties count half."""
    good = [s for s, p in zip(scores, positive, strict=True) if p]
    bad = [s for s, p in zip(scores, positive, strict=True) if not p]
    wins = sum((g > b) + 0.5 * (g == b) for g in good for b in bad)
    return wins / (len(good) * len(bad))


def accuracy(scores: Sequence[float], positive: Sequence[bool]) -> float:
    """Share of reviews on the right side of one half."""
    return sum((s > 0.5) == p for s, p in zip(scores, positive, strict=True)) / len(scores)


@contextmanager
def served(artifact: Path) -> Iterator[str]:
    """``dagserve serve`` in a process of its own on a free port; yields its address."""
    command = [sys.executable, "-m", "dagserve.cli", "serve", str(artifact), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            raise SystemExit(f"the server did not start (exit status {server.wait()})")
        print(line.strip())
        yield line.split()[-1]
    finally:
        server.terminate()
        server.wait(START_TIMEOUT_S)


def score(url: str, texts: Sequence[str]) -> list[list[float]]:
    """Scores of the labels for each text, in requests of :data:`BATCH` texts."""
    batches = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        return [row for rows in pool.map(lambda batch: score_batch(url, batch), batches) for row in rows]


def request_of(texts: Sequence[str]) -> dict[str, object]:
    """The scores of the labels for some texts."""
    return {"query": QUERY, "items": texts, "labels": list(LABELS), "apply_softmax": True}


def score_batch(url: str, texts: Sequence[str]) -> list[list[float]]:
    """One request."""
    reply = httpx.post(f"{url}/v1/score", json=request_of(texts), timeout=120, trust_env=False)
    if reply.status_code != 200:
        raise SystemExit(f"the server answered {reply.status_code}: {reply.text}")
    scores: list[list[float]] = reply.json()["scores"]
    return scores


def prompts(artifact: Path, texts: Sequence[str]) -> list[str]:
    """The template of the artifact filled in, for the comparison."""
    plan = json.loads((artifact / "plan.json").read_text())
    template = next(n["config"]["template"] for n in plan["nodes"] if n["op"] == "tokenize")
    values = [{"query": QUERY, "item": text} for text in texts]
    return ["".join(part.get("literal") or value[part["field"]] for part in template) for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reviews", type=int, default=120, help="how many reviews to score (at least 100)")
    parser.add_argument("--model", help="model directory, .gguf file or hub id instead of the packaged one")
    arguments = parser.parse_args()
    try:
        model = arguments.model or str(demo_model())
        reviews = pick(demo_reviews(), arguments.reviews)
    except Unreachable as error:
        raise SystemExit(f"demo: {error}") from error
    print(f"model: {Path(model).name}, {len(reviews)} human-rated reviews")
    print("compiling manifests/relevance.yaml (a few minutes the first time)", flush=True)
    try:
        result = compile_manifest(MANIFEST, {"model": model}, progress=report())
    except DagserveError as error:
        raise SystemExit(f"demo: {error}") from error
    print(
        f"{result.artifact}: {'up to date' if result.up_to_date else 'compiled'} in {result.seconds:.1f} s", flush=True
    )
    texts = [r.text for r in reviews]
    with served(result.artifact) as url:
        score(url, texts[:1])
        started = time.perf_counter()
        ours = [row[0] for row in score(url, texts)]
        seconds = time.perf_counter() - started
    print_examples(reviews, ours)
    compare(reviews, ours, seconds, model, prompts(result.artifact, texts))


def report() -> Callable[[str, str, float], None]:
    """Prints each stage of the build once."""
    seen: set[tuple[str, str]] = set()

    def say(task: str, stage: str, _: float) -> None:
        if (task, stage) not in seen:
            seen.add((task, stage))
            sys.stdout.write(f"  {task}: {stage}\n")
            sys.stdout.flush()

    return say


def print_examples(reviews: Sequence[Review], scores: Sequence[float]) -> None:
    """A few scores beside the human ratings."""
    print("\n P(positive)  human (-4..4)  review")
    step = max(1, len(reviews) // SHOWN)
    for review, value in list(zip(reviews, scores, strict=True))[::step][:SHOWN]:
        print(f"       {value:.3f}         {review.rating:+.2f}  {review.text[:78]}")


def compare(reviews: Sequence[Review], ours: Sequence[float], seconds: float, model: str, texts: Sequence[str]) -> None:
    """Quality and time beside transformers on the same prompts."""
    from demo.peer import transformers_scores

    positive = [r.rating > 0 for r in reviews]
    theirs, their_seconds = transformers_scores(model, texts, LABELS)
    difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"\n{len(reviews)} reviews            AUC  accuracy  seconds")
    for name, scores, took in (("dagserve, HTTP", ours, seconds), ("transformers, eager", theirs, their_seconds)):
        print(f"{name:20} {area_under_curve(scores, positive):.4f}    {accuracy(scores, positive):.4f}   {took:6.1f}")
    print(f"largest difference of a score: {difference:.1e}")


if __name__ == "__main__":
    main()
