"""Packed grouped-query attention: block-diagonal causal over ``cu_seqlens``."""
