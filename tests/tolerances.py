"""The one table of tolerances: largest absolute difference by precision. No test loosens it."""

from __future__ import annotations

import torch

LOGITS = {"fp32": 1e-4, "bf16": 0.15}
"""Logits and log-probabilities against transformers on the same weights."""

SCORES = {"fp32": 1e-5, "bf16": 2e-2}
"""Probabilities against transformers or eager."""

OPERATORS = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 2e-2}
"""Operators on inputs of about 1 against their FP32 references."""

E4M3_STEP = 2.0**-3
"""Of a quantised value, relative: where FP32 arithmetic rounds otherwise, a value may fall to the neighbouring step."""

E4M3_LOGITS = 2e-2
"""Log-probabilities of a model with E4M3 linears against one that rounds alike: a few values fall to another step."""

RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}
"""Of a sum by the magnitudes it adds up: FP32 arithmetic, and one rounding to the type."""

FP8_LINEAR = 2.0**-8
"""Of a sum by the magnitudes it adds up, where Hopper's FP8 matrix products keep fewer bits than FP32."""
