"""Generated sequences become the JSON body of the reply, in the shape of one of three services."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dagserve.errors import InternalError
from dagserve.interface import Assets, Interface, Option, Port
from dagserve.nodes.encode import FLOAT_BYTES, float_text
from dagserve.tokenizer.decoding import decoding
from dagserve.tokenizer.document import parse_tokenizer

STYLES = ("results", "completions", "beams")
"""dagserve's own ``/v1/generate``; OpenAI's and vLLM's ``/v1/completions``; SGLang's ``/generate``."""

_SEQUENCE_BYTES = 160
"""Names, brackets and numbers of one sequence, without its text, tokens and step scores."""
_TOKEN_BYTES = 20


class EncodeSequences:
    """CPU node ``encode_sequences``: token sequences as text, with their scores.

    Text is what the tokenizer's decoder makes of the tokens without special ones; bytes that are not UTF-8 become
    U+FFFD as the decoder does it (see docs/text.md). Scores are the shortest text that reads back as the same ``f32``,
    and ``null`` where they are not finite.
    """

    engine: ClassVar[str] = "cpu"
    options: ClassVar[tuple[Option, ...]] = (
        Option("tokenizer", {"type": "string", "minLength": 1}, required=True),
        Option("style", {"enum": list(STYLES)}, default="results"),
        Option("bytes_per_token", {"type": "integer", "minimum": 1, "maximum": 4096}, default=64),
        Option("bytes_for_items", {"type": "integer", "minimum": 1, "maximum": 65536}, default=256),
        Option("model", {"type": "string", "minLength": 1}),
    )

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """The outputs of a search, ``P`` prompts of at most ``R`` sequences of at most ``N`` tokens -> ``body: u8[J]``.

        ``counts: i32[P]`` says how many sequences each prompt has and ``lengths: i32[P,R]`` their tokens.
        ``cu_seqlens: i32[P+1]`` is the prompts', for usage. ``J`` allows ``bytes_per_token`` bytes of JSON for the text
        of each token, and ``bytes_for_items`` for the items of each sequence. ``nodes`` and what follows come from a
        catalog's search and its ``catalog`` node; style ``results`` then says which items a sequence stands for.
        """
        inputs = (
            Port.of("tokens", "i64[P,R,N]"),
            Port.of("lengths", "i32[P,R]"),
            Port.of("scores", "f32[P,R]"),
            Port.of("counts", "i32[P]"),
            Port.of("cu_seqlens", "i32[P+1]"),
            Port.of("step_scores", "f32[P,R,N]", optional=True),
            Port.of("cumulative", "f32[P,R]", optional=True),
            Port.of("finished", "bool[P,R]", optional=True),
            Port.of("return_tokens", "bool", optional=True),
            Port.of("return_scores", "bool", optional=True),
            Port.of("request_id", "text", optional=True),
            Port.of("created", "i64", optional=True),
            Port.of("nodes", "i64[P,R]", optional=True),
            Port.of("item_nodes", "i32[I]", optional=True),
            Port.of("item_offsets", "i32[I+1]", optional=True),
            Port.of("items", "u8[Q]", optional=True),
            Port.of("permitted", "u8[G]", optional=True),
        )
        items = int(options["bytes_for_items"])
        model, text = 6 * len(str(options.get("model") or "").encode()), int(options["bytes_per_token"])

        def size(sizes: Mapping[str, int]) -> int:
            tokens: int = sizes["N"] * (text + _TOKEN_BYTES + FLOAT_BYTES) + items
            twice = 2 if options["style"] == "beams" else 1  # the best one's text stands apart too
            return 4096 + model + sizes["P"] * (128 + twice * sizes["R"] * (_SEQUENCE_BYTES + tokens))

        return Interface(inputs, (Port.of("body", "u8[J]"),), {"J": size})

    @staticmethod
    def configure(options: Mapping[str, Any], assets: Assets) -> dict[str, Any]:
        """The plan's ``config``.

        Raises:
            ValueError: the tokenizer's tokens cannot become text.
        """
        files = assets.tokenizer(options["tokenizer"])
        if files.text_error:
            raise ValueError(files.text_error)
        model = options["model"] or assets.model_name
        return {"tables": files.tables, "tokenizer": files.json, "style": options["style"], "model": model}

    def __init__(self, config: Mapping[str, Any], root: Path) -> None:
        """Readable form of the native node. ``config`` is what :meth:`configure` returns."""
        spec = parse_tokenizer((root / config["tokenizer"]).read_bytes())
        self._decoding, self._style = decoding(spec), config["style"]
        self._model = config["model"]

    def run(self, inputs: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """``body: u8[J]``, UTF-8 JSON.

        Raises:
            InternalError: a count, length or token is out of range.
        """
        prompts = [self._sequences(inputs, prompt) for prompt in range(len(inputs["counts"]))]
        write = {"results": self._results, "completions": self._completions, "beams": self._beams}[self._style]
        return {"body": np.frombuffer(write(inputs, prompts).encode(), dtype=np.uint8)}

    def _sequences(self, inputs: Mapping[str, Any], prompt: int) -> list[dict[str, Any]]:
        count, (_, width, steps) = int(inputs["counts"][prompt]), inputs["tokens"].shape
        lengths = inputs["lengths"][prompt][: max(count, 0)]
        wrong = not 0 <= count <= width or any(not 0 <= n <= steps for n in lengths)
        rows = [] if wrong else [inputs["tokens"][prompt][i][:n].tolist() for i, n in enumerate(lengths)]
        if wrong or any(t < 0 for row in rows for t in row):
            raise InternalError(f"[encode_sequences] prompt {prompt} has a count, length or token out of range")
        return [self._sequence(inputs, prompt, i, tokens) for i, tokens in enumerate(rows)]

    def _sequence(self, inputs: Mapping[str, Any], prompt: int, i: int, tokens: Sequence[int]) -> dict[str, Any]:
        finished, steps = inputs.get("finished"), inputs.get("step_scores")
        return {
            "text": _quoted(self._decoding.text(tokens)),
            "tokens": "[" + ",".join(map(str, tokens)) + "]",
            "score": float_text(inputs["scores"][prompt][i]),
            "cumulative": _number(inputs.get("cumulative"), prompt, i),
            "steps": None if steps is None else "[" + ",".join(map(float_text, steps[prompt][i][: len(tokens)])) + "]",
            "reason": "stop" if finished is not None and finished[prompt][i] else "length",
            "length": len(tokens),
            "items": None if inputs.get("nodes") is None else _items(inputs, int(inputs["nodes"][prompt][i])),
        }

    def _results(self, inputs: Mapping[str, Any], prompts: Sequence[Sequence[Mapping[str, Any]]]) -> str:
        results = []
        for sequences in prompts:
            texts = []
            for s in sequences:
                more = "" if s["items"] is None else f',"items":{s["items"]}'
                more += f',"tokens":{s["tokens"]}' if _true(inputs.get("return_tokens")) else ""
                if _true(inputs.get("return_scores")):
                    more += f',"cumulative":{s["cumulative"]}' if s["cumulative"] else ""
                    more += f',"step_scores":{s["steps"]}' if s["steps"] else ""
                texts.append(f'{{"text":{s["text"]},"score":{s["score"]}{more}}}')
            results.append(f'{{"found":{len(sequences)},"sequences":[{",".join(texts)}]}}')
        usage = _usage(int(inputs["cu_seqlens"][-1]), prompts)
        model = _quoted(self._model)
        return f'{{"results":[{",".join(results)}],"model":{model},"usage":{usage},"object":"generation"}}'

    def _completions(self, inputs: Mapping[str, Any], prompts: Sequence[Sequence[Mapping[str, Any]]]) -> str:
        choices = [
            f'{{"index":{i},"text":{s["text"]},"logprobs":null,"finish_reason":"{s["reason"]}"}}'
            for i, s in enumerate(s for sequences in prompts for s in sequences)
        ]
        request_id, created = inputs.get("request_id"), inputs.get("created")
        name = _quoted("cmpl-" + (request_id or ""))
        head = f'"id":{name},"object":"text_completion","created":{0 if created is None else int(created)}'
        usage = _usage(int(inputs["cu_seqlens"][-1]), prompts)
        return f'{{{head},"model":{_quoted(self._model)},"choices":[{",".join(choices)}],"usage":{usage}}}'

    def _beams(self, inputs: Mapping[str, Any], prompts: Sequence[Sequence[Mapping[str, Any]]]) -> str:
        results = []
        for prompt, sequences in enumerate(prompts):
            beams = [
                f'{{"text":{s["text"]},"tokens":{s["tokens"]},"beam_score":{s["score"]},'
                f'"finish_reason":"{s["reason"]}"}}'
                for s in sequences
            ]
            best = sequences[0]["text"] if sequences else '""'
            count = int(inputs["cu_seqlens"][prompt + 1] - inputs["cu_seqlens"][prompt])
            generated = sum(s["length"] for s in sequences)
            meta = f'"prompt_tokens":{count},"completion_tokens":{generated},"beam_results":[{",".join(beams)}]'
            results.append(f'{{"text":{best},"meta_info":{{{meta}}}}}')
        return results[0] if len(results) == 1 else f"[{','.join(results)}]"


def _items(inputs: Mapping[str, Any], node: int) -> str:
    offsets, payload = inputs["item_offsets"], inputs["items"].tobytes()
    found = [
        payload[offsets[at] : offsets[at + 1]].decode()
        for at in np.flatnonzero(inputs["item_nodes"] == node)
        if inputs["permitted"][at // 8] >> (at % 8) & 1
    ]
    return "[" + ",".join(map(_quoted, found)) + "]"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _true(value: Any) -> bool:
    return value is not None and bool(value)


def _number(values: Any, prompt: int, i: int) -> str | None:
    return None if values is None else float_text(values[prompt][i])


def _usage(prompt_tokens: int, prompts: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    generated = sum(s["length"] for sequences in prompts for s in sequences)
    total = prompt_tokens + generated
    return f'{{"prompt_tokens":{prompt_tokens},"completion_tokens":{generated},"total_tokens":{total}}}'
