"""`python -m attnforge.benchmarks.real_sizes`, the short name of :mod:`attnforge.benchmarks.suites.real_sizes`."""

import typer

from attnforge.benchmarks.suites.real_sizes import main

if __name__ == "__main__":
    typer.run(main)
