"""Reference cases: which inputs a deployed model is judged on, and how to make them again without torch.

Random inputs are drawn by NumPy's PCG64 from a recorded seed, so the bundle holds outputs only; an output of more than
:data:`SAMPLED` numbers is kept at that many recorded places.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from attnforge.arrays import Array
from attnforge.bundle import Case, DimSpec, TensorSpec
from attnforge.errors import UnknownNameError

SAMPLED = 32_768


def cases(inputs: list[TensorSpec]) -> list[Case]:
    """The sweep: the example; every kind of input at its sizes; normal input at the smallest, the largest, odd and
    prime sizes inside the profile, and with one dim small while the others are large, and the reverse."""
    symbols: dict[str, DimSpec] = {}
    for spec in inputs:
        for dim in spec.dims:
            if isinstance(dim, DimSpec):
                symbols.setdefault(dim.symbol, _of_symbol(dim))
    opt, low, high = ({s: int(getattr(d, bound) or 0) for s, d in symbols.items()} for bound in ("opt", "min", "max"))
    found = [Case(name="example", sizes=opt, kind="example", seed=0)]
    for kind, scale in (("normal", 1.0), ("large", 16.0), ("constant", 1.0)):
        found.append(Case(name=f"{kind}-opt", sizes=opt, kind=kind, scale=scale, seed=len(found)))  # type: ignore[arg-type]
    if not symbols:
        found.append(Case(name="normal-again", sizes={}, kind="normal", seed=len(found)))
        return found
    odd = {s: _between(d, lambda n: n % 2 == 1, 0.4) for s, d in symbols.items()}
    prime = {s: _between(d, _is_prime, 0.7) for s, d in symbols.items()}
    shapes = {"smallest": low, "largest": high, "odd": odd, "prime": prime}
    if len(symbols) > 1:
        first = next(iter(symbols))
        shapes["first-small"] = {**prime, first: low[first]}
        shapes["first-large"] = {**low, first: high[first]}
    seen = [opt]
    for name, sizes in shapes.items():
        if sizes not in seen:
            seen.append(sizes)
            found.append(Case(name=f"normal-{name}", sizes=sizes, kind="normal", seed=len(found)))
    if odd != opt:
        found.append(Case(name="large-odd", sizes=odd, kind="large", scale=16.0, seed=len(found)))
        found.append(Case(name="constant-odd", sizes=odd, kind="constant", seed=len(found)))
    return found


def at(inputs: list[TensorSpec], sizes: Mapping[str, int]) -> Case:
    """Normal inputs of these sizes, the example's where none is given.

    Raises:
        UnknownNameError: no such dim.
    """
    example = next(case for case in cases(inputs) if case.kind == "normal")
    if unknown := [name for name in sizes if name not in example.sizes]:
        raise UnknownNameError("dim", unknown[0], example.sizes)
    return Case(name="at", sizes={**example.sizes, **sizes}, kind="normal", seed=1)


def _of_symbol(dim: DimSpec) -> DimSpec:
    bounds = {k: (getattr(dim, k) or 0) // dim.factor for k in ("min", "opt", "max")}
    return DimSpec(symbol=dim.symbol, **bounds)


def _between(dim: DimSpec, wanted, place: float) -> int:  # type: ignore[no-untyped-def]
    """A wanted size near `place` of the way from min to max; the size there if none is wanted."""
    low, high = dim.min or 0, dim.max or 0
    start = round(low + place * (high - low))
    nearest = sorted(range(low, high + 1), key=lambda n: abs(n - start)) if high - low < 10_000 else [start]
    return next((n for n in nearest if wanted(n)), start)


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def shape_of(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(d if isinstance(d, int) else d.factor * sizes[d.symbol] for d in spec.dims)


def make_inputs(case: Case, inputs: list[TensorSpec], example: Mapping[str, Array]) -> dict[str, Array]:
    """The inputs of `case`, in the dtypes of the model.

    Floating-point: standard normal times `case.scale`, or all ones. Integers: uniform over the example's range.
    Booleans: three quarters True at random, the first row of the last dim all False and, where there is another, the
    last all True, so that masks of either sense have rows that attend to nothing and rows that attend to all.
    """
    if case.kind == "example":
        return dict(example)
    rng = np.random.Generator(np.random.PCG64(case.seed))
    made: dict[str, Array] = {}
    for spec in inputs:
        shape, dtype = shape_of(spec, case.sizes), np.dtype(spec.dtype)
        if dtype == np.bool_:
            mask = np.asarray(rng.random(shape) < 0.75)
            rows = mask.reshape(-1, shape[-1]) if shape else mask.reshape(1, 1)
            rows[0] = False
            if len(rows) > 1:
                rows[-1] = True
            made[spec.name] = mask
        elif np.issubdtype(dtype, np.integer):
            made[spec.name] = np.asarray(rng.integers(spec.low or 0, spec.high or 0, shape, endpoint=True)).astype(
                dtype
            )
        elif case.kind == "constant":
            made[spec.name] = np.ones(shape, dtype)
        else:
            made[spec.name] = np.asarray(case.scale * rng.standard_normal(shape, np.float32)).astype(dtype)
    return made


def sampled(array: Array, case: Case) -> Array:
    """`array` flattened; at :data:`SAMPLED` places that the case's seed decides where it is larger."""
    chosen = places(array.size, case)
    return array.reshape(-1) if chosen is None else array.reshape(-1)[chosen]


def places(size: int, case: Case) -> Array | None:
    """Where an output of `size` numbers is sampled, in order; None where all of them are kept."""
    if size <= SAMPLED:
        return None
    return np.sort(np.random.Generator(np.random.PCG64([case.seed, size])).choice(size, SAMPLED, replace=False))


def key(case: Case, output: str, which: str) -> str:
    """Name under which an output of a case stands in the reference file; `which` is `eager`, `float64`, or the name of
    the precision that attention alone is computed in, for eager of the whole module at it."""
    return f"{case.name}/{output}/{which}"
