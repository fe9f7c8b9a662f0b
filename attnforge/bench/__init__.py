"""Benchmarks: backends and peers timed in turns in one run, and compared by ratio."""
