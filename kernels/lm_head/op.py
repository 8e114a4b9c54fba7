"""The implementations of the LM head a target may choose from.

A head in FP8 gives its own logits, so there is a choice for the whole and one for the selection alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from dagserve.kernels.beam import selection
from dagserve.kernels.lm_head import reference

Candidates = Callable[[Tensor, Tensor | None, int], tuple[Tensor, Tensor]]
LmHead = Callable[[Tensor, Tensor, Tensor | None, int], tuple[Tensor, Tensor]]


def triton_candidates(logits: Tensor, allowed: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """As :func:`dagserve.kernels.beam.selection.candidates`; ``allowed`` may also have a row for each row of logits."""
    from dagserve.kernels.lm_head.triton import candidates  # Triton is not everywhere

    return candidates(logits, allowed, count)


def triton_lm_head(hidden: Tensor, weight: Tensor, allowed: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """As :func:`dagserve.kernels.lm_head.reference.lm_head`."""
    return triton_candidates(hidden @ weight.t(), allowed, count)


CANDIDATES: Mapping[str, Candidates] = {"torch": selection.candidates, "triton": triton_candidates}

IMPLEMENTATIONS: Mapping[str, LmHead] = {"torch": reference.lm_head, "triton": triton_lm_head}
