"""Parity: whether the deployed model is still the same function."""
