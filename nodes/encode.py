"""Result encoding: scores become the JSON body of the reply."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dagserve.interface import Assets, Interface, Option, Port

FLOAT_BYTES = 16
"""Longest shortest-round-trip text of an ``f32`` (``-1.17549435e-38``) and a comma."""


class EncodeScores:
    """CPU node ``encode_scores``: SGLang's ``/v1/score`` reply, ``{"scores": [[...]], "model", "usage", "object"}``."""

    engine: ClassVar[str] = "cpu"
    options: ClassVar[tuple[Option, ...]] = (Option("model", {"type": "string", "minLength": 1}),)

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:
        """Inputs ``scores: f32[B,N]`` and ``cu_seqlens: i32[B+1]`` (for usage); output ``body: u8[J]``.

        With the optional input ``truncated: i32[B]`` the usage says how many tokens the request's texts have lost.
        """
        largest = max(bounds.values(), default=1)
        rows, columns = bounds.get("batch", largest), bounds.get("labels", largest)
        size = 256 + 6 * len(str(options.get("model") or "").encode()) + rows * (3 + columns * FLOAT_BYTES)
        return Interface(
            (
                Port.of("scores", "f32[B,N]"),
                Port.of("cu_seqlens", "i32[B+1]"),
                Port.of("truncated", "i32[B]", optional=True),
            ),
            (Port.of("body", "u8[J]"),),
            {"J": size},
        )

    @staticmethod
    def configure(options: Mapping[str, Any], assets: Assets) -> dict[str, Any]:
        """The plan's ``config``: the model name of the reply."""
        return {"model": options["model"] or assets.model_name}

    def __init__(self, config: Mapping[str, Any], root: Path) -> None:  # noqa: ARG002
        """Readable form of the native node. ``config`` has ``model``, the name to put in the reply."""
        self._model = json.dumps(config["model"], ensure_ascii=False)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """``body: u8[J]``, UTF-8 JSON. Scores that are not finite become ``null``."""
        rows = (",".join(map(float_text, row)) for row in np.asarray(inputs["scores"], dtype=np.float32))
        scores = ",".join(f"[{row}]" for row in rows)
        tokens = int(inputs["cu_seqlens"][-1])
        lost = inputs.get("truncated")
        truncated = "" if lost is None else f',"truncated_tokens":{int(np.sum(lost))}'
        usage = f'{{"prompt_tokens":{tokens},"completion_tokens":0,"total_tokens":{tokens}{truncated}}}'
        body = f'{{"scores":[{scores}],"model":{self._model},"usage":{usage},"object":"scoring"}}'
        return {"body": np.frombuffer(body.encode(), dtype=np.uint8)}


def float_text(value: np.float32) -> str:
    """The shortest text that reads back as ``value``, as C++ ``std::to_chars``: fixed unless scientific is shorter.

    >>> float_text(np.float32(0.1)), float_text(np.float32(1e-5)), float_text(np.float32("nan"))
    ('0.1', '1e-05', 'null')
    """
    if not math.isfinite(value):
        return "null"
    scientific = np.format_float_scientific(value, unique=True, trim="-", exp_digits=2)
    if float(value).is_integer():
        # An integer of as many digits is exact, where the shortest digits would end in made-up zeros.
        fixed = ("-" if math.copysign(1.0, value) < 0 else "") + str(abs(int(value)))
    else:
        fixed = np.format_float_positional(value, unique=True, trim="-")
    return fixed if len(fixed) <= len(scientific) else scientific
