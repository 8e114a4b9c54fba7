"""Result encoding: scores become the JSON body of the reply."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dagserve.errors import InvalidRequest
from dagserve.interface import Assets, Interface, Option, Port

FLOAT_BYTES = 16
"""Longest shortest-round-trip text of an ``f32`` (``-1.17549435e-38``) and a comma."""


class EncodeScores:
    """CPU node ``encode_scores``: SGLang's ``/v1/score`` reply, ``{"scores": [[...]], "model", "usage", "object"}``."""

    engine: ClassVar[str] = "cpu"
    options: ClassVar[tuple[Option, ...]] = (Option("model", {"type": "string", "minLength": 1}),)

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """Inputs ``scores: f32[B,N]`` and ``cu_seqlens: i32[B+1]`` (for usage); output ``body: u8[J]``.

        With the optional input ``truncated: i32[B]`` the usage says how many tokens the request's texts have lost.
        """
        model = 6 * len(str(options.get("model") or "").encode())

        def size(sizes: Mapping[str, int]) -> int:
            return 512 + model + sizes["B"] * (3 + sizes["N"] * FLOAT_BYTES)

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


class EncodeEmbeddings:
    """CPU node ``encode_embeddings``: OpenAI's ``/v1/embeddings`` reply."""

    engine: ClassVar[str] = "cpu"
    options: ClassVar[tuple[Option, ...]] = (Option("model", {"type": "string", "minLength": 1}),)

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """Inputs ``embeddings: f32[B,D]`` and ``cu_seqlens: i32[B+1]`` (for usage); output ``body: u8[J]``."""
        model = 6 * len(str(options.get("model") or "").encode())

        def size(sizes: Mapping[str, int]) -> int:
            return 512 + model + sizes["B"] * (64 + sizes["D"] * FLOAT_BYTES)

        inputs = (Port.of("embeddings", "f32[B,D]"), Port.of("cu_seqlens", "i32[B+1]"))
        return Interface(inputs, (Port.of("body", "u8[J]"),), {"J": size})

    @staticmethod
    def configure(options: Mapping[str, Any], assets: Assets) -> dict[str, Any]:
        """The plan's ``config``: the model name of the reply."""
        return EncodeScores.configure(options, assets)

    def __init__(self, config: Mapping[str, Any], root: Path) -> None:  # noqa: ARG002
        """Readable form of the native node. ``config`` has ``model``, the name to put in the reply."""
        self._model = json.dumps(config["model"], ensure_ascii=False)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """``body: u8[J]``, UTF-8 JSON. Numbers that are not finite become ``null``."""
        rows = (",".join(map(float_text, row)) for row in np.asarray(inputs["embeddings"], dtype=np.float32))
        data = ",".join(f'{{"object":"embedding","embedding":[{row}],"index":{i}}}' for i, row in enumerate(rows))
        tokens = int(inputs["cu_seqlens"][-1])
        usage = f'{{"prompt_tokens":{tokens},"total_tokens":{tokens}}}'
        body = f'{{"object":"list","data":[{data}],"model":{self._model},"usage":{usage}}}'
        return {"body": np.frombuffer(body.encode(), dtype=np.uint8)}


class EncodeRerank:
    """CPU node ``encode_rerank``: text-embeddings-inference's ``/rerank`` reply, ``[{"index": 1, "score": 0.9}, ...]``.

    The highest score first, equal ones in the order of the request; what is no number comes last, as ``null``.
    """

    engine: ClassVar[str] = "cpu"
    options: ClassVar[tuple[Option, ...]] = (Option("column", {"type": "integer", "minimum": 0}, default=0),)

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """Input ``scores: f32[B,N]``, of which ``column`` is the score; output ``body: u8[J]``."""

        def size(sizes: Mapping[str, int]) -> int:
            return 2 + sizes["B"] * (len('{"index":,"score":},') + len(str(sizes["B"])) + FLOAT_BYTES)

        return Interface((Port.of("scores", "f32[B,N]"),), (Port.of("body", "u8[J]"),), {"J": size})

    @staticmethod
    def configure(options: Mapping[str, Any], assets: Assets) -> dict[str, Any]:
        """The plan's ``config``: the column.

        Raises:
            ValueError: the scores never have so many columns.
        """
        if options["column"] >= assets.sizes["N"]:
            raise ValueError(
                f"column {options['column']} is out of range: there are at most {assets.sizes['N']} columns"
            )
        return {"column": options["column"]}

    def __init__(self, config: Mapping[str, Any], root: Path) -> None:  # noqa: ARG002
        """Readable form of the native node. ``config`` has ``column``."""
        self._column: int = config.get("column", 0)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """``body: u8[J]``, UTF-8 JSON.

        Raises:
            InvalidRequest: the request asks for too few labels.
        """
        scores = np.asarray(inputs["scores"], dtype=np.float32)
        if self._column >= scores.shape[1]:
            raise InvalidRequest(
                f"[encode_rerank] the request has {scores.shape[1]} labels; column {self._column} is not there"
            )
        values = scores[:, self._column]
        numbers = [i for i, value in enumerate(values) if not np.isnan(value)]
        order = sorted(numbers, key=lambda i: -values[i]) + [i for i, value in enumerate(values) if np.isnan(value)]
        body = ",".join(f'{{"index":{i},"score":{float_text(values[i])}}}' for i in order)
        return {"body": np.frombuffer(f"[{body}]".encode(), dtype=np.uint8)}


_DATATYPES: Mapping[str, tuple[str, int]] = {"f32": ("FP32", FLOAT_BYTES), "i32": ("INT32", 12), "i64": ("INT64", 21)}
"""KServe's name of a type, and the most bytes of a value with its comma."""


class EncodeTensors:
    """CPU node ``encode_tensors``: any tensors as KServe v2's reply.

    ``{"model_name": ..., "outputs": [{"name", "datatype", "shape", "data"}]}``; what is not finite is ``null``.
    """

    engine: ClassVar[str] = "cpu"
    options: ClassVar[tuple[Option, ...]] = (
        Option(
            "tensors", {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string"}}, required=True
        ),
        Option("model", {"type": "string", "minLength": 1}),
    )

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """An input for each entry of ``tensors``, say ``{scores: "f32[batch,labels]"}``; output ``body: u8[J]``."""
        ports = tuple(Port.of(name, kind) for name, kind in options["tensors"].items())
        for port in ports:
            if port.type.dtype not in _DATATYPES:
                raise ValueError(f"tensors: {port.name} is {port.type.dtype}; use one of {', '.join(_DATATYPES)}")
        model = 6 * len(str(options.get("model") or "").encode())

        def size(sizes: Mapping[str, int]) -> int:
            return 512 + model + sum(_tensor_bytes(port, sizes) for port in ports)

        return Interface(ports, (Port.of("body", "u8[J]"),), {"J": size})

    @staticmethod
    def configure(options: Mapping[str, Any], assets: Assets) -> dict[str, Any]:
        """The plan's ``config``: the model name of the reply."""
        return {"model": options["model"] or assets.model_name}

    def __init__(self, config: Mapping[str, Any], root: Path) -> None:  # noqa: ARG002
        """Readable form of the native node. ``config`` has ``model``, the name to put in the reply."""
        self._model = json.dumps(config["model"], ensure_ascii=False)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """``body: u8[J]``, UTF-8 JSON; tensors in the order of ``tensors``."""
        outputs = ",".join(_tensor_text(name, np.asarray(value)) for name, value in inputs.items())
        body = f'{{"model_name":{self._model},"outputs":[{outputs}]}}'
        return {"body": np.frombuffer(body.encode(), dtype=np.uint8)}


def _tensor_bytes(port: Port, sizes: Mapping[str, int]) -> int:
    """Most bytes of one tensor's JSON."""
    numbers = math.prod(sizes[dim.symbol] + dim.add if dim.symbol else dim.add for dim in port.type.shape)
    return 64 + 6 * len(port.name.encode()) + 20 * len(port.type.shape) + numbers * _DATATYPES[port.type.dtype][1]


def _tensor_text(name: str, value: npt.NDArray[Any]) -> str:
    datatype = {np.dtype(np.float32): "FP32", np.dtype(np.int32): "INT32", np.dtype(np.int64): "INT64"}[value.dtype]
    numbers = map(float_text, value.flat) if datatype == "FP32" else map(str, value.flat)
    shape, data = ",".join(map(str, value.shape)), ",".join(numbers)
    quoted = json.dumps(name, ensure_ascii=False)
    return f'{{"name":{quoted},"datatype":"{datatype}","shape":[{shape}],"data":[{data}]}}'


class EncodeClasses:
    """CPU node ``encode_classes``: vLLM's ``/classify`` reply."""

    engine: ClassVar[str] = "cpu"
    options: ClassVar[tuple[Option, ...]] = (
        Option(
            "labels",
            {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "uniqueItems": True},
            required=True,
        ),
        Option("model", {"type": "string", "minLength": 1}),
    )

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """Inputs ``scores: f32[B,N]``, ``N`` the number of ``labels``, and ``cu_seqlens: i32[B+1]`` (for usage).

        The optional inputs ``request_id: text`` and ``created: i64`` stand in the reply. Output ``body: u8[J]``.
        """
        longest = max(6 * len(label.encode()) for label in options["labels"])
        fixed = 2048 + 6 * len(str(options.get("model") or "").encode())

        def size(sizes: Mapping[str, int]) -> int:
            return fixed + sizes["B"] * (96 + longest + len(options["labels"]) * FLOAT_BYTES)

        inputs = (
            Port.of("scores", f"f32[B,{len(options['labels'])}]"),
            Port.of("cu_seqlens", "i32[B+1]"),
            Port.of("request_id", "text", optional=True),
            Port.of("created", "i64", optional=True),
        )
        return Interface(inputs, (Port.of("body", "u8[J]"),), {"J": size})

    @staticmethod
    def configure(options: Mapping[str, Any], assets: Assets) -> dict[str, Any]:
        """The plan's ``config``: the labels, and the model name of the reply."""
        return {"labels": list(options["labels"]), **EncodeScores.configure(options, assets)}

    def __init__(self, config: Mapping[str, Any], root: Path) -> None:  # noqa: ARG002
        """Readable form of the native node. ``config`` has ``labels`` and ``model``."""
        self._labels = [json.dumps(label, ensure_ascii=False) for label in config["labels"]]
        self._model = json.dumps(config["model"], ensure_ascii=False)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """``body: u8[J]``, UTF-8 JSON. Of equal scores the first is the best; what is not finite is ``null``."""
        rows = np.asarray(inputs["scores"], dtype=np.float32)
        data = ",".join(self._row(i, row) for i, row in enumerate(rows))
        tokens, created = int(inputs["cu_seqlens"][-1]), inputs.get("created")
        name = json.dumps("classify-" + (inputs.get("request_id") or ""), ensure_ascii=False)
        head = f'"id":{name},"object":"list","created":{0 if created is None else int(created)},"model":{self._model}'
        usage = f'"prompt_tokens":{tokens},"completion_tokens":0,"total_tokens":{tokens}'
        body = f'{{{head},"data":[{data}],"usage":{{{usage}}}}}'
        return {"body": np.frombuffer(body.encode(), dtype=np.uint8)}

    def _row(self, index: int, row: npt.NDArray[np.float32]) -> str:
        numbers = [i for i, score in enumerate(row) if not math.isnan(score)] or [0]
        best = max(numbers, key=row.__getitem__)
        probs = ",".join(map(float_text, row))
        return f'{{"index":{index},"label":{self._labels[best]},"probs":[{probs}],"num_classes":{len(row)}}}'


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
