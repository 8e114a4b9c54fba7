"""Definitions of two CPU nodes of one's own: ``Overlap`` runs in C++ (``overlap.cc``), ``Rank`` in Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dagserve.errors import InvalidRequest
from dagserve.interface import Interface, Option, Port


class Overlap:
    """The share of the query's words that stand in each item, 0 to 1."""

    engine: ClassVar[str] = "cpu"
    library: ClassVar[str] = "liboverlap.so"
    options: ClassVar[tuple[Option, ...]] = ()

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """Inputs ``query: text`` and ``items: text[B]``; output ``share: f32[B]``."""
        inputs = (Port.of("query", "text"), Port.of("items", "text[B]"))
        return Interface(inputs, (Port.of("share", "f32[B]"),))


class Rank:
    """Items in order of a value, the highest first; equal ones in the order of the request."""

    engine: ClassVar[str] = "cpu"
    options: ClassVar[tuple[Option, ...]] = (Option("least", {"type": "number"}, default=0.0),)

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """Input ``values: f32[B]``; output ``order: i32[B]``."""
        return Interface((Port.of("values", "f32[B]"),), (Port.of("order", "i32[B]"),))

    def __init__(self, config: Mapping[str, Any], root: Path) -> None:  # noqa: ARG002
        """``config`` is the manifest's ``with``; ``root`` is the artifact's directory."""
        self._least: float = config["least"]

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """``order: i32[B]``.

        Raises:
            InvalidRequest: no item has the least value.
        """
        values = inputs["values"]
        if values.max() < self._least:
            raise InvalidRequest(f"[Rank] no item shares {self._least:.0%} of the query's words; ask otherwise")
        return {"order": np.argsort(-values, kind="stable").astype(np.int32)}
