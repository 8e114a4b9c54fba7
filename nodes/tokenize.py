"""Template and tokenize: a request's strings become packed token ids and ``cu_seqlens``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dagserve.errors import InvalidRequest
from dagserve.interface import Assets, Interface, Option, Port, TokenizerFiles
from dagserve.nodes.added_tokens import Open, TextEncoder

_TRUNCATION = {
    "type": "object",
    "properties": {
        "side": {"enum": ["error", "left", "right", "middle"]},
        "max_tokens": {"type": "integer", "minimum": 1},
    },
    "required": ["side", "max_tokens"],
    "additionalProperties": False,
}
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


@dataclass(frozen=True)
class Cut:
    """How many tokens a field may have, and at which side a longer one is cut."""

    side: str
    most: int

    def apply(self, ids: Sequence[int], begins_inside: Callable[[int], bool]) -> list[int]:
        """What is left of too many tokens. A cut that would lie inside a character leaves out all of it."""
        head = {"right": self.most, "left": 0, "middle": (self.most + 1) // 2}[self.side]
        tail = len(ids) - (self.most - head)
        while head > 0 and begins_inside(ids[head]):
            head -= 1
        while tail < len(ids) and begins_inside(ids[tail]):
            tail += 1
        return [*ids[:head], *ids[tail:]]


@dataclass(frozen=True)
class _Part:
    """A part of a row; its ``ids`` and how many tokens are gone where it was cut."""

    text: str
    opened: bool
    ids: Sequence[int] | None = None
    removed: int = 0


class Tokenize:
    """CPU node ``tokenize``: one prompt per row of the batch, from a template over text inputs.

    Inputs are the template's fields; a scalar text is repeated for every row. Added tokens are found in the template's
    own text and in the fields of ``allow_added_tokens``: other text of a request never turns into one, nor into a part
    of one. ``special_tokens`` puts around each row what the tokenizer's post-processor does (a beginning-of-text token,
    say). ``tokenization`` says whether a row is one text (``joint``) or its parts are texts of their own
    (``separate``). ``truncate`` limits the tokens of a field, and says what of a longer one is left out, or that it is
    an error.
    """

    engine: ClassVar[str] = "cpu"
    options: ClassVar[tuple[Option, ...]] = (
        Option("tokenizer", {"type": "string", "minLength": 1}, required=True),
        Option("template", {"type": "string", "minLength": 1}, required=True),
        Option("max_length", {"type": "integer", "minimum": 1}),
        Option("special_tokens", {"type": "boolean"}, default=True),
        Option("allow_added_tokens", {"type": "array", "items": {"type": "string"}, "uniqueItems": True}, default=[]),
        Option("tokenization", {"enum": ["joint", "separate"]}, default="joint"),
        Option("truncate", {"type": "object", "additionalProperties": _TRUNCATION}, default={}),
    )

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """One text input per template field; outputs ``tokens: i64[T]`` and ``cu_seqlens: i32[B+1]``.

        With ``truncate`` also ``truncated: i32[B]``, how many tokens of its fields each row has lost.
        """
        segments = template_segments(options["template"])
        fields = dict.fromkeys(s["field"] for s in segments if "field" in s)
        if not fields:
            raise ValueError("template names no field: write the request's inputs as {query} or {item}")
        for option in ("allow_added_tokens", "truncate"):
            if others := [name for name in options[option] if name not in fields]:
                known = ", ".join(fields)
                raise ValueError(f"{option} names {others[0]!r}, which is no field of the template: use {known}")
        inputs = tuple(Port.of(f, "text[B]", broadcast=True) for f in fields)
        outputs = (Port.of("tokens", "i64[T]"), Port.of("cu_seqlens", "i32[B+1]"), Port.of("truncated", "i32[B]"))
        return Interface(inputs, outputs if options["truncate"] else outputs[:2])

    @staticmethod
    def configure(options: Mapping[str, Any], assets: Assets) -> dict[str, Any]:
        """The plan's ``config``: tables, template segments and limits."""
        files = assets.tokenizer(options["tokenizer"])
        segments = template_segments(options["template"])
        cuts = options["truncate"]
        if options["tokenization"] == "joint":
            _refuse_split_normalizing(segments, options["allow_added_tokens"], files)
        if files.text_error and any(cut["side"] != "error" for cut in cuts.values()):
            raise ValueError(f"truncate: {files.text_error}; use side: error")
        return {
            "tables": files.tables,
            "tokenizer": files.json,
            "template": segments,
            "special_tokens": int(options["special_tokens"]),
            "allow_added_tokens": options["allow_added_tokens"] or None,
            "joint": int(options["tokenization"] == "joint"),
            "truncate_fields": list(cuts) or None,
            "truncate_sides": [cut["side"] for cut in cuts.values()] or None,
            "truncate_tokens": [cut["max_tokens"] for cut in cuts.values()] or None,
            "names": [assets.request_inputs.get(field, field) for field in _fields_of(segments)],
            "max_length": options["max_length"],
            "max_tokens": assets.sizes["T"],
        }

    def __init__(self, config: Mapping[str, Any], root: Path) -> None:
        """Readable form of the native node.

        Args:
            config: what :meth:`configure` returns; all but ``tokenizer`` and ``template`` (segments) may be left out.
            root: the artifact directory, to which ``tokenizer`` is relative.
        """
        self._encoder = TextEncoder(root / config["tokenizer"])
        self._segments: Sequence[Mapping[str, str]] = config["template"]
        self._fields = _fields_of(self._segments)
        self._names = dict(zip(self._fields, config.get("names") or self._fields, strict=True))
        self._allowed = set(config.get("allow_added_tokens") or ())
        self._joint = bool(config.get("joint", 1))
        names = config.get("truncate_fields") or ()
        self._cuts = {
            name: Cut(side, most)
            for name, side, most in zip(
                names, config.get("truncate_sides") or (), config.get("truncate_tokens") or (), strict=True
            )
        }
        around = config.get("special_tokens", 1)
        self._before = list(self._encoder.spec.before) if around else []
        self._after = list(self._encoder.spec.after) if around else []
        self._max_length = config.get("max_length")
        self._max_tokens = config.get("max_tokens")

    def run(self, inputs: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """One row of ``tokens: i64[T]`` for each text; ``cu_seqlens: i32[B+1]`` has their starts and the end.

        With ``truncate`` also ``truncated: i32[B]``.

        Raises:
            InvalidRequest: no rows, texts that do not pair up or are not UTF-8, or too many or no tokens.
        """
        fields = self._fields
        lists = [name for name in fields if not isinstance(inputs.get(name), str | bytes | None)]
        rows = self._check_rows(inputs, lists)
        texts = {name: utf8_texts("tokenize", self._names[name], inputs[name]) for name in fields}
        tokens: list[int] = []
        ends = [0]
        truncated: list[int] = []
        for row in range(rows):
            parts = [
                _Part(s["literal"], opened=True)
                if "literal" in s
                else self._field(s["field"], texts[s["field"]], row if s["field"] in lists else None)
                for s in self._segments
            ]
            ids = [*self._before, *self._row(parts), *self._after]
            truncated.append(sum(part.removed for part in parts))
            self._check_length(f"{self._names[lists[0]]}[{row}]" if lists else self._names[fields[0]], len(ids))
            tokens += ids
            ends.append(len(tokens))
        if self._max_tokens is not None and len(tokens) > self._max_tokens:
            raise InvalidRequest(
                f"[tokenize] the request has {len(tokens)} tokens with the template, over the bound of "
                f"{self._max_tokens}; send fewer or shorter texts"
            )
        outputs: dict[str, npt.NDArray[Any]] = {"tokens": np.array(tokens, dtype=np.int64)}
        outputs["cu_seqlens"] = np.array(ends, dtype=np.int32)
        if self._cuts:
            outputs["truncated"] = np.array(truncated, dtype=np.int32)
        return outputs

    def _field(self, name: str, texts: Sequence[str], row: int | None) -> _Part:
        """One field of one row, cut where it has too many tokens; ``row`` is None where one text is repeated."""
        text, opened = texts[row or 0], name in self._allowed
        cut = self._cuts.get(name)
        ids = self._encoder.encode(text, [(0, len(text))] if opened else []) if cut else []
        if cut is None or len(ids) <= cut.most:
            return _Part(text, opened)
        if cut.side == "error":
            place = self._names[name] if row is None else f"{self._names[name]}[{row}]"
            raise InvalidRequest(f"[tokenize] {place} has {len(ids)} tokens, over its {cut.most}; shorten it")
        kept = cut.apply(ids, self._encoder.decoding.begins_inside)
        left = self._encoder.decoding.text(kept, special=True, unknown=False)
        return _Part(left, opened, kept, len(ids) - len(kept))

    def _row(self, parts: Sequence[_Part]) -> list[int]:
        if not self._joint:
            return [i for part in parts for i in self._encode_apart(part)]
        text, opened = "", list[Open]()
        closed = True
        for part in parts:
            if part.opened:
                begin = len(text) if closed else opened.pop()[0]
                opened.append((begin, len(text) + len(part.text)))
            closed = not part.opened
            text += part.text
        return self._encoder.encode(text, opened)

    def _encode_apart(self, part: _Part) -> Sequence[int]:
        if part.ids is not None:
            return part.ids
        return self._encoder.encode(part.text, [(0, len(part.text))] if part.opened else [])

    def _check_rows(self, inputs: Mapping[str, Any], lists: Sequence[str]) -> int:
        for port, name in self._names.items():
            if inputs.get(port) is None:
                raise InvalidRequest(f"[tokenize] {name} is missing; give it")
            if port not in lists:
                continue
            first, count = len(inputs[lists[0]]), len(inputs[port])
            if not count:
                raise InvalidRequest(f"[tokenize] {name} is empty; give at least one text")
            if count != first:
                other = self._names[lists[0]]
                raise InvalidRequest(f"[tokenize] {other} has {first} texts but {name} has {count}; give as many")
        return len(inputs[lists[0]]) if lists else 1

    def _check_length(self, place: str, count: int) -> None:
        if count == 0:
            raise InvalidRequest(f"[tokenize] {place} has no tokens with the template; send some text")
        if self._max_length is not None and count > self._max_length:
            raise InvalidRequest(
                f"[tokenize] {place} has {count} tokens with the template, over max_length {self._max_length}; "
                "shorten it"
            )


def _fields_of(segments: Sequence[Mapping[str, str]]) -> list[str]:
    return list(dict.fromkeys(s["field"] for s in segments if "field" in s))


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
