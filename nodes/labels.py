"""Label tokens: the vocabulary ids whose scores a request asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dagserve.errors import InvalidRequest
from dagserve.interface import Assets, Interface, Option, Port
from dagserve.nodes.added_tokens import plain_tokenizer
from dagserve.nodes.tokenize import utf8_texts


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

    @staticmethod
    def configure(options: Mapping[str, Any], assets: Assets) -> dict[str, Any]:
        """The plan's ``config``: tables, and the default labels as ids."""
        files = assets.tokenizer(options["tokenizer"])
        return {
            "tables": files.tables,
            "tokenizer": files.json,
            "vocab_size": files.vocab_size,
            "default_ids": [assets.label_id(options["tokenizer"], label) for label in options["default"]],
        }

    def __init__(self, config: Mapping[str, Any], root: Path) -> None:
        """Readable form of the native node.

        Args:
            config: ``tokenizer``, ``default_ids`` and ``vocab_size``.
            root: the artifact directory, to which ``tokenizer`` is relative.
        """
        self._plain = plain_tokenizer(root / config["tokenizer"])
        self._default_ids: list[int] = config["default_ids"]
        self._vocab_size: int = config["vocab_size"]

    def run(self, inputs: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """``label_ids: i64[N]``, in the order given.

        Raises:
            InvalidRequest: both inputs, an empty one, a text that is not one token, or an id outside the vocabulary.
        """
        labels, ids = inputs.get("labels"), inputs.get("label_token_ids")
        if labels is not None and ids is not None:
            raise InvalidRequest("[resolve_labels] labels and label_token_ids are both given; give one")
        if labels is not None:
            _check_count("labels", labels)
            ids = [self._label(i, text) for i, text in enumerate(utf8_texts("resolve_labels", "labels", labels))]
        elif ids is not None:
            self._check_ids(ids)
        return {"label_ids": np.array(self._default_ids if ids is None else ids, dtype=np.int64)}

    def _label(self, i: int, text: str) -> int:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        if len(ids) != 1:
            raise InvalidRequest(
                f"[resolve_labels] labels[{i}] is {len(ids)} tokens; a label must be exactly one token "
                "(most words need a leading space)"
            )
        return ids[0]

    def _check_ids(self, ids: Sequence[int]) -> None:
        _check_count("label_token_ids", ids)
        for i, index in enumerate(ids):
            if not 0 <= index < self._vocab_size:
                raise InvalidRequest(
                    f"[resolve_labels] label_token_ids[{i}] is {index}, outside the vocabulary; "
                    f"use 0 to {self._vocab_size - 1}"
                )


def _check_count(name: str, values: Sequence[Any]) -> None:
    if len(values) == 0:
        raise InvalidRequest(f"[resolve_labels] {name} is empty; give at least one, or leave it out")
