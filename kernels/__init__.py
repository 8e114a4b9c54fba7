"""Replaceable operators: one interface each, a Torch reference and implementations. Installs as ``dagserve.kernels``."""
