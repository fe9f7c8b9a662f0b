"""Eager torch at a precision: the baseline of deployed models, and the only backend that imports torch."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import is_parametrized
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from attnforge.arrays import Array, to_numpy, to_torch
from attnforge.bundle import Bundle
from attnforge.bundle.schema import LONGEST_NAME
from attnforge.errors import CONTROL, CaptureError, UsageError, first_line, raised_as, shortened
from attnforge.precision import Precision, precision_named
from attnforge.runtime.backends.backend import Backend, Memory
from attnforge.runtime.backends.copying import converted, duplicate
from attnforge.runtime.backends.uncompiled import interpreted
from attnforge.runtime.inputs import Shapes

PACKAGES, OURS = Path(torch.__file__).parents[1], Path(__file__).parents[2]

_DETECTS = "_detect_is_causal_mask"
"""What torch.nn's encoder and decoder call to see whether a mask is causal; private to torch."""

NOT_OF_MODULES = {
    *(PACKAGES / name for name in ("torch", "onnxscript", "onnx_ir", "sympy")), *(OURS / "export", OURS / "runtime"),
}  # fmt: skip
"""Folders of code that exports and runs modules."""


def torch_dtype(precision: Precision) -> torch.dtype:
    """torch's dtype of a precision."""
    dtype: torch.dtype = getattr(torch, precision.dtype.name)
    return dtype


def at_precision(module: nn.Module, precision: Precision) -> nn.Module:
    """A copy of `module` in eval mode with its floating-point weights in the precision's dtype, which takes
    keyword-only arguments by position. Parameters that have the dtype already share their memory with the module's;
    complex ones keep their dtype, unlike with `.to(dtype)`.

    Raises:
        CaptureError: it is no module, or a TorchScript one, or cannot be copied.
    """
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        raise CaptureError(
            f"the model is a {type(module).__name__}; give a torch.nn.Module, and for TorchScript, the module that was "
            "traced or scripted"
        )
    dtype, kind = torch_dtype(precision), type(module).__name__
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module = module.module  # it has no copy
    for part in map(type, module.modules()):
        if part.__module__.startswith("torch.ao.nn.") and "quantized" in part.__module__:
            advice = 'give the module as it was before, and precision="int8" to quantise it here'
            raise CaptureError(f"{kind} has a {part.__name__} that torch.ao quantised; {advice}")
    with raised_as(CaptureError, f"{kind} cannot be copied"):
        copied = duplicate(_frozen(module), dtype)
    _take_by_position(copied)
    copied.eval().requires_grad_(False)
    return copied._apply(lambda tensor: converted(tensor, dtype))  # type: ignore[no-untyped-call,no-any-return]


def _frozen(module: nn.Module) -> nn.Module:
    """A module whose parametrized weights, such as orthogonal ones, are what they are in eval mode: a copy, or the
    module itself if it has none. Most are computed by operators that neither run in 16 bits nor have ONNX functions."""
    if not any(map(is_parametrized, module.modules())):
        return module
    copied = duplicate(module, torch.float32).eval()
    parts: list[Any] = list(filter(is_parametrized, copied.modules()))
    for part in parts:
        weights, again = ({name: getattr(part, name).detach() for name in part.parametrizations} for _ in range(2))
        if all(torch.equal(weights[name], again[name]) for name in weights):  # others draw random numbers
            part.__class__ = type(part).__bases__[0]
            del part.parametrizations
            for name, weight in weights.items():
                part.register_parameter(name, nn.Parameter(weight, requires_grad=False))
    return copied


def _take_by_position(module: nn.Module) -> None:
    """Make the keyword-only parameters of a module's forward positional, after the others."""
    kind, parameters = type(module), list(inspect.signature(module.forward).parameters.values())
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    if not names or any(p.kind is p.VAR_POSITIONAL for p in parameters) or "forward" in vars(module):
        return
    first = [parameter.name for parameter in parameters].index(names[0])
    taken = [p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in parameters[: first + len(names)]]
    needed = max((i for i, p in enumerate(taken) if p.default is p.empty), default=0)

    def forward(self: nn.Module, *args: Any) -> Any:
        return kind.forward(self, *args[:first], **dict(zip(names, args[first:], strict=False)))

    empty = inspect.Parameter.empty
    taken[:needed] = [parameter.replace(default=empty) for parameter in taken[:needed]]
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [taken[0].replace(name="self", default=empty), *taken]
    )
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def doubled(module: nn.Module) -> nn.Module:
    """A copy of `module` with the same weights widened to float64."""
    return duplicate(module, torch.float64).double()


def run(module: nn.Module, inputs: Mapping[str, Array], dtype: torch.dtype) -> dict[str, Tensor]:
    """Run a module on arrays, without gradients.

    Args:
        module: the module.
        inputs: inputs in the order of the module's arguments.
        dtype: dtype that floating-point inputs are cast to.

    Returns:
        the outputs by their names in a bundle.

    Raises:
        CaptureError: the module does not run in that dtype, or does not return tensors.
    """
    tensors: list[Tensor] = [to_torch(array.copy()) for array in inputs.values()]  # a module may write to its inputs
    with torch.no_grad(), as_written():
        return outputs_of(module, [converted(tensor, dtype) for tensor in tensors], dtype, inputs)


def outputs_of(
    module: nn.Module, args: Sequence[Tensor], dtype: torch.dtype, inputs: Collection[str] = ()
) -> dict[str, Tensor]:
    """Call a module, which may write to `args`, and return its outputs by their names in a bundle with these inputs.

    Raises:
        CaptureError: it fails, in one line that names the line of code, or does not return tensors.
    """
    try:
        with interpreted():
            return named_outputs(module(*args), inputs)
    except (CaptureError, MemoryError):
        raise
    except Exception as error:
        hint = "" if dtype == torch.float32 else "; tensors that it creates itself need the dtype of its inputs"
        kind = str(dtype).removeprefix("torch.")
        raise CaptureError(
            f"{type(module).__name__} does not run in {kind}: {first_line(error)}{raised_at(error)}{hint}"
        ) from error


def raised_at(error: BaseException) -> str:
    """` (file.py:12)`, the last line of a module's own code before an error; empty if there is none."""
    frames = [f for f in extract_tb(error.__traceback__) if not NOT_OF_MODULES.intersection(Path(f.filename).parents)]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


@contextmanager
def as_written() -> Iterator[None]:
    """Make torch.nn's own modules compute as their code says, which is what torch exports, for a block.

    Their fused fast path differs for a fully masked row: it gives zeros where their code gives NaN. And their encoder
    and decoder compare a mask with a causal one, on whose answer no program can branch: they apply the mask as it is.
    """
    transformers: Any = nn.modules.transformer
    before = torch.backends.mha.get_fastpath_enabled(), getattr(transformers, _DETECTS, None)
    torch.backends.mha.set_fastpath_enabled(False)
    if before[1] is not None:
        setattr(transformers, _DETECTS, lambda mask, is_causal=None, size=None: is_causal is True)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before[0])
        if before[1] is not None:
            setattr(transformers, _DETECTS, before[1])


@contextmanager
def products_in(precision: Precision) -> Iterator[None]:
    """Make torch's products and convolutions on the CPU round as they do at a precision, for a block.

    In TF32 a GPU rounds their float32 operands to ten bits of mantissa, which no CPU does; at other precisions the
    operands' dtype says how they round.
    """
    if precision.name != "tf32":
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # fused attention hides its products
        with warnings.catch_warnings():  # of flags that are left as they are
            warnings.simplefilter("ignore")
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))  # and so does an LSTM's
        stack.enter_context(_InTF32())  # type: ignore[no-untyped-call]
        yield


class _InTF32(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds the operands of products to TF32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (first := _OPERANDS.get(func.overloadpacket)) is not None:
            args = (*args[:first], *map(_tf32, args[first : first + 2]), *args[first + 2 :])
            return func(*args, **(kwargs or {}))
        with self:  # in inference mode, operators that are made of others arrive whole
            result = func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result


_ATEN = torch.ops.aten
_OPERANDS = {
    _ATEN.mm: 0, _ATEN.bmm: 0, _ATEN.mv: 0, _ATEN.dot: 0, _ATEN.convolution: 0, _ATEN.linear: 0,
    _ATEN.addmm: 1, _ATEN.baddbmm: 1, _ATEN.addmv: 1, _ATEN.addbmm: 1, _ATEN.addmm_: 1, _ATEN.baddbmm_: 1,
}  # fmt: skip
"""The operators that are products, and which argument is the first of the two that are multiplied."""


def _tf32(tensor: Tensor) -> Tensor:
    """A float32 tensor rounded to the nearest numbers of ten bits of mantissa, ties to even."""
    if tensor.dtype != torch.float32:
        return tensor
    bits = tensor.contiguous().view(torch.int32)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
    return torch.where(rounded.isfinite(), rounded, tensor)


def apart(name: str) -> str:
    """The name in a bundle of an output that the module gives the name of an input."""
    return f"{name}_out"


def named_outputs(result: Any, inputs: Collection[str]) -> dict[str, Tensor]:
    """The tensors that a module returned, by their names as a bundle's outputs. A tensor in a tuple, list, mapping or
    dataclass in another has the names of both, as in `output_1_0`; None is left out.

    Args:
        result: what the module returned.
        inputs: names of its arguments.

    Raises:
        CaptureError: the result has something else in it or nothing, or a bundle cannot have its names.
    """
    names, items = [], []
    for name, item in _parts(result, "" if isinstance(_fields(result), Mapping) else "output"):
        if not isinstance(item, Tensor):
            raise CaptureError(f"{RETURNED}, not {type(item).__name__} in what it returned")
        if item.is_complex():
            raise CaptureError(
                "the module returns complex numbers; return real pairs, as torch.view_as_real makes them"
            )
        names.append(apart(name) if name in inputs else name)
        items.append(item)
    if not items:
        raise CaptureError(f"{RETURNED}, not nothing")
    if len(items) == 1 and isinstance(result, tuple | list):
        names = [apart("output") if "output" in inputs else "output"]
    for i, name in enumerate(names):
        if not 0 < len(name) <= LONGEST_NAME or CONTROL.search(name) or name in names[:i]:
            raise CaptureError(
                f"the module returns an output named {shortened(name)!r}; give each a name of its own, of at most "
                f"{LONGEST_NAME:,} characters and without control characters"
            )
    return dict(zip(names, items, strict=True))


RETURNED = "the module must return a tensor, or a tuple, list, dict or dataclass of tensors"


def _fields(result: Any) -> Any:
    """A dataclass as a mapping of its fields, and anything else as it is."""
    if not dataclasses.is_dataclass(result) or isinstance(result, Mapping):
        return result
    if pytree.tree_is_leaf(result):
        torch.export.register_dataclass(type(result))  # otherwise torch does not export it
    return {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}


def _parts(result: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What is in a result, in order, with its names."""
    result = _fields(result)
    if isinstance(result, Mapping | tuple | list):
        for key, item in result.items() if isinstance(result, Mapping) else enumerate(result):
            yield from _parts(item, f"{name}_{key}" if name else str(key))
    elif result is not None:
        yield name, result


class Eager(Backend):
    """The eager backend: a copy of the module in eval mode, its weights in the bundle's dtype.

    Args:
        bundle: the bundle that was deployed from the module.
        module: the torch module.

    Raises:
        UsageError: `module` is not a torch module.
    """

    name = "eager"

    def __init__(self, bundle: Bundle, module: torch.nn.Module) -> None:
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"the eager backend runs a torch.nn.Module, not {type(module).__name__}")
        precision = precision_named(bundle.manifest.eager_precision)
        self._dtype = torch_dtype(precision)
        self._module = at_precision(module, precision)

    def run(self, feeds: dict[str, Array], shapes: Shapes, out: Mapping[str, Array]) -> list[Array]:
        return [to_numpy(name, tensor) for name, tensor in run(self._module, feeds, self._dtype).items()]

    def memory(self) -> Memory:
        tensors = [*self._module.parameters(), *self._module.buffers()]
        return Memory(weights=sum(tensor.numel() * tensor.element_size() for tensor in tensors))

    def close(self) -> None:
        del self._module
