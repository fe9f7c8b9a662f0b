"""Benchmarks: backends and peers timed in turns in one run, and compared by ratio.

The module can be called like :func:`attnforge.benchmark`, because it has the name of the command line's verb.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Verb(ModuleType):
    def __call__(self, *args: Any, **keywords: Any) -> Any:
        from attnforge.bench.run import benchmark

        return benchmark(*args, **keywords)


sys.modules[__name__].__class__ = _Verb
