"""The backends: one file each, and the registry of them all."""
