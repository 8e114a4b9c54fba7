"""What an installed wheel owns."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_wheel_owns_dagserve_alone(tmp_path: Path) -> None:
    """Top-level ``kernels`` and ``nodes`` belong to others; schemas and the native module are inside."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run(
        [*command, f"--config-settings=build-dir={tmp_path / 'build'}", str(ROOT)], check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "dagserve",
        next(n for n in names if "dist-info" in n).split("/")[0],
    }
    for wanted in (
        "dagserve/nodes/prefill.py",
        "dagserve/kernels/attention/op.py",
        "dagserve/schemas/manifest.schema.json",
        "dagserve/schemas/artifact.schema.json",
        "dagserve/build/worker.py",
        "dagserve/py.typed",
    ):
        assert wanted in names
    assert any(name.startswith("dagserve/_native.") and name.endswith(".so") for name in names)
