"""Diagnosis: the first wrong step of a deployment, and its cause."""
