"""Turn an ONNX file into a graph of opset 23 in which every dim has a name, as :mod:`.torch_module` does with a module.

Files of other exporters compute sizes with chains of Shape, Gather and Concat, may be of an older opset, and give the
shapes of few values. Constants are folded, shapes are inferred with ONNX Runtime's symbolic inference, and every
dynamic dim of an input gets the range that the user gives.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes import common

from attnforge.arrays import Array, is_floating, to_numpy
from attnforge.bundle import Case, DimSpec, TensorSpec, dim_name
from attnforge.errors import BuildError, CaptureError, UsageError, first_line, raised_as, shortened
from attnforge.export.attention.roles import index_range
from attnforge.export.graphs.execute import Runner, as_it_is, at_own_precision, in_float64, wide
from attnforge.export.graphs.float64 import FIRST_OPSET, NoDoublePath
from attnforge.export.graphs.nodes import is_op, is_used, optional_input
from attnforge.export.graphs.types import DOUBLE, FLOAT, FLOATS, LOW, retype
from attnforge.export.sources import onnx_check
from attnforge.export.sources.repair import FUSED, repair, unfuse
from attnforge.export.sources.shapes import at_opset, fold, infer_shapes
from attnforge.export.sources.specs import Ranges, check_ranges, note_example, output_spec, spec_of
from attnforge.precision import Precision, precision_named
from attnforge.runtime.cases import make_inputs, shape_of, sizes_at

SMALL = 2**16
"""Bytes up to which a weight in another file is read immediately."""

_NAMES = {ir.DataType.FLOAT: "fp32", ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16"}
_SCOPES = "pkg.torch.onnx.name_scopes"


@dataclass
class Imported:
    """An ONNX graph that is ready to be canonicalised.

    The reference is the graph as it is in its file, run unoptimised on the CPU. At 16 bits, every operator of it
    computes in fp32 and its result is rounded to 16 bits, as ONNX Runtime itself runs the fp16 operators that it has no
    kernels for; for bf16 it has almost none.

    Attributes:
        model: the graph at opset 23, with the shape and type of every value.
        inputs: name, dtype and dims of each input.
        outputs: name, dtype and dims of each output.
        example: the example inputs.
        original: the graph as it is in the file, of any opset, at the precision.
        precision: the graph's own precision, or the one to which it was converted.
    """

    model: ir.Model
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    example: dict[str, Array]
    original: ir.Model
    precision: Precision

    reference = "the original ONNX graph, unoptimised on ONNX Runtime's CPU; there is no torch module"

    def eager(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs at the bundle's precision; 16-bit outputs as float32, which represents them exactly.

        Raises:
            CaptureError: the graph does not take inputs of these sizes or numbers, although its dims allow them.
        """
        return _run(self._eager, inputs)

    def exact(
        self, inputs: Mapping[str, Array], peaks: list[float] | None = None, noise: np.random.Generator | None = None
    ) -> dict[str, Array]:
        """Outputs in float64, with weights widened from the bundle's precision."""
        return {name: self.precision.with_own_limits(array) for name, array in _run(self._exact, inputs).items()}

    def at(self, precision: Precision) -> Imported:
        """The same weights rounded to another precision; only :meth:`eager` of the result may be used."""
        original = self.original.clone()
        retype(original, (FLOAT,), ir.DataType.from_numpy(precision.dtype))
        return replace(self, original=original, precision=precision)

    @cached_property
    def _eager(self) -> Runner:
        with raised_as(BuildError, "ONNX Runtime cannot run the graph as it was given"):
            return (at_own_precision if self.precision.is_low else as_it_is)(self.original)

    @cached_property
    def _exact(self) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
        """A function from float64 inputs to float64 outputs, by ONNX Runtime or else onnx's reference evaluator."""
        try:
            return in_float64(self.original, least_stays_least=True)
        except NoDoublePath as error:
            reason = str(error)
        except Exception as error:  # ONNX Runtime raises errors of several kinds for a graph that it refuses
            reason = first_line(error)
        with raised_as(BuildError, f"no float64 reference: ONNX Runtime: {reason}; onnx.reference"):
            double = self.original.clone()
            retype(double, [t for t in FLOATS if t != DOUBLE], DOUBLE)
            evaluator = ReferenceEvaluator(ir.to_proto(double))
        return lambda inputs: _evaluate(evaluator, inputs, reason)


def import_graph(
    file: str | os.PathLike[str],
    ranges: Ranges | None = None,
    precision: str | None = None,
    example: Sequence[Any] | Mapping[str, Any] | None = None,
) -> Imported:
    """Read an ONNX file.

    Args:
        file: the model, with its external data in the same folder.
        ranges: `{dim: (min, opt, max)}` for every dynamic dim of an input; if the three are equal, the dim is fixed.
        precision: name of a precision; by default the graph's own, which most of its weights have.
        example: arrays by name or in order. By default normal numbers at the dims' `opt`; integers below the size of
            the table that they index, else 0 and 1.

    Raises:
        UsageError: the file is not an ONNX model, the graph has control flow, random numbers or quantized numbers, or
            ranges are missing or invalid.
        BuildError: ONNX Runtime cannot run the graph, or no float64 reference can be computed.
    """
    with raised_as(UsageError, f"{file} cannot be read as a graph", "; run onnx.checker for details", (OSError,)):
        return _imported(Path(file), ranges or {}, precision, example)


def _imported(
    file: Path, ranges: Ranges, precision: str | None, example: Sequence[Any] | Mapping[str, Any] | None
) -> Imported:
    model = given = _read(file)
    is_old = (model.opset_imports.get("") or 0) < FIRST_OPSET
    if is_old or any(node.op_type == FUSED for node in model.graph):
        infer_shapes(given)  # onnx's converter flattens what a Softmax of opset 12 takes if its rank is not known
        model = given.clone()
        unfuse(model)
    if is_old:
        at_opset(model)
    usual = {name: opt for name, (_, opt, _) in ranges.items()}
    _name_dims(model, file.name, ranges)
    infer_shapes(model)
    onnx_check.check_growth(model, usual)  # after each step that makes more shapes known
    fold(model, floats=False)
    infer_shapes(model)
    onnx_check.check_growth(model, usual)
    _refuse(model)
    converted = None if model is given else model.clone()
    dtype = _float_type(given)
    chosen = precision_named(precision or _NAMES[dtype])
    if (wanted := ir.DataType.from_numpy(chosen.dtype)) != dtype:
        retype(model, LOW if dtype != FLOAT and wanted == FLOAT else (dtype,), wanted)
    dims = {name: DimSpec(symbol=name, min=low, opt=opt, max=high) for name, (low, opt, high) in ranges.items()}
    inputs = [_spec(value, dims) for value in model.graph.inputs]
    as_standard(model, lambda node: has_scores(node) and is_unlike_standard(node))
    original = model.clone()
    as_standard(original, is_unlike_standard)
    at_opset(model)
    fold(model)
    infer_shapes(model)
    fold(model)
    repair(model)
    common.NameFixPass()(model)
    _name_scopes(model)
    if unknown := [v.name for node in model.graph for v in node.outputs if v.shape is None or v.dtype is None]:
        logging.getLogger("attnforge").info("the shapes of %d values are not known: %s, …", len(unknown), unknown[0])
    outputs = [output_spec(value, inputs) for value in model.graph.outputs]
    onnx_check.check_growth(model, usual)
    imported = Imported(model, inputs, outputs, _example(inputs, example), original, chosen)
    if converted is not None:
        check_converted(given, converted, imported.example)
    imported.eager(imported.example), imported.exact(imported.example)  # raise if the graph cannot be run
    return imported


def _read(file: Path) -> ir.Model:
    if not file.is_file():
        raise UsageError(f"no file {str(file)!r}; give the path of an ONNX model")
    with raised_as(UsageError, f"{file} cannot be read as an ONNX model"):
        proto = onnx.load(file, load_external_data=False)
        onnx_check.check_files(proto, file.parent)
        onnx_check.check_names(proto.graph)
        model = ir.from_proto(proto)
    if not model.graph.outputs or not model.opset_imports:
        raise UsageError(f"{file} cannot be read as an ONNX model: it has no outputs")
    for tensor in onnx_check.tensors(model):
        if isinstance(tensor, ir.ExternalTensor):
            tensor.base_dir = file.parent.absolute()
    for value in model.graph.initializers.values():  # shapes, which inference would look for in the current folder
        if isinstance(value.const_value, ir.ExternalTensor) and value.const_value.nbytes <= SMALL:
            (value.const_value,) = ir.external_data.convert_tensors_from_external([value.const_value])
    onnx_check.check(model)
    common.InlinePass()(model)
    onnx_check.check_signatures(model)
    common.RemoveInitializersFromInputsPass()(model)
    common.NameFixPass()(model)
    return model


_QUANTIZED = (
    *("QuantizeLinear", "DequantizeLinear", "DynamicQuantize", "QLinear", "QAttention", "QGemm"),
    *("MatMulInteger", "MatMulNBits", "MatMulBnb4", "ConvInteger"),
)
"""Prefixes of the names of operators on quantized numbers."""


def _refuse(model: ir.Model) -> None:
    """Refuse a graph that is quantized, not a function of its inputs alone, has nested graphs, or operators of unknown
    domains.

    Raises:
        UsageError: it does.
    """
    for node in model.graph:
        if node.op_type.startswith(_QUANTIZED):
            raise UsageError(
                f"the graph has {node.op_type} ({node.name}), so there is no float64 reference to check it against; "
                "give the graph as it was before it was quantized"
            )
        onnx_check.check_operator(node)
        if node.domain not in onnx_check.KNOWN_DOMAINS:
            raise UsageError(
                f"the graph has {node.domain}::{node.op_type} ({node.name}), an operator of neither ONNX nor ONNX "
                "Runtime; export it with standard ones, or add a function that defines it"
            )


# --- dims -------------------------------------------------------------------------------------------------------------


def _name_dims(model: ir.Model, file: str, ranges: Ranges) -> None:
    """Give every dynamic dim of an input a name, or its size if its range is a single number.

    Raises:
        UsageError: an input has no shape, or the ranges do not match the dynamic dims.
    """
    first: dict[str, str] = {}
    for value in model.graph.inputs:
        if value.shape is None or value.dtype is None:
            raise UsageError(f"input {value.name!r} of {file} has no shape; export it with one")
        if value.dtype == ir.DataType.STRING:
            raise UsageError(f"input {value.name!r} of {file} takes strings; give a graph that takes their token ids")
        dims: list[int | ir.SymbolicDim] = []
        for i, dim in enumerate(value.shape):
            if isinstance(dim, int) and dim > 0:
                dims.append(dim)
                continue
            name = dim_name(None if isinstance(dim, int) else dim.value, str(value.name), i)
            first.setdefault(name, f"dim {i} of {value.name}")
            bounds = ranges.get(name)
            dims.append(bounds[0] if bounds and bounds[0] == bounds[2] else ir.SymbolicDim(name))
        value.shape = ir.Shape(dims)
    check_ranges(ranges, first, file)
    if missing := {name: where for name, where in first.items() if name not in ranges}:
        raise UsageError(
            f"{file} has dynamic dims without a range: {', '.join(f'{n} ({w})' for n, w in missing.items())}; give "
            f"each its least, usual and largest size: {' '.join(f'--dim {name}=1:4:16' for name in missing)} "
            f"(dynamic_shapes={{{', '.join(f'{name!r}: (1, 4, 16)' for name in missing)}}})"
        )


def _spec(value: ir.Value, dims: Mapping[str, DimSpec]) -> TensorSpec:
    """The spec of an input, given its dynamic dims; integers go from 0 to the last row of what they index."""
    assert value.dtype is not None and value.shape is not None
    spec = spec_of(value, [dim if isinstance(dim, int) else dims[str(dim.value)] for dim in value.shape])
    if value.dtype.is_integer():
        spec.low, spec.high = 0, (index_range(value) or (0, 1))[1]
    return spec


def _example(inputs: list[TensorSpec], values: Sequence[Any] | Mapping[str, Any] | None) -> dict[str, Array]:
    """The example inputs by name; the integer ranges of `inputs` are set from it.

    Raises:
        CaptureError: the example has other inputs, dtypes or shapes than the graph.
    """
    sizes = sizes_at(inputs, "opt")
    if values is None or len(values) == 0:
        return make_inputs(Case(name="example", sizes=sizes, kind="normal", seed=0), inputs, {})
    if not isinstance(values, Mapping):
        values = dict(zip((spec.name for spec in inputs), values, strict=False))
    if sorted(names := [spec.name for spec in inputs]) != sorted(map(str, values)):
        raise CaptureError(f"the example has {', '.join(values) or 'no inputs'}; the graph takes {', '.join(names)}")
    example: dict[str, Array] = {}
    for spec in inputs:
        array = to_numpy(spec.name, values[spec.name])
        if is_floating(array):
            array = array.astype(spec.dtype)
        opt = shape_of(spec, sizes)
        if array.dtype != np.dtype(spec.dtype) or array.shape != opt:
            raise CaptureError(
                f"the example of {spec.name!r} is {array.dtype}{list(array.shape)}; give {spec.dtype}{list(opt)}, with "
                "dynamic dims at their usual size"
            )
        note_example(spec, array)
        example[spec.name] = array
    return example


# --- precision and names ----------------------------------------------------------------------------------------------


def _float_type(model: ir.Model) -> ir.DataType:
    """The float type of most of the weights' numbers; without weights, that of the inputs."""
    counts: Counter[ir.DataType] = Counter()
    results = (node.outputs[0] for node in model.graph if node.op_type == "Constant")
    for tensor in map(ir.convenience.get_const_tensor, (*model.graph.initializers.values(), *results)):
        if tensor is not None:
            counts[tensor.dtype] += tensor.size
    floats = [d for d, _ in counts.most_common() if d in _NAMES]
    floats += [value.dtype for value in model.graph.inputs if value.dtype in _NAMES]
    if not floats:
        double = " except double ones" if DOUBLE in counts else ""
        raise UsageError(f"the graph has no float weights{double}; attnforge deploys fp32, fp16 and bf16 graphs")
    return floats[0]


def _name_scopes(model: ir.Model) -> None:
    """Record the module of each node, from the node's name if nothing else gives it: `/encoder/0/Softmax`."""
    for node in model.graph:
        if _SCOPES not in node.metadata_props and (parts := (node.name or "").split("/"))[0] == "" and len(parts) > 2:
            node.metadata_props[_SCOPES] = repr(["", ".".join(parts[1:-1]), parts[-1]])


# --- the graph as it is in its file -----------------------------------------------------------------------------------

CONVERSION = 2.0**-10
"""Relative to the largest number, how far the conversion of a graph's opset may change an output; in general it keeps
every bit."""


def has_scores(node: ir.Node) -> bool:
    """Whether the scores of an ai.onnx Attention are used."""
    return is_op(node, "Attention") and len(node.outputs) > 3 and is_used(node.outputs[3])


def is_unlike_standard(node: ir.Node) -> bool:
    """Whether ONNX Runtime 1.31 computes an ai.onnx Attention differently from the standard: it does not know windows,
    refuses a mask that is shorter than the keys, and its masked scores are the least number instead of minus infinity.
    """
    return is_op(node, "Attention") and bool(
        {"left_window_size", "right_window_size"} & set(node.attributes)
        or (optional_input(node, 3) is not None and optional_input(node, 6) is not None)
        or (has_scores(node) and node.attributes.get_int("qk_matmul_output_mode", 0) == 2)
    )


def as_standard(model: ir.Model, is_replaced: Callable[[ir.Node], bool]) -> None:
    """Replace operators of ai.onnx by the functions that the standard defines them by, in place. (ONNX's own inliner
    fails at nodes that omit an input.)"""
    for i, node in enumerate(list(filter(is_replaced, model.graph))):
        schema: Any = onnx.defs.get_schema(node.op_type, model.opset_imports[""])
        types = [b"" if value is None else ir.to_proto(value).type.SerializeToString() for value in node.inputs]
        body = schema.get_context_dependent_function_with_opset_version(
            schema.since_version, ir.to_proto(node).SerializeToString(), types
        )
        proto = onnx.FunctionProto.FromString(body)
        proto.domain, proto.name = "attnforge", f"{node.op_type}{i}"
        proto.output[:] = proto.output[: len(node.outputs)]
        for name in set(proto.output).difference(*(part.output for part in proto.node)):  # which the node omits
            proto.node.append(onnx.helper.make_node("Constant", [], [name], value_int=0))
        function = ir.from_proto(proto)
        model.functions[function.identifier()] = function
        node.domain, node.op_type, node.version = proto.domain, proto.name, None
        model.opset_imports[proto.domain] = 1
    common.InlinePass()(model)


def check_converted(given: ir.Model, converted: ir.Model, inputs: Mapping[str, Array]) -> None:
    """Check on some inputs that a graph which cannot be the reference itself computes the same after its conversion. Of
    both, what is in 16 bits is computed in fp32. The graphs are changed.

    Raises:
        BuildError: ONNX Runtime does not run the graph as it was given.
        UsageError: the conversion changed what it computes.
    """
    for model in (given, converted):
        retype(model, LOW, FLOAT)
    with raised_as(BuildError, "ONNX Runtime cannot run the graph as it was given"):
        before, after = as_it_is(given), as_it_is(converted)
    results = _run(after, inputs)
    for name, array in _run(before, inputs).items():
        expected, got = wide(array), wide(results[name])
        within = CONVERSION * np.abs(expected[np.isfinite(expected)]).max(initial=0) if is_floating(array) else 0
        if expected.shape != got.shape or not np.allclose(got, expected, rtol=0, atol=within, equal_nan=True):
            raise UsageError(
                f"onnx's converter changes the output {name!r} of the graph, of opset {given.opset_imports['']}; "
                f"export it with opset {FIRST_OPSET} or later"
            )


def _run(runner: Callable[[Mapping[str, Array]], dict[str, Array]], inputs: Mapping[str, Array]) -> dict[str, Array]:
    shapes = shortened(", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items()))
    failed = f"the graph does not run with {shapes}, which its dims allow"
    with raised_as(CaptureError, failed, "; give ranges that it takes"):
        return runner(inputs)


def _evaluate(evaluator: ReferenceEvaluator, inputs: Mapping[str, Array], reason: str) -> dict[str, Array]:
    """Run onnx's reference evaluator, and check that no operator fell back to fp32."""
    feeds = {name: wide(array) for name, array in inputs.items()}
    with raised_as(BuildError, f"no float64 reference: ONNX Runtime: {reason}; onnx.reference"):
        results: Any = evaluator.run(None, feeds, intermediate=True)
    types = {name: getattr(result, "dtype", None) for name, result in results.items()}
    for node in evaluator.nodes_:
        taken, made = ({types.get(name) for name in names} for names in (node.input, node.output))
        if np.dtype(np.float64) in taken and np.dtype(np.float32) in made:
            raise BuildError(f"no float64 reference: {reason}; onnx.reference computes {node.op_type} in fp32")
    return {name: np.asarray(results[name]) for name in evaluator.output_names}
