"""Serving: integrations that run bundles in other systems, on top of :mod:`attnforge.runtime` and without torch."""
