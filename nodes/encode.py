"""Result encoding: scores become the JSON body of the reply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dagserve.interface import Interface, Option, Port

FLOAT_BYTES = 16
"""Longest shortest-round-trip text of an ``f32`` (``-1.17549435e-38``) and a comma."""


class EncodeScores:
    """CPU node ``encode_scores``: SGLang's ``/v1/score`` reply, ``{"scores": [[...]], "model", "usage", "object"}``."""

    engine: ClassVar[str] = "cpu"
    options: ClassVar[tuple[Option, ...]] = (Option("model", {"type": "string", "minLength": 1}),)

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:
        """Inputs ``scores: f32[B,N]`` and ``cu_seqlens: i32[B+1]`` (for usage); output ``body: u8[J]``."""
        largest = max(bounds.values(), default=1)
        rows, columns = bounds.get("batch", largest), bounds.get("labels", largest)
        size = 256 + 6 * len(str(options.get("model") or "").encode()) + rows * (3 + columns * FLOAT_BYTES)
        return Interface(
            (Port.of("scores", "f32[B,N]"), Port.of("cu_seqlens", "i32[B+1]")),
            (Port.of("body", "u8[J]"),),
            {"J": size},
        )
