"""Prefill-Only model nodes. Torch code is in :mod:`dagserve.nodes.decoder`, imported only when a package is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dagserve.interface import Interface, Option, Port

REDUCTIONS = ("softmax", "probability", "log_probability", "map")
"""``softmax`` over the labels; full-vocabulary ``probability`` and ``log_probability`` of each label; ``map``: the
expected value of fixed ``values`` under the labels' softmax."""


class Score:
    """AOTI node: one packed prefill, the last token's hidden state of each row, label rows of the LM head, a reduction."""

    engine: ClassVar[str] = "aoti"
    options: ClassVar[tuple[Option, ...]] = (
        Option("checkpoint", {"type": "string", "minLength": 1}, required=True),
        Option("reduce", {"enum": list(REDUCTIONS)}, default="softmax"),
        Option("values", {"type": "array", "items": {"type": "number"}, "minItems": 1}),
        Option("max_length", {"type": "integer", "minimum": 1}),
    )

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """``tokens: i64[T]``, ``cu_seqlens: i32[B+1]``, ``label_ids: i64[N]`` -> ``scores: f32[B,N]``.

        A connected ``apply_softmax: bool`` chooses per request: true is ``softmax``, false is ``probability``.
        With ``reduce: map`` the output is ``f32[B,1]`` and the labels must be as many as ``values``.
        """
        mapped = options.get("reduce") == "map"
        if mapped != bool(options.get("values")):
            raise ValueError("`values` goes with `reduce: map`: give both, or neither")
        labels = str(len(options["values"])) if mapped else "N"
        inputs = (
            Port.of("tokens", "i64[T]"),
            Port.of("cu_seqlens", "i32[B+1]"),
            Port.of("label_ids", f"i64[{labels}]"),
            Port.of("apply_softmax", "bool", optional=True),
        )
        return Interface(inputs, (Port.of("scores", "f32[B,1]" if mapped else "f32[B,N]"),))
