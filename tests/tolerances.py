"""The one table of tolerances: largest absolute difference by precision. No test loosens it."""

LOGITS = {"fp32": 1e-4, "bf16": 0.15}
"""Logits and log-probabilities against transformers on the same weights."""

SCORES = {"fp32": 1e-5, "bf16": 2e-2}
"""Probabilities against transformers or eager."""

OPERATORS = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 2e-2}
"""Operators on inputs of about 1 against their FP32 references."""
