"""Limits of a model's latency: its least work and the machine's ceilings (a roofline).

Williams, Waterman and Patterson 2009, https://doi.org/10.1145/1498765.1498785. The work is counted in the canonical
graph (:mod:`.work`), so it does not depend on the form that a backend receives; ceilings are measured
(:mod:`.ceilings`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Literal

from attnforge.errors import UsageError
from attnforge.records import Record

FEWEST_RUNS = 3


class Work(Record):
    """The operations and memory traffic of one run of a model at given sizes.

    Attributes:
        products: floating-point operations of matrix products, convolutions and attention, two per multiply-add, by the
            precision of the operands.
        others: floating-point operations of other operators: one per element of the result; for a reduction one per
            element of its input; for a softmax :data:`~.work.SOFTMAX` per score.
        exponentials: exponentials of all softmaxes, including those inside attention.
        weights: bytes of the initializers and constants that are read, each once; for a table whose rows are gathered,
            only those rows. Shapes and axes are included, a few bytes each.
        inputs, outputs: bytes.
        uncounted: names of operators and tensors that are in none of these numbers, each with the reason.
    """

    products: dict[str, int] = {}
    others: int = 0
    exponentials: int = 0
    weights: int = 0
    inputs: int = 0
    outputs: int = 0
    uncounted: list[str] = []

    @property
    def flops(self) -> int:
        """Floating-point operations of all products."""
        return sum(self.products.values())

    @property
    def least_bytes(self) -> int:
        """Bytes that a program moves if everything between inputs and outputs stays in caches."""
        return self.weights + self.inputs + self.outputs

    @property
    def intensity(self) -> float:
        """Floating-point operations per byte."""
        return self.flops / max(self.least_bytes, 1)


class Ceilings(Record):
    """The best measured rates of a machine.

    Attributes:
        threads: number of threads of each library.
        flops: floating-point operations per second of a square matrix product, by precision.
        bandwidth: bytes per second of copying in memory, reads and writes both counted.
        exponentials: exponentials per second, in fp32, of numbers that stay in the cache.
        by: the library that reached `flops`, by precision, and the one that reached `exponentials`.
    """

    threads: int
    flops: dict[str, float]
    bandwidth: float
    exponentials: float
    by: dict[str, str] = {}


class Limit(Record):
    """The least time of some work: for its products and the exponentials of its softmaxes, or for moving its bytes,
    whichever is longer.

    Bytes are assumed to come from memory: a small model whose weights stay in the caches between calls may take less
    than `memory_seconds`.
    """

    seconds: float
    compute_seconds: float
    memory_seconds: float
    bound: Literal["compute", "memory"]

    def share(self, seconds: float) -> float:
        """Return the limit over the seconds of a run, from 0 to 1: 1 is as fast as the limit."""
        return self.seconds / seconds


def limit_seconds(work: Work, ceilings: Ceilings) -> Limit:
    """Return the least time that `work` takes on a machine with these `ceilings`.

    A precision without a ceiling is assumed to be as fast as fp32; 16-bit precisions are at least as fast as fp32,
    because they can be computed in fp32.

    Raises:
        UsageError: neither the precision nor fp32 has a ceiling.
    """
    compute = work.exponentials / ceilings.exponentials
    for precision, flops in work.products.items():
        able = {precision, "fp32"} if precision in ("bf16", "fp16") or precision not in ceilings.flops else {precision}
        rates = [ceilings.flops[name] for name in able if name in ceilings.flops]
        if not rates:
            raise UsageError(f"the work has products in {precision}; measure the ceilings of {precision} or fp32 too")
        compute += flops / max(rates)
    memory = work.least_bytes / ceilings.bandwidth
    bound: Literal["compute", "memory"] = "compute" if compute >= memory else "memory"
    return Limit(seconds=max(compute, memory), compute_seconds=compute, memory_seconds=memory, bound=bound)


def best_rate(time_call: Callable[[], float], amount: float, seconds: float) -> float:
    """Return the best rate of repeated calls, in `amount` per second.

    Args:
        time_call: makes a call and returns the seconds that it took.
        amount: work of each call, in any unit.
        seconds: time for which the call is repeated, at least :data:`FEWEST_RUNS` times.
    """
    best, runs, end = inf, 0, time.perf_counter() + seconds
    while runs < FEWEST_RUNS or time.perf_counter() < end:
        best = min(best, time_call())
        runs += 1
    return amount / best
