"""Run time: bundle → Session → outputs, and parity. Imports no torch, the eager backend aside."""
