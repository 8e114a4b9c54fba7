"""Linear layers in E4M3 with a scale for each token and each output channel."""
