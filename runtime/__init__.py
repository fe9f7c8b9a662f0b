"""Run time: bundle → Session → outputs, and parity. Imports no torch, except in the eager backend."""
