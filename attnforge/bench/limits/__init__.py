"""What a model's latency can be held against: the least work it is, and what a machine can do at best (a roofline).

Williams, Waterman and Patterson 2009, https://doi.org/10.1145/1498765.1498785. The work is counted in the canonical
graph (:mod:`.work`), so it is the same whatever form a backend was given; ceilings are measured (:mod:`.ceilings`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Literal

from pydantic import Field

from attnforge.errors import UsageError
from attnforge.records import Record

FEWEST_RUNS = 3


class Work(Record):
    """What a model has to compute and to move for one run at given sizes.

    Attributes:
        products: floating-point operations of matrix products, convolutions and attention, two a multiply-add, by the
            precision of the operands.
        others: floating-point operations of other operators: one an element of the result; of a reduction one an
            element of its input; of a softmax :data:`~.work.SOFTMAX` a score.
        exponentials: of all softmaxes, those inside attention too.
        weights: bytes of the initializers and constants that are read, each once; of a table whose rows are gathered,
            those rows alone. Shapes and axes are among them, a few bytes each.
        inputs, outputs: bytes.
        uncounted: names of operators and tensors that are in none of these numbers, each with the reason.
    """

    products: dict[str, int] = Field(default_factory=dict)
    others: int = 0
    exponentials: int = 0
    weights: int = 0
    inputs: int = 0
    outputs: int = 0
    uncounted: list[str] = Field(default_factory=list)

    @property
    def flops(self) -> int:
        """Floating-point operations of all products."""
        return sum(self.products.values())

    @property
    def least_bytes(self) -> int:
        """Bytes that a program moves if it keeps everything between inputs and outputs in caches."""
        return self.weights + self.inputs + self.outputs

    @property
    def intensity(self) -> float:
        """Floating-point operations a byte."""
        return self.flops / max(self.least_bytes, 1)


class Ceilings(Record):
    """What a machine was measured to do at best.

    Attributes:
        threads: that each library had.
        flops: floating-point operations a second of a square matrix product, by precision.
        by: the library that reached them, by precision.
        bandwidth: bytes a second of copying in memory, those read and those written both counted.
        exponentials: exponentials a second, in fp32, of numbers that stay in the cache.
    """

    threads: int
    flops: dict[str, float]
    bandwidth: float
    exponentials: float
    by: dict[str, str] = Field(default_factory=dict)


class Limit(Record):
    """The least time that some work takes: for its products or for moving its bytes, whichever is longer.

    Bytes are taken to come from memory: a small model whose weights stay in the caches from call to call may take less
    than `memory_seconds`.
    """

    seconds: float
    compute_seconds: float
    memory_seconds: float
    bound: Literal["compute", "memory"]

    def share(self, seconds: float) -> float:
        """The limit over the seconds of a run, from 0 to 1: 1 is as fast as the limit."""
        return self.seconds / seconds


def limit_seconds(work: Work, ceilings: Ceilings) -> Limit:
    """The least time that `work` takes on a machine with these `ceilings`.

    A precision without a ceiling is taken to be as fast as fp32, and 16 bits are no slower, for fp32 holds them.

    Raises:
        UsageError: neither the precision nor fp32 has a ceiling.
    """
    compute = 0.0
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
    """The best amount a second of repeated calls.

    Args:
        time_call: makes a call and returns the seconds that it took.
        amount: what each call does, in any unit.
        seconds: for which the call is repeated, :data:`FEWEST_RUNS` times at least.
    """
    best, runs, end = inf, 0, time.perf_counter() + seconds
    while runs < FEWEST_RUNS or time.perf_counter() < end:
        best = min(best, time_call())
        runs += 1
    return amount / best
