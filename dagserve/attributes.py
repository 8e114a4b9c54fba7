"""Attributes of a catalog's items: what a manifest declares, how values are stored, and a request's terms.

A term is an attribute and one of its values as text: ``region=de``, ``stock=true``, ``price=2.5``.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("text", "number", "bool")
ITEM = "item"
RESERVED = (ITEM, "tokens", "text")
"""What an item's own keys are called."""

NAME_MEANING = f"letters, digits and _, at most 32, no digit first; not {', '.join(RESERVED)}, which are an item's own"
NAME = f"^(?!({'|'.join(RESERVED)})$)[A-Za-z_][A-Za-z0-9_]{{0,31}}$"
MAX_ATTRIBUTES = 16
MAX_VALUE_BYTES = 256

_TYPES: dict[str, tuple[type, ...]] = {"text": (str,), "number": (int, float), "bool": (bool,)}
_MEANINGS = {
    "text": f"text of at most {MAX_VALUE_BYTES} bytes",
    "number": "a number that a 64-bit float holds exactly",
    "bool": "true or false",
}
_NUMBER = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True)
class Attribute:
    """One declared attribute; ``kind`` is one of :data:`KINDS`."""

    name: str
    kind: str

    @staticmethod
    def of(declared: str) -> Attribute:
        """``Attribute.of("region:text")``."""
        name, _, kind = declared.partition(":")
        return Attribute(name, kind)

    @property
    def declared(self) -> str:
        """``region:text``, as configs have it."""
        return f"{self.name}:{self.kind}"

    @property
    def meaning(self) -> str:
        """What its values must be, in words."""
        return _MEANINGS[self.kind]

    def takes(self, value: object) -> bool:
        """Whether a value read from a file is of its kind: a bool is no number."""
        return type(value) in _TYPES[self.kind]

    def key(self, value: str | float | bool) -> bytes | None:
        """The bytes that a value it takes is stored as; None where they do not hold it."""
        if isinstance(value, str):
            text = value.encode("utf-8", "surrogatepass")
            return text if len(text) <= MAX_VALUE_BYTES else None
        if isinstance(value, bool):
            return b"true" if value else b"false"
        exact = math.isfinite(value) and float(value) == value
        return struct.pack("<d", value + 0.0) if exact else None  # -0.0 is 0.0

    def key_of_text(self, text: bytes) -> bytes | None:
        """The key of a term's value; None where it is not of this kind."""
        if self.kind == "text":
            return text
        if self.kind == "bool":
            return text if text in (b"true", b"false") else None
        number = float(text) if _NUMBER.fullmatch(text.decode(errors="replace")) else math.inf
        return struct.pack("<d", number + 0.0) if math.isfinite(number) else None


def named(attributes: Sequence[Attribute]) -> str:
    """For messages: ``region (text), stock (bool)``."""
    return ", ".join(f"{a.name} ({a.kind})" for a in attributes) or "none"
