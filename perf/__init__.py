"""Benchmarks: every performance claim of this project comes from here."""
