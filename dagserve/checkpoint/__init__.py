"""Model import: safetensors directories, GGUF files and Hugging Face hub ids become one :class:`Checkpoint`.

Nothing here imports torch: tensors are handed out as numpy arrays (``bf16`` as ``uint16`` bit patterns).
"""

from dagserve.checkpoint.base import Checkpoint, SourceTensor
from dagserve.checkpoint.open import open_checkpoint, resolve_source, source_files
from dagserve.checkpoint.safetensors_directory import open_file

__all__ = ["Checkpoint", "SourceTensor", "open_checkpoint", "open_file", "resolve_source", "source_files"]
