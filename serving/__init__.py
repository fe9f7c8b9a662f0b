"""Serving: a bundle where its users run it, over :mod:`attnforge.runtime` and without torch."""
