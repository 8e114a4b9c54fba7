"""Replaceable operators: one interface, a Torch reference, implementations. Installs as ``dagserve.kernels``."""

HEAD_SIZES = (16, 32, 64, 128, 256)
"""Head sizes that the attention kernels have tiles for."""
