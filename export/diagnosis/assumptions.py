"""Sizes of which a program of torch.export assumes something that its Dims do not say.

Where a module's code branches on a size, the exporter keeps the branch that the example takes, and leaves out the check
that sizes take it. What it assumes is left in the program: as ranges of sizes, and as comparisons that nothing uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import sympy
import torch

from attnforge.bundle import DimSpec
from attnforge.export.sources.torch_module import Captured
from attnforge.runtime.cases import sizes_at

NEAREST = 16
"""How many of the smallest sizes are tried, in addition to those at the numbers that an assumption names."""


class Assumption(NamedTuple):
    """What a program assumes of sizes, and sizes for which that is not so.

    Attributes:
        text: the condition, such as `Eq(Mod(tokens, 4), 0)`.
        sizes: sizes of all dims.
    """

    text: str
    sizes: dict[str, int]


def assumptions(source: Captured) -> Iterator[Assumption]:
    """Yield what the program assumes of sizes that the inputs' dims do not guarantee, in order and each once."""
    if source.program is None:
        return
    names = _names(source)
    low, opt, high = (sizes_at(source.inputs, bound) for bound in ("min", "opt", "max"))
    usual = {symbol: opt[name] for symbol, name in names.items()}
    for condition in dict.fromkeys(_conditions(source)):
        if not condition.free_symbols <= names.keys():
            continue
        failing = (
            {**opt, name: size}
            for symbol in sorted(condition.free_symbols, key=str)
            for name in [names[symbol]]
            for size in _tried(condition, low[name], high[name])
            if condition.subs({**usual, symbol: size}) == sympy.false
        )
        if (sizes := next(failing, None)) is not None:
            yield Assumption(str(condition.subs({s: sympy.Symbol(name) for s, name in names.items()})), sizes)


def _names(source: Captured) -> dict[sympy.Symbol, str]:
    """The names of the inputs' dims by the program's symbols."""
    assert source.program is not None
    examples = {node.name: node.meta.get("val") for node in source.program.graph.nodes if node.op == "placeholder"}
    names: dict[sympy.Symbol, str] = {}
    for name, spec in zip(source.program.graph_signature.user_inputs, source.inputs, strict=True):
        value = examples.get(name)
        shape: Sequence[Any] = value.shape if isinstance(value, torch.Tensor) else ()
        for size, dim in zip(shape, spec.dims, strict=False):
            if isinstance(dim, DimSpec) and isinstance(size, torch.SymInt):
                symbol = size.node.expr / dim.factor
                if isinstance(symbol, sympy.Symbol):
                    names[symbol] = dim.symbol
    return names


def _conditions(source: Captured) -> Iterator[Any]:
    """The program's comparisons of sizes that no operator uses, and the ranges of its symbols."""
    assert source.program is not None
    for symbol, bounds in source.program.range_constraints.items():
        for condition in (symbol >= bounds.lower, symbol <= bounds.upper):
            if condition not in (sympy.true, sympy.false):
                yield condition
    for node in source.program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and not node.users and isinstance(value, torch.SymBool):
            yield value.node.expr


def _tried(condition: Any, low: int, high: int) -> list[int]:
    """The sizes of a dim to try: the smallest, the largest, and those around the numbers of a condition."""
    numbers = {int(number) + i for number in condition.atoms(sympy.Integer) for i in (-1, 0, 1)}
    return sorted(n for n in {*range(low, low + NEAREST), *numbers, high} if low <= n <= high)
