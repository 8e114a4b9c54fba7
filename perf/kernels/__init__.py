"""Operators on a GPU beside PyTorch's own, one module an operator."""
