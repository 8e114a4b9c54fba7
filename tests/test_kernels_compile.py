"""Every kernel compiles for Hopper: the interpreter takes what the compiler refuses, and no GPU is needed to see it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent


def run(script: str, *arguments: str, **variables: str) -> list[str]:
    """The words that a script prints in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "CUDA_VISIBLE_DEVICES": "", **variables}
    command = [sys.executable, str(ROOT / "tests" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


@pytest.mark.parametrize("rows", [1, 3])
def test_every_kernel_compiles(rows: int, tmp_path: Path) -> None:
    """With a cache of its own, so that the compiler does run."""
    compiled = run("compile_for_hopper.py", str(rows), TRITON_CACHE_DIR=str(tmp_path))
    sources = (path.read_text("utf-8") for path in (ROOT / "kernels").glob("*/triton.py"))
    assert set(compiled) == {n for source in sources for n in re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)}


def test_every_package_exports_with_every_kernel() -> None:
    exported = run("export_operators.py")
    wanted = ("backbone", "probability", "embed", "prefill", "expand", "step", "finish", "search")
    assert sorted(exported) == sorted(3 * wanted)
