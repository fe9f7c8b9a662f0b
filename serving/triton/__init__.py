"""Triton: model repositories from bundles, and the model for Triton's Python backend."""
