"""Copy a module at a dtype, with everything that it keeps."""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableSet
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

CONTAINERS = (dict, list, set, tuple)
KINDS = (*CONTAINERS, Tensor, nn.Module, partial, MethodType, FunctionType)
"""What may keep tensors or modules."""


@torch.no_grad()  # a script copies its parameters itself, and would record how
def duplicate(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of `module` whose parameters have `dtype` (one that has it already shares its memory).

    Tensors that the module keeps outside parameters and buffers, such as a cache that an earlier call filled, also get
    `dtype` if they have the weights' dtype. Tensors without dims are not converted: they take the dtype of what they
    are combined with. Functions that it keeps, such as hooks, refer to the copy where they refer to the module.
    Containers into which they write are not copied, because code that is not kept may read them.
    """
    weights = (tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point())
    weights_dtype = next((tensor.dtype for tensor in weights), None)
    kept = [*module.parameters(), *_kept_in(module, {id(buffer) for buffer in module.buffers()})]
    copies: dict[int, Any] = {id(b): b.detach().clone() for b in module.buffers() if b.grad_fn is not None}
    for value in kept:
        if isinstance(value, nn.Parameter):
            copies[id(value)] = nn.Parameter(converted(value.detach(), dtype), requires_grad=False)
        elif isinstance(value, Tensor):
            is_weight = value.dtype == weights_dtype and value.dim()
            copies[id(value)] = value.detach().to(dtype if is_weight else value.dtype, copy=True)
        else:
            copies |= {id(container): container for container in _written_by(value)}
        if isinstance(value, FunctionType):
            cells = tuple(CellType() for _ in value.__closure__ or ())
            copies[id(value)] = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
    items = (item for part in module.modules() for item in vars(part).values())
    copies |= {id(item): item for item in items if isinstance(item, staticmethod)}  # which Python does not copy
    result = copy.deepcopy(module, copies)
    for value in kept:
        if isinstance(value, FunctionType):
            _complete(copies[id(value)], value, copies)
    return result


def converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating-point tensor in `dtype`; another as it is."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _kept_in(value: Any, seen: MutableSet[int]) -> Iterator[Tensor | FunctionType | partial[Any]]:
    """The tensors that a module keeps, and the functions that refer to anything: in nested containers, in other
    modules, and in what functions refer to."""
    if not isinstance(value, KINDS) or id(value) in seen:
        return
    seen.add(id(value))
    items: Any = value
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, partial | FunctionType):
        items = _references(value)
        if not str(value.__module__).startswith("torch."):  # which overrides know by identity
            yield value
    elif isinstance(value, nn.Module):
        items = vars(value).values()
    elif isinstance(value, dict):
        items = value.values()
    elif isinstance(value, MethodType):
        items = (value.__self__,)
    for item in items:
        yield from _kept_in(item, seen)


def _references(function: FunctionType | partial[Any]) -> list[Any]:
    """What a function refers to: its defaults, and the values of variables around it; for a partial one, its
    arguments."""
    if isinstance(function, partial):
        return [function.func, *function.args, *function.keywords.values()]
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a variable that has no value yet
            values.append(cell.cell_contents)
    return values


def _written_by(function: FunctionType | partial[Any]) -> Iterator[Any]:
    """The containers, other than those of modules and parameters, that a function may write into."""
    values = _references(function)
    if isinstance(function, FunctionType):
        values += [function.__globals__.get(name) for name in function.__code__.co_names]
    for value in values:
        items = value.values() if isinstance(value, dict) else value
        if isinstance(value, CONTAINERS) and not any(isinstance(item, nn.Module | nn.Parameter) for item in items):
            yield value


def _complete(function: FunctionType, given: FunctionType, copies: dict[int, Any]) -> None:
    """Give the copy of a function copies of what the function refers to."""

    def copy_of(value: Any) -> Any:
        return copy.deepcopy(value, copies) if isinstance(value, KINDS) else value

    function.__dict__.update(given.__dict__)
    function.__defaults__ = copy_of(given.__defaults__)
    function.__kwdefaults__ = copy_of(given.__kwdefaults__)
    for cell, original in zip(function.__closure__ or (), given.__closure__ or (), strict=True):
        with suppress(ValueError):
            cell.cell_contents = copy_of(original.cell_contents)
