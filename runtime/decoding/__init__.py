"""Decoders: caches of keys and values, single-token steps, and whole sequences made of them."""
