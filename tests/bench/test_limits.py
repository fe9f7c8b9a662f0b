"""Limits of latency: work counted by hand, by torch and from the graph, and measured ceilings."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from attnforge.bench.limits import Ceilings, Work, limit_seconds
from attnforge.bench.limits import ceilings as measuring
from attnforge.bench.limits.ceilings import LIBRARIES, measure_ceilings
from attnforge.bench.limits.work import SOFTMAX, work_of
from attnforge.bundle import CANONICAL
from attnforge.errors import UnknownNameError, UsageError
from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.precision import assign as mixed
from attnforge.export.sources.torch_module import Captured, capture
from attnforge.model import build_model
from attnforge.precision import precision_named
from attnforge.runtime import cases as reference
from attnforge.runtime.backends.registry import why_not_here
from tests.support.bundles import Deploy

pytestmark = pytest.mark.xdist_group("limits")

FEW = 512
"""Bytes of all shapes and axes in a graph, fewer than in any weight tensor here."""


@functools.cache
def canonical(name: str, **options: Any) -> Captured:
    """Return a registered model in fp32, canonical. Tests share it, so it must not be modified."""
    captured = capture(*build_model(name, **options), precision_named("fp32"))
    assert all(site.node is not None for site in canonicalize(captured.model).sites)
    return captured


def vit() -> Captured:
    return canonical("vit", num_layers=1)


def transformer() -> Captured:
    return canonical("transformer-encoder", num_layers=1)


def counted(captured: Captured, sizes: Mapping[str, int]) -> Work:
    """Return its work, after checking that nothing is uncounted."""
    work = work_of(captured.model, sizes)
    assert work.uncounted == []
    return work


def graph(inputs: str, body: str, outputs: str, values: str = "") -> ir.Model:
    """Return a graph from ONNX's text format, with the shapes of `values` between inputs and outputs."""
    imports = '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1, "local" : 1]>'
    return ir.from_onnx_text(f"{imports} g ({inputs}) => ({outputs}) <{values}> {{ {body} }}")


# Registered models: by hand, and as torch counts what eager does


@pytest.mark.parametrize(("batch", "rows", "cols"), [(1, 56, 56), (2, 7, 13)])
def test_patch_attention_by_hand(batch: int, rows: int, cols: int) -> None:
    captured = canonical("patch-attention", image_size=32, max_image_size=64)
    work = counted(captured, {"batch": batch, "rows": rows, "cols": cols})
    n, heads, d = rows * cols, 3, 64
    projections, products = 3 * 2 * n * 48 * 192, 2 * 2 * heads * n**2 * d
    assert work.products == {"fp32": batch * (projections + products)}
    assert work.exponentials == batch * heads * n**2
    assert work.others == SOFTMAX * batch * heads * n**2  # nothing else is computed
    assert work.inputs == 4 * batch * 3 * (4 * rows) * (4 * cols)
    assert work.outputs == 4 * batch * n * 192
    assert 0 <= work.weights - 4 * 3 * 48 * 192 < FEW
    assert work.intensity == work.flops / (work.weights + work.inputs + work.outputs)


@pytest.mark.parametrize("batch", [1, 5])
def test_vit_by_hand(batch: int) -> None:
    work = counted(vit(), {"batch": batch})
    n, d, classes = 65, 128, 10
    layer = 4 * 2 * n * d * d + 2 * 2 * n * d * (4 * d) + 2 * 2 * n**2 * d
    assert work.products == {"fp32": batch * (2 * 64 * 48 * d + layer + 2 * d * classes)}
    assert work.exponentials == batch * 4 * n**2
    assert (work.inputs, work.outputs) == (4 * batch * 3 * 32 * 32, 4 * batch * classes)
    norms, gelu, bias, residuals = 3 * n * d, n * 4 * d, 64 * d + (4 + 4 + 1) * n * d, (1 + 2) * n * d
    assert work.others == batch * (norms + gelu + bias + residuals) + SOFTMAX * work.exponentials


def test_transformer_encoder_by_hand() -> None:
    batch, n, d = 3, 17, 128
    work = counted(transformer(), {"batch": batch, "tokens": n})
    assert work.products == {"fp32": batch * (4 * 2 * n * d * d + 2 * 2 * n * d * (4 * d) + 2 * 2 * n**2 * d)}
    assert work.inputs == batch * n * (8 + 1)  # int64 tokens and a boolean mask
    longer = counted(transformer(), {"batch": batch, "tokens": n + 10})
    assert longer.weights - work.weights == 4 * d * 10 * (batch + 1)  # rows of the embedding, and of the positions


@pytest.mark.parametrize(
    ("captured", "sizes"),
    [
        (vit, {"batch": 3}),
        (transformer, {"batch": 2, "tokens": 48}),
        (transformer, {"batch": 5, "tokens": 9}),
        (functools.partial(canonical, "multi-head-attention"), {"batch": 2, "queries": 7, "keys": 19}),
        (functools.partial(canonical, "cross-attention"), {"batch": 3, "queries": 48, "keys": 5}),
    ],
    ids=["vit", "transformer-encoder", "transformer-encoder, short", "multi-head-attention", "cross-attention"],
)
def test_products_are_those_that_torch_counts(captured: Callable[[], Captured], sizes: dict[str, int]) -> None:
    model = captured()
    inputs = reference.make_inputs(reference.at(model.inputs, sizes), model.inputs, {})
    with FlopCounterMode(display=False) as counter:
        outputs = model.eager(inputs)
    work = counted(model, sizes)
    assert work.flops == counter.get_total_flops()
    assert work.inputs == sum(array.nbytes for array in inputs.values())
    assert work.outputs == sum(array.nbytes for array in outputs.values())


def test_a_bundles_graph_is_counted(registered: Deploy) -> None:
    bundle = registered("self-attention", "fp16")
    work = work_of(ir.load(bundle.file(CANONICAL)), {"batch": 2, "tokens": 48})
    assert work.uncounted == []
    assert work.products == {"fp16": 2 * (3 * 2 * 48 * 64 * 64 + 2 * 2 * 48**2 * 64)}
    assert work.inputs == work.outputs == 2 * 2 * 48 * 64
    assert 0 <= work.weights - 2 * 3 * 64 * 64 < FEW


def test_products_are_counted_by_precision() -> None:
    sizes = {"batch": 2}
    single = counted(vit(), sizes)
    low, both = vit().model.clone(), vit().model.clone()
    mixed.assign(low, ir.DataType.BFLOAT16, high=())
    mixed.assign(both, ir.DataType.FLOAT16, high=[str(node.name) for node in both.graph if node.op_type == "MatMul"])
    assert work_of(low, sizes).products == {"bf16": single.flops}
    assert 0 <= work_of(low, sizes).weights - single.weights // 2 < FEW
    attention_and_head = 2 * (2 * 2 * 65**2 * 128 + 2 * 128 * 10)
    assert work_of(both, sizes).products == {"fp16": attention_and_head, "fp32": single.flops - attention_and_head}


# Masks


class Masked(nn.Module):
    """Attention with a window, a window with padding, blocks, and a window whose width is an input."""

    def forward(self, x: Tensor, keep: Tensor, width: Tensor) -> tuple[Tensor, ...]:
        """Attention of `(batch, 2, tokens, 8)` tensors; `keep` is `(batch, tokens)`, `width` a scalar."""
        index = torch.arange(x.shape[2])
        back = index[:, None] - index
        window = (back >= 0) & (back < 5)
        blocks = index[:, None] // 4 == index // 4
        masks = (window, window & keep[:, None, None], blocks, (back >= 0) & (back < width))
        return tuple(nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask) for mask in masks)


def test_attention_counts_the_pairs_that_its_mask_is_proved_to_leave() -> None:
    batch, tokens = torch.export.Dim("batch", min=1, max=4), torch.export.Dim("tokens", min=2, max=64)
    args = (torch.zeros(2, 2, 9, 8), torch.ones(2, 9, dtype=torch.bool), torch.tensor(3))
    shapes = {"x": {0: batch, 2: tokens}, "keep": {0: batch, 1: tokens}, "width": None}
    captured = capture(Masked(), args, shapes, precision_named("fp32"))
    canonicalize(captured.model)
    for n in (2, 10, 33):
        back = np.subtract.outer(np.arange(n), np.arange(n))
        window = int(((back >= 0) & (back < 5)).sum())
        blocks = int(np.equal.outer(np.arange(n) // 4, np.arange(n) // 4).sum())
        work = counted(captured, {"batch": 3, "tokens": n})
        pairs = 3 * 2 * (2 * window + blocks + n * n)  # the last window's width is not in the graph
        assert work.exponentials == pairs
        assert work.products == {"fp32": 2 * pairs * (8 + 8)}


# Operators


@pytest.mark.parametrize(("n_q", "n_k"), [(5, 5), (3, 7), (7, 3), (1, 1)])
def test_causal_attention_counts_the_pairs_that_attend(n_q: int, n_k: int) -> None:
    operands = "float[b,4,q,16] query, float[b,2,k,16] key, float[b,2,k,8] value, bool[1,1,q,k] mask"
    causal, whole, masked = (
        work_of(
            graph(operands, f"y = Attention<is_causal={is_causal}>(query, key, value{mask})", "float[b,4,q,8] y"),
            {"b": 3, "q": n_q, "k": n_k},
        )
        for is_causal, mask in ((1, ""), (0, ""), (0, ", mask"))
    )
    pairs = 3 * 4 * int(np.tril(np.ones((n_q, n_k), dtype=int)).sum())
    assert (causal.exponentials, causal.others) == (pairs, SOFTMAX * pairs)
    assert causal.products == {"fp32": 2 * pairs * (16 + 8)}
    assert whole.products == masked.products == {"fp32": 2 * 3 * 4 * n_q * n_k * (16 + 8)}
    assert masked.inputs - whole.inputs == n_q * n_k  # an input that nothing reads does not count


def test_one_operation_an_element() -> None:
    model = graph(
        "float[n,6] x, int64[n,6] i",
        """
        w = Constant<value = float[6] {1, 1, 1, 1, 1, 1}>()
        a = LayerNormalization(x, w)  s = Softmax(a)  m = ReduceMean<keepdims = 0>(s, axis)  t = Tanh(m)
        j = Add(i, i)  k = Mul(j, i)  f = Cast<to = 1>(k)  y = Transpose(f)
        """,
        "float[n] t, float[6,n] y",
        "int64[1] axis = {1}, float[6] w, float[n,6] a, float[n,6] s, float[n] m, int64[n,6] j, int64[n,6] k, "
        "float[n,6] f",
    )
    work = work_of(model, {"n": 10})
    norm, softmax, mean, tanh, cast = 60, SOFTMAX * 60, 60, 10, 60
    assert work.others == norm + softmax + mean + tanh + cast  # integer operations do not count
    assert (work.exponentials, work.products, work.uncounted) == (60, {}, [])
    assert (work.weights, work.inputs, work.outputs) == (8 + 24, 60 * (4 + 8), 4 * 10 + 4 * 60)


def test_whole_numbers_without_a_type_are_counted_as_such() -> None:
    """Nodes that canonicalization adds to compute sizes have no types."""
    model = graph(
        "float[n,6] x",
        "a = Shape<start=0, end=1>(x) b = Mul(a, a) c = Div(b, a) r = Concat<axis=0>(c, six) y = Reshape(x, r)",
        "float[n,6] y",
        "int64[1] six = {6}",
    )
    work = work_of(model, {"n": 10})
    assert (work.others, work.uncounted) == (0, [])
    untyped = work_of(graph("float[n,6] x", "a = Mul(x, x) y = Add(a, x)", "float[n,6] y"), {"n": 10})
    assert (untyped.others, untyped.uncounted) == (60, ["Mul: the shape of 'a' is not known"])


def products() -> Iterator[tuple[str, str, str, int]]:
    """Yield inputs, operator, output, and operations as counted by torch or, where it does not count, by hand."""
    x, w = torch.randn(2, 6, 9, 10), torch.randn(8, 3, 3, 4)
    with FlopCounterMode(display=False) as counter:
        y = torch.conv2d(x, w, stride=2, padding=1, groups=2)
    dims = ",".join(map(str, y.shape))
    yield "float[2,6,9,10] x, float[8,3,3,4] w", "Conv(x, w)", f"float[{dims}] y", counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        z = torch.conv_transpose2d(x, v := torch.randn(6, 5, 3, 4), stride=2)
    dims, kernel = (",".join(map(str, shape)) for shape in (z.shape, v.shape))
    yield (
        f"float[2,6,9,10] x, float[{kernel}] w", "ConvTranspose(x, w)", f"float[{dims}] y", counter.get_total_flops()
    )  # fmt: skip
    yield "float[7,5] a, float[7,3] b, float[3] c", "Gemm<transA=1>(a, b, c)", "float[5,3] y", 2 * 7 * 5 * 3
    yield "float[5,7] a, float[3,7] b", "Gemm<transB=1>(a, b)", "float[5,3] y", 2 * 7 * 5 * 3
    yield "float[7] a, float[2,7,3] b", "MatMul(a, b)", "float[2,3] y", 2 * 2 * 7 * 3
    yield "float[2,5,7] a, float[7] b", "MatMul(a, b)", "float[2,5] y", 2 * 2 * 5 * 7
    yield "float[4,1,5,7] a, float[6,7,3] b", "MatMul(a, b)", "float[4,6,5,3] y", 2 * 4 * 6 * 5 * 7 * 3
    equation = 'Einsum<equation = "bnhd, bmhd -> bhnm">(a, b)'
    yield "float[2,5,4,8] a, float[2,6,4,8] b", equation, "float[2,4,5,6] y", 2 * 2 * 5 * 6 * 4 * 8


@pytest.mark.parametrize(("inputs", "operator", "output", "flops"), list(products()))
def test_products(inputs: str, operator: str, output: str, flops: int) -> None:
    work = work_of(graph(inputs, f"y = {operator}", output), {})
    assert (work.products, work.others, work.uncounted) == ({"fp32": flops}, 0, [])


@pytest.mark.parametrize(
    ("body", "outputs", "rows"),
    [
        ("y = Gather(table, ids)", "int64[n,8] y", 12),
        ("y = Slice(table, from, to)", "int64[3,8] y", 3),
        ("y = Gather(table, ids) z = Gather(table, more)", "int64[n,8] y, int64[5,8] z", 12 + 5),
        ("y = Gather(table, ids) z = Transpose(table)", "int64[n,8] y, int64[8,100] z", 100),
        ("y = Gather(table, ids) z = Gather(table, many)", "int64[n,8] y, int64[99,8] z", 100),
        ("y = GatherND(source, table)", "int64[100] y", 100),
        ("y = Identity(ids)", "int64[n] y", 0),
    ],
    ids=["gathered", "sliced", "twice", "read elsewhere", "more rows than there are", "as indices", "unused"],
)
@pytest.mark.parametrize("with_default", [False, True])
def test_tables_count_the_rows_that_are_gathered(body: str, outputs: str, rows: int, with_default: bool) -> None:
    inputs = "int64[n] ids, int64[5] more, int64[99] many, int64[2,2,2,2,2,2,2,2] source, int64[1] from, int64[1] to"
    model = graph(f"{inputs}, int64[100,8] table", body, outputs)
    table = model.graph.inputs[-1]
    table.const_value = ir.tensor(np.zeros((100, 8), np.int64))
    model.graph.register_initializer(table)
    if not with_default:  # a weight, not an input that callers may replace
        model.graph.inputs.pop()
    read = {
        value.name: value for node in model.graph for value in node.inputs if value is not None and value is not table
    }
    work = work_of(model, {"n": 12})
    assert (work.weights, work.uncounted) == (8 * 8 * rows, [])
    given = {"ids": 12, "more": 5, "many": 99, "source": 2**8, "from": 1, "to": 1}
    assert work.inputs == 8 * sum(given[str(name)] for name in read)


TABLE = f"float[4,2] table = {{{', '.join('12345678')}}}"


def test_a_table_that_is_given_back_counts_whole() -> None:
    model = graph("int64[1] ids", "y = Gather(table, ids)", "float[1,2] y", TABLE)
    assert work_of(model, {}).weights == 4 * 2
    model.graph.outputs.append(model.graph.initializers["table"])
    assert work_of(model, {}).weights == 4 * 8


def test_a_table_that_a_graph_within_reads_counts_whole() -> None:
    """It may run any number of times."""
    branches = [f"{name}_branch = {name}s () => (float[1,2] {name}) {{ {name} = Gather(table, ids) }}"
                for name in ("then", "else")]  # fmt: skip
    model = graph("bool c, int64[1] ids", f"y = If<{', '.join(branches)}>(c)", "float[1,2] y", TABLE)
    assert work_of(model, {}).weights == 4 * 8


BRANCHES = "then_branch = a () => (float[n] u) { u = Identity(x) }, else_branch = b () => (float[n] v) { v = Neg(x) }"


@pytest.mark.parametrize(
    ("inputs", "operator", "reason"),
    [
        ("bool c", f"If<{BRANCHES}>(c)", "If contains subgraphs"),
        ("", "com.microsoft.FastGelu(x)", "com.microsoft::FastGelu is not a standard operator"),
        ("float[1,4,n] w, float[1,4,4] r", "LSTM<hidden_size=1>(x, w, r)", "no rule for LSTM"),
        ("int32[n,2] i", "MatMul(i, i)", "a product of int32"),
        ("float[2,2] i", 'Einsum<equation = "ab,bc,cd->ad">(i, i, i)', "an Einsum that does not have two operands"),
        ("float[unknown] u", "Neg(u)", "the shape [unknown] of 'y' is not known"),
        ("float[1,n,8] q", "Attention<q_num_heads=2, kv_num_heads=2>(q, q, q)", "an Attention that is not canonical"),
        ("float[n] u", 'ScatterElements<reduction = "add">(x, i, u)', "no rule for ScatterElements"),
    ],
    ids=[
        "subgraph",
        "contrib",
        "no rule",
        "whole numbers",
        "three operands",
        "shape",
        "packed heads",
        "scattered sums",
    ],
)
def test_what_is_not_counted_is_named(inputs: str, operator: str, reason: str) -> None:
    output = "float[unknown] y" if "unknown" in inputs else "float[n] y"
    model = graph(f"float[n] x, {inputs}".rstrip(", "), f"[named] y = {operator} z = Exp(x)", f"{output}, float[n] z")
    work = work_of(model, {"n": 12})
    ((name, why), *rest) = [line.split(": ", 1) for line in work.uncounted]
    assert name == "named" and why.startswith(reason)
    assert [name for name, _ in rest] == (["u", "y"] if "unknown" in inputs else [])
    assert (work.others, work.products) == (12, {})  # the rest is counted


def test_functions_are_named() -> None:
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 23, "local" : 1]>
        g (float[n] x) => (float[n] y) { [mine] y = local.Twice(x) }
        <domain: "local", opset_import: ["" : 23]> Twice (a) => (b) { b = Add(a, a) }
    """)
    assert work_of(model, {"n": 12}).uncounted == ["mine: Twice is a function of the model"]


def test_a_size_that_is_not_given_is_named() -> None:
    work = work_of(vit().model, {})
    assert not work.products and not work.inputs and not work.outputs
    assert any(line.startswith("image: the shape [batch,3,32,32] of 'image'") for line in work.uncounted)


# The limit


WORK = Work(products={"fp32": 6_000, "bf16": 8_000}, weights=500, inputs=200, outputs=300)


def ceilings(bandwidth: float, **flops: float) -> Ceilings:
    return Ceilings(threads=1, flops=flops, bandwidth=bandwidth, exponentials=10.0)


def test_the_longer_time_is_the_limit() -> None:
    assert (WORK.flops, WORK.least_bytes, WORK.intensity) == (14_000, 1_000, 14.0)
    by_compute = limit_seconds(WORK, ceilings(250.0, fp32=1_000.0, bf16=4_000.0))
    assert (by_compute.compute_seconds, by_compute.memory_seconds) == (6.0 + 2.0, 4.0)
    assert (by_compute.seconds, by_compute.bound) == (8.0, "compute")
    by_memory = limit_seconds(WORK, ceilings(100.0, fp32=1_000.0, bf16=4_000.0))
    assert (by_memory.compute_seconds, by_memory.memory_seconds) == (8.0, 10.0)
    assert (by_memory.seconds, by_memory.bound) == (10.0, "memory")
    assert by_memory.share(40.0) == 0.25
    attention = WORK.model_copy(update={"exponentials": 50})
    assert limit_seconds(attention, ceilings(250.0, fp32=1_000.0, bf16=4_000.0)).compute_seconds == 8.0 + 5.0


def test_a_precision_without_a_ceiling_is_as_fast_as_fp32() -> None:
    assert limit_seconds(WORK, ceilings(1e9, fp32=1_000.0)).seconds == 6.0 + 8.0
    slow = ceilings(1e9, fp32=1_000.0, bf16=10.0)  # no unit for bf16, so it is computed in fp32
    assert limit_seconds(WORK, slow).seconds == 6.0 + 8.0
    with pytest.raises(UsageError, match="fp32"):
        limit_seconds(WORK, ceilings(1e9, bf16=1_000.0))


# The ceilings


def test_ceilings_are_numbers() -> None:
    measured = measure_ceilings(1, ("fp32", "fp64", "bf16"), seconds=0.01)
    assert measured.threads == 1 and list(measured.flops) == ["fp32", "fp64", "bf16"]
    assert all(0 < rate < math.inf for rate in (*measured.flops.values(), measured.bandwidth, measured.exponentials))
    assert Ceilings.model_validate_json(measured.model_dump_json()) == measured


def test_ceilings_are_of_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """If every run takes one second, the rate is the work of a run."""
    for name, value in {"PRODUCT_SIZES": (4, 8), "COPIED": 64, "CACHED": (8, 16)}.items():
        monkeypatch.setattr(measuring, name, value)
    monkeypatch.setattr("time.perf_counter", itertools.count().__next__)
    measured = measure_ceilings(2, ("fp32",), seconds=1000)
    assert measured.flops == {"fp32": 2 * 8**3}
    assert (measured.bandwidth, measured.exponentials) == (64 + 64, 2 * 16)
    assert measure_ceilings(2, ("fp32",), seconds=0).flops == {"fp32": 2 * 4**3}  # no time for a larger one


def test_the_ceiling_is_that_of_the_fastest_library(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"torch": {"fp32": 2.0, "bf16": 5.0}, "onnxruntime": {"fp32": 3.0}, "openvino": {"fp32": 1.0, "bf16": 4.0}}
    libraries = {name: lambda precision, *_, name=name: rates[name].get(precision) for name in rates}
    monkeypatch.setattr(measuring, "LIBRARIES", libraries)
    monkeypatch.setattr(measuring, "_rate", lambda rate, *_: rate if isinstance(rate, float) else 1.0)
    measured = measure_ceilings(1, ("fp32", "bf16"))
    assert measured.flops == {"fp32": 3.0, "bf16": 5.0} and measured.exponentials == 3.0
    assert measured.by == {"fp32": "onnxruntime", "bf16": "torch", "exponentials": "onnxruntime"}


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize(("op_type", "shape", "expected"), [("MatMul", (16, 16), 16.0), ("Exp", (16,), math.e)])
def test_each_library_computes(name: str, op_type: str, shape: tuple[int, ...], expected: float) -> None:
    call = LIBRARIES[name]("fp32", op_type, shape, 1)
    if name == "openvino" and call is None:
        pytest.skip(str(why_not_here("openvino")))
    assert call is not None
    made = call()
    result = next(iter(made)) if name == "onnxruntime" else made[0] if name == "openvino" else made  # type: ignore[call-overload,index]
    assert np.allclose(np.asarray(result), np.full(shape, expected), rtol=1e-5 if op_type == "Exp" else 0, atol=0)
    assert LIBRARIES["onnxruntime"]("bf16", op_type, shape, 1) is None


def test_the_best_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    runs = iter([4.0, 2.0, 5.0, 3.0])
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def call() -> None:
        clock[0] += next(runs)

    assert measuring._rate(call, 100, seconds=14.0) == 100 / 2.0
    assert next(runs, None) is None


def test_threads_are_those_asked_for_and_then_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def rate(*_: object) -> float:
        seen.append(torch.get_num_threads())
        return 1.0

    monkeypatch.setattr(measuring, "_rate", rate)
    measure_ceilings(before + 1, ("fp32",))
    assert set(seen) == {before + 1} and torch.get_num_threads() == before

    def fails(seconds: float) -> float:
        raise MemoryError

    monkeypatch.setattr(measuring, "_copy_rate", fails)
    with pytest.raises(MemoryError):
        measure_ceilings(before + 1, ())
    assert torch.get_num_threads() == before


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="int4"):
        measure_ceilings(1, ("int4",))
    with pytest.raises(UsageError, match="0 threads"):
        measure_ceilings(0)
