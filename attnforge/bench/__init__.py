"""Measuring: ratios taken side by side, in one run."""
