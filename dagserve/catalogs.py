"""Catalogs of a running engine: another one can take the place of each, and the one before can come back."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagserve._native import Runtime
from dagserve.catalog import LIMITS, Section, read_section
from dagserve.errors import Draining, InternalError, InvalidRequest, Overloaded


@dataclass(frozen=True)
class Version:
    """One table file. ``number`` counts from 1, the artifact's own; ``items`` is how many it has."""

    number: int
    tables: Path
    items: int

    @staticmethod
    def of(number: int, tables: Path) -> Version:
        """The version of a table file that is there."""
        return Version(number, tables, int.from_bytes(read_section(tables, Section.SIZES)[12:16], "little"))


class Catalogs:
    """The catalogs of one engine by their nodes' names.

    A request uses the catalog that was there when it began, from its beginning to its end. Of each catalog two versions
    are kept, the current one and the one before.
    """

    def __init__(self, root: Path, plan: Mapping[str, Any], runtime: Runtime) -> None:
        self._root, self._runtime = root, runtime
        self._configs = {n["name"]: n["config"] for n in plan["nodes"] if n["op"] == "catalog"}
        self._versions = {name: [Version.of(1, root / c["tables"])] for name, c in self._configs.items()}
        self._numbers = dict.fromkeys(self._configs, 1)
        self._swaps = dict.fromkeys(self._configs, 0)
        self._changing, self._starting = threading.Lock(), threading.Lock()
        self._builder: subprocess.Popen[str] | None = None
        self._stopped = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes that have one."""
        return tuple(self._configs)

    def upload_limit(self, name: str) -> int:
        """Largest upload in bytes."""
        return 1024 * (64 + int(self._configs[name]["max_items"]))

    def state(self, name: str) -> dict[str, Any]:
        """``name``, ``version``, ``items``, and ``previous``: the version a rollback brings back, None at first."""
        current, *before = self._versions[name]
        return {
            "name": name,
            "version": current.number,
            "items": current.items,
            "previous": before[0].number if before else None,
        }

    def swaps(self, name: str) -> int:
        """How often another version took the current one's place, rollbacks among them."""
        return self._swaps[name]

    def install(self, name: str, file: Path) -> dict[str, Any]:
        """Builds a ``.jsonl`` or ``.parquet`` file and puts it in the place of the current catalog. Blocks.

        Raises:
            InvalidRequest: the file is wrong or passes the artifact's limits; the current catalog stays.
            Overloaded: another change is under way.
        """
        with self._one_at_a_time():
            number = self._numbers[name] + 1
            tables = self._path(f"{name}-{number}.bin")
            self._build(name, file, tables)
            current, *before = self._versions[name]
            self._use(name, tables)
            self._numbers[name] = number
            self._versions[name] = [Version.of(number, tables), current]
            for old in before:
                if old.number > 1:
                    old.tables.unlink()
        return self.state(name)

    def rollback(self, name: str) -> dict[str, Any]:
        """Brings the version before back; the current one becomes the one before.

        Raises:
            InvalidRequest: there is none.
            Overloaded: another change is under way.
        """
        with self._one_at_a_time():
            if len(self._versions[name]) < 2:
                raise InvalidRequest(f"catalog {name} has no version before this one")
            current, before = self._versions[name]
            self._use(name, before.tables)
            self._versions[name] = [before, current]
        return self.state(name)

    def stop(self) -> None:
        """Takes no new catalogs, and ends the building of one: it must not hold up a service that drains."""
        with self._starting:
            self._stopped = True
            if self._builder is not None:
                self._builder.kill()

    def close(self) -> None:
        """Removes the files of versions that were put in; the mapped ones stay readable."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _path(self, name: str) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="dagserve-catalogs-")
        return Path(self._folder.name) / name

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if not self._changing.acquire(blocking=False):
            raise Overloaded("another catalog is being changed; try again when it is done")
        try:
            yield
        finally:
            self._changing.release()

    def _build(self, name: str, file: Path, tables: Path) -> None:
        config = self._configs[name]
        limits = json.dumps({key: config[key] for key in LIMITS})
        tokenizer = str(self._root / config["tokenizer"]) if config["tokenizer"] else ""
        command = [sys.executable, "-m", "dagserve.build.catalogs", str(file), str(tables), limits, tokenizer]
        with self._starting:
            if self._stopped:
                raise Draining("the service is draining and takes no new catalogs")
            self._builder = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        _, said = self._builder.communicate()
        if self._stopped:
            raise Draining("the service is draining: the catalog was not put in")
        if self._builder.returncode == 1 and said.count("\n") == 1:
            raise InvalidRequest(said.strip())
        if self._builder.returncode:
            raise InternalError(f"building the catalog failed: {said.strip()[-400:]}")

    def _use(self, name: str, tables: Path) -> None:
        try:
            self._runtime.replace_node(name, {**self._configs[name], "tables": str(tables.resolve())})
        except (RuntimeError, ValueError) as error:
            raise InvalidRequest(str(error)) from error
        self._swaps[name] += 1
