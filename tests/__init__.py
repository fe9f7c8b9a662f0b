"""The tests. What they import and torch's exporter make millions of small objects; looking for cycles among them takes
a tenth of the run at Python's own thresholds, so that it is said here, before any of it is imported."""

import gc

gc.set_threshold(1_000_000, 20, 20)
