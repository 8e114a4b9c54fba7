"""Dtypes, symbolic dimensions and tensor types, and the text that names them: ``i64[tokens]``, ``i32[batch+1]``.

A type is immutable. Sizes come from *bounds*: a mapping from each symbol to its largest value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

INTEGER_RANGES: Mapping[str, tuple[int, int]] = {
    "u8": (0, 2**8 - 1),
    "i32": (-(2**31), 2**31 - 1),
    "i64": (-(2**63), 2**63 - 1),
}
"""The least and the largest value of each integer dtype."""

DTYPE_BYTES: Mapping[str, int] = {"u8": 1, "bool": 1, "i32": 4, "i64": 8, "f16": 2, "bf16": 2, "f32": 4}
"""Size in bytes of one element of each dtype. ``text`` has none: its payload is planned by ``max_bytes``."""

DTYPES = (*DTYPE_BYTES, "text")

_TYPE = re.compile(r"\s*([a-z0-9]+)\s*(?:\[(.*)\])?\s*", re.DOTALL)
_DIM = re.compile(r"\s*(?:(\d+)|([A-Za-z_]\w*)\s*(?:\+\s*(\d+))?)\s*")


@dataclass(frozen=True)
class Dim:
    """One dimension: ``symbol + add``, or the constant ``add`` where ``symbol`` is empty."""

    symbol: str
    add: int = 0

    def __str__(self) -> str:
        if not self.symbol:
            return str(self.add)
        return f"{self.symbol}+{self.add}" if self.add else self.symbol

    def size(self, values: Mapping[str, int]) -> int:
        """The dimension's value, given one for each symbol."""
        return (values[self.symbol] if self.symbol else 0) + self.add


@dataclass(frozen=True)
class TensorType:
    """A dtype and a shape, for example ``i32[batch+1]``."""

    dtype: str
    shape: tuple[Dim, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]" if self.shape else self.dtype

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols of the shape in order, each once."""
        return tuple(dict.fromkeys(d.symbol for d in self.shape if d.symbol))

    def numel(self, values: Mapping[str, int]) -> int:
        """Number of elements, given a value for each symbol."""
        count = 1
        for dim in self.shape:
            count *= dim.size(values)
        return count


def parse_dim(text: str | int) -> Dim:
    """Reads ``32``, ``batch`` or ``batch+1``.

    Raises:
        ValueError: the text is none of these; the message says what is.
    """
    match = _DIM.fullmatch(str(text))
    if match is None:
        raise ValueError(f"dimension {text!r} is not an integer, a symbol, or symbol+integer; write one of these")
    number, symbol, add = match.groups()
    return Dim("", int(number)) if number else Dim(symbol, int(add or 0))


def parse_type(text: str) -> TensorType:
    """Reads a tensor type.

    >>> str(parse_type("i32[batch + 1]"))
    'i32[batch+1]'

    Raises:
        ValueError: unknown dtype or malformed shape; the message says which.
    """
    match = _TYPE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a tensor type; write one such as i64[tokens] or f32[batch,2]")
    dtype, dims = match.groups()
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: use one of {', '.join(DTYPES)}")
    if dims is None:
        return TensorType(dtype)
    if not dims.strip():
        return TensorType(dtype)
    return TensorType(dtype, tuple(parse_dim(d) for d in dims.split(",")))
