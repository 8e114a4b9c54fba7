"""The kernels' benchmarks and tuning problems run, so that no typo costs time on a GPU. No figure is checked."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import DEVICE, MARKS, NUMPY_MAY_WARN, exact_conversions, loops_to_scalars

pytest.importorskip("triton")

from dagserve.kernels.configs import KernelConfig, load_config
from dagserve.kernels.tuning import Found, document
from perf.kernels.__main__ import DATASHEET, OPERATORS, check_small, reached, rows_of, table, write
from perf.kernels.sides import Comparison, Work, timed

pytestmark = [*MARKS, NUMPY_MAY_WARN]
exact_conversions()
loops_to_scalars()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_side_of_ours_is_right_in_a_small_case(operator: str) -> None:
    failed = check_small([operator], DEVICE)
    assert [(row["side"], row["note"]) for row in failed] == []


@pytest.mark.parametrize("operator", OPERATORS)
def test_cases_have_names_of_their_own(operator: str) -> None:
    cases = importlib.import_module(f"perf.kernels.{operator}").CASES
    assert len(set(cases)) == len(cases)


def tuned_operators() -> list[str]:
    return sorted(p.parent.name for p in (Path(__file__).parent.parent / "kernels").glob("*/tune.py"))


def test_every_operator_with_tiles_is_tuned_and_timed() -> None:
    configured = sorted(p.parent.parent.name for p in Path("kernels").glob("*/configs/default.json"))
    assert configured == tuned_operators() == sorted(OPERATORS)


@pytest.mark.parametrize("operator", OPERATORS)
def test_each_problem_is_picked_by_its_own_shape(operator: str) -> None:
    """In the order in which they are declared, no bucket hides another, and the candidates differ."""
    problems = importlib.import_module(f"dagserve.kernels.{operator}.tune").problems()
    default = load_config(operator, "default")
    found = [Found(p, {"number": i}, 1.0, None, ()) for i, p in enumerate(problems)]
    config = KernelConfig.of(document("NVIDIA Test", problems, found, None, default))
    assert [config.pick(**p.shape) for p in problems] == [{"number": i} for i in range(len(problems))]
    for problem in problems:
        names = default.pick(**problem.shape).keys()
        assert all(candidate.keys() == names for candidate in problem.candidates)
        distinct = {tuple(sorted(candidate.items())) for candidate in problem.candidates}
        assert len(distinct) == len(problem.candidates) > 1


def comparison(**sides: Any) -> Comparison:
    made = {name: (lambda run=run: run) for name, run in sides.items()}
    return Comparison("op", "case", Work(4.8e6, 0), made, lambda result: abs(result - 1.0), 0.1)


def test_a_side_that_is_wrong_or_fails_has_no_time_and_says_why() -> None:
    def fails() -> float:
        raise RuntimeError("out of\nmemory")

    sides = {"ours": lambda: 1.0, "wrong": lambda: 2.0, "fails": fails, "copy": lambda: None}
    rows = timed(comparison(**sides), DATASHEET, lambda run: 2.0 if run() != 3 else 0)
    assert [row["us"] for row in rows] == [2.0, None, None, 2.0]
    assert [row["note"] for row in rows] == ["", "differs by 1, more than 0.1", "RuntimeError: out of", ""]
    assert rows[0]["floor_us"] == pytest.approx(1.0)
    assert reached(rows[0]) == "2400 GB/s"


def test_a_case_that_cannot_be_made_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("perf.kernels.beam")
    monkeypatch.setattr(module, "SMALL", ("broken", module.SMALL[0]))
    rows = rows_of("beam", DEVICE, DATASHEET, lambda _: 1.0, small=True)
    assert rows[0]["note"].startswith("AttributeError")
    assert rows[1]["us"] == 1.0
    assert "AttributeError" in table(rows)


def test_the_floor_is_the_longer_of_bytes_and_arithmetic() -> None:
    assert DATASHEET.floor_us(Work(4.8e6, 989e6 * 3)) == pytest.approx(3.0)
    assert DATASHEET.floor_us(Work(4.8e6, 1979e6 * 3, fp8=True)) == pytest.approx(3.0)
    assert DATASHEET.floor_us(Work(4.8e7, 989e6)) == pytest.approx(10.0)


def test_results_are_written_for_each_operator(tmp_path: Path) -> None:
    rows = timed(comparison(ours=lambda: 1.0, other=lambda: 1.0), DATASHEET, lambda _: 4.0)
    write(tmp_path, "op", {"device": "NVIDIA Test"}, rows)
    assert json.loads((tmp_path / "kernels_op.json").read_text())["device"] == "NVIDIA Test"
    assert "| op | case | other | 4.0 | 1200 GB/s | 1.0 | 25% | 1.00 |" in (tmp_path / "kernels_op.md").read_text()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_copy_takes_about_what_it_must() -> None:
    from dagserve.kernels.timing import measure

    source = torch.ones(2**28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    assert 2**29 / measure(lambda: target.copy_(source)) > 1e5  # bytes a microsecond: 0.1 TB/s on any GPU
