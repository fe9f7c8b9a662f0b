"""What a model's latency can be held against: the least work it is, and what this machine can do at best (a roofline).

Williams, Waterman and Patterson 2009, https://doi.org/10.1145/1498765.1498785. The work is counted in the canonical
graph, so it is the same whatever form a backend was given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from math import ceil, inf, prod
from typing import Literal

import onnx_ir as ir
import torch
from pydantic import Field

from attnforge.benchmarks.measure.products import DTYPES, LIBRARIES, Product
from attnforge.errors import UnknownNameError, UsageError
from attnforge.export.attention.layout import LayoutError, sizes_of
from attnforge.export.attention.operators import is_standard
from attnforge.export.lowering.tuning import Unmeasurable, evaluated
from attnforge.export.precision.assign import MOVERS
from attnforge.records import Record
from attnforge.runtime.turns import seconds_of


class Work(Record):
    """What a model has to compute and to move, once, at given sizes.

    Attributes:
        products: floating-point operations of matrix products, convolutions and attention, two a multiply-add, by the
            precision of what is multiplied.
        others: floating-point operations of all else: one an element of the result, of a reduction one an element of
            what is reduced, of a softmax :data:`SOFTMAX` a score.
        exponentials: of all softmaxes, those inside attention too.
        weights: bytes of the initializers and constants that are read, each once; of a table from which rows are
            gathered those rows alone. Shapes and axes are among them, a few bytes each.
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
        """What a program must move that keeps everything between inputs and outputs in caches."""
        return self.weights + self.inputs + self.outputs

    @property
    def intensity(self) -> float:
        """Floating-point operations a byte."""
        return self.flops / max(self.least_bytes, 1)


class Ceilings(Record):
    """What a machine was measured to do at best with so many threads.

    Attributes:
        flops: floating-point operations a second of a square matrix product, by precision.
        by: the library that reached them, by precision.
        bandwidth: bytes a second of copying in memory, read and written ones both counted.
        exponentials: a second, in fp32, of numbers that stay in the cache.
    """

    threads: int
    flops: dict[str, float]
    bandwidth: float
    exponentials: float
    by: dict[str, str] = Field(default_factory=dict)


class Limit(Record):
    """The least time that some work takes: that of its products or that of moving its bytes, whichever is longer.

    Bytes are taken to come from memory: a small model whose weights stay in the caches from call to call may take less
    than `memory_seconds`.
    """

    seconds: float
    compute_seconds: float
    memory_seconds: float
    bound: Literal["compute", "memory"]

    def share(self, seconds: float) -> float:
        """How much of the limit a run of so many seconds reaches; 1 is at the limit."""
        return self.seconds / seconds


def limit_seconds(work: Work, ceilings: Ceilings) -> Limit:
    """The least time that `work` takes on a machine of such `ceilings`.

    A precision without a ceiling is taken to be as fast as fp32, and 16 bits are no slower, for fp32 holds them.

    Raises:
        UsageError: nor has fp32 a ceiling.
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


# --- the work ---------------------------------------------------------------------------------------------------------


SOFTMAX = 5
"""Operations a score: compared for the maximum, less that, its exponential, added up, times the reciprocal."""

PRECISIONS = {
    ir.DataType.FLOAT: "fp32",
    ir.DataType.FLOAT16: "fp16",
    ir.DataType.BFLOAT16: "bf16",
    ir.DataType.DOUBLE: "fp64",
}

PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum")

READS_PART = ("Gather", "GatherElements", "GatherND", "Slice")
"""Operators that read of their first input no more than they give."""

FREE = MOVERS | {
    *("Compress", "Constant", "ConstantOfShape", "DepthToSpace", "Dropout", "EyeLike", "GatherND", "NonZero"),
    *("OneHot", "Range", "ReverseSequence", "ScatterElements", "ScatterND", "Shape", "Size", "SpaceToDepth", "Trilu"),
}
"""Operators that compute no floating-point numbers."""

REDUCTIONS = frozenset({
    *("ArgMax", "ArgMin", "AveragePool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LpPool", "MaxPool"),
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd"),
    *("ReduceSum", "ReduceSumSquare", "TopK"),
})  # fmt: skip

ELEMENTWISE = frozenset({
    *("Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BatchNormalization", "BitShift"),
    *("BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Cos"),
    *("Cosh", "CumProd", "CumSum", "DequantizeLinear", "Div", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu"),
    *("Greater", "GreaterOrEqual", "GroupNormalization", "HardSigmoid", "HardSwish", "InstanceNormalization", "IsInf"),
    *("IsNaN", "LayerNormalization", "LeakyRelu", "Less", "LessOrEqual", "Log", "LpNormalization", "Max", "Mean"),
    *("MeanVarianceNormalization", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow", "QuantizeLinear"),
    *("RMSNormalization", "Reciprocal", "Relu", "Resize", "RotaryEmbedding", "Round", "Selu", "Shrink", "Sigmoid"),
    *("Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tan", "Tanh", "ThresholdedRelu"),
    *("Where", "Xor"),
})  # fmt: skip


class Uncountable(Exception):
    """Why it is not known what an operator computes, or how large a tensor is."""


def work_of(model: ir.Model, sizes: Mapping[str, int]) -> Work:
    """Count the work of a model.

    Causal attention counts the pairs of query and key that attend; with a mask, all count.

    Args:
        model: canonical; every value has its shape.
        sizes: of the symbolic dims.
    """
    graph, work = model.graph, Work()
    floats = _floats(graph)
    for node in graph:
        try:
            _count(work, model, node, floats, sizes)
        except Uncountable as reason:
            work.uncounted.append(f"{node.name or node.op_type}: {reason}")

    def total(values: Iterable[ir.Value], bytes_of: Callable[[ir.Value], int]) -> int:
        found = 0
        for value in values:
            try:
                found += bytes_of(value)
            except Uncountable as reason:
                work.uncounted.append(f"{value.name}: {reason}")
        return found

    constants = [node.outputs[0] for node in graph if node.op_type == "Constant"]
    inputs = [v for v in graph.inputs if v.uses() and v.name not in graph.initializers]
    work.weights = total((*graph.initializers.values(), *constants), lambda v: _read(v, graph, sizes))
    work.inputs = total(inputs, lambda v: _bytes(v, v.dtype, sizes))
    work.outputs = total(graph.outputs, lambda v: _bytes(v, v.dtype, sizes))
    return work


def _floats(graph: ir.Graph) -> set[ir.Value]:
    """The values that hold floating-point numbers. Of one without a type, what it is made of tells."""
    found = {v for v in (*graph.inputs, *graph.initializers.values()) if v.dtype and v.dtype.is_floating_point()}
    for node in graph:
        made_of_floats = any(v in found for v in node.inputs) and node.op_type not in ("Shape", "Size")
        for v in node.outputs:
            if v.dtype.is_floating_point() if v.dtype is not None else made_of_floats:
                found.add(v)
    return found


def _count(work: Work, model: ir.Model, node: ir.Node, floats: Collection[ir.Value], sizes: Mapping[str, int]) -> None:
    """Add what one operator computes.

    Raises:
        Uncountable: it is not known; nothing was added.
    """
    op_type = node.op_type
    if (why := _why_opaque(model, node)) is not None:
        raise Uncountable(why)
    if op_type in FREE and node.attributes.get_string("reduction", "none") == "none":
        return
    if op_type in REDUCTIONS | ELEMENTWISE and not any(v in floats for v in (*node.inputs, *node.outputs)):
        return
    if op_type == "Attention":
        scores, flops = _attention(node, sizes)
        _add_product(work, node, flops)
        work.others += SOFTMAX * scores
        work.exponentials += scores
    elif op_type in PRODUCTS:
        _add_product(work, node, _product(node, sizes))
    elif op_type in ("Softmax", "LogSoftmax"):
        scores = prod(_shape(node.outputs[0], sizes))
        work.others += SOFTMAX * scores
        work.exponentials += scores
    elif op_type in REDUCTIONS:
        work.others += prod(_shape(node.inputs[0], sizes))
    elif op_type in ELEMENTWISE:
        work.others += prod(_shape(node.outputs[0], sizes))
    else:
        raise Uncountable(f"no rule for {op_type}")


def _why_opaque(model: ir.Model, node: ir.Node) -> str | None:
    """Why it cannot be seen what a node computes, or None."""
    if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
        return f"{node.op_type} holds graphs of its own"
    if node.op_identifier() in model.functions:
        return f"{node.op_type} is a function of the model"
    return f"{node.domain}::{node.op_type} is no standard operator" if node.domain else None


def _add_product(work: Work, node: ir.Node, flops: int) -> None:
    dtype = node.inputs[0].dtype if node.inputs[0] is not None else None
    if dtype not in PRECISIONS:
        raise Uncountable(f"a product of {str(dtype).lower() if dtype is not None else 'an unknown type'}")
    work.products[PRECISIONS[dtype]] = work.products.get(PRECISIONS[dtype], 0) + flops


def _attention(node: ir.Node, sizes: Mapping[str, int]) -> tuple[int, int]:
    """How many scores an Attention node has that are needed, and the operations of its two products."""
    if not is_standard(node):
        raise Uncountable("an Attention that is not canonical")
    (batch, heads, n_q, d_k), (_, _, n_k, _), (_, _, _, d_v) = (_shape(v, sizes) for v in node.inputs[:3])
    pairs = n_q * n_k
    if node.attributes.get_int("is_causal", 0):  # the query at i attends to the keys up to i
        rows = min(n_q, n_k)
        pairs = rows * (rows + 1) // 2 + (n_q - rows) * n_k
    scores = batch * heads * pairs
    return scores, 2 * scores * (d_k + d_v)


def _product(node: ir.Node, sizes: Mapping[str, int]) -> int:
    """Floating-point operations of a matrix product or convolution; what padding adds to these counts as well."""
    if node.op_type == "Einsum":
        return _einsum(node, sizes)
    a, b = (_shape(v, sizes) for v in node.inputs[:2])
    if node.op_type == "ConvTranspose":
        return 2 * prod(a) * prod(b[1:])
    result = prod(_shape(node.outputs[0], sizes))
    if node.op_type == "Conv":
        return 2 * result * prod(b[1:])
    return 2 * result * (a[0] if node.op_type == "Gemm" and node.attributes.get_int("transA") == 1 else a[-1])


def _einsum(node: ir.Node, sizes: Mapping[str, int]) -> int:
    """A multiply-add for every combination of indices of two operands; of more, their order would have to be known."""
    terms = node.attributes["equation"].as_string().replace(" ", "").partition("->")[0].split(",")
    if len(terms) != 2 or any("..." in term for term in terms):
        raise Uncountable("an Einsum of other than two operands whose indices are all named")
    shapes = [_shape(v, sizes) for v in node.inputs]
    named = [pair for term, shape in zip(terms, shapes, strict=True) for pair in zip(term, shape, strict=True)]
    return 2 * prod(dict(named).values())


def _shape(value: ir.Value | None, sizes: Mapping[str, int]) -> list[int]:
    assert value is not None
    try:
        return [evaluated(size, sizes) for size in sizes_of(value)]
    except LayoutError as error:
        raise Uncountable(str(error)) from error
    except Unmeasurable as error:
        raise Uncountable(f"the shape {value.shape} of {value.name!r} is not known") from error


def _bytes(value: ir.Value, dtype: ir.DataType | None, sizes: Mapping[str, int]) -> int:
    if dtype is None or dtype == ir.DataType.STRING:
        raise Uncountable("elements of no known size")
    return ceil(prod(_shape(value, sizes)) * dtype.bitwidth / 8)


def _read(weight: ir.Value, graph: ir.Graph, sizes: Mapping[str, int]) -> int:
    """Bytes that are read of a weight: all, or what is gathered where nothing else is done with it, or none."""
    tensor = ir.convenience.get_const_tensor(weight)
    if tensor is None:
        raise Uncountable("an initializer without a value")
    partial_reads = [
        node for node, i in weight.uses() if i == 0 and node.op_type in READS_PART and node.graph is graph
    ]  # a graph within may run any number of times
    if len(partial_reads) < len(weight.uses()) or weight.is_graph_output():
        return tensor.nbytes
    return min(tensor.nbytes, sum(_bytes(node.outputs[0], tensor.dtype, sizes) for node in partial_reads))


# --- the ceilings -----------------------------------------------------------------------------------------------------


PRODUCT_SIZES = (256, 512, 1024, 2048)
"""Rows of the square matrices. The least ones tell whether there is time for the next."""

COPIED = 2**27
"""Bytes of what is copied, and of what it is copied to: more than a core has of any cache."""

CACHED = (2**15, 2**16, 2**17)
"""Numbers a thread: with their exponentials 256 KiB to 1 MiB, which second-level caches hold. Torch gives no thread
fewer."""

FEWEST_RUNS = 3


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
    if threads < 1:
        raise UsageError(f"{threads} threads were asked for; give 1 or more")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        best = {precision: _fastest_product(precision, threads, seconds) for precision in precisions}
        return Ceilings(
            threads=threads,
            flops={precision: rate for precision, (rate, _) in best.items()},
            bandwidth=_copy_rate(seconds),
            exponentials=_exponential_rate(threads, seconds),
            by={precision: library for precision, (_, library) in best.items()},
        )
    finally:
        torch.set_num_threads(before)


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
        best = max(best, best_rate(partial(seconds_of, product), flops, left / (len(PRODUCT_SIZES) - i)))
    return best


def _copy_rate(seconds: float) -> float:
    source, target = torch.ones(2, COPIED // 4)
    return best_rate(partial(seconds_of, partial(target.copy_, source)), 2 * COPIED, seconds)


def _exponential_rate(threads: int, seconds: float) -> float:
    best = 0.0
    for numbers in CACHED:
        x = torch.linspace(-10, 0, threads * numbers)
        call = partial(torch.exp, x, out=torch.empty_like(x))
        best = max(best, best_rate(partial(seconds_of, call), x.numel(), seconds / len(CACHED)))
    return best


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
