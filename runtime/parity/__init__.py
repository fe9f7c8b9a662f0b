"""Parity: whether what was deployed is still the same function."""
