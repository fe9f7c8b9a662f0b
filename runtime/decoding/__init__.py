"""Decoders: caches of keys and values, steps of a token, and whole sequences by them."""
