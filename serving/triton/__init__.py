"""Triton: model repositories that are made of bundles, and the model that answers in Triton's Python backend."""
