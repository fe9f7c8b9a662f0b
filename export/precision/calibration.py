"""Forms of quantised products, chosen by what each does to the product on data.

For each input the candidates are tried on rows of the data: by tensor and by token, balanced by several degrees, clipped
by several. What counts is the error of the products themselves, so a channel that no weight reads may be coarse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.export.graphs.execute import as_it_is
from attnforge.export.precision.quantisation import (
    MOST,
    Form,
    Product,
    fake_quantised,
    inputs_of,
    quantised_weight,
)
from attnforge.runtime.parity.budget import relative_error

ROWS = 256
"""Tokens on which forms are tried; ranges are of all tokens."""

DEGREES = (0.5, 0.65, 0.8, 0.9)
"""How much of the spread of an input's channels balancing moves to the weights: 0 none, 1 all of it."""

CLIPS = (1.0, 0.8, 0.6)
"""Shares of the largest number of the data that one scale for all is to hold."""

AS_GOOD, GOOD = 1.5, 0.01
"""By tensor is chosen, which is faster, where it errs no more than so many times as much as by token, or than this."""


def calibrate(
    model: ir.Model, found: Sequence[Product], data: Sequence[Mapping[str, Array]], is_real: bool
) -> dict[str, Form]:
    """The form of every product's input, by the product's name.

    Args:
        model: fp32, that runs as it is.
        found: its products.
        data: inputs of the model.
        is_real: whether the data is such as the model will see. Where it is not, forms are by token and unbalanced, and
            the data tells their errors alone.
    """
    groups = inputs_of(found)
    rows = _Rows(model, [str(value.name) for value in groups], data)
    forms: dict[str, Form] = {}
    for value, group in groups.items():
        weight = np.concatenate([product.weight for product in group], axis=1)
        form = _best(rows.sample[str(value.name)], rows.peak[str(value.name)], weight, is_real)
        forms |= {product.name: form for product in group}
    return forms


class _Rows:
    """Rows of inputs on data, and the largest number of every channel.

    Attributes:
        sample: by the input's name, (at most :data:`ROWS`, channels) float32, drawn from all data.
        peak: (channels,) float32, of all rows.
    """

    def __init__(self, model: ir.Model, names: Sequence[str], data: Sequence[Mapping[str, Array]]) -> None:
        run, rng = as_it_is(model, names), np.random.default_rng(0)
        count = -(-ROWS // len(data))
        drawn: dict[str, list[Array]] = {name: [] for name in names}
        self.peak: dict[str, Array] = {}
        for feeds in data:
            for name, array in run(feeds).items():
                rows = array.reshape(-1, array.shape[-1])
                rows = rows[np.isfinite(rows).all(axis=-1)]
                peak = np.abs(rows).max(axis=0, initial=0.0)
                self.peak[name] = np.maximum(self.peak.get(name, peak), peak)
                drawn[name].append(rows[rng.permutation(len(rows))[:count]])
        self.sample = {name: np.concatenate(arrays)[:ROWS] for name, arrays in drawn.items()}


def _best(rows: Array, peak: Array, weight: Array, is_real: bool) -> Form:
    """The form of one input.

    Args:
        rows: (tokens, channels) of it.
        peak: (channels,), the largest number of each.
        weight: (channels, outputs) of all products with it.
        is_real: as :func:`calibrate` says.
    """
    exact = rows @ weight
    by_token, by_tensor = [], []
    for degree in (None, *(DEGREES if is_real else ())):
        balance = None if degree is None else balanced(peak, weight, degree)
        tried = _tried(rows, peak, weight, exact, balance)
        by_token.append(tried(None))
        by_tensor += [tried(clip) for clip in (CLIPS if is_real else ())]
    best = min(by_token, key=lambda form: form.error)
    static = min(by_tensor, key=lambda form: form.error, default=best)
    return static if static.error <= max(AS_GOOD * best.error, GOOD) else best


def _tried(
    rows: Array, peak: Array, weight: Array, exact: Array, balance: Array | None
) -> Callable[[float | None], Form]:
    """The form of a clip, with its error; by token for None."""
    if balance is not None:
        rows, weight, peak = rows / balance, weight * balance[:, None], peak / balance
    numbers, scales = quantised_weight(weight)
    quantised, largest = numbers * scales, float(peak.max(initial=0.0))

    def tried(clip: float | None) -> Form:
        scale = None if clip is None else max(largest * clip / MOST, float(np.finfo(np.float32).tiny))
        return Form(scale, balance, relative_error(fake_quantised(rows, scale) @ quantised, exact))

    return tried


def balanced(peak: Array, weight: Array, degree: float) -> Array:
    """What every channel is divided by, so that inputs and weights share the spread.

    Args:
        peak: (channels,) float32 ≥ 0, the largest number of each channel of the input.
        weight: (channels, outputs) float32.
        degree: α of SmoothQuant's eq. 4, `peak^α / max|weight|^(1 - α)`.

    Returns:
        (channels,) float32, of a geometric mean of 1; 1 where a channel or its weights are zeros.
    """
    largest = np.abs(weight).max(axis=1)
    known = (peak > 0) & (largest > 0)
    logs = degree * np.log(np.where(known, peak, 1)) - (1 - degree) * np.log(np.where(known, largest, 1))
    logs -= logs[known].mean() if known.any() else 0.0
    return np.exp(np.where(known, logs, 0.0)).astype(np.float32)
