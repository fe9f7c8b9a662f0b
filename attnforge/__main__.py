"""`python -m attnforge`: the command line."""

from attnforge.cli import main

main()
