"""Template and tokenize: a request's strings become packed token ids and ``cu_seqlens``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dagserve.errors import InvalidRequest
from dagserve.interface import Assets, Interface, Option, Port

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


def plain_tokenizer(path: Path) -> Any:
    """The Hugging Face tokenizer of a ``tokenizer.json`` without its added tokens: text never turns into one."""
    from tokenizers import Tokenizer  # slow to import, and declarations do not need it

    return Tokenizer.from_str(json.dumps(json.loads(path.read_bytes()) | {"added_tokens": []}))


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

    @staticmethod
    def configure(options: Mapping[str, Any], assets: Assets) -> dict[str, Any]:
        """The plan's ``config``: tables, template segments and limits."""
        files = assets.tokenizer(options["tokenizer"])
        return {
            "tables": files.tables,
            "tokenizer": files.json,
            "template": template_segments(options["template"]),
            "max_length": options["max_length"],
            "max_tokens": assets.sizes["T"],
        }

    def __init__(self, config: Mapping[str, Any], root: Path) -> None:
        """Readable form of the native node.

        Args:
            config: ``tokenizer``, ``template`` (segments), ``max_length``, and ``max_tokens``, the bound of all rows.
            root: the artifact directory, to which ``tokenizer`` is relative.
        """
        path = root / config["tokenizer"]
        self._plain = plain_tokenizer(path)
        self._steps = list(_steps(config["template"], path))
        self._max_length = config.get("max_length")
        self._max_tokens = config.get("max_tokens")

    def run(self, inputs: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """One row of ``tokens: i64[T]`` for each text; ``cu_seqlens: i32[B+1]`` has their starts and the end.

        Raises:
            InvalidRequest: no rows, texts that do not pair up or are not UTF-8, or too many or no tokens.
        """
        fields = list(dict.fromkeys(text for kind, text in self._steps if kind == "field"))
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
        ids: list[int] = []
        text = ""
        for kind, value in (*self._steps, ("token", None)):
            if kind == "token":
                ids += self._plain.encode(text, add_special_tokens=False).ids
                ids += [] if value is None else [value]
                text = ""
            else:
                text += texts[value] if kind == "field" else value
        return ids

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


def _steps(template: Sequence[Mapping[str, str]], path: Path) -> Iterator[tuple[str, Any]]:
    """The template as ``("field", name)``, ``("literal", text)`` and ``("token", id)``.

    Added tokens are found as Hugging Face finds them, by encoding each literal on its own.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    added = tokenizer.get_added_tokens_decoder()
    for segment in template:
        if "field" in segment:
            yield "field", segment["field"]
            continue
        literal, plain = segment["literal"], 0
        encoding = tokenizer.encode(literal, add_special_tokens=False)
        for index, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if index in added and literal[start:end] == added[index].content:
                yield "literal", literal[plain:start]
                yield "token", index
                plain = end
        yield "literal", literal[plain:]
