"""Reference cases: the inputs that a deployed model is checked on, made again without torch.

Random inputs are drawn by NumPy's PCG64 from a recorded seed, so the bundle stores only outputs. Of an output of more
than :data:`SAMPLED` elements it stores that many, at positions determined by the seed, and sums of :data:`BLOCK`
elements each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import ml_dtypes
import numpy as np

from attnforge.arrays import Array, pieces
from attnforge.bundle import Case, DimSpec, Kind, Masks, TensorSpec
from attnforge.bundle.schema import LARGEST_SIZE
from attnforge.errors import InputError, UnavailableError, check_known
from attnforge.memory import ROOM, available

SAMPLED = 32_768
"""Number of elements up to which an output is stored whole, and that are stored of a larger one."""

OUTLIERS = 60.0
"""Factor by which an outlier channel is larger than the others; the maximum of transformers' "emergent features"
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
    ("sparse", 1.0),
)
"""Kinds of floating-point inputs in addition to normal ones, and their scales."""

MASKS: tuple[Masks, ...] = ("all", "none", "one", "all but one", "ragged")
"""Kinds of masks in addition to random ones."""

LARGEST_INTEGER = 2**31 - 1
"""The largest integer that is drawn: the largest of 32 bits, in which OpenVINO also computes int64. In fp32, in which
it compares and divides integers, its neighbours are the same number."""

LARGEST = "normal-largest"
"""Name of the case of normal inputs with all dims at their maximum."""

WHOLE_CACHE = "whole-cache"
"""Name of the case of one sample that fills a decoder's caches, which only steps reach."""

STEPPED = ("example", "normal-prime")
"""Names of the cases whose tokens a decoder receives by every schedule, and whose keys and values the bundle stores."""

CHEAP = 1e9
"""Floating-point operations of a run up to which no case is made smaller because of its cost."""

PASSES = 10
"""Runs of the example that all cases together may cost, not counting the largest sizes."""

Cost = Callable[[Mapping[str, int]], float]
"""The floating-point operations of a run of the model, as a function of the sizes of its dims."""


def cases(inputs: list[TensorSpec], cost: Cost | None = None) -> list[Case]:
    """The cases that a bundle is deployed with, in addition to real data.

    - The example.
    - Normal inputs at the example's sizes, if these are static or a run is cheap; with all dims smallest, all dims
      largest, each dim smallest with the others largest, and at odd and at prime sizes. With up to two dynamic dims
      these are all corners of the profile.
    - Every kind of :data:`KINDS`, at odd sizes, if an input is floating-point.
    - Every kind of :data:`MASKS`, at prime sizes, if an input is a mask.
    - Zeros, and the largest numbers that eager accepts, at odd sizes, if an input is an integer that does not index a
      table: a length of nothing, and of everything.
    - -infinity in some elements, at prime sizes, if an input is added to scores.

    The cost of a case is counted in runs of the example, or of :data:`CHEAP` operations if that is more. All dims are
    largest once, whatever that costs. Other cases cost at most: the corners four runs together, prime sizes one, odd
    sizes half a run, and a kind of inputs or of masks, where sizes are not under test, a quarter. If they would
    cost more, the sizes move towards the smallest, and in corners the other dims are as in the example.

    Args:
        inputs: the model's inputs.
        cost: the cost of a run; without it every run is cheap.
    """
    cost = cost or (lambda sizes: 0.0)
    opt = sizes_at(inputs, "opt")
    sweep = [Case(name="example", sizes=opt, kind="example", seed=0)]

    usual = min((spec.high or 0 for spec in inputs if _is_number(spec)), default=math.inf)

    def add(name: str, sizes: dict[str, int], kind: Kind = "normal", scale: float = 1, masks: Masks = "random") -> None:
        most = max(sizes.values(), default=0)
        reach = most if kind == "normal" and most > usual else None
        sweep.append(Case(name=name, sizes=sizes, kind=kind, scale=scale, masks=masks, reach=reach, seed=len(sweep)))

    for name, sizes in _normal_sizes(inputs, cost).items():
        if sizes not in [case.sizes for case in sweep[1:]]:
            add(f"normal-{name}", sizes)
    if not opt:
        add("normal-again", opt)
    odd, prime = _sizes_between(inputs, cost, _is_odd, 0.4, 1 / 4), _sizes_between(inputs, cost, _is_prime, 0.7, 1 / 4)
    if any(_is_floating(spec) and spec.excludes is None for spec in inputs):
        for kind, scale in KINDS:
            add(f"{kind}-{scale:g}" if kind == "scaled" else kind, odd, kind, scale)
    if any(_is_mask(spec) and spec.index is None for spec in inputs):
        for masks in MASKS:
            add(f"mask-{masks.replace(' ', '-')}", prime, masks=masks)
    if any(_is_number(spec) for spec in inputs):
        add("integers-zero", odd, "zeros")
        add("integers-large", odd, "large")
    if any(_is_added(spec) for spec in inputs):
        add("mask-infinite", prime, masks="infinite")
    return sweep


def _normal_sizes(inputs: Sequence[TensorSpec], cost: Cost) -> dict[str, dict[str, int]]:
    """The sizes of the cases of normal inputs, by the end of their names; some may be equal."""
    opt, low, high = (sizes_at(inputs, bound) for bound in ("opt", "min", "max"))
    run = run_of_example(opt, cost)
    sizes = {} if opt and cost(opt) > CHEAP else {"opt": opt}
    sizes |= {"smallest": low, "largest": high}
    sizes["odd"] = _sizes_between(inputs, cost, _is_odd, 0.4, 1 / 2)
    sizes["prime"] = _sizes_between(inputs, cost, _is_prime, 0.7, 1)
    for symbol in opt if len(opt) > 1 else ():
        corner = {**high, symbol: low[symbol]}
        sizes[f"small-{symbol}"] = {**opt, symbol: low[symbol]} if cost(corner) > 4 * run / len(opt) else corner
    return sizes


def _sizes_between(
    inputs: Sequence[TensorSpec], cost: Cost, wanted: Callable[[int], bool], fraction: float, runs: float
) -> dict[str, int]:
    """The wanted sizes at `fraction` of the way from min to max, or as near to it as `runs` of the example allow."""
    low, high, opt = (sizes_at(inputs, bound) for bound in ("min", "max", "opt"))
    run = run_of_example(opt, cost)
    for share in SHARES:
        sizes = {symbol: _between(low[symbol], high[symbol], wanted, fraction * share) for symbol in low}
        if cost(sizes) <= runs * run:
            break
    return sizes


def sizes_at(inputs: Sequence[TensorSpec], bound: str) -> dict[str, int]:
    """The sizes of all symbols alone at a bound of their ranges, `min`, `opt` or `max`, in the order of the inputs."""
    sizes: dict[str, int] = {}
    for dim in (dim for spec in inputs for dim in spec.dims if isinstance(dim, DimSpec)):
        sizes.setdefault(dim.symbol, (getattr(dim, bound) or 0) // dim.factor)
    return sizes


SHARES = (1, 3 / 4, 1 / 2, 1 / 3, 1 / 4, 1 / 6, 1 / 8, 1 / 12, 1 / 16, 1 / 24, 1 / 32, 1 / 64, 1 / 128, 0)
"""Steps of sizes towards the smallest, until the case is cheap enough."""


def run_of_example(sizes: Mapping[str, int], cost: Cost) -> float:
    """The unit in which the cost of cases is counted.

    Args:
        sizes: the example's sizes.
        cost: the cost of a run.
    """
    return max(cost(sizes), CHEAP)


def _is_floating(spec: TensorSpec) -> bool:
    return spec.dtype not in ("bool",) and not np.issubdtype(np.dtype(spec.dtype), np.integer)


def lower_most(case: Case, inputs: list[TensorSpec]) -> bool:
    """Halve the largest integer of a case's inputs. In a `large` case it becomes the next smaller size of a dim, or the
    example's largest number, and so does that of lengths which reach a size of the case.

    Args:
        case: modified.
        inputs: the model's inputs.

    Returns:
        whether there was one to lower.
    """
    if case.reach is not None:
        case.reach = max((size for size in case.sizes.values() if size < case.reach), default=None)
        return True
    if case.kind == "large":
        ends = (*case.sizes.values(), *(spec.high or 0 for spec in inputs if _is_number(spec)))
        case.most = max((end for end in ends if 0 < end < (case.most or LARGEST_INTEGER)), default=0)
        return case.most > 0
    whole = [spec.high for spec in inputs if spec.high is not None and not _is_mask(spec)]
    most = max(whole, default=0) if case.most is None else case.most
    if most <= 0 or case.kind in ("example", "data", "zeros"):
        return False
    case.most = most // 2
    return True


def _is_mask(spec: TensorSpec) -> bool:
    """Whether an input is a mask: booleans, integers from 0 to 1, or numbers that are added to scores."""
    return spec.dtype == "bool" or spec.excludes is not None or (spec.low, spec.high) == (0, 1)


def _is_number(spec: TensorSpec) -> bool:
    """Whether an input is an integer of any size, such as a length or a time, as far as is known: not a mask, not an
    index into a table of known size, and not a size itself."""
    if spec.dtype == "bool" or _is_floating(spec) or spec.index is not None or spec.role == "shape":
        return False
    return spec.role == "number" or not _is_mask(spec)


def _is_added(spec: TensorSpec) -> bool:
    """Whether an input is added to scores, and its example does not show which number excludes keys."""
    return spec.role == "scores" and spec.excludes is None


def excluded_by(example: Array) -> float | Literal["-inf"] | None:
    """The number by which a floating-point input excludes keys: the only number in its example other than zero.

    Args:
        example: the input's example.

    Returns:
        the number, or "-inf"; None if the input does not look like a mask that is added to scores.
    """
    numbers = np.unique(example.astype(np.float64)) if example.size else np.zeros(0)
    if len(numbers) != 2 or numbers[1] != 0 or numbers[0] > -1e3:
        return None
    return float(numbers[0]) if np.isfinite(numbers[0]) else "-inf"


def range_of_setting(example: Array) -> tuple[float, float] | None:
    """The range of a setting of the model or of each sample: from half of the example's numbers to twice them.

    Args:
        example: the input's example.

    Returns:
        the least and the largest; None if the input has more than one number per sample, or numbers of both signs.
    """
    if not example.size or math.prod(example.shape[1:]) != 1:
        return None
    least, most = float(example.min()), float(example.max())
    limit = float(ml_dtypes.finfo(example.dtype).max)  # type: ignore[no-untyped-call]
    if least > 0 and most <= limit:
        return least / 2, min(2 * most, limit)
    if -limit <= least and most < 0:
        return max(2 * least, -limit), most / 2
    return None


def at(inputs: list[TensorSpec], sizes: Mapping[str, int]) -> Case:
    """A case of normal inputs.

    Args:
        inputs: the model's inputs.
        sizes: sizes of dims, by symbol; dims without a size are as in the example.

    Raises:
        UnknownNameError: no such dim.
        InputError: a size that is not an integer.
    """
    usual = sizes_at(inputs, "opt")
    for name in sizes:
        check_known("dim", name, usual)
    if wrong := [name for name, size in sizes.items() if not isinstance(size, int) or not 0 <= size <= LARGEST_SIZE]:
        raise InputError(f"the size of {wrong[0]} is {sizes[wrong[0]]!r}; give an integer from 0 to {LARGEST_SIZE:,}")
    return Case(name="at", sizes={**usual, **sizes}, kind="normal", seed=1)


def _between(low: int, high: int, wanted: Callable[[int], bool], fraction: float) -> int:
    """The wanted size nearest to `fraction` of the way from `low` to `high`; the size there if none is wanted."""
    start = round(low + fraction * (high - low))
    nearest = sorted(range(low, high + 1), key=lambda n: abs(n - start)) if high - low < 10_000 else [start]
    return next((n for n in nearest if wanted(n)), start)


def _is_odd(n: int) -> bool:
    return n % 2 == 1


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def shape_of(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an input with these sizes of its symbols."""
    return tuple(d if isinstance(d, int) else d.factor * sizes[d.symbol] for d in spec.dims)


def make_inputs(case: Case, inputs: list[TensorSpec], stored: Mapping[str, Array]) -> dict[str, Array]:
    """The inputs of a case by name, in the dtypes of the model.

    Floating-point inputs are standard normal, or depend on the case's kind:

    - `uniform`: from -1 to 1;
    - `scaled`: normal times `case.scale`;
    - `outliers`: normal, with one channel (index of the last dim) in sixty-four :data:`OUTLIERS` times as large;
    - `constant`: ones;
    - `denormal`: normal times `case.scale` times a quarter of the dtype's least normal number;
    - `extremes`: normal, with one element in sixty-one `case.scale` times the dtype's largest or least number;
    - `sparse`: normal, with zeros in a quarter of the rows (along the last dim) and in one element in eight: a model
      may take such rows for padding.

    A setting, such as a temperature, is uniform over its range in every kind, unless all inputs are settings: it scales
    all numbers, and would hide what others show.

    Integers are uniform over the example's range, or all rows of the table that they index, up to `case.most` if there
    is one; those that may be lengths also up to `case.reach`, which one of them is. Those that do not index a table
    are 0 in a case of kind `zeros`; in `large`, the last four up to :data:`LARGEST_INTEGER`, the dtype's largest number
    or `case.most`, including negative ones if the example has any.

    Masks depend on the case's `masks`; True, 1 and "not excluded" are the same here:

    - `random`: three quarters of the elements are True; of several rows (along the last dim) one is all False and one
      is all True;
    - `all` and `none`: all True, all False;
    - `one` and `all but one`: one element of every row is True, or False;
    - `ragged`: the beginning of every row is True;
    - `infinite`: random, and in a floating-point input that is added to scores -infinity replaces the elements where
      the mask is False.

    Some models exclude where a mask is True and others where it is False; every kind tests both.

    Args:
        case: the case.
        inputs: the model's inputs.
        stored: the example's inputs by name, and those of real data by :func:`data_key`.

    Raises:
        UnavailableError: there is too little memory; a manifest may name any sizes.
    """
    if case.kind == "example":
        return {spec.name: stored[spec.name] for spec in inputs}
    if case.kind == "data":
        return {spec.name: stored[data_key(case, spec.name)] for spec in inputs}
    needed = sum(math.prod(shape_of(spec, case.sizes)) * np.dtype(spec.dtype).itemsize for spec in inputs)
    if needed > ROOM and (left := available()) is not None and needed > left:
        raise UnavailableError(
            f"the inputs of {case.name} take {needed / 2**30:,.1f} GiB, and this machine has {left / 2**30:,.1f} GiB "
            "available"
        )
    rng = np.random.Generator(np.random.PCG64(case.seed))
    all_set = all(spec.setting is not None for spec in inputs)
    return {spec.name: _drawn(case, spec, rng, all_set) for spec in inputs}


def data_key(case: Case, name: str) -> str:
    """The name under which an input of a case of real data is stored."""
    return f"{case.name}/{name}"


def labels_key(case: Case) -> str:
    """The name under which the labels of a case of real data are stored."""
    return f"labels/{case.name}"


def _drawn(case: Case, spec: TensorSpec, rng: np.random.Generator, all_set: bool) -> Array:
    """One input of a case with random inputs; `all_set` if all inputs are settings."""
    shape, dtype = shape_of(spec, case.sizes), np.dtype(spec.dtype)
    if spec.setting is not None and not all_set:
        return np.asarray(rng.uniform(*spec.setting, shape)).astype(dtype)
    if dtype == np.bool_ or spec.excludes is not None or (_is_mask(spec) and case.masks not in ("random", "infinite")):
        mask = _mask(case.masks, shape, rng)
        return (mask if spec.excludes is None else np.where(mask, 0.0, float(spec.excludes))).astype(dtype)
    return (_drawn_numbers if _is_floating(spec) else _drawn_integers)(case, spec, shape, rng).astype(dtype, copy=False)


def _drawn_integers(case: Case, spec: TensorSpec, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    low, high = spec.low or 0, max(spec.high or 0, case.reach or 0 if _is_number(spec) else 0)
    most = high if case.most is None else min(high, case.most)
    if case.kind in ("zeros", "large") and _is_number(spec):
        largest = min(case.most or LARGEST_INTEGER, int(np.iinfo(spec.dtype).max)) if case.kind == "large" else 0
        numbers = rng.permutation(np.maximum(largest - np.arange(math.prod(shape)) % 4, 0)).reshape(shape)
        return np.asarray(numbers * rng.choice([-1, 1] if low < 0 else [1], shape))
    numbers = np.asarray(rng.integers(min(low, most), most, shape, endpoint=True))
    if most > (spec.high or 0) and numbers.size:
        numbers.reshape(-1)[rng.integers(numbers.size)] = most
    return numbers


def _drawn_numbers(case: Case, spec: TensorSpec, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    if case.kind == "constant":
        return np.ones(shape)
    if case.kind == "uniform":
        return np.asarray(rng.uniform(-1, 1, shape))
    dtype = np.dtype(spec.dtype)
    limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    factor = {"denormal": case.scale * float(limits.smallest_normal) / 4, "scaled": case.scale}.get(case.kind, 1.0)
    normal = np.asarray(factor * rng.standard_normal(shape, np.float32))
    if case.kind == "outliers" and shape:
        normal[..., rng.choice(shape[-1], -(-shape[-1] // 64), replace=False)] *= OUTLIERS * case.scale
    array = normal.astype(dtype)
    if case.masks == "infinite" and _is_added(spec):
        array[~_mask("random", shape, rng)] = -np.inf
    if case.kind == "sparse" and len(shape) > 1 and array.size:
        rows = rng.random(shape[:-1]) < 1 / 4
        rows.reshape(-1)[rng.integers(rows.size)] = True
        array[rows[..., np.newaxis] | (rng.random(shape) < 1 / 8)] = 0
    if case.kind == "extremes" and array.size:
        few = rng.choice(array.size, -(-array.size // 61), replace=False)
        array.reshape(-1)[few] = np.copysign(case.scale * float(limits.max), normal.reshape(-1)[few])
    return array


def _mask(masks: Masks, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    if masks in ("all", "none"):
        return np.full(shape, masks == "all")
    size = shape[-1] if shape else 1
    if masks in ("random", "infinite"):
        mask = np.asarray(rng.random(shape) < 0.75)
        rows = mask.reshape(-1, size)
        if len(rows) > 1:  # rows are drawn, because a fault may affect only the first or the last sample
            hidden, shown = rng.choice(len(rows), 2, replace=False)
            rows[hidden], rows[shown] = False, True
        return mask
    index = np.arange(size)
    chosen = rng.integers(0, size, (*shape[:-1], 1))
    row = {"one": index == chosen, "all but one": index != chosen, "ragged": index <= chosen}[masks]
    return np.asarray(row.reshape(shape))


def sampled(array: Array, case: Case) -> Array:
    """The stored elements of an output: all of it, flattened, or the elements at its :func:`stored_indices`."""
    kept = stored_indices(array.size, case)
    return array.reshape(-1) if kept is None else array.reshape(-1)[kept]


def stored_indices(size: int, case: Case) -> Array | None:
    """The flat indices at which an output of `size` elements is stored, in order; None if it is stored whole. Outputs
    of real data are stored whole, because metrics are measured on them."""
    if size <= SAMPLED or case.kind == "data":
        return None
    return np.sort(np.random.Generator(np.random.PCG64([case.seed, size])).choice(size, SAMPLED, replace=False))


def channels(shape: tuple[int, ...], case: Case) -> tuple[Array, ...]:
    """The index along each axis of an output of every element that :func:`sampled` gives; nothing on hard inputs, and
    for large outputs of real data."""
    size, kept = math.prod(shape), stored_indices(math.prod(shape), case)
    if not shape or not case.is_ordinary or (kept is None and size > SAMPLED):
        return ()
    return np.unravel_index(np.arange(size) if kept is None else kept, shape)


BLOCK = 64
"""Number of elements in each sum of an output that is stored in part."""

BLOCKS = "/blocks"
"""What is appended to the name of an output for its sums."""


def blocks(array: Array, case: Case) -> Array | None:
    """The sums of every :data:`BLOCK` elements of an output that is stored in part, so that every element is checked:
    float64, each element with a sign determined by the case's seed. None if the output is stored whole."""
    if stored_indices(array.size, case) is None:
        return None
    rng, sums = np.random.Generator(np.random.PCG64([case.seed, array.size, BLOCK])), []
    for (numbers,) in pieces(array):
        signed = numbers.astype(np.float64) * (rng.integers(0, 2, numbers.size) * 2 - 1)
        with np.errstate(invalid="ignore"):  # infinities of both signs may be added
            sums.append(np.add.reduceat(signed, np.arange(0, numbers.size, BLOCK)))
    return np.concatenate(sums)


def key(case: Case, output: str, which: str) -> str:
    """The name of an output of a case in the reference file; the sums of an output that is stored in part have
    `/blocks` appended.

    Args:
        case: the case.
        output: name of the output.
        which: `eager`, `float64`, or the name of a precision at which a backend computes attention alone, for the whole
            module in eager at that precision.
    """
    return f"{case.name}/{output}/{which}"


def scale_key(cache: str) -> str:
    """The name of the scales of an int8 cache in the reference file, `(key heads, 1, size)`."""
    return f"{cache}/scale"
