"""Replaceable operators: one interface, a Torch reference, implementations. Installs as ``dagserve.kernels``."""
