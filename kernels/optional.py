"""What needs Triton, which is not everywhere: imported when it is used, not when its operator is."""

from __future__ import annotations

import importlib
from typing import Any


def triton_function(op: str, name: str) -> Any:
    """``name`` of ``kernels/<op>/triton.py``.

    Raises:
        ModuleNotFoundError: Triton is not installed.
    """
    try:
        return getattr(importlib.import_module(f"dagserve.kernels.{op}.triton"), name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        message = f"{op}: this implementation needs Triton: pip install 'dagserve[gpu]', or choose `{op}: torch`"
        raise ModuleNotFoundError(message, name="triton") from error
