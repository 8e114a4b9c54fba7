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


@pytest.mark.parametrize("rows", [1, 3])
def test_every_kernel_compiles(rows: int, tmp_path: Path) -> None:
    """In a process without the interpreter; a cache of its own, so that the compiler does run."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "tests" / "compile_for_hopper.py"), str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    sources = (path.read_text("utf-8") for path in (ROOT / "kernels").glob("*/triton.py"))
    kernels = {name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)}
    assert set(done.stdout.split()) == kernels
