"""The fastest form of attention over a cache on this machine, for one token after many and for a prompt.

One graph serves both, so it has one form: the fastest for a prompt and as many single tokens after it. A site is
measured alone, its caches input and output in one buffer, as a decoder's are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.arrays import Array
from attnforge.export.attention.canonical import attention_node
from attnforge.export.graphs.build import Builder, constant, typed
from attnforge.export.graphs.execute import open_session
from attnforge.export.graphs.qdq import INT8, InInt8
from attnforge.export.lowering.attention import Attention, attention_of
from attnforge.export.lowering.cached import step_mask
from attnforge.export.lowering.tuning import (
    ONNX_RUNTIME,
    ROUNDS,
    Candidate,
    FormChoice,
    Unmeasurable,
    agreeing,
    evaluated,
)
from attnforge.runtime.race import ALIKE, medians

INT64 = ir.DataType.INT64

SITE = "site"
"""The name of the measured node."""

Write = Callable[[ir.Graph, Attention, Candidate], None]
"""Replaces a site by a form."""


def signature(a: Attention, sizes: Mapping[str, int]) -> Hashable:
    """Identify the work of a site: equal for two sites that one measurement serves."""
    assert a.cached is not None
    heads = tuple(evaluated(a.size(name), sizes) for name in ("H", "H_kv", "d_k", "d_v", "n_q", "n_k"))
    return heads, a.cached.seen, a.cached.in_int8 is not None, a.dtype, a.scale, a.softcap, a.softmax_dtype


def measured(
    a: Attention,
    candidates: Sequence[Candidate],
    ruled: FormChoice,
    sizes: Mapping[str, int],
    seconds: float,
    write: Write,
) -> FormChoice:
    """The form that is fastest for a prompt and as many single tokens after it.

    Args:
        a: the site, in a decoder step.
        candidates: its forms; the first is the reference that the others are checked against.
        ruled: the form that the rules choose; it is kept if it is as fast as the best.
        sizes: the usual size of each symbolic dim, which gives the prompt's number of tokens.
        seconds: time for measuring.
        write: replaces the site by a form.

    Raises:
        Unmeasurable: ONNX Runtime runs none of the forms.
    """
    capacity, tokens = evaluated(a.size("n_k"), sizes), max(evaluated(a.size("n_q"), sizes), 2)
    work = {"token": (1, capacity // 2), "prompt": (min(tokens, capacity), 0)}
    times: dict[str, dict[str, float]] = {}
    dropped: dict[str, str] = {}
    for kind, (count, past) in work.items():
        model, feeds = _alone(a, sizes, count), _feeds(a, sizes, count, past)
        opened = partial(_opened, model=model, feeds=feeds, write=write)
        runs, refused = agreeing(candidates, opened, ONNX_RUNTIME.name)
        dropped |= refused
        times[kind] = medians(runs, ROUNDS, seconds / 2)
    forms = [form for form in times["token"] if form in times["prompt"] and form not in dropped]
    if not forms:
        raise Unmeasurable("; ".join(dropped.values()))
    count, _ = work["prompt"]
    together = {form: times["prompt"][form] + count * times["token"][form] for form in forms}
    best = min(forms, key=lambda form: together[form])
    chosen = ruled.form if together.get(ruled.form, np.inf) <= ALIKE * together[best] else best
    timings = [_timing(kind, count, past, times[kind], chosen, forms) for kind, (count, past) in work.items()]
    why = f"measured: {'; '.join(timings)}" + "".join(f"; not {form}: {reason}" for form, reason in dropped.items())
    return FormChoice(chosen, why, {form: times["token"][form] for form in forms}, dropped)


def _timing(kind: str, count: int, past: int, times: Mapping[str, float], chosen: str, forms: Sequence[str]) -> str:
    work = f"a token after {past:,}" if kind == "token" else f"a prompt of {count:,}"
    others = ", ".join(f"{form} {times[form]:.3f}" for form in forms if form != chosen)
    return f"{times[chosen]:.3f} ms for {work}" + (f" against {others}" if others else "")


def _opened(
    candidate: Candidate, model: ir.Model, feeds: Mapping[str, Array], write: Write
) -> tuple[Callable[[], Any], Array]:
    """A run of a site in one form that writes its caches in place, and the array of its output."""
    model = model.clone()
    node = next(node for node in model.graph if node.name == SITE)
    write(model.graph, attention_of(node), candidate)
    RemoveUnusedNodesPass()(model)
    session = open_session(model, optimised=True)
    binding = session.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    taken = {value.name for value in session.get_inputs()}
    for name, value in values.items():
        if name in taken:
            binding.bind_ortvalue_input(name, value)
    answer = model.graph.outputs[0].shape
    assert answer is not None
    shape = answer.numpy()
    output = np.zeros(shape, np.float32)
    binding.bind_ortvalue_output("output", ort.OrtValue.ortvalue_from_numpy(output))
    for name in ("key", "value"):
        binding.bind_ortvalue_output(f"{name}.next", values[f"{name}_cache"])
    session.run_with_iobinding(binding)
    return partial(session.run_with_iobinding, binding), output


def _sizes(a: Attention, sizes: Mapping[str, int]) -> tuple[int, int, int, int, int]:
    """Number of heads and of heads of keys and values, sizes of keys and values, and capacity of the cache."""
    heads, shared, d_k, d_v, capacity = (evaluated(a.size(name), sizes) for name in ("H", "H_kv", "d_k", "d_v", "n_k"))
    return heads, shared, d_k, d_v, capacity


def _alone(a: Attention, sizes: Mapping[str, int], tokens: int) -> ir.Model:
    """A canonical step of one site and one sample, with heads side by side in its inputs and output."""
    heads, shared, d_k, d_v, capacity = _sizes(a, sizes)
    op, cached = Builder(), a.cached
    assert cached is not None

    def taken(name: str, dtype: ir.DataType, *dims: int) -> ir.Value:
        return typed(ir.Value(name=name), dtype, dims)

    def apart(value: ir.Value, count: int, size: int) -> ir.Value:
        split = typed(op.Reshape(value, constant(op, [1, tokens, count, size])), a.dtype, [1, tokens, count, size])
        return typed(op.Transpose(split, perm=[0, 2, 1, 3]), a.dtype, [1, count, tokens, size])

    ids, past = taken("tokens", INT64, 1, tokens), taken("past", INT64, 1)
    query = taken("query", a.dtype, 1, tokens, heads * d_k)
    inputs, outputs, read = [ids, past, query], [], []
    kept = INT8 if cached.in_int8 is not None else a.dtype
    for which, (name, size) in enumerate((("key", d_k), ("value", d_v))):
        new, cache = (
            taken(f"new_{name}", a.dtype, 1, tokens, shared * size),
            taken(f"{name}_cache", kept, 1, shared, capacity, size),
        )
        inputs += [new, cache]
        rows = apart(new, shared, size)
        rounded = None if cached.in_int8 is None else InInt8.of(op, rows, cached.in_int8[which].scale)
        written = op.op("TensorScatter", [cache, rows if rounded is None else rounded.stored, past], {"axis": 2})
        written.name = f"{name}.next"
        outputs.append(typed(written, kept, [1, shared, capacity, size]))
        read.append(written if rounded is None else rounded.restored(op, written))
    positions = typed(
        op.Add(op.Unsqueeze(past, constant(op, [1])), constant(op, [list(range(tokens))])), INT64, [1, tokens]
    )
    mask = step_mask(op, positions, cached.seen, capacity, a.dtype)
    result = attention_node(
        op, SITE, apart(query, heads, d_k), read[0], read[1], mask, scale=a.scale, softcap=a.softcap,
        softmax_precision=a.softmax_dtype.value if a.softmax_dtype != a.dtype else 0,
    )  # fmt: skip
    node = result.producer()
    assert node is not None
    node.metadata_props.update(cached.seen.metadata)
    rows = typed(op.Transpose(result, perm=[0, 2, 1, 3]), a.dtype, [1, tokens, heads, d_v])
    answer = typed(op.Reshape(rows, constant(op, [1, tokens, heads * d_v])), a.dtype, [1, tokens, heads * d_v])
    answer.name = "output"
    opsets = {"": 24, "com.microsoft": 1}
    graph = ir.Graph(inputs, [answer, *outputs], nodes=op.nodes, opset_imports=opsets, name=SITE)
    return ir.Model(graph, ir_version=11)


def _feeds(a: Attention, sizes: Mapping[str, int], tokens: int, past: int) -> dict[str, Array]:
    """Random inputs of a site alone, whose scores are of magnitude one."""
    heads, shared, d_k, d_v, capacity = _sizes(a, sizes)
    assert a.cached is not None
    rng = np.random.default_rng(0)
    arrays: dict[str, Array] = {
        "tokens": np.zeros((1, tokens), np.int64),
        "past": np.array([past]),
        "query": rng.standard_normal((1, tokens, heads * d_k), np.float32) / np.float32(a.scale * d_k**0.5),
    }
    for which, (name, size) in enumerate((("key", d_k), ("value", d_v))):
        arrays[f"new_{name}"] = rng.standard_normal((1, tokens, shared * size), np.float32)
        cache = rng.standard_normal((1, shared, capacity, size), np.float32)
        if a.cached.in_int8 is not None:
            cache = np.clip(np.rint(cache / a.cached.in_int8[which].scale), -127, 127).astype(np.int8)
        arrays[f"{name}_cache"] = cache
    return arrays
