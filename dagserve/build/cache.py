"""The build cache: one directory per key, complete or absent."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dagserve.build.keys import digest, file_digest


def default_cache_root() -> Path:
    """``$DAGSERVE_CACHE``, or ``dagserve`` under ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    explicit = os.environ.get("DAGSERVE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(explicit) if explicit else Path(base) / "dagserve"


@dataclass(frozen=True)
class BuildCache:
    """Directories by kind and key under ``root``. An entry appears by a rename, so that a killed build leaves none."""

    root: Path

    def path(self, kind: str, key: str) -> Path:
        """Where an entry lies once it is complete."""
        return self.root / kind / key

    def get(self, kind: str, key: str) -> Path | None:
        """A complete entry, or None."""
        path = self.path(kind, key)
        return path if path.is_dir() else None

    def put(self, kind: str, key: str, fill: Callable[[Path], None]) -> Path:
        """Fills a fresh directory and publishes it under the key; keeps the first of two equal builds."""
        parent = self.root / kind
        parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
        try:
            fill(scratch)
            target = self.path(kind, key)
            try:
                scratch.rename(target)
            except OSError:
                if not target.is_dir():
                    raise
            return target
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def digest_of(self, path: Path) -> str:
        """A file's SHA-256, remembered by path, size, time and inode: model files are large and rarely change."""
        stat = path.stat()
        identity = digest([str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino])
        entry = self.path("digests", identity)
        if not entry.is_dir():
            value = file_digest(path)
            self.put("digests", identity, lambda d: _write_json(d / "digest.json", value))
        return str(json.loads((entry / "digest.json").read_text()))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
