"""A Torch module of one's own: the expected rating, 1 to 5, of a text from its embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rating(nn.Module):
    """A small network over an embedding of ``size`` numbers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.normalize = nn.BatchNorm1d(size)
        self.hidden = nn.Linear(size, 32)
        self.stars = nn.Linear(32, 5)

    def forward(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """``f32[B, size]`` -> ``probabilities: f32[B, 5]``, ``rating: f32[B]``."""
        probabilities = self.stars(torch.relu(self.hidden(self.normalize(embeddings)))).softmax(dim=-1)
        return probabilities, probabilities @ torch.arange(1.0, 6.0)


if __name__ == "__main__":
    from safetensors.torch import save_file

    torch.manual_seed(0)
    save_file(Rating(64).state_dict(), "rating.safetensors")  # a real one is trained first
