"""dagserve: bounded generation on small language models, from a manifest to a frozen graph to an HTTP service."""

__version__ = "0.1.0"
