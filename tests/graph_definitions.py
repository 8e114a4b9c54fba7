"""Node definitions that tests name as ``graph_definitions:Class``."""

from collections.abc import Mapping
from typing import Any, ClassVar

from dagserve.interface import Interface, Option, Port


class Join:
    """Two offset shapes in, one that the node decides out."""

    engine: ClassVar[str] = "cpu"
    options: ClassVar[tuple[Option, ...]] = (
        Option("scale", {"type": "number", "minimum": 0}, default=1.5),
        Option("table", {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}),
    )

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """``a: f32[M+2,K]``, ``b: f32[K,3]`` -> ``out: f32[M,R+1]`` with ``R`` at most 10."""
        assert bounds.get("unread", 0) is not None
        inputs = (Port.of("a", "f32[M+2,K]"), Port.of("b", "f32[K,3]", optional=True))
        return Interface(inputs, (Port.of("out", "f32[M,R+1]"),), {"R": 10})


class Model:
    """An aoti node that maps a vector to one of the same length."""

    engine: ClassVar[str] = "aoti"
    options: ClassVar[tuple[Option, ...]] = (Option("max_length", {"type": "integer"}),)

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """``x: f32[N]`` -> ``y: f32[N]``."""
        return Interface((Port.of("x", "f32[N]"), Port.of("more", "f32[N]", optional=True)), (Port.of("y", "f32[N]"),))


NOT_A_DEFINITION = 3
