"""The Python artifact runtime: the same artifact as the native one, node by node, to read and to compare with."""

from dagserve.runtime.reference import ReferenceRuntime

__all__ = ["ReferenceRuntime"]
