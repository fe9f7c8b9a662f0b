"""Export an eager module to an ONNX graph, keeping its names and symbolic dims, at a fixed precision."""

from __future__ import annotations

import inspect
import itertools
import logging
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial, partialmethod
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram, export
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from attnforge.arrays import Array, to_numpy
from attnforge.bundle import DimSpec, TensorSpec
from attnforge.errors import CaptureError, first_line
from attnforge.export.attention.counted import counted, in_graph, in_program, missing
from attnforge.export.sources.onnx_check import check_operator
from attnforge.export.sources.programs import computed_by_torch, decomposed, promoted
from attnforge.export.sources.repair import optimise, repair, share_weights
from attnforge.export.sources.shapes import OPSET
from attnforge.export.sources.specs import Dims, note_example, output_dims, spec_of
from attnforge.export.sources.translations import translations
from attnforge.export.sources.widened import Float64
from attnforge.precision import Precision
from attnforge.quiet import quiet
from attnforge.runtime.backends import eager
from attnforge.runtime.backends.uncompiled import traced
from attnforge.runtime.cases import shape_of, sizes_at

log = logging.getLogger("attnforge")

DynamicShapes = Mapping[str, Any] | Sequence[Any] | None

FIRST_LOW, FIRST_HIGH = 47_468, 411_202
"""Seeds after which the first numbers of Python's and NumPy's generators are below 0.002, and above 0.998: a module
that drops a layer at random drops it after one of them."""

KEPT_ERROR = 2.0**-5
"""Relative to an output's largest number, how far rounding may change it in 16 bits."""

DATA: Callable[[Any], Tensor] = Tensor.data.__get__  # type: ignore[attr-defined]


@dataclass
class Captured:
    """An exported module that is ready to be canonicalised.

    Attributes:
        model: the graph, as torch's exporter wrote it.
        module: a copy of the module in eval mode, with floating-point weights in the precision's dtype.
        args: the example inputs, floating-point ones in the precision's dtype.
        inputs: name, dtype and dims of each input.
        outputs: name, dtype and dims of each output.
        precision: precision of weights, inputs and outputs.
        program: the program of torch.export, whose names the graph's values have.
        without_effect: the submodules of softmaxes and attention operators that ran, and without which the program
            computes the outputs: those that are constant, repeated, or not used.
        lost: the submodules of those that the program has and the graph lacks.
    """

    model: ir.Model
    module: nn.Module
    args: tuple[Tensor, ...]
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    precision: Precision
    program: ExportedProgram | None = None
    without_effect: Sequence[str] = ()
    lost: Sequence[str] = ()

    reference = "the torch module in eager mode"

    @property
    def example(self) -> dict[str, Array]:
        return {spec.name: to_numpy(spec.name, arg) for spec, arg in zip(self.inputs, self.args, strict=True)}

    def eager(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs of the module at the bundle's precision; 16-bit outputs as float32 and integers as float64, which
        represent them exactly (64-bit integers up to 2^53)."""
        with eager.products_in(self.precision):
            results = eager.run(self.module, inputs, eager.torch_dtype(self.precision))
        wide = {name: value.float() if value.is_floating_point() else value.double() for name, value in results.items()}
        return {name: to_numpy(name, value) for name, value in wide.items()}

    def exact(
        self, inputs: Mapping[str, Array], peaks: list[float] | None = None, noise: np.random.Generator | None = None
    ) -> dict[str, Array]:
        """Outputs with the same weights in float64 (:class:`~.widened.Float64`)."""
        results = self._float64(inputs, peaks, noise)
        limits = self.precision.with_own_limits
        return {name: limits(to_numpy(name, value.double())) for name, value in results.items()}

    def at(self, precision: Precision) -> Captured:
        """The same weights rounded to another precision; only :meth:`eager` of the result may be used."""
        return replace(self, module=eager.at_precision(self.module, precision), precision=precision)

    @cached_property
    def _float64(self) -> Float64:
        return Float64(self.module)


def capture(
    module: nn.Module,
    args: Sequence[Tensor] | Mapping[str, Tensor],
    dynamic_shapes: DynamicShapes,
    precision: Precision,
) -> Captured:
    """Export `module` in eval mode at `precision`. The module itself is not changed.

    Args:
        module: takes tensors and returns a tensor, or a tuple, list, dict or dataclass of them.
        args: example inputs, by position or by name; their sizes become the profile's `opt`.
        dynamic_shapes: as for `torch.export`: for every input a `{dim: torch.export.Dim}`, by name or by position. A
            Dim's `min` and `max` bound what the deployed model takes, which is at least 1.
        precision: dtype of weights, inputs and outputs.

    Raises:
        CaptureError: torch cannot run or export the module with these arguments, an argument is not a tensor, a Dim has
            no max, or a dim that was declared dynamic was exported as a constant.
    """
    copied = eager.at_precision(module, precision)
    names, args = _named(copied, args)
    shapes = _by_name(names, dynamic_shapes)
    dtype = eager.torch_dtype(precision)
    cast = tuple((arg.to(dtype) if arg.is_floating_point() else arg).clone() for arg in args)  # one given twice is two
    inputs = inputs_of(copied, cast, dynamic_shapes)
    is_dynamic = any(isinstance(dim, DimSpec) for spec in inputs for dim in spec.dims)
    in_signature = inspect.signature(copied.forward).bind_partial(*shapes.values()).arguments if shapes else None
    if any(isinstance(layer, nn.RNNBase) for layer in copied.modules()):
        torch._dynamo.reset()  # which keeps loops over tokens of earlier exports, and fixes sizes that it compares
    with quiet(), torch.no_grad(), eager.as_written(), _prepared_exporter():
        uncalled = eager.at_precision(copied, precision)
        answers, ran = _answers(copied, uncalled, cast, precision)
        renamed = [name for name in names if name in answers]
        answers = eager.named_outputs(answers, names)
        called = eager.at_precision(copied, precision)  # torch replaces the containers of what it exports
        copies: list[Callable[[], nn.Module]] = [lambda: called]
        if is_dynamic and _buffers(uncalled) != _buffers(copied):
            copies.insert(0, partial(_called_with_largest, eager.at_precision(copied, precision), cast, inputs))
        if is_dynamic:
            copies.insert(0, lambda: uncalled)
        program = _program(copies, cast, names, list(answers), in_signature)
    for name in renamed:
        log.warning("%s has an input %r: the output of that name is %r", type(module).__name__, name, eager.apart(name))
    model = program.model
    for value, name in zip(model.graph.outputs, answers, strict=True):
        value.name = name  # a value that is returned twice has the last of its names
    for node in model.graph:
        check_operator(node)
    exported = program.exported_program
    assert exported is not None
    _rename_symbols(model, symbols_of(exported, inputs))
    computed_by_torch(program)
    repair(model)
    share_weights(model)
    for value, spec, arg in zip(model.graph.inputs, inputs, cast, strict=True):
        value.name = spec.name  # one that is returned as it is has the name of an output
        note_example(spec, to_numpy(spec.name, arg))
    outputs = [spec_of(value, output_dims(value, inputs)) for value in model.graph.outputs]
    used, kept = in_program(exported), in_graph(model.graph)
    return Captured(
        model, copied, cast, inputs, outputs, precision, exported,
        without_effect=missing(ran, used | kept), lost=missing(used, kept),
    )  # fmt: skip


def _answers(
    module: nn.Module, uncalled: nn.Module, args: Sequence[Tensor], precision: Precision
) -> tuple[dict[str, Tensor], Any]:
    """What a module answers to the example, and the softmaxes and attention operators that ran.

    Args:
        module: is called.
        uncalled: a copy of it, which is not.
        args: the example.
        precision: that of both.

    Raises:
        CaptureError: it does not answer the same in every call, or is not the same function in every process.
    """
    name, dtype = type(module).__name__, eager.torch_dtype(precision)
    with _seeded(FIRST_LOW):
        answers = eager.outputs_of(module, [arg.clone() for arg in args], dtype)
    with _seeded(FIRST_HIGH), counted(module) as ran:
        again = eager.outputs_of(module, [arg.clone() for arg in args], dtype)
    if differing := [o for o, first in answers.items() if o not in again or not _is_same(first, again[o])]:
        raise CaptureError(
            f"{name} returns a different {differing[0]} when called again with the same inputs: it draws random "
            "numbers or keeps state between calls; disable dropout outside training"
        )
    if (changed := _kept_from_first_call(module, eager.at_precision(uncalled, precision), args, dtype)) is not None:
        raise CaptureError(
            f"{name} returns a different {changed} if it was called with other inputs before: it keeps state between "
            "calls, such as what it computed from its first inputs; compute that in every call"
        )
    if (stale := _kept_from_earlier_call(uncalled, precision, args, answers)) is not None:
        raise CaptureError(
            f"{name} keeps {stale!r} from a call before it was deployed, without which it returns something else; "
            "compute that in every call, or deploy the module before it is called"
        )
    return answers, ran


def _buffers(module: nn.Module) -> dict[str, torch.Size]:
    return {name: buffer.shape for name, buffer in module.named_buffers()}


def _called_with_largest(module: nn.Module, args: Sequence[Tensor], inputs: Sequence[TensorSpec]) -> nn.Module:
    """`module`, called with each dim in turn at its largest size: what it keeps for all sizes is as large."""
    usual, largest = (sizes_at(inputs, bound) for bound in ("opt", "max"))
    for symbol, size in largest.items():
        shapes = (shape_of(spec, {**usual, symbol: size}) for spec in inputs)
        larger = [arg.clone() for arg in args]
        for i, shape in enumerate(shapes):
            for axis, count in enumerate(shape):
                larger[i] = larger[i].index_select(axis, torch.arange(count) % args[i].shape[axis])
        eager.outputs_of(module, larger, torch.float32)
    return module


def _program(
    copies: Sequence[Callable[[], nn.Module]], args: Sequence[Tensor], names: list[str], outputs: list[str], shapes: Any
) -> Any:
    """The program of the first copy of a module that torch exports. One that was called may keep tables of the
    example's sizes, of which one that was not called computes those of any sizes.

    Raises:
        CaptureError: torch exports none.
    """
    last = copies[-1]()
    to_onnx = partial(
        torch.onnx.export, args=tuple(args), dynamo=True, opset_version=OPSET, dynamic_shapes=shapes, verbose=False,
        input_names=names, output_names=outputs, optimize=False, custom_translation_table=translations(),
    )  # fmt: skip
    # torch.onnx takes no quotient of sizes, such as those of two batches, for 1; torch.export does
    models: list[Callable[[], Any]] = [*copies, lambda: export(last, tuple(args), dynamic_shapes=shapes)]
    errors: list[Exception] = []
    for model in models:
        try:
            with _Data(), traced():
                program = to_onnx(model())
            assert program is not None
            optimise(program.model)
            return program
        except Exception as error:
            errors.append(error)
    raise CaptureError(f"torch cannot export {type(last).__name__}: {_why(errors[-2])}") from errors[-2]


class _Data(TorchFunctionMode):
    """Traces what a module writes to a tensor's `data` as written to the tensor; to torch, `data` is a constant. And
    fills a diagonal by a mask, since torch fixes the sizes of the matrix otherwise."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.fill_diagonal_ and len(args) == 2 and args[0].dim() == 2 and not kwargs:
            rows, columns = (torch.arange(size, device=args[0].device) for size in args[0].shape)
            return args[0].masked_fill_(rows[:, None] == columns, args[1])
        return args[0].detach() if func == DATA else func(*args, **(kwargs or {}))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed Python's and NumPy's generators for a block; what torch draws shows in the graph."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def inputs_of(module: nn.Module, args: Sequence[Tensor], dynamic_shapes: DynamicShapes) -> list[TensorSpec]:
    """The inputs that :func:`capture` would give a module, which is not exported. Arguments and errors are the same."""
    names = _input_names(module, args)
    shapes = _by_name(names, dynamic_shapes)
    return [
        TensorSpec(name=name, dtype=str(arg.dtype).removeprefix("torch."), dims=_dims(name, arg, shapes.get(name)))
        for name, arg in zip(names, args, strict=True)
    ]


@contextmanager
def _prepared_exporter() -> Iterator[None]:
    """Spare torch's exporter three kinds of work that take most of a small export: building its table of ONNX functions
    for each export, decomposing programs that have nothing to decompose, and tracing all operators once more to find
    the few whose operands are of several dtypes. All are private to torch."""
    from torch.onnx._internal.exporter import _fx_passes
    from torch.onnx._internal.exporter._registration import ONNXRegistry
    from torch.onnx._internal.fx.passes.type_promotion import _TypePromotionInterpreter as Promotion

    table = staticmethod(partial(_registry, ONNXRegistry.from_torchlib))
    decompose = partial(decomposed, _fx_passes.decompose_with_registry)
    with (
        patch.object(ONNXRegistry, "from_torchlib", table),
        patch.object(_fx_passes, "decompose_with_registry", decompose),
        patch.object(Promotion, "run_node", partialmethod(promoted, Promotion.run_node)),
    ):
        yield


def _registry(make: Callable[..., Any], *args: int, **kwargs: int) -> Any:
    """A copy of the table for an opset version, because exports with custom operators add to it."""
    registry = copy(_made_once(make, *args, **kwargs))
    registry.functions = {operator: [*known] for operator, known in registry.functions.items()}
    return registry


@cache
def _made_once(make: Callable[..., Any], *args: int, **kwargs: int) -> Any:
    return make(*args, **kwargs)


def _named(module: nn.Module, args: Sequence[Tensor] | Mapping[str, Tensor]) -> tuple[list[str], Sequence[Tensor]]:
    """The names of the example inputs, and the inputs in the order of forward's parameters."""
    if not isinstance(args, Mapping):
        return _input_names(module, args), args
    names = list(inspect.signature(module.forward).parameters)
    if sorted(names[: len(args)]) != sorted(args):
        raise CaptureError(
            f"example inputs were given for {', '.join(args)}; {type(module).__name__}.forward takes "
            f"{', '.join(names)}: give the first of these, without gaps"
        )
    return _named(module, [args[name] for name in names[: len(args)]])


def _input_names(module: nn.Module, args: Sequence[Tensor]) -> list[str]:
    """The names of forward's parameters that the example inputs are for."""
    for i, arg in enumerate(args):
        if not isinstance(arg, Tensor):
            raise CaptureError(
                f"example input {i} is {type(arg).__name__}; give tensors, in the order of forward's arguments"
            )
        if arg.is_complex():
            raise CaptureError(
                f"example input {i} is {str(arg.dtype).removeprefix('torch.')}; take real pairs, as torch.view_as_real "
                "makes them"
            )
    names: list[str] = []
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{i}" for i in range(len(args) - len(names))]
        elif parameter.kind not in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            names.append(parameter.name)
    if len(names) < len(args):
        raise CaptureError(
            f"{type(module).__name__}.forward takes {len(names)} inputs; {len(args)} examples were given"
        )
    return names[: len(args)]


def _by_name(names: list[str], dynamic_shapes: DynamicShapes) -> dict[str, Any]:
    """The dynamic shapes of every input by name; empty if nothing is dynamic."""
    if dynamic_shapes is None:
        return {}
    dynamic_shapes = _by_key(dynamic_shapes, names)
    if unknown := sorted({*map(str, dynamic_shapes)} - {*names}):
        raise CaptureError(f"dynamic_shapes names {', '.join(unknown)}; the inputs are {', '.join(names)}")
    return {name: dynamic_shapes.get(name) for name in names}


def _dims(name: str, arg: Tensor, shapes: Any) -> Dims:
    """The dims of one input: an int for a fixed dim, else the range of the Dim that is declared for it."""
    shapes = _by_key(shapes or {}, itertools.count())
    if unknown := [dim for dim in shapes if dim not in range(arg.dim())]:
        raise CaptureError(f"dynamic_shapes has dim {unknown[0]} of {name!r}, whose dims are 0 to {arg.dim() - 1}")
    dims: Dims = []
    for i, size in enumerate(arg.shape):
        dim = shapes.get(i)
        if dim is None or isinstance(dim, int):
            dims.append(size)
            continue
        root = getattr(dim, "root", dim)
        low, high = (getattr(dim, bound, None) for bound in ("min", "max"))
        if not (isinstance(low, int) and isinstance(high, int)) or high >= 2**62:
            dim_name = getattr(dim, "__name__", str(dim))
            raise CaptureError(
                f"dim {i} of input {name!r} ({dim_name}) has no upper bound; give torch.export.Dim(name, min=…, "
                "max=…), which becomes the optimization profile"
            )
        if not low <= size <= high:
            raise CaptureError(f"dim {i} of input {name!r} is {size} in the example, outside its Dim's {low} to {high}")
        factor = dim.fn(1) if root is not dim else 1
        if root is not dim and dim.fn(0) != 0:
            raise CaptureError(
                f"dim {i} of input {name!r} is {dim.__name__}; only multiples are supported as derived Dims"
            )
        # without samples or tokens, ONNX Runtime's Attention fails, and its recurrent layers end the process
        dims.append(DimSpec(symbol=root.__name__, factor=factor, min=low or factor, opt=size, max=high))
    return dims


def _by_key(shapes: Any, keys: Iterable[Any]) -> Mapping[Any, Any]:
    """Dynamic shapes that were given by key, or in the order of the keys."""
    if not isinstance(shapes, Mapping | Sequence):
        raise CaptureError(f"dynamic_shapes has {shapes!r} in place of a {{dim: torch.export.Dim}} for each input")
    return shapes if isinstance(shapes, Mapping) else dict(zip(keys, shapes, strict=False))


def symbols_of(exported: ExportedProgram, inputs: Sequence[TensorSpec]) -> dict[Any, str]:
    """The names of the inputs' dims by the symbols of the program that was exported with them.

    Raises:
        CaptureError: the exporter fixed a dim that was declared dynamic, or narrowed it to the multiples of a number.
    """
    names: dict[Any, str] = {}
    examples = {node.name: node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"}
    for name, spec in zip(exported.graph_signature.user_inputs, inputs, strict=True):
        for i, (size, dim) in enumerate(zip(examples[name].shape, spec.dims, strict=True)):
            if isinstance(dim, int):
                continue
            declared = f"dim {i} of input {spec.name!r} was declared dynamic ({dim.text}) but the export"
            if isinstance(size, int):
                raise CaptureError(
                    f"{declared} fixed it at {size}: the module's code depends on its value, as it does with len(x) in "
                    "place of x.shape[0], math.sqrt(n) in place of n**0.5 and int(n / 2) in place of n // 2; give "
                    f"{'an example size of at least 2' if size == 1 else 'no Dim for it'}"
                )
            multiple, symbol = size.node.expr.as_coeff_Mul()
            if multiple != dim.factor:
                raise CaptureError(
                    f"{declared} takes only multiples of {multiple}: the module's code depends on its value; give "
                    f"{multiple} * torch.export.Dim(…)"
                )
            names[symbol] = dim.symbol
    return names


def _rename_symbols(model: ir.Model, names: Mapping[Any, str]) -> None:
    """Rename the exporter's symbols (`s30` for the user's `4*rows`) to the user's names, in every shape."""
    aliases = {str(symbol): name for symbol, name in names.items()}
    pattern = re.compile("|".join(rf"\b{re.escape(alias)}\b" for alias in aliases) or r"(?!)")
    for value in (v for node in model.graph for v in node.outputs):
        if value.shape is None:
            continue
        value.shape = ir.Shape(
            d if isinstance(d, int) or d.value is None else pattern.sub(lambda m: aliases[m.group()], d.value)
            for d in value.shape
        )


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two outputs are bitwise equal; NaN is equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _kept_from_first_call(
    called: nn.Module, uncalled: nn.Module, args: Sequence[Tensor], dtype: torch.dtype
) -> str | None:
    """The first output that differs, of the reversed example, between a module that was called with the example and a
    copy that was not; None also if the module does not take the reversed example."""
    others = [arg.flip(tuple(range(arg.dim()))) for arg in args]
    try:
        expected = eager.outputs_of(uncalled, [arg.clone() for arg in others], dtype)
    except CaptureError:
        return None
    answers = eager.outputs_of(called, [arg.clone() for arg in others], dtype)
    return next((name for name, first in expected.items() if not _is_close(first, answers[name])), None)


def _kept_from_earlier_call(
    module: nn.Module, precision: Precision, args: Sequence[Tensor], answers: Mapping[str, Tensor]
) -> str | None:
    """The attribute whose tensors a call computes again if they are missing, and then answers something else; None if
    there is none. What a call does not compute again is a constant."""
    own, parts = vars(nn.Module()).keys(), (part for part in module.modules() if not isinstance(part, fx.GraphModule))
    attributes = (item for part in parts for item in vars(part).items() if item[0] not in own)
    for name in dict.fromkeys(name for name, value in attributes if _has_tensors(value)):
        for is_deleted in (False, True):
            other = eager.at_precision(module, precision)
            keeping = [vars(part) for part in other.modules() if _has_tensors(vars(part).get(name))]
            for part in keeping:
                value = part.pop(name)
                if not is_deleted:
                    part[name] = type(value)() if isinstance(value, dict | list) else None
            with suppress(CaptureError):
                answer = eager.outputs_of(other, [arg.clone() for arg in args], eager.torch_dtype(precision))
                is_other = answer.keys() != answers.keys() or any(
                    not _is_close(first, answer[output]) for output, first in answers.items()
                )
                if is_other and any(_has_tensors(part.get(name)) for part in keeping):
                    return name
                break
    return None


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def _is_close(a: Tensor, b: Tensor) -> bool:
    """Whether two outputs are equal but for rounding, which may differ where one was computed from kept results."""
    a, b = a.double(), b.double()
    largest = a.nan_to_num(0, 0, 0).abs().amax() if a.numel() else 0.0
    return a.shape == b.shape and torch.allclose(a, b, KEPT_ERROR, KEPT_ERROR * float(largest), equal_nan=True)


def _why(error: BaseException) -> str:
    """The first line of torch's own reason, which is at the end of a chain of exceptions, and where it arose."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = first_line(error)
    if unknown := re.match(r"No ONNX function found for <OpOverload\(op='(.+?)', overload='(.+?)'\)>", line):
        line = f"its exporter has no ONNX function for {'.'.join(unknown.groups())}; compute it by other operators"
    if values := re.match(r"Could not .* (data-dependent expression .*) \(unhinted: ", line):
        line = f"its code depends on values ({values[1]}); choose by torch.where, or deploy the part before it"
    if "must be bool, not SymBool" in line:
        line += "; write bool(…) around a comparison of sizes"
    if re.match(r"Unsupported attribute type: .*SymbolicTensor", line):
        line = "a constant of an operator, such as a convolution's groups, depends on a dynamic dim; give no Dim for it"
    return line + eager.raised_at(error)
