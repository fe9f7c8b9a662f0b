"""Measuring decoders: time to the first token, and of a step after it."""
