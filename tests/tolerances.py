"""The one table of tolerances: largest absolute difference by precision. No test loosens it."""

LOGITS = {"fp32": 1e-4, "bf16": 0.15}
"""Logits and log-probabilities against transformers on the same weights."""

SCORES = {"fp32": 1e-5, "bf16": 2e-2}
"""Probabilities against transformers or eager."""

E4M3_STEP = 2.0**-3
"""Of a quantised value, relative: where FP32 arithmetic rounds otherwise, a value may fall to the neighbouring step."""
