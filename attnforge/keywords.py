"""Keywords of the public functions as users guess them: other names in the field, one value in place of a list, and the
nearest right name for an unknown one."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

from attnforge.errors import UnknownNameError, UsageError

P = ParamSpec("P")
T = TypeVar("T")

ALIASES = {
    "backend": "backends",
    "cuda_graphs": "graphs",
    "dtype": "precision",
    "eos_token_id": "stop",
    "max_cache_len": "cache_tokens",
    "max_concurrency": "contexts",
    "min_metric": "least",
    "target": "targets",
}
"""Other names of keywords, accepted by every function that has the keyword."""

SAID_OTHERWISE = {
    "io_precision": "precision='auto-fp16' (or auto-bf16) computes in 16 bits, with inputs and outputs in fp32"
}
"""Keywords of other tools whose meaning has another keyword's value here, and which."""

LISTS = frozenset({"against", "backends", "compute_capabilities", "data", "require_fused", "stop", "targets"})
"""Keywords that take several values; a single one may be given alone."""


def guessable(options: type | None = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator of functions that accept :data:`ALIASES`, and a single value for each of :data:`LISTS`, and
    refuse unknown keywords with the nearest known one.

    Args:
        options: dataclass of the function's further keywords, which `help` and `inspect.signature` then show.
    """

    def decorator(function: Callable[P, T]) -> Callable[P, T]:
        signature = _with_fields(inspect.signature(function), options)
        known = signature.parameters

        @functools.wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> T:
            named: dict[str, Any] = {}
            taken = signature.bind_partial(*args).arguments.keys() | keywords.keys()
            for given, value in keywords.items():
                name = given if given in known else ALIASES.get(given, given)
                if name in SAID_OTHERWISE and "precision" in known:
                    raise UsageError(f"{function.__name__} has no keyword {given!r}: {SAID_OTHERWISE[name]}")
                if name not in known:
                    raise UnknownNameError(f"keyword of {function.__name__}", given, known.keys() - {"self"})
                if name != given and name in taken:
                    raise UsageError(f"{given} is another name of {name}, and both were given; leave one out")
                named[name] = value
            bound = signature.bind(*args, **named)
            for name in LISTS.intersection(bound.arguments):
                if isinstance(value := bound.arguments[name], str | int | os.PathLike):
                    bound.arguments[name] = (value,)
            return function(*bound.args, **bound.kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorator


def _with_fields(signature: inspect.Signature, options: type | None) -> inspect.Signature:
    """The signature with the fields of a dataclass in place of `**keywords`."""
    if options is None:
        return signature
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    further = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(options)
        if field.name not in signature.parameters
    ]
    return signature.replace(parameters=[*own, *further])
