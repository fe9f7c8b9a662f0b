"""Suppression of other libraries' output."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO


@contextmanager
def quiet() -> Iterator[None]:
    """Discard log messages, warnings and output of libraries inside the block; exceptions pass through.

    This affects the whole process. A progress display that must stay visible writes to the stream that was `sys.stderr`
    before the block began.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
