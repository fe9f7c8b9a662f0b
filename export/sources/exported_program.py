"""Turn exported programs into modules again, with their example inputs and dynamic dims."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._higher_order_ops import flex_attention
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from attnforge.errors import CaptureError, UntrustedError, UsageError, raised_as
from attnforge.export.sources.specs import Ranges, check_ranges
from attnforge.quiet import quiet

M = TypeVar("M", bound=nn.Module)

UNREADABLE = "cannot be read as an exported program"

_PRECISIONS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class Opened(NamedTuple):
    """An exported program in the form that :func:`~attnforge.export.sources.torch_module.capture` takes.

    Attributes:
        module: takes the program's tensors by position.
        args: the program's example inputs.
        dynamic_shapes: a Dim for every dynamic dim of an input, by the input's name.
        precision: name of the precision of the weights.
    """

    module: nn.Module
    args: tuple[Tensor, ...]
    dynamic_shapes: dict[str, dict[int, Any]]
    precision: str


def load_program(file: Path, trusted: bool = False) -> ExportedProgram:
    """Load the program in a `.pt2` file. torch may execute what it reads there: pickles, sizes, names, libraries.

    Args:
        file: the file, which needs the same trust as a program.
        trusted: whether the caller trusts its author; otherwise nothing of the file is read.

    Raises:
        UntrustedError: `trusted` is False.
        UsageError: the file does not exist, or is not a program that this torch can read.
    """
    if not file.is_file():
        raise UsageError(f"no file {str(file)!r}; give the path of a program that torch.export.save wrote")
    if not trusted:
        raise UntrustedError(
            f"{file} is a .pt2 file, from which torch may run code with your permissions; if you trust its author, "
            "pass --trust-source (trust_source=True)"
        )
    with raised_as(UsageError, f"{file} {UNREADABLE}"), quiet():
        return torch.export.load(file)


def open_program(program: ExportedProgram, ranges: Ranges | None = None) -> Opened:
    """Turn `program` into a module that takes its tensors by position, with its own example inputs.

    A dynamic dim is named after the first input that has it (`x_dim0`), because programs do not keep the names of Dims.

    Args:
        program: a program exported in eval mode; is not changed.
        ranges: `{dim: (min, opt, max)}`, for dims without an upper bound, or to replace a bound. `opt` is the example's
            size.

    Raises:
        UsageError: the program has no example inputs, was exported in training mode or cannot be read, or a range is
            missing or invalid.
    """
    module, example = as_module(program)
    with raised_as(UsageError, f"the program {UNREADABLE}"), quiet():
        dims = _dims(program, example, ranges or {})
        return Opened(module, tuple(example.values()), dims, _PRECISIONS[module.float_type])


def as_module(program: ExportedProgram) -> tuple[Program, dict[str, Tensor]]:
    """Turn `program` into a module that takes its tensors by position; return it with its example inputs by name.

    Raises:
        UsageError: the program has no example inputs, was exported in training mode, or cannot be read.
    """
    if program.example_inputs is None:
        raise UsageError(
            "the program has no example inputs; export it again with torch.export.export, which keeps them"
        )
    for node in program.graph.nodes:
        training = node.kwargs.get("train", node.args[-1:] == (True,))
        if node.op == "call_function" and "dropout" in str(node.target) and training:
            raise UsageError(f"the program draws random numbers ({node.name}); export it in eval mode")
        if node.target is flex_attention:
            raise UsageError("the program has flex_attention, which has no ONNX function; deploy its module instead")
    with raised_as(UsageError, f"the program {UNREADABLE}"), quiet():
        leaves = pytree.tree_leaves(program.example_inputs)
        names = [str(name) for name in program.graph_signature.user_inputs]
        example = {n: leaf for n, leaf in zip(names, leaves, strict=True) if isinstance(leaf, Tensor)}
        dtypes = [v.dtype for v in (*program.state_dict.values(), *example.values()) if isinstance(v, Tensor)]
        float_type = next((dtype for dtype in dtypes if dtype in _PRECISIONS), None)
        if float_type is None:
            raise UsageError("the program has no weights or inputs of fp32, fp16 or bf16")
        inner = program.module(check_guards=False)
        arguments = pytree.tree_map(lambda leaf: Tensor if isinstance(leaf, Tensor) else leaf, program.example_inputs)
        return taking("ExportedProgram", Program, list(example))(inner, arguments, float_type), example


class Program(nn.Module):
    """A program as a module. Conversion to another float type, as by `half()`, also converts the types that its graph
    names: the type of its weights, and for float64 all float types.

    Args:
        inner: the program's graph.
        arguments: its positional arguments and those by name, with the class `Tensor` in place of every tensor.
        float_type: the float type of its weights.
    """

    def __init__(self, inner: fx.GraphModule, arguments: Any, float_type: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        self.float_type = float_type
        self._arguments = arguments

    def call(self, *tensors: Tensor) -> Any:
        left = iter(tensors)
        args, kwargs = pytree.tree_map(lambda leaf: next(left) if leaf is Tensor else leaf, self._arguments)
        return self.inner(*args, **kwargs)

    def train(self, mode: bool = True) -> Program:
        """Return self: a program stays in the mode in which it was exported."""
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Program:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        source = self.float_type
        to = fn(torch.empty(0, dtype=source)).dtype
        if to == source:
            return self
        types = [t for t in (*_PRECISIONS, torch.float64) if t == source or to == torch.float64]

        least, largest, source_least = torch.finfo(to).min, torch.finfo(to).max, torch.finfo(source).min

        def retyped(argument: Any) -> Any:
            if isinstance(argument, float) and math.isfinite(argument):  # the least number stands for minus infinity
                return least if argument == source_least else min(max(argument, least), largest)
            return to if isinstance(argument, torch.dtype) and argument in types else argument

        for name, value in list(vars(self.inner).items()):  # constants, which a graph module keeps apart from buffers
            if isinstance(value, Tensor) and value.dtype in types:
                setattr(self.inner, name, value.to(to))
        for node in self.inner.graph.nodes:
            node.args, node.kwargs = (pytree.tree_map(retyped, a) for a in (node.args, node.kwargs))
        self.inner.recompile()
        self.float_type = to
        return self


def taking(name: str, kind: type[M], names: Sequence[str]) -> type[M]:
    """A subclass of a module with this name, and with a forward whose parameters have these names, which become the
    names of the deployed inputs; it passes their values to the module's `call`."""

    def forward(self: Any, *tensors: Tensor) -> Any:
        return self.call(*tensors)

    parameters = [inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in ("self", *names)]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return type(name, (kind,), {"forward": forward, "names": names, "__module__": kind.__module__})


def _dims(program: ExportedProgram, example: dict[str, Tensor], ranges: Ranges) -> dict[str, dict[int, Any]]:
    """`torch.export`'s dynamic shapes, from the shapes of the program's inputs and the bounds of their symbols."""
    names: dict[Any, str] = {}
    sizes: dict[Any, int] = {}
    factors: dict[str, dict[int, tuple[int, Any]]] = {}
    for name, node in ((node.name, node) for node in program.graph.nodes if node.name in example):
        factors[name] = {}
        for i, size in enumerate(node.meta["val"].shape):
            if isinstance(size, int):
                continue
            expression = size.node.expr
            factor, symbol = expression.as_coeff_Mul()
            if not symbol.is_Symbol or not factor.is_Integer:
                raise CaptureError(
                    f"dim {i} of input {name!r} is {expression}; only multiples are supported as derived dims"
                )
            names.setdefault(symbol, f"{name}_dim{i}")
            sizes[symbol] = example[name].shape[i] // int(factor)
            factors[name][i] = int(factor), symbol
    dims = _bounded(program, names, sizes, ranges)
    return {
        name: {i: dims[symbol] if factor == 1 else factor * dims[symbol] for i, (factor, symbol) in of_input.items()}
        for name, of_input in factors.items()
    }


def _bounded(
    program: ExportedProgram, names: Mapping[Any, str], sizes: Mapping[Any, int], ranges: Ranges
) -> dict[Any, Any]:
    """A Dim for every symbol.

    Raises:
        UsageError: a symbol has no upper bound, or a range does not fit.
    """
    check_ranges(ranges, names.values(), "the program")
    dims: dict[Any, Any] = {}
    missing: dict[str, str] = {}
    for symbol, name in names.items():
        bounds, usual = program.range_constraints[symbol], sizes[symbol]
        low, high = max(int(bounds.lower), 1), bounds.upper
        if name in ranges:
            if ranges[name][0] < low or ranges[name][1] != usual:
                raise UsageError(
                    f"the range of {name!r} is {':'.join(map(str, ranges[name]))}; the least size must be {low} or "
                    f"more, and the usual size that of the program's example, {usual}"
                )
            low, _, high = ranges[name]
        if not getattr(high, "is_Integer", True) or int(high) >= 2**62:
            missing[name] = f"--dim {name}={max(usual // 2, 1)}:{usual}:{4 * usual}"
            continue
        dims[symbol] = Dim(name, min=low, max=int(high))
    if missing:
        raise UsageError(
            f"the program has dynamic dims without an upper bound: {', '.join(missing)}; give their ranges: "
            f"{' '.join(missing.values())}"
        )
    return dims
