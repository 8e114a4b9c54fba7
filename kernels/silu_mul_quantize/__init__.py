"""SiLU(gate) x up, quantised for an FP8 linear, in one pass."""
