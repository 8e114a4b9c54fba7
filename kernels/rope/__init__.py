"""Rotary position embedding, with the norm of queries and keys in front and the K/V write behind."""
