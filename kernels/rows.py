"""Token counts that operators over rows are tuned and timed at."""

from __future__ import annotations

TOKENS = {128: 100, 512: 400, 2048: 1605, 8192: 4000, 65536: 32768}
"""A bucket's bound, and the count that stands for it: beams of one search, prefills, and one large enough that the
time to start a kernel does not count."""
