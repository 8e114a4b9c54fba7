"""Attention of many beams over one shared prefix and a suffix of their own."""
