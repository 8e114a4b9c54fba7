"""The search for tiles, with operators and a timer of the test's own: no GPU is needed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import DEVICE, MARKS, NUMPY_MAY_WARN, exact_conversions, loops_to_scalars

pytest.importorskip("triton")

from dagserve.build.keys import source_digest
from dagserve.errors import TuningError
from dagserve.kernels import configs
from dagserve.kernels.configs import KernelConfig, load_config, tunable
from dagserve.kernels.tuning import Found, Problem, Trial, document, quantized_difference, search
from dagserve.tuning import Bench, tune_kernels

pytestmark = [*MARKS, NUMPY_MAY_WARN]
exact_conversions()
loops_to_scalars()

DEFAULT = {"BLOCK": 1}
NEVER = bool


class Machine:
    """An operator whose result is off by ``wrong[BLOCK]`` and takes ``times[BLOCK]``, one value a call."""

    def __init__(self, times: Mapping[int, list[float]], wrong: Mapping[int, float] | None = None) -> None:
        self.times, self.wrong, self.called = {k: list(v) for k, v in times.items()}, wrong or {}, 0

    def call(self, tiles: Mapping[str, int]) -> float:
        self.called = tiles["BLOCK"]
        if self.called > 100:
            raise RuntimeError("out of resource: shared memory\nHint: smaller blocks")
        return self.wrong.get(self.called, 0.0)

    def measure(self, run: Callable[[], Any]) -> float:
        run()
        times = self.times[self.called]
        return times.pop(0) if len(times) > 1 else times[0]

    def problem(self, *blocks: int, tokens: int = 64) -> Problem:
        trial = Trial(self.call, lambda result: float(result), 0.1)
        tiles = [{"BLOCK": block} for block in blocks]
        when, shape = {"tokens_at_most": tokens}, {"tokens": tokens}
        return Problem(f"{tokens} tokens", when, shape, tiles, lambda _device: trial)

    def search(self, *blocks: int, out_of_time: Callable[[], bool] = NEVER) -> Found | None:
        return search(self.problem(*blocks), DEFAULT, "cpu", self.measure, out_of_time)


def test_the_fastest_that_is_right_and_fits_wins() -> None:
    machine = Machine({1: [5.0], 2: [4.0], 3: [1.0], 4: [3.0]}, wrong={3: 0.2})
    found = machine.search(1, 2, 3, 4, 200)
    assert found is not None
    assert (found.use, found.us, found.default_us) == ({"BLOCK": 4}, 3.0, 5.0)
    notes = {row["BLOCK"]: row["note"] for row in found.rows}
    assert notes == {1: "", 2: "", 4: "", 3: "differs by 0.2", 200: "RuntimeError: out of resource: shared memory"}


def test_one_lucky_measurement_does_not_win() -> None:
    found = Machine({1: [5.0], 2: [1.0, 6.0], 4: [3.0]}).search(2, 4)
    assert found is not None
    assert (found.use, found.us) == ({"BLOCK": 4}, 3.0)


def test_the_defaults_tiles_are_tried_though_no_candidate() -> None:
    found = Machine({1: [2.0], 2: [4.0]}).search(2)
    assert found is not None
    assert (found.use, found.default_us) == (DEFAULT, 2.0)


def test_a_default_that_does_not_fit() -> None:
    found = Machine({1: [1.0], 2: [4.0]}, wrong={1: float("inf")}).search(2)
    assert found is not None
    assert (found.use, found.default_us) == ({"BLOCK": 2}, None)


def test_nothing_is_found_where_none_is_right_or_time_is_out() -> None:
    assert Machine({}, wrong={1: 1.0, 2: float("nan")}).search(2) is None
    calls = iter([False, False, True])
    assert Machine({1: [1.0], 2: [1.0]}).search(2, out_of_time=lambda: next(calls, True)) is None


def test_a_file_keeps_what_was_not_searched_and_ends_with_the_default() -> None:
    machine = Machine({})
    problems = [machine.problem(2, tokens=n) for n in (16, 64, 256)]
    previous = {
        "gpu": "NVIDIA Test",
        "buckets": [
            {"when": {"tokens_at_most": 16}, "use": {"BLOCK": 7}},
            {"when": {"tokens_at_most": 64}, "use": {"BLOCK": 8}},
            {"when": {"tokens_at_most": 100}, "use": {"BLOCK": 9}},
            {"when": {}, "use": {"BLOCK": 10}},
        ],
    }
    default = KernelConfig.of({"gpu": "default", "buckets": [{"when": {}, "use": DEFAULT}]})
    found = [Found(problems[1], {"BLOCK": 2}, 1.0, None, ())]
    content = document("NVIDIA Test", problems, found, KernelConfig.of(previous), default)
    assert content == {
        "gpu": "NVIDIA Test",
        "buckets": [
            {"when": {"tokens_at_most": 16}, "use": {"BLOCK": 7}},
            {"when": {"tokens_at_most": 64}, "use": {"BLOCK": 2}},
            {"when": {}, "use": DEFAULT},
        ],
    }


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The only operator that is installed, ``an_op``, with two buckets."""
    machine = Machine({1: [5.0], 2: [4.0], 3: [3.0]})
    folder = tmp_path / "kernels" / "an_op" / "configs"
    folder.mkdir(parents=True)
    (folder.parent / "tune.py").touch()
    (folder / "default.json").write_text(json.dumps({"gpu": "default", "buckets": [{"when": {}, "use": DEFAULT}]}))
    module = types.ModuleType("dagserve.kernels.an_op.tune")
    problems = [machine.problem(2, tokens=16), machine.problem(2, 3, tokens=64)]
    monkeypatch.setattr(module, "problems", lambda: problems, raising=False)
    monkeypatch.setitem(sys.modules, "dagserve.kernels.an_op", types.ModuleType("dagserve.kernels.an_op"))
    monkeypatch.setitem(sys.modules, "dagserve.kernels.an_op.tune", module)
    monkeypatch.setattr(configs, "_KERNELS", tmp_path / "kernels")
    monkeypatch.delenv(configs.OWN_CONFIGS, raising=False)
    return machine


def bench(machine: Machine) -> Bench:
    return Bench("NVIDIA Test 9", "cpu", machine.measure, {"torch": "2", "triton": "3"})


def test_configuration_and_tables_are_written(machine: Machine, tmp_path: Path) -> None:
    said: list[str] = []
    written = tune_kernels([], None, tmp_path / "out", None, said.append, bench(machine))
    assert written == [tmp_path / "kernels" / "an_op" / "configs" / "test-9.json"]
    config = load_config("an_op", "NVIDIA Test 9")
    assert [config.pick(tokens=n)["BLOCK"] for n in (16, 64, 65)] == [2, 3, 1]
    assert said == [
        "an_op, 16 tokens: 4.0 us, 5.0 with the default's (BLOCK=2)",
        "an_op, 64 tokens: 3.0 us, 5.0 with the default's (BLOCK=3)",
    ]
    table = json.loads((tmp_path / "out" / "tune_an_op.json").read_text())
    assert (table["gpu"], table["triton"]) == ("NVIDIA Test 9", "3")
    assert [(r["bucket"], r["BLOCK"], r["us"]) for r in table["rows"] if r["BLOCK"] == 3] == [("64 tokens", 3, 3.0)]
    assert "| 64 tokens | BLOCK=3 | 3.0 | 5.0 | 1.67 | 3 | 0 |" in (tmp_path / "out" / "tune_an_op.md").read_text()


def test_where_the_file_goes(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def path(configs_option: Path | None) -> Path:
        return tune_kernels(["an_op"], configs_option, tmp_path, None, lambda _: None, bench(machine))[0]

    assert path(tmp_path / "a") == tmp_path / "a" / "an_op" / "configs" / "test-9.json"
    monkeypatch.setenv(configs.OWN_CONFIGS, str(tmp_path / "b"))
    assert path(None) == tmp_path / "b" / "an_op" / "configs" / "test-9.json"
    assert load_config("an_op", "NVIDIA Test 9").pick(tokens=64) == {"BLOCK": 3}
    assert path(tmp_path / "a").is_relative_to(tmp_path / "a")


def test_a_folder_that_cannot_be_written(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(TuningError, match=r"cannot be written: give --configs FOLDER, and set DAGSERVE_KERNEL_CONFIGS"):
        tune_kernels([], None, tmp_path, None, lambda _: None, bench(machine))


def test_a_bucket_that_fails_does_not_stop_the_others(machine: Machine, tmp_path: Path) -> None:
    said: list[str] = []
    module: Any = sys.modules["dagserve.kernels.an_op.tune"]
    good = module.problems()

    def fails(_device: str) -> Trial:
        raise MemoryError("too large")

    broken = Problem("broken", {"tokens_at_most": 1}, {"tokens": 1}, (), fails)
    module.problems = lambda: [broken, *good]
    assert tune_kernels([], None, tmp_path, None, said.append, bench(machine))
    assert said[0] == "an_op, broken: MemoryError: too large"
    assert len(said) == 3


def test_with_no_time_nothing_is_written(machine: Machine, tmp_path: Path) -> None:
    said: list[str] = []
    assert tune_kernels([], None, tmp_path / "out", -1.0, said.append, bench(machine)) == []
    assert said == ["an_op: no time left; the remaining 2 buckets wait"]
    assert not (tmp_path / "out").exists()


def test_an_operator_that_does_not_exist(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(TuningError, match="no operator attenton has tiles to tune: use some of an_op"):
        tune_kernels(["attenton"], None, tmp_path, None, lambda _: None, bench(machine))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dagserve.cli", "tune-kernels", *arguments, "--out", str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True)

    without = run()
    assert (without.returncode, without.stderr) == (
        1,
        "error: tune-kernels needs a CUDA GPU, and Torch finds none here: run it where you will serve\n",
    )
    assert "use some of attention, beam" in run("attenton").stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("operator", tunable())
def test_candidates_are_right_in_a_small_case(operator: str) -> None:
    """The first and the last candidate and the default's tiles, on the operator's own inputs."""
    tune: Any = importlib.import_module(f"dagserve.kernels.{operator}.tune")
    problem = tune.problems()[0]
    trial = tune._prepare(tune.SMALL[0], DEVICE)
    for tiles in (
        load_config(operator, "default").pick(**problem.shape),
        *problem.candidates[:: len(problem.candidates) - 1],
    ):
        assert trial.difference(trial.call(tiles)) <= trial.tolerance


def test_a_quantised_result_that_is_wrong_is_seen() -> None:
    values = torch.tensor([[448.0, 1.0, 0.0]]).to(torch.float8_e4m3fn)
    scale = torch.ones(1, 1)
    assert quantized_difference((values, scale), (values, scale)) == 0
    off = torch.tensor([[448.0, 1.25, 0.0]]).to(torch.float8_e4m3fn)
    assert quantized_difference((off, scale), (values, scale)) == 0.25
    assert quantized_difference((values, scale * 1.1), (values, scale)) == float("inf")
    nothing = torch.full((1, 3), float("nan")).to(torch.float8_e4m3fn)
    assert quantized_difference((nothing, scale), (values, scale)) == float("inf")


def test_packages_are_built_again_when_tiles_change(tmp_path: Path) -> None:
    folder = tmp_path / "an_op" / "configs"
    folder.mkdir(parents=True)
    before = source_digest([tmp_path])
    (folder / "h200.json").write_text("{}")
    assert source_digest([tmp_path]) != before
