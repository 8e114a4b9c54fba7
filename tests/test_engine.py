"""The three tiers, deadlines, cancellation and draining: every request ends in exactly one reply."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dagserve.engine import Engine
from dagserve.errors import Cancelled, DeadlineExceeded, Draining, InvalidRequest, Overloaded, RequestError

SMALL: dict[str, object] = {"query": "q", "items": ["a"]}
LARGE: dict[str, object] = {"query": "q", "items": ["\x01" * 100] * 32}
"""Takes tens of milliseconds: long enough to be in the way."""

Load = Callable[..., Engine]


@pytest.fixture
def load(relevance_artifact: Path, tmp_path: Path) -> Iterator[Load]:
    """Loads the artifact with other tiers and admission."""
    engines: list[Engine] = []

    def make(**changes: Any) -> Engine:
        root = tmp_path / f"artifact{len(engines)}"
        shutil.copytree(relevance_artifact, root)
        plan = json.loads((root / "plan.json").read_text())
        for name, value in changes.items():
            plan["concurrency" if name in plan["concurrency"] else "admission"][name] = value
        (root / "plan.json").write_text(json.dumps(plan))
        engines.append(Engine.load(root))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def outcome(result: object) -> str:
    return type(result).__name__


async def gather(engine: Engine, request: dict[str, object], count: int, deadline_s: float | None = None) -> list[Any]:
    return await asyncio.gather(*(engine.submit(request, deadline_s) for _ in range(count)), return_exceptions=True)


def test_the_queue_limit_is_exact(load: Load) -> None:
    engine = load(runners=1, contexts=1, in_flight=2, max_queued=3, max_wait_ms=60_000, deadline_ms=60_000)
    results = asyncio.run(gather(engine, LARGE, 20))
    assert Counter(map(outcome, results)) == {"bytes": 5, "Overloaded": 15}
    stats = engine.stats()
    assert stats["counters"]["rejected"] == 15
    assert stats["counters"]["completed"] - stats["counters"]["admitted"] == 0
    assert all(tier["used"] == tier["waiting"] == 0 for tier in stats["tiers"].values())


def test_no_queue_means_reject_at_once(load: Load) -> None:
    engine = load(runners=1, contexts=1, in_flight=1, max_queued=0, max_wait_ms=60_000)
    results = asyncio.run(gather(engine, LARGE, 6))
    assert Counter(map(outcome, results)) == {"bytes": 1, "Overloaded": 5}


def test_the_wait_for_a_permit_is_bounded(load: Load) -> None:
    engine = load(runners=1, contexts=1, in_flight=1, max_queued=10, max_wait_ms=1, deadline_ms=60_000)
    results = asyncio.run(gather(engine, LARGE, 8))
    kinds = Counter(map(outcome, results))
    assert kinds["Overloaded"] >= 5
    assert "max_wait_ms" in str(next(r for r in results if isinstance(r, Overloaded)))


def test_a_request_that_cannot_start_is_answered_at_its_deadline(load: Load) -> None:
    engine = load(runners=1, contexts=1, in_flight=8, max_queued=0, deadline_ms=60_000)
    runs = engine.stats()["nodes"]["score"]["runs"]

    async def scenario() -> tuple[float, object, list[object]]:
        busy = [asyncio.ensure_future(engine.submit(LARGE)) for _ in range(4)]
        await asyncio.sleep(0)
        started = time.perf_counter()
        late = await asyncio.gather(engine.submit(SMALL, 0.005), return_exceptions=True)
        return time.perf_counter() - started, late[0], await asyncio.gather(*busy)

    _, late, busy = asyncio.run(scenario())
    assert isinstance(late, DeadlineExceeded)
    assert Counter(map(outcome, busy)) == {"bytes": 4}
    stats = engine.stats()
    assert stats["counters"]["expired"] == 1
    assert stats["nodes"]["score"]["runs"] - runs == 4, "the expired request never reached the model"


def test_a_runner_is_waited_for_until_the_deadline_only(load: Load) -> None:
    engine = load(runners=1, contexts=4, in_flight=4, max_queued=0, deadline_ms=60_000)

    async def scenario() -> list[object]:
        busy = [asyncio.ensure_future(engine.submit(LARGE)) for _ in range(3)]
        await asyncio.sleep(0.002)
        late = asyncio.ensure_future(engine.submit(SMALL, 0.01))
        return await asyncio.gather(late, *busy, return_exceptions=True)

    late, *busy = asyncio.run(scenario())
    assert Counter(map(outcome, busy)) == {"bytes": 3}
    assert outcome(late) in ("DeadlineExceeded", "bytes")
    assert engine.stats()["packages"]["score.backbone"]["capacity"] == 1


def test_deadline_zero_never_starts(load: Load) -> None:
    engine = load()
    with pytest.raises(DeadlineExceeded):
        engine.run(SMALL, 0.0)


def test_a_cancelled_task_cancels_the_request(load: Load) -> None:
    engine = load(runners=1, contexts=1, in_flight=8, max_queued=0, deadline_ms=60_000)
    runs = engine.stats()["nodes"]["score"]["runs"]

    async def scenario() -> bytes:
        first = asyncio.ensure_future(engine.submit(LARGE))
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(engine.submit(SMALL)) for _ in range(5)]
        await asyncio.sleep(0)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        assert all(o.cancelled() for o in others)
        return await first

    assert asyncio.run(scenario()).startswith(b'{"scores"')
    stats = engine.stats()
    assert stats["counters"]["cancelled"] == 5
    assert stats["nodes"]["score"]["runs"] - runs == 1, "none of them reached the model"
    assert engine.run(SMALL).startswith(b'{"scores"')


def test_draining_finishes_what_was_admitted(load: Load) -> None:
    engine = load(runners=1, contexts=1, in_flight=8, max_queued=8, deadline_ms=60_000)

    async def scenario() -> list[object]:
        admitted = [asyncio.ensure_future(engine.submit(LARGE)) for _ in range(4)]
        await asyncio.sleep(0)
        done = asyncio.get_running_loop().run_in_executor(None, engine.drain, 60.0)
        await asyncio.sleep(0.01)
        with pytest.raises(Draining):
            await engine.submit(SMALL)
        assert await done
        return await asyncio.gather(*admitted)

    assert Counter(map(outcome, asyncio.run(scenario()))) == {"bytes": 4}
    with pytest.raises(Draining):
        engine.run(SMALL)


def test_draining_is_bounded(load: Load) -> None:
    engine = load(runners=1, contexts=1, in_flight=8, max_queued=0, deadline_ms=60_000)

    async def scenario() -> list[object]:
        admitted = [asyncio.ensure_future(engine.submit(LARGE)) for _ in range(4)]
        await asyncio.sleep(0)
        assert not await asyncio.to_thread(engine.drain, 0.0)
        return await asyncio.gather(*admitted)

    assert Counter(map(outcome, asyncio.run(scenario()))) == {"bytes": 4}


def test_closing_ends_what_waits(load: Load) -> None:
    engine = load(runners=1, contexts=1, in_flight=4, max_queued=4, max_wait_ms=60_000, deadline_ms=60_000)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(engine.run, LARGE) for _ in range(8)]
        while engine.stats()["tiers"]["in_flight"]["used"] < 4:
            time.sleep(0.001)
        engine.close()
        results = [future.exception(60) or future.result() for future in futures]
    kinds = Counter(map(outcome, results))
    assert kinds["bytes"] + kinds["Draining"] == 8
    assert kinds["Draining"] >= 1
    with pytest.raises(Draining):
        engine.run(SMALL)


def test_every_request_of_a_storm_ends_once(load: Load) -> None:
    """Good, bad, late and abandoned requests at once, from threads and a loop: each ends, and all counters agree."""
    engine = load(runners=1, contexts=2, in_flight=4, max_queued=4, max_wait_ms=5, deadline_ms=200)
    before = engine.stats()["counters"]
    total = 3000

    async def one(index: int) -> str:
        request = {"query": "q", "items": ["a" * (index % 50)] * (1 + index % 4)}
        if index % 7 == 0:
            request = {"query": "q", "items": []}
        task = asyncio.ensure_future(engine.submit(request, 0.0005 if index % 5 == 0 else None))
        if index % 11 == 0:
            await asyncio.sleep(0)
            task.cancel()
        try:
            return outcome(await task)
        except (RequestError, asyncio.CancelledError) as error:
            return outcome(error)

    async def storm() -> list[str]:
        limit = asyncio.Semaphore(16)

        async def bounded(index: int) -> str:
            async with limit:
                return await one(index)

        return await asyncio.gather(*(bounded(i) for i in range(total)))

    kinds = Counter(asyncio.run(storm()))
    assert kinds.total() == total
    assert set(kinds) <= {"bytes", "InvalidRequest", "Overloaded", "DeadlineExceeded", "CancelledError", "Cancelled"}
    assert kinds["bytes"] > 20
    assert engine.drain(60.0)
    stats = engine.stats()
    after = {k: v - before[k] for k, v in stats["counters"].items()}
    assert all(tier["used"] == tier["waiting"] == 0 for tier in stats["tiers"].values())
    assert after["completed"] >= kinds["bytes"]
    assert after["failed"] == 0


def test_cancelled_is_its_own_error() -> None:
    assert issubclass(Cancelled, RequestError)
    assert not issubclass(Cancelled, InvalidRequest)


def test_a_second_loop_can_be_served_after_the_first(load: Load) -> None:
    engine = load()
    for _ in range(2):
        assert asyncio.run(engine.submit(SMALL)).startswith(b'{"scores"')


def test_memory_is_as_planned(load: Load) -> None:
    """The runtime holds what the plan says, give or take alignment and the tokenizer's workspace."""
    engine = load(in_flight=4, max_queued=2)
    held, planned = engine.memory(), engine.plan["memory"]
    assert held["slots"] == 2 * 4 + 2
    assert planned["slot"] <= held["slot"] <= planned["slot"] + 64 * 16
    assert held["context"] >= planned["context"]
