"""The laboratory: what measures attnforge itself, from a checkout. It is no part of the package."""
