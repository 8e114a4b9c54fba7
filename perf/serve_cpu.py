"""Serving on a CPU: the HTTP endpoint, the runtime without HTTP, and transformers behind the same kind of service.

Every side runs in a process of its own and is loaded by another; rounds are interleaved. Writes
``perf/results/serve_cpu.json`` and ``.md`` and prints the tables. See ``perf/README.md``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from dagserve.artifact import read_plan
from demo.assets import Unreachable, demo_model
from perf.costs import (
    compile_command,
    measure_compile,
    measure_health,
    measure_start,
    package_seconds,
    scrape,
    where_time_goes,
)
from perf.environment import describe_environment
from perf.measure import Case, agreement, interleave, ratios
from perf.processes import Worker, server, worker
from perf.report import grids, markdown
from perf.workload import Workload, make_workload

HTTP = "dagserve, HTTP"
RUNTIME = "dagserve, Engine.run"
BATCHED = "transformers, batched"
SINGLE = "transformers, single"
QUIET_CORES = 0.2
RESULT = Path(__file__).parent / "results" / "serve_cpu.json"


@dataclass(frozen=True)
class Settings:
    """How much is measured. Requests are those of one case in one round: at least ``waves`` for each in flight."""

    rounds: int
    requests: int
    waves: int
    concurrency: tuple[int, ...]
    baseline_concurrency: tuple[int, ...]
    baseline_environment: dict[str, str]
    probe_s: float
    starts: int
    helps: int

    def requests_at(self, concurrency: int) -> int:
        """Enough that the first and last requests, which find a shorter queue, do not make the mean."""
        return max(self.requests, self.waves * concurrency)


@dataclass(frozen=True)
class Sides:
    """The running processes."""

    http: str
    baseline: str
    runtime: Worker
    load: Worker

    @property
    def urls(self) -> dict[str, str]:
        """Scoring endpoint of each side that has one."""
        return {
            HTTP: self.http + "/v1/score",
            BATCHED: self.baseline + "/batched/v1/score",
            SINGLE: self.baseline + "/single/v1/score",
        }

    def cases(self, settings: Settings) -> list[Case]:
        """All that is measured in a round."""
        served = [(HTTP, c) for c in settings.concurrency]
        served += [(side, c) for side in (BATCHED, SINGLE) for c in settings.baseline_concurrency]
        cases = [Case(side, c, partial(self._bench, self.urls[side], c)) for side, c in served]
        return cases + [Case(RUNTIME, c, partial(self._direct, c)) for c in settings.concurrency]

    def _bench(self, url: str, concurrency: int, requests: int) -> dict[str, Any]:
        return self.load.run(url=url, concurrency=concurrency, requests=requests)

    def _direct(self, concurrency: int, requests: int) -> dict[str, Any]:
        return self.runtime.run(concurrency=concurrency, requests=requests)


@contextmanager
def running(
    artifact: Path, model: str, workload: Workload, baseline_environment: Mapping[str, str], say: Console
) -> Iterator[Sides]:
    """Starts every side."""
    with ExitStack() as stack:
        bodies = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "bodies.jsonl"
        bodies.write_bytes(b"\n".join(workload.bodies) + b"\n")
        say.print("starting dagserve, Engine.run and transformers")
        arguments = ["--model", model, "--artifact", str(artifact)]
        http = stack.enter_context(server("dagserve.cli", ["serve", str(artifact), "--port", "0"], "/ready"))
        runtime = stack.enter_context(worker("perf.direct", str(artifact), str(bodies)))
        baseline = stack.enter_context(server("perf.baseline", arguments, "/health", baseline_environment))
        load = stack.enter_context(worker("perf.generator", str(bodies)))
        yield Sides(http.url, baseline.url, runtime, load)


class NodeCosts:
    """Change of ``/metrics`` over the HTTP runs with one request in flight."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.change: Counter[str] = Counter()

    @contextmanager
    def around(self, case: Case) -> Iterator[None]:
        """Adds the change over one run of a case."""
        if (case.side, case.concurrency) != (HTTP, 1):
            yield
            return
        before = scrape(self._url)
        yield
        self.change.update({name: value - before.get(name, 0.0) for name, value in scrape(self._url).items()})


def measure(artifact: Path, model: str, workload: Workload, settings: Settings, say: Console) -> dict[str, Any]:
    """Everything but the environment and compile time."""
    plan = read_plan(artifact)
    with running(artifact, model, workload, settings.baseline_environment, say) as sides:
        agreed = agreement(sides.urls, workload.bodies[:1], HTTP)
        costs = NodeCosts(sides.http)
        measurements = interleave(sides.cases(settings), settings.rounds, settings.requests_at, say.print, costs.around)
        say.print("probing /health")
        health = measure_health(sides.http, sides.load, settings.probe_s, plan["concurrency"]["in_flight"])
    say.print("timing starts")
    return {
        "workload": describe_workload(workload, model, plan, agreed["prompt_tokens_a_request"]),
        "concurrency": plan["concurrency"],
        "agreement": agreed["largest_difference"],
        "measurements": measurements,
        "ratios": ratios(measurements, HTTP, (BATCHED, SINGLE, RUNTIME)),
        "health": health,
        "where": where_time_goes(costs.change, measurements, HTTP, RUNTIME),
        "start": measure_start(artifact, settings.starts, settings.helps),
    }


def describe_workload(workload: Workload, model: str, plan: Mapping[str, Any], tokens: float) -> dict[str, Any]:
    """What was sent to what."""
    return {
        "model": Path(model).name,
        "manifest": plan["name"],
        "precision": plan["fingerprint"]["precision"],
        "items": workload.items,
        "bodies": len(workload.bodies),
        "mean_characters": workload.mean_characters,
        "prompt_tokens_a_request": tokens,
    }


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m perf.serve_cpu", description=__doc__)
    add = parser.add_argument
    add("--artifact", type=Path, default=Path("artifacts/relevance.cpu"), help="compiled first where it is missing")
    add("--model", help="what the artifact was made of [the demo's model]")
    add("--rounds", type=int, help="interleaved rounds [3; 1 with --quick]")
    add("--requests", type=int, help="requests of each case in a round, or 4 for each in flight [16; 4 with --quick]")
    add("--items", type=int, default=15, help="texts a request [15]")
    add("--texts", type=Path, help="texts to send instead of the demo's reviews, one a line")
    add("--concurrency", type=int, nargs="+", help="requests in flight [1 2 4 8; 1 2 with --quick]")
    add("--baseline-concurrency", type=int, nargs="+", help="the same for transformers [1 4; 1 with --quick]")
    add("--openmp-wait", choices=("active", "passive"), help="OMP_WAIT_POLICY of transformers [OpenMP's own default]")
    add("--compile", action="store_true", help="also time a compile with an empty cache, and an unchanged one")
    add("--json", type=Path, default=RESULT, help=f"result; .md beside it [{RESULT.relative_to(RESULT.parents[2])}]")
    add("--quick", action="store_true", help="only see that everything runs; the figures mean nothing")
    return parser.parse_args(arguments)


def make_settings(arguments: argparse.Namespace) -> Settings:
    """The amounts, from the command line."""
    quick: bool = arguments.quick
    return Settings(
        rounds=arguments.rounds or (1 if quick else 3),
        requests=arguments.requests or (4 if quick else 16),
        waves=1 if quick else 4,
        concurrency=tuple(arguments.concurrency or ((1, 2) if quick else (1, 2, 4, 8))),
        baseline_concurrency=tuple(arguments.baseline_concurrency or ((1,) if quick else (1, 4))),
        baseline_environment={"OMP_WAIT_POLICY": arguments.openmp_wait} if arguments.openmp_wait else {},
        probe_s=1.0 if quick else 20.0,
        starts=1 if quick else 3,
        helps=1 if quick else 7,
    )


def warn_of_others(busy_cores: float | None, say: Console) -> None:
    """Other work spoils timings, most of all those of threads that spin while they wait."""
    if busy_cores is not None and busy_cores > QUIET_CORES:
        say.print(
            f"warning: other work keeps {busy_cores:.1f} cores busy; expect wrong figures, transformers' most of all",
            soft_wrap=True,
        )


def main(given: Sequence[str] | None = None) -> None:
    """Measures, prints, writes."""
    given = sys.argv[1:] if given is None else given
    arguments = parse_arguments(given)
    try:
        model = arguments.model or str(demo_model())
        workload = make_workload(arguments.items, arguments.texts)
    except Unreachable as error:
        raise SystemExit(f"perf: {error}") from error
    say, settings = Console(), make_settings(arguments)
    environment = describe_environment("perf.serve_cpu", given)
    warn_of_others(environment["busy_cores_before"], say)
    if not arguments.artifact.exists():
        subprocess.run(compile_command(model, arguments.artifact), check=True)
    result = {"environment": environment, "settings": vars(settings) | {"quick": arguments.quick}}
    result |= measure(arguments.artifact, model, workload, settings, say)
    result["compile"] = {"packages": package_seconds(arguments.artifact)}
    if arguments.compile:
        say.print("compiling with an empty cache")
        result["compile"] |= measure_compile(model)
    write_result(result, arguments.json)
    for grid in grids(result):
        grid.print(say)
    say.print(f"wrote {arguments.json} and {arguments.json.with_suffix('.md')}", soft_wrap=True)


def write_result(result: Mapping[str, Any], path: Path) -> None:
    """The JSON, and the Markdown beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(result))


if __name__ == "__main__":
    main()
