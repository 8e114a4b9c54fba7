"""Label tokens: the vocabulary ids whose scores a request asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dagserve.interface import Interface, Option, Port


class ResolveLabels:
    """CPU node ``resolve_labels``: a request's label texts or ids, or the manifest's default labels, as ids.

    Each label text must be exactly one token. A request gives one of the two inputs, or neither.
    """

    engine: ClassVar[str] = "cpu"
    options: ClassVar[tuple[Option, ...]] = (
        Option("tokenizer", {"type": "string", "minLength": 1}, required=True),
        Option("default", {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}, required=True),
    )

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """Inputs ``labels: text[N]`` and ``label_token_ids: i64[N]``, both optional; output ``label_ids: i64[N]``."""
        return Interface(
            (Port.of("labels", "text[N]", optional=True), Port.of("label_token_ids", "i64[N]", optional=True)),
            (Port.of("label_ids", "i64[N]"),),
        )
