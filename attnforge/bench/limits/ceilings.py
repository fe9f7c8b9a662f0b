"""Measured ceilings of a CPU: matrix products and exponentials by the fastest available library, and copies.

A single library is not enough: on AMD processors, torch multiplies fp32 at half the rate of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import onnxruntime as ort
import torch

from attnforge.bench.contenders.engines import one_operator, openvino_request
from attnforge.bench.contenders.peers import with_threads
from attnforge.bench.limits import FEWEST_RUNS, Ceilings, best_rate
from attnforge.errors import UnavailableError, check_known
from attnforge.runtime.backends.backend import OPENVINO_TYPES, check_threads
from attnforge.runtime.backends.onnxruntime import session_options
from attnforge.runtime.race import seconds_of

PRODUCT_SIZES = (256, 512, 1024, 2048)
"""Rows of the square matrices. The smaller ones show whether there is time for the next."""

COPIED = 2**27
"""Bytes of the source of a copy, and of its target: more than any cache of a core."""

CACHED = (2**15, 2**16, 2**17)
"""Numbers per thread: with their exponentials 256 KiB to 1 MiB, which fit in second-level caches. Torch gives
each thread at least 2¹⁵."""


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}

Shape = tuple[int, ...]

Call = Callable[[], object]

Make = Callable[[Shape, int], Call | None]
"""An operator of a library at a precision: see :data:`LIBRARIES`."""


def measure_ceilings(
    threads: int, precisions: Sequence[str] = ("fp32", "bf16", "fp16"), seconds: float = 1.0
) -> Ceilings:
    """Measure the ceilings of this machine's CPU: products and exponentials with the fastest library, and copies.

    Args:
        threads: number of threads of each library; torch's number of threads is restored afterwards.
        precisions: precisions whose products to measure, of fp32, bf16, fp16 and fp64.
        seconds: time for each precision and library, for copying and for exponentials; slow calls may take longer.

    Raises:
        UnknownNameError: no such precision.
        UsageError: fewer than one thread.
    """
    for name in precisions:
        check_known("precision", name, DTYPES)
    check_threads(threads)
    products: dict[Shape, int] = {(size, size): 2 * size**3 for size in PRODUCT_SIZES}
    exponentials: dict[Shape, int] = {(threads * numbers,): threads * numbers for numbers in CACHED}
    with ExitStack() as stack:
        with_threads(threads, stack)
        best = {precision: _fastest(precision, "MatMul", products, threads, seconds) for precision in precisions}
        best["exponentials"] = _fastest("fp32", "Exp", exponentials, threads, seconds)
        return Ceilings(
            threads=threads,
            flops={precision: best[precision][0] for precision in precisions},
            bandwidth=_copy_rate(seconds),
            exponentials=best["exponentials"][0],
            by={name: library for name, (_, library) in best.items()},
        )


def _fastest(
    precision: str, op_type: str, operations: Mapping[Shape, int], threads: int, seconds: float
) -> tuple[float, str]:
    """Return the operations per second, and the library that reaches them, over some shapes of the operands."""
    return max(
        (_rate_over(operations, partial(make, precision, op_type), threads, seconds), name)
        for name, make in LIBRARIES.items()
    )


def _rate_over(operations: Mapping[Shape, int], make: Make, threads: int, seconds: float) -> float:
    """Return the operations per second; 0 if the library has no such operator."""
    best, end = 0.0, time.perf_counter() + seconds
    for i, (shape, count) in enumerate(operations.items()):
        left = end - time.perf_counter()
        if best and FEWEST_RUNS * count / best > left:
            break
        if (call := make(shape, threads)) is None:
            break
        best = max(best, _rate(call, count, left / (len(operations) - i)))
    return best


def _copy_rate(seconds: float) -> float:
    source, target = torch.ones(2, COPIED // 4)
    return _rate(partial(target.copy_, source), 2 * COPIED, seconds)


def _rate(call: Callable[[], object], amount: int, seconds: float) -> float:
    """Return the best rate of `call`, in `amount` per second of wall-clock time."""
    return best_rate(partial(seconds_of, call), amount, seconds)


# --- a matrix product, or exponentials, by each library ---------------------------------------------------------------


def _by_torch(precision: str, op_type: str, shape: Shape, threads: int) -> Call | None:
    """Return torch's operator, on torch's current number of threads."""
    a, b, out = torch.ones(3, *shape, dtype=DTYPES[precision])
    return partial(torch.mm, a, b, out=out) if op_type == "MatMul" else partial(torch.exp, a, out=out)


def _by_onnxruntime(precision: str, op_type: str, shape: Shape, threads: int) -> Call | None:
    """Return ONNX Runtime's operator, in fp32 only: on a CPU it has no 16-bit products."""
    if precision != "fp32":
        return None
    session = ort.InferenceSession(one_operator(op_type, shape), session_options(threads), ["CPUExecutionProvider"])
    return partial(session.run, None, {"a": np.ones(shape, np.float32)})


def _by_openvino(precision: str, op_type: str, shape: Shape, threads: int) -> Call | None:
    """Return OpenVINO's operator, in fp32 and the 16-bit types that it supports on this processor."""
    if precision not in ("fp32", *OPENVINO_TYPES):
        return None
    try:
        request = openvino_request(one_operator(op_type, shape), precision, threads)
    except UnavailableError:
        return None
    request.get_input_tensor().data[:] = 1
    return request.infer  # type: ignore[no-any-return]


LIBRARIES: dict[str, Callable[[str, str, Shape, int], Call | None]] = {
    "torch": _by_torch,
    "onnxruntime": _by_onnxruntime,
    "openvino": _by_openvino,
}
"""By name; each takes a precision, `MatMul` (of square matrices) or `Exp`, the shape of the operands and a number of
threads, and returns a call, or None."""
