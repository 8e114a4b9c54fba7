"""Fixtures: the demo model, a tiny random model, and an artifact compiled from it once a session."""

from __future__ import annotations

import os
from pathlib import Path

import interpreter  # noqa: F401
import pytest
from random_models import write_tiny_model

from dagserve.build.cache import BuildCache, default_cache_root
from dagserve.compiler import compile_manifest
from demo.assets import Unreachable
from demo.assets import demo_model as find_demo_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")

MANIFEST = Path(__file__).parent.parent / "manifests" / "relevance.yaml"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo's GGUF file; tests that need it are skipped where it cannot be had."""
    try:
        return find_demo_model()
    except Unreachable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def build_cache() -> BuildCache:
    """The user's own build cache: packages are keyed by all that matters, so sharing it is safe."""
    return BuildCache(default_cache_root())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a byte-level tokenizer trained here."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def relevance_artifact(tiny_model: Path, build_cache: BuildCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """manifests/relevance.yaml compiled with the tiny model."""
    output = tmp_path_factory.mktemp("artifact") / "relevance.cpu"
    return compile_manifest(MANIFEST, {"model": str(tiny_model)}, output=output, cache=build_cache).artifact
