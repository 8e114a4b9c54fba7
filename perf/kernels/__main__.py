"""Times the operators' implementations on this GPU, each beside PyTorch's own and Inductor's.

``python -m perf.kernels [OPERATOR ...]``. ``--small`` runs one small case an operator first and checks it, untimed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dagserve.kernels.timing import measure
from dagserve.kernels.tuning import Measure
from perf.kernels.sides import Ceilings, described, timed

OPERATORS = (
    "attention",
    "shared_prefix_attention",
    "rms_norm",
    "rope",
    "quantize",
    "silu_mul_quantize",
    "fp8_linear",
    "lm_head",
    "beam",
)

DATASHEET = Ceilings(copy=4.8e12, bf16=989e12, fp8=1979e12)
"""Of an H200, where nothing is timed."""


def rows_of(
    operator: str, device: str, ceilings: Ceilings, measure: Measure, *, small: bool = False
) -> list[dict[str, Any]]:
    """A row for each case and side; a case that cannot be made is a row that says why."""
    module = importlib.import_module(f"perf.kernels.{operator}")
    found: list[dict[str, Any]] = []
    for case in module.SMALL if small else module.CASES:
        try:
            found += timed(module.compare(case, device), ceilings, measure)
        except Exception as error:  # the next case may be fine
            found.append({"op": operator, "case": str(case), "side": "-", "us": None, "note": described(error)})
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown: a line for each case and side; the last column is the time as a ratio to ours, the case's first."""
    lines = [
        "| operator | case | side | us | reached | floor us | share of the floor | time / ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ours: dict[tuple[str, str], float | None] = {}
    for row in rows:
        first = ours.setdefault((row["op"], row["case"]), row["us"])
        start = f"| {row['op']} | {row['case']} | {row['side']} |"
        if not row["us"]:
            lines.append(f"{start} {str(row['note'] or '-')[:80]} | - | - | - | - |")
            continue
        ratio = f"{row['us'] / first:.2f}" if first else "-"
        share = f"{row['floor_us'] / row['us']:.0%}"
        lines.append(f"{start} {row['us']:.1f} | {reached(row)} | {row['floor_us']:.1f} | {share} | {ratio} |")
    return "\n".join(lines)


def reached(row: Mapping[str, Any]) -> str:
    """GB/s, and TFLOP/s where there is arithmetic to speak of."""
    rates = [f"{row['bytes'] / row['us'] / 1e3:.0f} GB/s"]
    if row["flops"]:
        rates.append(f"{row['flops'] / row['us'] / 1e6:.0f} TFLOP/s")
    return ", ".join(rates)


def write(folder: Path, operator: str, about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """``kernels_<operator>.json`` and ``.md``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"kernels_{operator}.json").write_text(json.dumps({**about, "rows": list(rows)}, indent=1) + "\n")
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    (folder / f"kernels_{operator}.md").write_text(f"# {operator}\n\n{facts}\n\n{table(rows)}\n")


def check_small(operators: Sequence[str], device: str) -> list[dict[str, Any]]:
    """The small cases, once and untimed: rows whose side is ours and that failed."""
    failed = []
    for operator in operators:
        rows = rows_of(operator, device, DATASHEET, _untimed, small=True)
        for row in rows:
            state = row["note"] or "ok"
            print(f"{row['op']} | {row['case']} | {row['side']} | {state}", flush=True)
        failed += [row for row in rows if row["note"] and row["side"].startswith(("triton", "torch", "-"))]
    return failed


def _untimed(run: Any) -> float:
    run()
    return 1.0


def measured_ceilings() -> Ceilings:
    """Those of this GPU, or the datasheet's where they cannot be had."""
    try:
        return Ceilings.measured(measure)
    except Exception as error:  # a Torch without FP8 products, say
        print(f"ceilings of the datasheet: {described(error)}", flush=True)
        return DATASHEET


def describe(commit: str | None) -> dict[str, Any]:
    """What a result was measured on."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,
        "python": platform.python_version(),
        "commit": commit or git.stdout.strip() or "unknown",
        "command": shlex.join(["python", "-m", "perf.kernels", *sys.argv[1:]]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="*", default=list(OPERATORS), metavar="OPERATOR")
    parser.add_argument("--out", type=Path, default=Path("perf/results"))
    parser.add_argument("--commit", help="where this is no git checkout")
    parser.add_argument("--small", action="store_true", help="only check one small case an operator")
    options = parser.parse_args()
    unknown = sorted(set(options.operators) - set(OPERATORS))
    if unknown:
        parser.error(f"no operator {', '.join(unknown)}: use some of {', '.join(OPERATORS)}")
    if not torch.cuda.is_available():
        parser.error("no GPU here: tests/test_perf_kernels.py runs the small cases in Triton's interpreter")
    if options.small:
        failed = check_small(options.operators, "cuda")
        sys.exit(f"{len(failed)} failed" if failed else 0)
    ceilings, about = measured_ceilings(), describe(options.commit)
    about |= {"copy_TB_per_s": ceilings.copy / 1e12}
    about |= {"bf16_TFLOP_per_s": ceilings.bf16 / 1e12, "fp8_TFLOP_per_s": ceilings.fp8 / 1e12}
    for operator in options.operators:
        rows = rows_of(operator, "cuda", ceilings, measure)
        write(options.out, operator, about, rows)
        print(table(rows), flush=True)


if __name__ == "__main__":
    main()
