"""Template and tokenize: a request's strings become packed token ids and ``cu_seqlens``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from dagserve.interface import Interface, Option, Port

_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


def template_segments(template: str) -> list[dict[str, str]]:
    """Splits ``"Query: {query}"`` into ``[{"literal": "Query: "}, {"field": "query"}]``; ``{{`` and ``}}`` are braces.

    Raises:
        ValueError: a brace that opens or closes nothing.
    """
    segments: list[dict[str, str]] = []
    literal = ""
    i = 0
    while i < len(template):
        pair, match = template[i : i + 2], _FIELD.match(template, i)
        if pair in ("{{", "}}"):
            literal, i = literal + pair[0], i + 2
        elif match:
            if literal:
                segments.append({"literal": literal})
            segments.append({"field": match[1]})
            literal, i = "", match.end()
        elif template[i] in "{}":
            raise ValueError(f"template has an unmatched {template[i]!r} at character {i}: write {{{{ or }}}} for a brace")
        else:
            literal, i = literal + template[i], i + 1
    if literal:
        segments.append({"literal": literal})
    return segments


class Tokenize:
    """CPU node ``tokenize``: one prompt per row of the batch, from a template over text inputs.

    Inputs are the template's fields; a scalar text is repeated for every row. Special tokens are recognised in the
    template's own text only: text of a request never turns into one.
    """

    engine: ClassVar[str] = "cpu"
    options: ClassVar[tuple[Option, ...]] = (
        Option("tokenizer", {"type": "string", "minLength": 1}, required=True),
        Option("template", {"type": "string", "minLength": 1}, required=True),
        Option("max_length", {"type": "integer", "minimum": 1}),
    )

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """One text input per template field; outputs ``tokens: i64[T]`` and ``cu_seqlens: i32[B+1]``."""
        segments = template_segments(options["template"])
        fields = dict.fromkeys(s["field"] for s in segments if "field" in s)
        if not fields:
            raise ValueError("template names no field: write the request's inputs as {query} or {item}")
        inputs = tuple(Port.of(f, "text[B]", broadcast=True) for f in fields)
        return Interface(inputs, (Port.of("tokens", "i64[T]"), Port.of("cu_seqlens", "i32[B+1]")))
