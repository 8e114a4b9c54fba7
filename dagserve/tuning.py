"""Offline search for the tile sizes of this GPU: what ``dagserve tune-kernels`` runs.

Operators are found by name; each declares what it is tuned on in ``kernels/<op>/tune.py``. Results are written after
every bucket, so that a search that is stopped, or a kernel that takes the GPU down with it, loses only its own.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dagserve
from dagserve.errors import TuningError

Say = Callable[[str], None]


@dataclass(frozen=True)
class Bench:
    """Where kernels are timed.

    Attributes:
        gpu: its name as CUDA gives it.
        device: Torch's name for it.
        measure: microseconds of a call.
        versions: of what compiles the kernels.
    """

    gpu: str
    device: str
    measure: Callable[[Callable[[], Any]], float]
    versions: Mapping[str, str]

    @staticmethod
    def here() -> Bench:
        """The GPU that CUDA has current.

        Raises:
            TuningError: there is none.
        """
        import torch

        if not torch.cuda.is_available():
            raise TuningError("tune-kernels needs a CUDA GPU, and Torch finds none here: run it where you will serve")
        versions = {"torch": torch.__version__, "triton": version("triton")}
        return Bench(torch.cuda.get_device_name(), "cuda", _kernels("timing").measure, versions)


def tune_kernels(
    operators: Sequence[str],
    configs: Path | None,
    out: Path,
    limit_s: float | None,
    say: Say,
    bench: Bench | None = None,
) -> list[Path]:
    """Searches tiles for each bucket of some operators.

    Args:
        operators: folders of ``kernels/``; all that have tiles when empty.
        configs: folder for ``<op>/configs/<gpu>.json``; None for ``$DAGSERVE_KERNEL_CONFIGS`` or, without it, the
            package.
        out: folder for the tables of all that was tried, ``tune_<op>.json`` and ``.md``.
        limit_s: buckets that are not done then keep what they had.
        say: is told of each bucket.
        bench: the GPU here when None.

    Returns:
        The configuration files that were written.

    Raises:
        TuningError: no such operator, no GPU, or a folder that cannot be written.
    """
    names = _chosen(operators)
    bench = Bench.here() if bench is None else bench
    end = None if limit_s is None else time.monotonic() + limit_s
    written = []
    for name in names:
        path = _config_path(name, bench.gpu, configs)
        search = _OperatorSearch(name, bench, path, out)
        if search.run(lambda: end is not None and time.monotonic() > end, say):
            written.append(path)
    return written


@dataclass(frozen=True)
class _OperatorSearch:
    """One operator on one GPU; ``path`` is its configuration file, ``out`` the folder of the tables."""

    name: str
    bench: Bench
    path: Path
    out: Path

    def run(self, out_of_time: Callable[[], bool], say: Say) -> bool:
        """Whether any bucket was done."""
        configs, tuning = _kernels("configs"), _kernels("tuning")
        default = configs.load_config(self.name, "default")
        previous = configs.find_config(self.name, self.bench.gpu)
        problems = _kernels(f"{self.name}.tune").problems()
        found: list[Any] = []
        for problem in problems:
            if out_of_time():
                say(f"{self.name}: no time left; the remaining {len(problems) - problems.index(problem)} buckets wait")
                break
            try:
                result = tuning.search(
                    problem, default.pick(**problem.shape), self.bench.device, self.bench.measure, out_of_time
                )
            except Exception as error:  # inputs that do not fit, say: the next bucket may be fine
                say(f"{self.name}, {problem.name}: {type(error).__name__}: {error}")
                continue
            if result is None:
                say(f"{self.name}, {problem.name}: not done")
                continue
            found.append(result)
            say(f"{self.name}, {problem.name}: {_sentence(result)}")
            _write(self.path, _json(tuning.document(self.bench.gpu, problems, found, previous, default)))
            self.write_tables(found)
        return bool(found)

    def write_tables(self, found: Sequence[Any]) -> None:
        """All candidates as JSON, the winners as Markdown."""
        about = {"gpu": self.bench.gpu, "dagserve": dagserve.__version__, **self.bench.versions}
        about["command"] = f"dagserve tune-kernels {self.name}"
        rows = [{"bucket": f.problem.name, **row} for f in found for row in f.rows]
        _write(self.out / f"tune_{self.name}.json", _json({**about, "rows": rows}))
        facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
        lines = [
            "| bucket | tiles | us | default's us | default / this | tried | refused |",
            "|---|---|---|---|---|---|---|",
        ]
        for f in found:
            default, gain = (
                ("-", "-") if f.default_us is None else (f"{f.default_us:.1f}", f"{f.default_us / f.us:.2f}")
            )
            refused = sum(1 for row in f.rows if row["note"])
            cells = (f.problem.name, _tiles(f.use), f"{f.us:.1f}", default, gain, len(f.rows), refused)
            lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
        table = "\n".join(lines)
        _write(self.out / f"tune_{self.name}.md", f"# Tiles of {self.name}\n\n{facts}\n\n{table}\n")


def _chosen(operators: Sequence[str]) -> list[str]:
    there: list[str] = _kernels("configs").tunable()
    unknown = [name for name in operators if name not in there]
    if unknown:
        raise TuningError(f"no operator {', '.join(unknown)} has tiles to tune: use some of {', '.join(there)}")
    return [name for name in there if name in operators or not operators]


def _config_path(name: str, gpu: str, configs: Path | None) -> Path:
    """Where the file goes, which can be written."""
    module = _kernels("configs")
    own = os.environ.get(module.OWN_CONFIGS)
    root = configs if configs is not None else Path(own) if own else None
    folder: Path = module.folder_in(root, name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TuningError(f"cannot make {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise TuningError(
            f"{folder} cannot be written: give --configs FOLDER, and set {module.OWN_CONFIGS}=FOLDER for compile"
        )
    path: Path = folder / module.file_name(gpu)
    return path


def _kernels(name: str) -> Any:
    try:
        return importlib.import_module(f"dagserve.kernels.{name}")
    except ModuleNotFoundError as error:
        if error.name == "triton":
            raise TuningError("tune-kernels needs Triton: pip install 'dagserve[gpu]'") from error
        if error.name == "dagserve.kernels":
            raise TuningError("tune-kernels needs the folder kernels/, which is not installed") from error
        raise


def _sentence(found: Any) -> str:
    before = "the default's do not fit" if found.default_us is None else f"{found.default_us:.1f} with the default's"
    return f"{found.us:.1f} us, {before} ({_tiles(found.use)})"


def _tiles(use: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in use.items())


def _json(content: Any) -> str:
    return json.dumps(content, indent=1) + "\n"


def _write(path: Path, content: str) -> None:
    """All of it or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        temporary.write_text(content, "utf-8")
        temporary.replace(path)
    except OSError as error:
        raise TuningError(f"cannot write {path}: {error.strerror}") from error
