"""Run time: bundle → Session → outputs, and parity. Imports no torch, the eager backend aside."""

from attnforge.runtime.parity import Report, verify
from attnforge.runtime.session import Session, load

__all__ = ["Report", "Session", "load", "verify"]
