"""Tile sizes of a kernel by GPU and shape, from ``kernels/<op>/configs/<gpu>.json``. Read when a package is built."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_KERNELS = Path(__file__).parent
_AT_MOST = "_at_most"

OWN_CONFIGS = "DAGSERVE_KERNEL_CONFIGS"
"""Environment variable: a folder with ``<op>/configs/<gpu>.json``, for where the package is installed read-only."""


@dataclass(frozen=True)
class Bucket:
    """The shapes that ``when`` admits, and what a kernel shall ``use`` for them."""

    when: Mapping[str, int]
    use: Mapping[str, int]

    def admits(self, shape: Mapping[str, int]) -> bool:
        """``X_at_most`` bounds ``shape[X]``; a plain name equals it.

        Raises:
            ValueError: ``when`` names what the shape does not have.
        """
        return all(_holds(key, wanted, shape) for key, wanted in self.when.items())


@dataclass(frozen=True)
class KernelConfig:
    """One file: the GPU's name as CUDA gives it, and buckets in the order they are tried."""

    gpu: str
    buckets: tuple[Bucket, ...]

    def pick(self, **shape: int) -> Mapping[str, int]:
        """What the first bucket that admits the shape says to use.

        Example: ``load_config("attention").pick(length=107, head_dim=128, groups=2, itemsize=2)["BLOCK_M"]``.
        """
        return next(bucket.use for bucket in self.buckets if bucket.admits(shape))

    @staticmethod
    def of(document: Mapping[str, Any]) -> KernelConfig:
        """From ``{"gpu": "NVIDIA H200", "buckets": [{"when": {"tokens_at_most": 2048}, "use": {"BLOCK_M": 64}}]}``.

        Raises:
            ValueError: the last bucket does not admit every shape.
        """
        buckets = tuple(Bucket(dict(b["when"]), dict(b["use"])) for b in document["buckets"])
        if not buckets or buckets[-1].when:
            raise ValueError(f'kernel configuration of {document["gpu"]}: the last bucket must have "when": {{}}')
        return KernelConfig(document["gpu"], buckets)


def load_config(op: str, gpu: str | None = None) -> KernelConfig:
    """The configuration of ``kernels/<op>`` for a GPU, or the default one with a warning that says how to tune.

    Files of the folder that ``$DAGSERVE_KERNEL_CONFIGS`` names come before those that are installed.

    Args:
        op: folder of the operator, ``"attention"``.
        gpu: a file's name (``"h200"``) or the GPU's (``"NVIDIA H200"``); None for the device that CUDA has current, and
            for the default where there is none.
    """
    if gpu is None:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "default"
    found = find_config(op, gpu)
    if found is not None:
        return found
    # The text is the same for every operator: Python shows it once.
    warnings.warn(
        f"kernels are not all tuned for {gpu}, some use default tile sizes: run `dagserve tune-kernels` there",
        stacklevel=1,
    )
    return load_config(op, "default")


def find_config(op: str, gpu: str) -> KernelConfig | None:
    """As :func:`load_config`; None where the GPU has no file."""
    for folder in (folder_in(root, op) for root in (*_own_roots(), _KERNELS)):
        for path in sorted(folder.glob("*.json")):
            config = KernelConfig.of(json.loads(path.read_text("utf-8")))
            if gpu in (path.stem, config.gpu):
                return config
    return None


def folder_in(root: Path | None, op: str) -> Path:
    """``<root>/<op>/configs``; without a root that of the installed kernels."""
    return (_KERNELS if root is None else root) / op / "configs"


def file_name(gpu: str) -> str:
    """Example: ``file_name("NVIDIA H200") == "h200.json"``."""
    return re.sub("[^a-z0-9]+", "-", gpu.removeprefix("NVIDIA ").lower()).strip("-") + ".json"


def tunable() -> list[str]:
    """The operators that have tiles to choose."""
    return sorted(path.parent.name for path in _KERNELS.glob("*/tune.py"))


def _own_roots() -> list[Path]:
    root = os.environ.get(OWN_CONFIGS)
    return [Path(root)] if root else []


def upper_bound(size: int | torch.SymInt) -> int:
    """A size, or the largest that an export allows it to be; 2^31-1 where it sets no bound."""
    if isinstance(size, int):
        return size
    largest = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(largest) if largest.is_Integer else 2**31 - 1


def _holds(key: str, wanted: int, shape: Mapping[str, int]) -> bool:
    name = key.removesuffix(_AT_MOST)
    if name not in shape:
        raise ValueError(f"kernel configuration: {key} asks for {name}; the shape has {', '.join(sorted(shape))}")
    return shape[name] <= wanted if key.endswith(_AT_MOST) else shape[name] == wanted
