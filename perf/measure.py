"""Cases measured in interleaved rounds, their medians, and ratios of medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import httpx

METRICS = ("qps", "mean_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms", "cpu_share")
SCORE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Case:
    """One side at one number of requests in flight; ``run`` sends so many and gives the fields of a ``BenchResult``."""

    side: str
    concurrency: int
    run: Callable[[int], dict[str, Any]]


def interleave(
    cases: Sequence[Case],
    rounds: int,
    requests: Callable[[int], int],
    say: Callable[[str], None],
    around: Callable[[Case], AbstractContextManager[None]],
) -> list[dict[str, Any]]:
    """Runs every case once a round, starting each round one case later; returns medians over rounds.

    Before each measured run, which happens inside ``around(case)``, as many requests as are in flight warm it up.
    """
    results: list[list[dict[str, Any]]] = [[] for _ in cases]
    for number in range(rounds):
        for step in range(len(cases)):
            index = (step + number) % len(cases)
            case = cases[index]
            case.run(case.concurrency)
            with around(case):
                results[index].append(case.run(requests(case.concurrency)))
            qps = results[index][-1]["qps"]
            say(f"round {number + 1}/{rounds}  {case.side:22} c={case.concurrency}  {qps:.2f} QPS")
    return [summarize(case, found) for case, found in zip(cases, results, strict=True)]


def summarize(case: Case, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median of each metric over rounds, totals of requests and errors, and the rounds themselves."""
    errors = sum(sum(r["errors"].values()) for r in rounds)
    medians = {name: statistics.median(r[name] for r in rounds) for name in METRICS}
    requests = sum(r["requests"] for r in rounds)
    kept = [{k: v for k, v in r.items() if k != "url"} for r in rounds]
    return {
        "side": case.side,
        "concurrency": case.concurrency,
        "requests": requests,
        "errors": errors,
        **medians,
        "rounds": kept,
    }


def ratios(measurements: Sequence[Mapping[str, Any]], ours: str, others: Sequence[str]) -> list[dict[str, Any]]:
    """Ratios of medians, ours over each other side where both ran with as many in flight, and best over best."""
    found = {(m["side"], m["concurrency"]): m for m in measurements}
    rows = []
    for side in others:
        shared = sorted(c for s, c in found if s == side and (ours, c) in found)
        rows += [{"concurrency": str(c), **_ratio(found[ours, c], found[side, c])} for c in shared]
        best = [max((m for m in measurements if m["side"] == s), key=lambda m: m["qps"]) for s in (ours, side)]
        rows.append({"concurrency": "best", **_ratio(best[0], best[1])})
    return rows


def _ratio(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    names = ("qps", "mean_ms", "p50_ms", "p99_ms")
    return {"side": mine["side"], "over": theirs["side"], **{f"{n}_ratio": mine[n] / theirs[n] for n in names}}


def post_scores(url: str, body: bytes) -> dict[str, Any]:
    """One reply.

    Raises:
        SystemExit: it is not 200.
    """
    reply = httpx.post(url, content=body, headers={"content-type": "application/json"}, timeout=300, trust_env=False)
    if reply.status_code != 200:
        raise SystemExit(f"{url} answered {reply.status_code}: {reply.text}")
    value: dict[str, Any] = reply.json()
    return value


def agreement(urls: Mapping[str, str], bodies: Sequence[bytes], ours: str) -> dict[str, Any]:
    """Largest difference of a score from ours, and our prompt tokens a request: no speed without the same answer.

    Raises:
        SystemExit: a side differs by more than :data:`SCORE_TOLERANCE`.
    """
    replies = {side: [post_scores(url, body) for body in bodies] for side, url in urls.items()}
    tokens = {side: [r["usage"]["prompt_tokens"] for r in rows] for side, rows in replies.items()}
    flat = {side: [s for r in rows for row in r["scores"] for s in row] for side, rows in replies.items()}
    differences = {
        side: max(abs(a - b) for a, b in zip(flat[ours], scores, strict=True))
        for side, scores in flat.items()
        if side != ours
    }
    for side, difference in differences.items():
        if not difference <= SCORE_TOLERANCE or tokens[side] != tokens[ours]:
            raise SystemExit(
                f"{side} differs from {ours} by {difference:.1e}; is --model what the artifact was made of?"
            )
    return {"largest_difference": differences, "prompt_tokens_a_request": statistics.fmean(tokens[ours])}
