"""Run a torch module in float64 with its own weights: the reference that errors are measured against.

Nothing is copied: the operands of every function and every operator are widened as it runs, so a model of a billion
parameters needs no second copy in double. Casts to other floating-point types on the way stay float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from attnforge.arrays import Array, is_floating
from attnforge.errors import CaptureError
from attnforge.runtime.backends.eager import doubled, run

aten: Any = torch.ops.aten

WIDE: Mapping[torch.dtype, torch.dtype] = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    **dict.fromkeys((torch.complex32, torch.complex64), torch.complex128),
}
"""The types that are widened, and the types that they are widened to."""

LEAST = {torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32)}
"""Numbers that stand for minus infinity in code that was written, or exported, for a narrower type."""

PLAIN = {Tensor, nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device}
"""The most common types of arguments that are not containers."""

CENTRED = {aten.std, aten.std_mean, aten.var, aten.var_mean}
"""Operators that subtract the mean of their operand."""

SQUARING = CENTRED | {aten.linalg_vector_norm, aten.norm}
"""Operators that sum squares in a wider type than that of their operand, and are exported as products and sums."""

SUMS: Mapping[Any, Callable[..., int]] = {
    **dict.fromkeys((aten.mm, aten.bmm, aten.mv, aten.dot), lambda x, y: x.shape[-1]),
    **dict.fromkeys((aten.addmm, aten.baddbmm), lambda _, x, *rest: x.shape[-1]),
    **dict.fromkeys((aten._softmax, aten._log_softmax), lambda x, dim, *rest: x.shape[dim] if x.dim() else 1),
    aten.cumsum: lambda x, dim, *rest: x.shape[dim] if x.dim() else 1,
    aten.convolution: lambda x, weight, *rest: weight[0].numel(),
    aten.scaled_dot_product_attention: lambda query, key, *rest: key.shape[-2],
    aten.native_batch_norm: lambda x, *rest: x.numel() // x.shape[1] if rest[4] else 0,
    aten.native_group_norm: lambda x, *rest: x.numel() // max(rest[2] * rest[5], 1),
    aten.native_layer_norm: lambda _, sizes, *rest: math.prod(sizes),
}
"""Operators that sum, and what returns the number of terms from their arguments."""

REDUCTIONS = CENTRED | {
    *(aten.linalg_vector_norm, aten.logsumexp, aten.mean, aten.norm, aten.sum),
    *(aten.avg_pool2d, aten.avg_pool3d, aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d),
}
"""Operators whose terms are the elements that each element of the result is computed from."""

TRANSFORMS = {aten._fft_c2c, aten._fft_c2r, aten._fft_r2c}
"""Fourier transforms, each number of which is a sum of all, most of which cancel if they are equal."""

UNINITIALISED = {
    *(aten.empty, aten.empty_like, aten.empty_permuted, aten.empty_strided, aten.new_empty, aten.new_empty_strided)
}
"""Operators whose results hold whatever was in memory."""

UNIT, LEAST_STEP = 2.0**-24, 2.0**-149
"""The unit roundoff of fp32, the type of sums in fp32 and TF32, and its smallest positive number."""

KEPT = 3 << 28
"""Bytes of widened parameters that are kept for later operators and runs; other parameters are widened at each use. In
the first run, which has the largest sizes, none are: its own results need the memory."""

SCORES = 1 << 22
"""Attention scores that are in memory at a time: 32 MiB."""


class Float64:
    """Runs a module in float64 with its own weights.

    Args:
        module: is not changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters: _Kept | None = _Kept(most=0)

    def __call__(
        self, inputs: Mapping[str, Array], peaks: list[float] | None = None, noise: np.random.Generator | None = None
    ) -> dict[str, Tensor]:
        """The outputs, by their names in a bundle.

        Args:
            inputs: inputs by name, in the order of the module's arguments.
            peaks: receives the largest absolute number of every operator's results, in the order in which operators
                run; it is empty if the module's code bypasses torch's dispatch.
            noise: moves the result of every sum as rounding in fp32 might; not together with `peaks`.

        Raises:
            CaptureError: the module does not run in float64, or does not return tensors.
        """
        inputs = {name: a.astype(np.float64) if is_floating(a) else a for name, a in inputs.items()}
        if self._parameters is not None:
            try:
                noting = nullcontext() if peaks is None else _Note(peaks)
                rounding = nullcontext() if noise is None else _Rounding(noise)
                widen, fused = _Widen(self._parameters), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
                # Functions compare types before they call their operator; and operators are also called by functions
                # that cannot be intercepted.
                with _wide_by_default(), noting, rounding, _Operators(widen), _Functions(widen), fused:
                    outputs = run(self._module, inputs, torch.float64)
                self._parameters.most = KEPT
                return outputs
            except CaptureError:  # code that bypasses the dispatch, such as a script, does not see widened weights
                if noise is not None:
                    return self(inputs)
                self._module, self._parameters = doubled(self._module), None
        if peaks is not None:
            peaks.clear()
        # The fused kernel reads a float32 mask as float64 if the query is float64 (torch 2.13).
        with _wide_by_default(), sdpa_kernel(SDPBackend.MATH):
            return run(self._module, inputs, torch.float64)


@contextmanager
def _wide_by_default() -> Iterator[None]:
    """Make float64 the default type of new tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Kept:
    """Widened tensors.

    Args:
        most: bytes up to which they are kept for their next use.
    """

    def __init__(self, most: float = math.inf) -> None:
        self.most = most
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._bytes = 0

    def widened(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self._tensors:
            return self._tensors[id(tensor)][1]
        wide = tensor.to(WIDE[tensor.dtype])
        if self._bytes + wide.nbytes <= self.most:
            self._tensors[id(tensor)] = tensor, wide
            self._bytes += wide.nbytes
        return wide


class _Widen:
    """Widens the operands and types in the arguments of functions and operators, for one run of a module.

    Tensors that the module keeps outside its parameters, such as a cache, are widened once per run, so that in-place
    writes of one operator are visible to the next; the module's own tensors are not changed.
    """

    def __init__(self, parameters: _Kept) -> None:
        self._parameters, self._others = parameters, _Kept()

    def __call__(self, arguments: Any) -> Any:
        """The arguments with every operand widened. This runs twice per operator, so the most common types are handled
        here; torch's pytrees, which know every container, take four times as long."""
        kind = type(arguments)
        if kind in PLAIN:
            return self._argument(arguments)
        if kind is tuple or kind is list:
            return kind([self(argument) for argument in arguments])
        if kind is dict:
            return {name: self(argument) for name, argument in arguments.items()}
        return pytree.tree_map(self._argument, arguments)

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            kept = self._parameters if isinstance(argument, nn.Parameter) else self._others
            return kept.widened(argument) if argument.dtype in WIDE else argument
        if isinstance(argument, torch.dtype):
            return WIDE.get(argument, argument)
        if isinstance(argument, float) and argument in LEAST:
            return torch.finfo(torch.float64).min
        return argument


DTYPE: Callable[[Any], torch.dtype] = Tensor.dtype.__get__  # type: ignore[attr-defined]

GETTERS = {
    getattr(Tensor, name).__get__ for name in ("shape", "ndim", "device", "layout", "requires_grad", "is_cuda", "grad")
}
"""Attributes of tensors that are read often and need no widening."""


class _Functions(TorchFunctionMode):
    def __init__(self, widen: _Widen) -> None:
        super().__init__()
        self._widen = widen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == DTYPE:
            return WIDE.get(dtype := func(*args), dtype)
        if func in GETTERS:
            return func(*args)
        if func is nn.functional.embedding and (args[3] if len(args) > 3 else kwargs.get("max_norm")) is None:
            return func(*args, **kwargs)  # its operator widens the rows that it reads; with max_norm, it writes
        return func(*self._widen(args), **self._widen(kwargs))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators on widened operands, and torch's fused attention in blocks of queries, so that the reference
    shares no fused kernel with eager and does not materialise all scores."""

    def __init__(self, widen: _Widen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._widen = widen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == aten.embedding.default:
            rows = func(*args, **(kwargs or {}))
            return rows.to(WIDE.get(rows.dtype, rows.dtype))
        args, kwargs = self._widen(args), self._widen(kwargs or {})
        if func == aten._scaled_dot_product_flash_attention_for_cpu.default:
            query, key, value, *rest = args
            is_causal = bool(rest[1]) if len(rest) > 1 else False
            attended = _attention(query, key, value, kwargs.get("attn_mask"), is_causal, kwargs.get("scale"))
            return attended, attended.new_zeros(attended.shape[:-1])
        if func == aten._grouped_mm.default and args[0].dtype == torch.float64:  # which it does not take
            rows, matrices, ends = args[:3]
            groups = rows.tensor_split(ends[:-1].long())
            return torch.cat([group @ matrix for group, matrix in zip(groups, matrices, strict=True)])
        return func(*args, **kwargs)


class _Note(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the largest absolute number of every operator's results. Of an operator that other libraries compute in
    separate steps, also a bound of what these make: a sum of squares, or the scores of attention."""

    def __init__(self, peaks: list[float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        peaks.clear()
        self._peaks = peaks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func.overloadpacket in SQUARING:
            norm = float(torch.linalg.vector_norm(args[0]))
            self._peaks.append(norm * norm)
        elif not func.is_view and func.overloadpacket not in UNINITIALISED:
            leaves = [t for t in pytree.tree_leaves(results) if isinstance(t, Tensor) and t.is_floating_point()]
            peaks = [_largest(tensor) for tensor in leaves if tensor.numel()]
            if func == aten.scaled_dot_product_attention.default and peaks:
                peaks.append(math.prod(_largest(torch.linalg.vector_norm(operand, dim=-1)) for operand in args[:2]))
            self._peaks.append(max(peaks, default=0.0))
        return results


class _Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves the results of sums as rounding might that adds equal numbers in an unlucky order (Monte Carlo arithmetic:
    D. S. Parker, 1997).

    Each element moves by up to one unit roundoff, and all elements together by a sixth of one for each term: twice the
    root mean square, over the number of terms, of the error of equal numbers that are added one by one. Sums of terms
    that differ err by less, since their roundings cancel; but below the normal range each term is rounded to a multiple
    of the smallest number. A variance does not change with the mean that it subtracts, so its operand's elements move
    instead, by up to a quarter for each term, the largest such error of a mean. By as much moves the mean that a
    channel subtracts which is normalised on its own, where equal numbers leave nothing else. The results of a Fourier
    transform, most of which are zero then, move by as much as their root mean square would.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rng = rng

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results, packet = func(*args, **(kwargs or {})), func.overloadpacket
        result = results[0] if isinstance(results, tuple) else results
        if packet in TRANSFORMS:
            return self._transformed(args[0], args[1], result)
        if (packet not in SUMS and packet not in REDUCTIONS) or not result.is_floating_point() or not result.numel():
            return results
        terms = SUMS[packet](*args) if packet in SUMS else args[0].numel() // result.numel()
        if packet in CENTRED:  # which do not change with the mean that is subtracted
            return func(args[0] * (1 + UNIT * (1 + terms / 4) * self._drawn(args[0])), *args[1:], **(kwargs or {}))
        if packet is aten.native_batch_norm and not terms:  # by running statistics
            return results
        if packet is aten.native_batch_norm or (packet is aten.native_group_norm and args[4] == args[6]):
            weight, like = 1.0 if args[1] is None else args[1], (-1, result.shape[1], *[1] * (result.dim() - 2))
            moved = results[1] * UNIT * (1 + terms / 4) * self._drawn(results[1]) * results[2]
            result.add_((moved.unflatten(-1, (-1, result.shape[1])) * weight).reshape(like))
        result.mul_(1 + UNIT * (self._rng.choice([-1, 1]) * terms / 6 + self._drawn(result)))
        result.add_(self._drawn(result) * (result != 0), alpha=LEAST_STEP * math.sqrt(terms))
        return results

    def _transformed(self, x: Tensor, dims: Sequence[int], result: Tensor) -> Tensor:
        terms = math.prod(max(x.shape[dim], result.shape[dim]) for dim in dims)
        size: Tensor = torch.linalg.vector_norm(result, dim=dims, keepdim=True) / math.sqrt(terms)
        drawn = torch.complex(self._drawn(result), self._drawn(result))
        moved: Tensor = (
            result * (1 + UNIT * self._rng.choice([-1, 1]) * terms / 6) + UNIT * (1 + terms / 6) * size * drawn
        )
        return moved if result.is_complex() else moved.real

    def _drawn(self, like: Tensor) -> Tensor:
        return torch.from_numpy(self._rng.uniform(-1, 1, like.shape))


def _largest(tensor: Tensor) -> float:
    """The largest absolute number of a tensor."""
    least, most = (float(number) for number in torch.aminmax(tensor))
    return max(-least, most)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Scaled dot-product attention on `(B, H, n, d)`, in blocks of queries, by torch's own code without a fused kernel.
    Causal blocks read only the keys up to their last query. In memory, the head dim comes after the query dim, as in
    the fused kernel's output, of which programs take views."""
    queries, keys = query.shape[-2], key.shape[-2]
    rows = max(SCORES * queries // max(query.shape[:-1].numel() * keys, 1), 1)
    grouped = query.shape[1] != key.shape[1]
    attended = query.new_empty(query.shape[0], queries, query.shape[1], value.shape[-1]).transpose(1, 2)
    for start in reversed(range(0, queries, rows)):  # each block fits into the memory of a larger one
        end = min(start + rows, queries)
        seen = min(end, keys) if is_causal else keys
        part = mask
        if is_causal:
            part = torch.arange(seen) <= torch.arange(start, end)[:, None]
        elif mask is not None and mask.shape[-2] != 1:
            part = mask[..., start:end, :]
        block = query[..., start:end, :], key[..., :seen, :], value[..., :seen, :]
        with sdpa_kernel(SDPBackend.MATH):
            attended[..., start:end, :] = nn.functional.scaled_dot_product_attention(
                *block, part, scale=scale, enable_gqa=grouped
            )
    return attended
