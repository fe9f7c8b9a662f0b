"""Reference cases: which inputs a deployed model is judged on, and how to make them again without torch.

Random inputs are drawn by NumPy's PCG64 from a recorded seed, so the bundle holds outputs only; an output of more than
:data:`SAMPLED` numbers is kept at that many recorded places, and in sums of :data:`BLOCK` numbers each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import ml_dtypes
import numpy as np

from attnforge.arrays import Array
from attnforge.bundle import Case, DimSpec, Kind, Masks, TensorSpec
from attnforge.errors import UnknownNameError

SAMPLED = 32_768


OUTLIERS = 60.0
"""How far a channel stands out: "emergent features" of transformers are up to sixty times the others
(LLM.int8(), https://arxiv.org/abs/2208.07339)."""

KINDS: tuple[tuple[Kind, float], ...] = (
    ("uniform", 1.0),
    ("scaled", 0.1),
    ("scaled", 16.0),
    ("scaled", 100.0),
    ("outliers", 1.0),
    ("constant", 1.0),
    ("denormal", 1.0),
    ("extremes", 1.0),
)
MASKS: tuple[Masks, ...] = ("all", "none", "one", "all but one", "ragged")


def cases(inputs: list[TensorSpec]) -> list[Case]:
    """The sweep: the example; normal input at its sizes, at the corners of the profile and at odd and prime sizes
    inside it; of floating-point inputs every kind, and of masks every kind."""
    symbols: dict[str, DimSpec] = {}
    for spec in inputs:
        for dim in spec.dims:
            if isinstance(dim, DimSpec):
                symbols.setdefault(dim.symbol, _of_symbol(dim))
    opt, low, high = ({s: int(getattr(d, bound) or 0) for s, d in symbols.items()} for bound in ("opt", "min", "max"))
    odd = {s: _between(d, lambda n: n % 2 == 1, 0.4) for s, d in symbols.items()}
    prime = {s: _between(d, _is_prime, 0.7) for s, d in symbols.items()}
    shapes = {"opt": opt, "smallest": low, "largest": high, "odd": odd, "prime": prime}
    for symbol in symbols if len(symbols) > 1 else ():
        shapes[f"small-{symbol}"] = {**high, symbol: low[symbol]}
    found = [Case(name="example", sizes=opt, kind="example", seed=0)]

    def add(name: str, sizes: dict[str, int], kind: Kind = "normal", scale: float = 1, masks: Masks = "random") -> None:
        found.append(Case(name=name, sizes=sizes, kind=kind, scale=scale, masks=masks, seed=len(found)))

    for name, sizes in shapes.items():
        if sizes not in [case.sizes for case in found[1:]]:
            add(f"normal-{name}", sizes)
    if not symbols:
        add("normal-again", opt)
    if any(_is_floating(spec) and spec.excludes is None for spec in inputs):
        for kind, scale in KINDS:
            add(f"{kind}-{scale:g}" if kind == "scaled" else kind, odd, kind, scale)
    if any(_is_mask(spec) for spec in inputs):
        for masks in MASKS:
            add(f"mask-{masks.replace(' ', '-')}", prime, masks=masks)
    return found


def _is_floating(spec: TensorSpec) -> bool:
    return spec.dtype not in ("bool",) and not np.issubdtype(np.dtype(spec.dtype), np.integer)


def _is_mask(spec: TensorSpec) -> bool:
    """Whether an input says what may be attended to: booleans, numbers from 0 to 1, or what is added to scores."""
    return spec.dtype == "bool" or spec.excludes is not None or (spec.low, spec.high) == (0, 1)


def excluded_by(example: Array) -> float | Literal["-inf"] | None:
    """The number by which a floating-point input excludes keys, where the example holds it and zeros alone."""
    numbers = np.unique(example.astype(np.float64)) if example.size else np.zeros(0)
    if len(numbers) != 2 or numbers[1] != 0 or numbers[0] > -1e3:
        return None
    return float(numbers[0]) if np.isfinite(numbers[0]) else "-inf"


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


def make_inputs(case: Case, inputs: list[TensorSpec], stored: Mapping[str, Array]) -> dict[str, Array]:
    """The inputs of `case`, in the dtypes of the model.

    Floating-point ones are standard normal, or by the case's kind: `scaled`, normal times `case.scale`; `uniform`, from
    -1 to 1; `outliers`, normal with one channel (place in the last dim) in sixty-four :data:`OUTLIERS` times as large;
    `constant`, ones; `denormal`, normal times `case.scale` times a quarter of the dtype's least normal number;
    `extremes`, normal with one number in sixty-one `case.scale` times the dtype's largest or least. Whole numbers are
    uniform over the example's range.

    Masks are drawn by the case's `masks`, True or 1 or not excluded: three quarters at random, and of several rows (of
    the last dim) one all False and one all True; `all`; `none`; in every row `one`, or `all but one`; or a `ragged`
    beginning of every row. They are of either sense, so every kind means something to each.

    Args:
        case: what to make.
        inputs: the model's.
        stored: the example by input, and real data by `case/input`.
    """
    if case.kind == "example":
        return {spec.name: stored[spec.name] for spec in inputs}
    if case.kind == "data":
        return {spec.name: stored[data_key(case, spec.name)] for spec in inputs}
    rng = np.random.Generator(np.random.PCG64(case.seed))
    return {spec.name: _made(case, spec, rng) for spec in inputs}


def data_key(case: Case, name: str) -> str:
    """Name under which an input of a case of real data is stored."""
    return f"{case.name}/{name}"


def labels_key(case: Case) -> str:
    """Name under which the labels of a case of real data are stored."""
    return f"labels/{case.name}"


def _made(case: Case, spec: TensorSpec, rng: np.random.Generator) -> Array:
    shape, dtype = shape_of(spec, case.sizes), np.dtype(spec.dtype)
    if dtype == np.bool_ or spec.excludes is not None or (_is_mask(spec) and case.masks != "random"):
        mask = _mask(case.masks, shape, rng)
        if spec.excludes is not None:
            return np.where(mask, 0.0, float(spec.excludes)).astype(dtype)
        return mask.astype(dtype)
    if not _is_floating(spec):
        return np.asarray(rng.integers(spec.low or 0, spec.high or 0, shape, endpoint=True)).astype(dtype)
    if case.kind == "constant":
        return np.ones(shape, dtype)
    if case.kind == "uniform":
        return np.asarray(rng.uniform(-1, 1, shape)).astype(dtype)
    limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    factor = {"denormal": case.scale * float(limits.smallest_normal) / 4, "scaled": case.scale}.get(case.kind, 1.0)
    drawn = np.asarray(factor * rng.standard_normal(shape, np.float32))
    if case.kind == "outliers" and shape:
        drawn[..., rng.choice(shape[-1], -(-shape[-1] // 64), replace=False)] *= OUTLIERS * case.scale
    made = drawn.astype(dtype)
    if case.kind == "extremes" and made.size:
        few = rng.choice(made.size, -(-made.size // 61), replace=False)
        made.reshape(-1)[few] = np.copysign(case.scale * float(limits.max), drawn.reshape(-1)[few])
    return made


def _mask(masks: Masks, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    if masks in ("all", "none"):
        return np.full(shape, masks == "all")
    size = shape[-1] if shape else 1
    if masks == "random":
        mask = np.asarray(rng.random(shape) < 0.75)
        rows = mask.reshape(-1, size)
        if len(rows) > 1:  # which ones, the seed says: a fault in the first or last sample alone must show somewhere
            none, all_of_it = rng.choice(len(rows), 2, replace=False)
            rows[none], rows[all_of_it] = False, True
        return mask
    place = np.arange(size)
    chosen = rng.integers(0, size, (*shape[:-1], 1))
    row = {"one": place == chosen, "all but one": place != chosen, "ragged": place <= chosen}[masks]
    return np.asarray(row.reshape(shape))


def sampled(array: Array, case: Case) -> Array:
    """`array` flattened; at :data:`SAMPLED` places that the case's seed decides where it is larger."""
    chosen = places(array.size, case)
    return array.reshape(-1) if chosen is None else array.reshape(-1)[chosen]


def places(size: int, case: Case) -> Array | None:
    """Where an output of `size` numbers is sampled, in order; None where all of them are kept, as of real data, for
    metrics are measured on whole outputs."""
    if size <= SAMPLED or case.kind == "data":
        return None
    return np.sort(np.random.Generator(np.random.PCG64([case.seed, size])).choice(size, SAMPLED, replace=False))


BLOCK = 64
"""How many numbers of an output that is kept in part are summed up to one."""


def blocks(array: Array, case: Case) -> Array | None:
    """Of an output that is kept in part, the sums of every :data:`BLOCK` numbers, in float64, with signs that the
    case's seed decides: no number of it is left unseen. None where all of it is kept."""
    if places(array.size, case) is None:
        return None
    signs = np.random.Generator(np.random.PCG64([case.seed, array.size, BLOCK])).integers(0, 2, array.size) * 2 - 1
    signed = array.reshape(-1).astype(np.float64) * signs
    with np.errstate(invalid="ignore"):  # of infinities of both signs
        return np.add.reduceat(signed, np.arange(0, array.size, BLOCK))


def key(case: Case, output: str, which: str) -> str:
    """Name under which an output of a case stands in the reference file; `which` is `eager`, `float64`, or the name of
    the precision that attention alone is computed in, for eager of the whole module at it; of what is kept in part, the
    sums of blocks have `/blocks` behind that."""
    return f"{case.name}/{output}/{which}"
