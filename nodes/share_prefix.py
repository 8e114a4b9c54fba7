"""The prefix that all texts of a request begin with, taken out so that a prefill computes it once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dagserve.errors import InvalidRequest
from dagserve.interface import Interface, Option, Port


class SharePrefix:
    """CPU node ``share_prefix``: packed texts to their common prefix and the rest of each.

    Row 0 of the output is the prefix, empty where nothing is shared or there is one text; of every text at least one
    token is left, since its last one gives its score. A node with ``shared_prefix: exact`` takes this layout.
    """

    engine: ClassVar[str] = "cpu"
    options: ClassVar[tuple[Option, ...]] = ()

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """``tokens: i64[T]``, ``cu_seqlens: i32[B+1]`` -> ``tokens: i64[U]``, ``cu_seqlens: i32[B+2]``."""
        inputs = (Port.of("tokens", "i64[T]"), Port.of("cu_seqlens", "i32[B+1]"))
        outputs = (Port.of("tokens", "i64[U]"), Port.of("cu_seqlens", "i32[B+2]"))
        return Interface(inputs, outputs, {"U": lambda sizes: sizes["T"]})

    def __init__(self, config: Mapping[str, Any], root: Path) -> None:
        """Readable form of the native node."""

    def run(self, inputs: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """Both outputs.

        Raises:
            InvalidRequest: ``cu_seqlens`` does not rise from 0 to the number of tokens.
        """
        tokens, ends = inputs["tokens"], inputs["cu_seqlens"]
        if ends[0] != 0 or ends[-1] != len(tokens) or np.any(np.diff(ends) < 0):
            raise InvalidRequest(f"[share_prefix] cu_seqlens must rise from 0 to the number of tokens, {len(tokens)}")
        texts = np.split(tokens, ends[1:-1])
        shared = _common_prefix(texts) if len(texts) > 1 else 0
        rows = [texts[0][:shared], *(text[shared:] for text in texts)]
        lengths = np.cumsum([0, *map(len, rows)])
        return {"tokens": np.concatenate(rows), "cu_seqlens": lengths.astype(np.int32)}


def _common_prefix(texts: list[npt.NDArray[np.int64]]) -> int:
    """How many tokens all texts begin with; of each at least one is left."""
    longest = max(0, min(map(len, texts)) - 1)
    same = np.all([text[:longest] == texts[0][:longest] for text in texts], axis=0)
    return longest if same.all() else int(np.argmin(same))
