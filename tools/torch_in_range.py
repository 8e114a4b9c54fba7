"""Exit status 0 when an installed torch is in the range that pyproject.toml allows."""

from __future__ import annotations

import importlib.metadata
import re
import sys


def main() -> int:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return 1
    major, minor = (int(part) for part in re.match(r"(\d+)\.(\d+)", version).groups())  # type: ignore[union-attr]
    good = (2, 11) <= (major, minor) < (2, 14)
    if not good:
        print(f"torch {version} is outside >=2.11,<2.14; installing one that fits")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
