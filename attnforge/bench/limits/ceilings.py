"""What a CPU can do at best, measured: matrix products by the fastest of the libraries at hand, copies, exponentials.

No library alone tells it: torch's own multiplies fp32 on AMD processors at half the rate of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import onnxruntime as ort
import torch

from attnforge.bench.contenders.engines import openvino_request, product_of
from attnforge.bench.contenders.peers import with_threads
from attnforge.bench.limits import FEWEST_RUNS, Ceilings, best_rate
from attnforge.errors import UnavailableError, UnknownNameError
from attnforge.runtime.backends.onnxruntime import session_options
from attnforge.runtime.backends.openvino import CAPABILITIES
from attnforge.runtime.options import check_threads
from attnforge.runtime.race import seconds_of

PRODUCT_SIZES = (256, 512, 1024, 2048)
"""Rows of the square matrices. The smaller ones tell whether there is time for the next."""

COPIED = 2**27
"""Bytes of the source of a copy, and of its target: more than a core has of any cache."""

CACHED = (2**15, 2**16, 2**17)
"""Numbers a thread: with their exponentials 256 KiB to 1 MiB, which second-level caches hold. Torch gives no thread
fewer."""


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}

Product = Callable[[], object]


def measure_ceilings(
    threads: int, precisions: Sequence[str] = ("fp32", "bf16", "fp16"), seconds: float = 1.0
) -> Ceilings:
    """Measure what this machine's CPU does at best: products with whichever library is fastest, all else with torch.

    Args:
        threads: of each library; torch has as many as before afterwards.
        precisions: whose products to measure, of fp32, bf16, fp16 and fp64.
        seconds: for each precision and library, for copying and for exponentials; slow ones take longer, to run at all.

    Raises:
        UnknownNameError: no such precision.
        UsageError: no threads.
    """
    if unknown := [name for name in precisions if name not in DTYPES]:
        raise UnknownNameError("precision", unknown[0], DTYPES)
    check_threads(threads)
    with ExitStack() as stack:
        with_threads(threads, stack)
        best = {precision: _fastest_product(precision, threads, seconds) for precision in precisions}
        return Ceilings(
            threads=threads,
            flops={precision: rate for precision, (rate, _) in best.items()},
            bandwidth=_copy_rate(seconds),
            exponentials=_exponential_rate(threads, seconds),
            by={precision: library for precision, (_, library) in best.items()},
        )


def _fastest_product(precision: str, threads: int, seconds: float) -> tuple[float, str]:
    """Operations a second, and the library."""
    return max((_product_rate(partial(make, precision), threads, seconds), name) for name, make in LIBRARIES.items())


def _product_rate(make: Callable[[int, int], Product | None], threads: int, seconds: float) -> float:
    """Operations a second, 0 where nothing multiplies so."""
    best, end = 0.0, time.perf_counter() + seconds
    for i, size in enumerate(PRODUCT_SIZES):
        flops, left = 2 * size**3, end - time.perf_counter()
        if best and FEWEST_RUNS * flops / best > left:
            break
        product = make(size, threads)
        if product is None:
            break
        best = max(best, _rate(product, flops, left / (len(PRODUCT_SIZES) - i)))
    return best


def _copy_rate(seconds: float) -> float:
    source, target = torch.ones(2, COPIED // 4)
    return _rate(partial(target.copy_, source), 2 * COPIED, seconds)


def _exponential_rate(threads: int, seconds: float) -> float:
    best = 0.0
    for numbers in CACHED:
        x = torch.linspace(-10, 0, threads * numbers)
        best = max(best, _rate(partial(torch.exp, x, out=torch.empty_like(x)), x.numel(), seconds / len(CACHED)))
    return best


def _rate(call: Callable[[], object], amount: int, seconds: float) -> float:
    """The best amount a second, by the clock, of calls that each do `amount`."""
    return best_rate(partial(seconds_of, call), amount, seconds)


# --- a square matrix product by each library --------------------------------------------------------------------------


def _by_torch(precision: str, size: int, threads: int) -> Product | None:
    """On as many threads as torch has."""
    a, b, out = torch.ones(3, size, size, dtype=DTYPES[precision])
    return partial(torch.mm, a, b, out=out)


def _by_onnxruntime(precision: str, size: int, threads: int) -> Product | None:
    """In fp32 alone: on a CPU it has no 16-bit products."""
    if precision != "fp32":
        return None
    session = ort.InferenceSession(product_of(size), session_options(threads), ["CPUExecutionProvider"])
    return partial(session.run, None, {"a": np.ones((size, size), np.float32)})


def _by_openvino(precision: str, size: int, threads: int) -> Product | None:
    """In fp32, and in the 16-bit types that it computes in on this processor."""
    if precision not in ("fp32", *CAPABILITIES):
        return None
    try:
        request = openvino_request(product_of(size), precision, threads)
    except UnavailableError:
        return None
    request.get_input_tensor().data[:] = 1
    return request.infer  # type: ignore[no-any-return]


LIBRARIES: dict[str, Callable[[str, int, int], Product | None]] = {
    "torch": _by_torch,
    "onnxruntime": _by_onnxruntime,
    "openvino": _by_openvino,
}
"""By name; each makes a product at a precision, of so many rows, on so many threads, or None where it has none."""
