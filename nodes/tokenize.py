"""Template and tokenize: a request's strings become packed token ids and ``cu_seqlens``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dagserve.errors import InvalidRequest
from dagserve.interface import Assets, Interface, Option, Port, TokenizerFiles
from dagserve.nodes.added_tokens import Open, TextEncoder

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
            raise ValueError(
                f"template has an unmatched {template[i]!r} at character {i}: write {{{{ or }}}} for a brace"
            )
        else:
            literal, i = literal + template[i], i + 1
    if literal:
        segments.append({"literal": literal})
    return segments


def utf8_texts(op: str, name: str, value: str | bytes | Sequence[str | bytes]) -> list[str]:
    """The texts of one input, one where it is a scalar.

    Raises:
        InvalidRequest: a text is not UTF-8 (a lone surrogate counts as its three bytes); names the first wrong byte.
    """
    scalar = isinstance(value, str | bytes)
    texts = []
    for i, text in enumerate([value] if isinstance(value, str | bytes) else value):
        try:
            texts.append((text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")).decode())
        except UnicodeDecodeError as error:
            place = name if scalar else f"{name}[{i}]"
            raise InvalidRequest(f"[{op}] {place} is not valid UTF-8 at byte {error.start}; send UTF-8 text") from error
    return texts


class Tokenize:
    """CPU node ``tokenize``: one prompt per row of the batch, from a template over text inputs.

    Inputs are the template's fields; a scalar text is repeated for every row. Added tokens are found in the template's
    own text and in the fields of ``allow_added_tokens``: other text of a request never turns into one, nor into a part
    of one. ``special_tokens`` puts around each row what the tokenizer's post-processor does (a beginning-of-text token,
    say).
    """

    engine: ClassVar[str] = "cpu"
    options: ClassVar[tuple[Option, ...]] = (
        Option("tokenizer", {"type": "string", "minLength": 1}, required=True),
        Option("template", {"type": "string", "minLength": 1}, required=True),
        Option("max_length", {"type": "integer", "minimum": 1}),
        Option("special_tokens", {"type": "boolean"}, default=True),
        Option("allow_added_tokens", {"type": "array", "items": {"type": "string"}, "uniqueItems": True}, default=[]),
    )

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """One text input per template field; outputs ``tokens: i64[T]`` and ``cu_seqlens: i32[B+1]``."""
        segments = template_segments(options["template"])
        fields = dict.fromkeys(s["field"] for s in segments if "field" in s)
        if not fields:
            raise ValueError("template names no field: write the request's inputs as {query} or {item}")
        for name in options["allow_added_tokens"]:
            if name not in fields:
                raise ValueError(
                    f"allow_added_tokens names {name!r}, which is no field of the template; name one of its fields"
                )
        inputs = tuple(Port.of(f, "text[B]", broadcast=True) for f in fields)
        return Interface(inputs, (Port.of("tokens", "i64[T]"), Port.of("cu_seqlens", "i32[B+1]")))

    @staticmethod
    def configure(options: Mapping[str, Any], assets: Assets) -> dict[str, Any]:
        """The plan's ``config``: tables, template segments and limits."""
        files = assets.tokenizer(options["tokenizer"])
        segments = template_segments(options["template"])
        _refuse_split_normalizing(segments, options["allow_added_tokens"], files)
        return {
            "tables": files.tables,
            "tokenizer": files.json,
            "template": segments,
            "special_tokens": int(options["special_tokens"]),
            "allow_added_tokens": options["allow_added_tokens"] or None,
            "max_length": options["max_length"],
            "max_tokens": assets.sizes["T"],
        }

    def __init__(self, config: Mapping[str, Any], root: Path) -> None:
        """Readable form of the native node.

        Args:
            config: ``tokenizer``, ``template`` (segments), ``special_tokens``, ``allow_added_tokens``, ``max_length``,
            and
                ``max_tokens``, the bound of all rows.
            root: the artifact directory, to which ``tokenizer`` is relative.
        """
        self._encoder = TextEncoder(root / config["tokenizer"])
        self._segments: Sequence[Mapping[str, str]] = config["template"]
        self._fields = list(dict.fromkeys(s["field"] for s in self._segments if "field" in s))
        self._allowed = set(config.get("allow_added_tokens") or ())
        around = config.get("special_tokens", 1)
        self._before = list(self._encoder.spec.before) if around else []
        self._after = list(self._encoder.spec.after) if around else []
        self._max_length = config.get("max_length")
        self._max_tokens = config.get("max_tokens")

    def run(self, inputs: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """One row of ``tokens: i64[T]`` for each text; ``cu_seqlens: i32[B+1]`` has their starts and the end.

        Raises:
            InvalidRequest: no rows, texts that do not pair up or are not UTF-8, or too many or no tokens.
        """
        fields = self._fields
        lists = [name for name in fields if not isinstance(inputs.get(name), str | bytes | None)]
        rows = _check_rows(inputs, fields, lists)
        texts = {name: utf8_texts("tokenize", name, inputs[name]) for name in fields}
        tokens: list[int] = []
        ends = [0]
        for row in range(rows):
            ids = self._row({name: texts[name][row if name in lists else 0] for name in fields})
            self._check_length(f"{lists[0]}[{row}]" if lists else fields[0], len(ids))
            tokens += ids
            ends.append(len(tokens))
        if self._max_tokens is not None and len(tokens) > self._max_tokens:
            raise InvalidRequest(
                f"[tokenize] the request has {len(tokens)} tokens with the template, over the bound of "
                f"{self._max_tokens}; send fewer or shorter texts"
            )
        return {"tokens": np.array(tokens, dtype=np.int64), "cu_seqlens": np.array(ends, dtype=np.int32)}

    def _row(self, texts: Mapping[str, str]) -> list[int]:
        text, opened = "", list[Open]()
        closed = True
        for segment in self._segments:
            part = segment["literal"] if "literal" in segment else texts[segment["field"]]
            is_open = "literal" in segment or segment["field"] in self._allowed
            if is_open:
                begin = len(text) if closed else opened.pop()[0]
                opened.append((begin, len(text) + len(part)))
            closed = not is_open
            text += part
        return [*self._before, *self._encoder.encode(text, opened), *self._after]

    def _check_length(self, place: str, count: int) -> None:
        if count == 0:
            raise InvalidRequest(f"[tokenize] {place} has no tokens with the template; send some text")
        if self._max_length is not None and count > self._max_length:
            raise InvalidRequest(
                f"[tokenize] {place} has {count} tokens with the template, over max_length {self._max_length}; "
                "shorten it"
            )


def _check_rows(inputs: Mapping[str, Any], fields: Sequence[str], lists: Sequence[str]) -> int:
    for name in fields:
        if inputs.get(name) is None:
            raise InvalidRequest(f"[tokenize] {name} is missing; give it")
        if name not in lists:
            continue
        first, count = len(inputs[lists[0]]), len(inputs[name])
        if not count:
            raise InvalidRequest(f"[tokenize] {name} is empty; give at least one text")
        if count != first:
            raise InvalidRequest(f"[tokenize] {lists[0]} has {first} texts but {name} has {count}; give as many")
    return len(inputs[lists[0]]) if lists else 1


def _refuse_split_normalizing(
    segments: Sequence[Mapping[str, str]], allowed: Sequence[str], files: TokenizerFiles
) -> None:
    """Added tokens in normalized text are found where all of a row is open, or where there can be none."""
    fields = {s["field"] for s in segments if "field" in s}
    if fields == set(allowed):
        return
    for token in files.normalized_tokens:
        if allowed or any(token in s.get("literal", "") for s in segments):
            raise ValueError(
                f"this tokenizer looks for its added token {token!r} in normalized text, which takes a whole row; put "
                "every field in allow_added_tokens, or none and leave the token to special_tokens"
            )
