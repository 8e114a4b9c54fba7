"""The node of one Torch module of the user's own, with the interface that the manifest declares."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Set
from typing import Any, ClassVar

from dagserve.interface import BuildSpec, Call, Check, Interface, Option, PackageSpec, Port
from dagserve.shapes import DTYPE_BYTES, INTEGER_RANGES

_TYPES = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string"}}
_RANGE = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}


class Module:
    """AOTI node ``module``: any ``torch.nn.Module`` that ``torch.export`` takes, compiled as it is.

    ``forward`` takes one tensor an input, in the order of ``inputs``, and returns one tensor or a tuple of them, in the
    order of ``outputs``. Its parameters have the dtype that the module gives them, whatever the target's precision.
    """

    engine: ClassVar[str] = "aoti"
    options: ClassVar[tuple[Option, ...]] = (
        Option("module", {"type": "string", "pattern": r"^[\w.]+:\w+$", "examples": ["heads:Head"]}, required=True),
        Option("arguments", {"type": "object"}, default={}),
        Option("weights", {"type": "string", "minLength": 1}),
        Option("inputs", _TYPES, required=True),
        Option("outputs", _TYPES, required=True),
        Option("ranges", {"type": "object", "additionalProperties": _RANGE}, default={}),
    )

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """A port for each entry of ``inputs`` and ``outputs``, say ``{hidden: "f32[B,576]"}``."""
        for problem in _problems(options):
            raise ValueError(problem)
        return Interface(_ports(options["inputs"]), _ports(options["outputs"]))

    @staticmethod
    def build(
        options: Mapping[str, Any],
        config: Mapping[str, Any],  # noqa: ARG004
        precision: str,  # noqa: ARG004
        operators: Mapping[str, str],  # noqa: ARG004
        connected: Set[str],  # noqa: ARG004
    ) -> BuildSpec:
        """One package; integers are checked against ``ranges`` before it runs."""
        inputs, outputs = _ports(options["inputs"]), _ports(options["outputs"])
        ranges = {name: (low, high + 1) for name, (low, high) in options["ranges"].items()}
        package = PackageSpec(
            "module", options["module"], _plain(options["arguments"]), inputs, outputs, weights="weights", ranges=ranges
        )
        call = Call("module", tuple(f"port:{p.name}" for p in inputs), tuple(f"port:{p.name}" for p in outputs))
        checks = tuple(Check("range", {"tensor": n, "low": lo, "high": hi}) for n, (lo, hi) in ranges.items())
        return BuildSpec((package,), (call,), checks, "", {})


def _ports(types: Mapping[str, str]) -> tuple[Port, ...]:
    return tuple(Port.of(name, text) for name, text in types.items())


def _problems(options: Mapping[str, Any]) -> Iterator[str]:
    module = options["module"].partition(":")[0]
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        yield f"module: there is no module `{module}`; install it, or put its folder on PYTHONPATH"
    inputs, outputs = _ports(options["inputs"]), _ports(options["outputs"])
    for port in (*inputs, *outputs):
        if port.type.dtype not in DTYPE_BYTES:
            yield f"`{port.name}` is {port.type.dtype}; a module takes and gives {', '.join(DTYPE_BYTES)}"
    for port in inputs:
        if port.type.dtype in INTEGER_RANGES and port.name not in options["ranges"]:
            yield f"input `{port.name}` is {port.type.dtype}: say what it may hold, `ranges: {{{port.name}: [0, 9]}}`"
    names = [port.name for port in inputs if port.type.dtype in INTEGER_RANGES]
    for name, (low, high) in options["ranges"].items():
        if name not in names:
            yield f"ranges: `{name}` is no integer input; use one of {', '.join(names) or 'none'}"
        elif low > high:
            yield f"ranges: `{name}` goes from {low} to {high}; write the lower one first"
    known = {symbol for port in inputs for symbol in port.type.symbols}
    for port in outputs:
        for symbol in port.type.symbols:
            if symbol not in known:
                yield f"output `{port.name}` has the size {symbol}, which no input has; write a number or one of theirs"


def _plain(value: Any) -> Any:
    """Read-only mappings and tuples as JSON has them."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
