"""Forms of quantised products, chosen by their effect on the product with calibration data.

For each input the candidates are tried on rows of the data: by token, and by tensor if a norm has bounded it, or in
blocks of several lengths, each balanced to several degrees. The error of the products themselves is what counts, so a
channel that no weight reads may be coarse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.export.graphs.execute import as_it_is
from attnforge.export.graphs.qdq import Scheme
from attnforge.export.precision.quantisation import INT8, Product, Quantisation
from attnforge.runtime.parity.budget import relative_error

ROWS = 256
"""Tokens on which forms are tried; ranges are over all tokens."""

DEGREES = (0.5, 0.65, 0.8, 0.9)
"""Part of the spread of an input's channels that balancing moves to the weights: 0 none, 1 all of it."""

HEADROOM = 1.2
"""Ratio of the range of a single scale for a whole input to the largest number of the data."""

PAYS = 1.25
"""Factor by which the error of a balanced form has to be smaller."""

NORMS = ("LayerNormalization", "RMSNormalization", "GroupNormalization", "InstanceNormalization")

BY_NUMBER = frozenset({"Add", "Erf", "Gelu", "HardSwish", "Mul", "Relu", "Sigmoid", "Sub", "Swish", "Tanh"})
"""Elementwise operators."""

AS_GOOD, GOOD = 1.5, 0.01
"""Quantisation by tensor, which is faster, is chosen if its error is at most this factor times that by token, or below
this error."""

AS_GOOD_AFTER_NORM = 1.25
"""The same factor for what weights and activations compute from a norm's output, whose largest numbers are rare, so
that the data may lack them. One range has 1.2 times the error of that by token in BERT-base with random weights; 1.3 to
2.1 times in all-MiniLM-L6-v2, where a factor of 1.5 gave two products one range, and a cosine over 208 sentences fell
below 0.99."""

LONGER = 1.1
"""Longer blocks, which take less memory, are chosen if their error is at most this factor times as large."""


def calibrate(
    model: ir.Model,
    quantisable: Sequence[Product],
    data: Sequence[Mapping[str, Array]],
    is_real: bool,
    scheme: Scheme = INT8,
) -> dict[str, Quantisation]:
    """The form of every product's input, by product name.

    Args:
        model: an fp32 graph that can be run as it is.
        quantisable: its products.
        data: inputs of the model.
        is_real: whether the data is like what the model will see. If not, forms are by token and unbalanced, and the
            data only gives their errors.
        scheme: the scheme of all of them.
    """
    groups: dict[ir.Value, list[Product]] = {}
    for product in quantisable:
        groups.setdefault(product.input, []).append(product)
    rows = _Rows(model, [str(value.name) for value in groups], data)
    forms: dict[str, Quantisation] = {}
    for value, group in groups.items():
        weight = np.concatenate([product.weight for product in group], axis=1)
        tried = _Tried(rows.sample[str(value.name)], rows.peak[str(value.name)], weight, scheme)
        is_shared = any(product.is_shared for product in group)  # balanced, each would need its own weight
        degrees = (None, *DEGREES) if is_real and not is_shared else (None,)
        by_tensor = allowed_by_tensor(value) if is_real and not scheme.blocks else None
        form = tried.in_blocks(degrees) if scheme.blocks else tried.quantised(degrees, by_tensor)
        forms |= {product.name: form for product in group}
    return forms


def allowed_by_tensor(value: ir.Value) -> tuple[float, float] | None:
    """Maximum ratio of a value's error by tensor to its error by token, and the error that is always allowed; None if
    its range depends on the data."""
    if not is_normed(value):
        return None
    node = value.producer()
    return (AS_GOOD, GOOD) if node is not None and node.op_type in NORMS else (AS_GOOD_AFTER_NORM, 0.0)


def is_normed(value: ir.Value) -> bool:
    """Whether each token's numbers are computed from a norm's output for that token, by weights and activations alone,
    so that their range does not depend on the model's input. Other ranges depend on the data: attention over one token
    gives larger numbers than over many, which a range from many clips."""
    pending, seen = [value], set[ir.Value]()
    while pending:
        node = (value := pending.pop()).producer()
        if value in seen or (node is not None and node.op_type in NORMS):
            continue
        seen.add(value)
        if node is None or node.domain != "":
            return False
        computed = [operand for operand in node.inputs if operand is not None and operand.const_value is None]
        is_product = node.op_type in ("Div", "MatMul", "Gemm") and computed == [node.inputs[0]]
        if not computed or not (is_product or node.op_type in BY_NUMBER):
            return False
        pending += computed
    return True


class _Rows:
    """Rows of inputs on the data, and the largest number of every channel.

    Attributes:
        sample: `(at most ROWS, channels)`, float32, drawn from all data, by input name.
        peak: `(channels,)`, float32, over all rows, by input name.
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


@dataclass(frozen=True)
class _Tried:
    """Tries forms of one input.

    Attributes:
        rows: `(tokens, channels)`, rows of the input.
        peak: `(channels,)`, the largest number of each channel.
        weight: `(channels, outputs)`, of all products with this input.
        scheme: the scheme of the forms.
    """

    rows: Array
    peak: Array
    weight: Array
    scheme: Scheme

    def quantised(self, degrees: Sequence[float | None], by_tensor: tuple[float, float] | None) -> Quantisation:
        """The best form of a quantised input.

        Args:
            degrees: degrees of balancing; None for none.
            by_tensor: the error allowed with one range (:func:`allowed_by_tensor`); None if one range is not allowed.
        """
        tokens, tensors = [], []
        for balance in (self._balance(degree) for degree in degrees):
            form = Quantisation(balance=balance, scheme=self.scheme)
            weight = form.fake_weight(self.weight)
            tokens.append(self._with_error(form, weight))
            tensors += [self._with_error(self._static(balance), weight)] if by_tensor is not None else []
        best = _least(tokens)
        if by_tensor is None:
            return best
        factor, least = by_tensor
        static = _least(tensors)
        return static if static.error <= max(factor * best.error, least) else best

    def in_blocks(self, degrees: Sequence[float | None]) -> Quantisation:
        """The best form of weights in blocks: the longest blocks whose error is about as small as the shortest's."""
        balances = [self._balance(degree) for degree in degrees]
        fitting = [block for block in self.scheme.blocks if self.scheme.fits(len(self.weight), block)]
        by_block = []
        for block in fitting:
            forms = [Quantisation(None, balance, 0.0, self.scheme, block) for balance in balances]
            by_block.append(_least([self._with_error(form, form.fake_weight(self.weight)) for form in forms]))
        return max((form for form in by_block if form.error <= LONGER * by_block[0].error), key=lambda f: f.block or 0)

    def _balance(self, degree: float | None) -> Array | None:
        return None if degree is None else balanced(self.peak, self.weight, degree)

    def _static(self, balance: Array | None) -> Quantisation:
        """One range that covers all of the data."""
        peak = self.peak if balance is None else self.peak / balance
        scale = max(HEADROOM * float(peak.max(initial=0.0)) / self.scheme.most, float(np.finfo(np.float32).tiny))
        return Quantisation(scale, balance, scheme=self.scheme)

    def _with_error(self, form: Quantisation, weight: Array) -> Quantisation:
        return replace(form, error=relative_error(form.fake_input(self.rows) @ weight, self._exact))

    @cached_property
    def _exact(self) -> Array:
        return self.rows @ self.weight


def _least(forms: Sequence[Quantisation]) -> Quantisation:
    """The form with the smallest error; a balanced one, which takes another pass over the input, if clearly better."""
    return min(forms, key=lambda form: form.error * (1 if form.balance is None else PAYS))


def balanced(peak: Array, weight: Array, degree: float) -> Array:
    """Divisors of the channels by which inputs and weights share the spread.

    Args:
        peak: `(channels,)`, float32 ≥ 0, the largest number of each channel of the input.
        weight: `(channels, outputs)`, float32.
        degree: α of SmoothQuant's eq. 4, `peak^α / max|weight|^(1 - α)`.

    Returns:
        `(channels,)`, float32, with a geometric mean of 1; 1 where a channel or its weights are all zeros.
    """
    largest = np.abs(weight).max(axis=1)
    known = (peak > 0) & (largest > 0)
    logs = degree * np.log(np.where(known, peak, 1)) - (1 - degree) * np.log(np.where(known, largest, 1))
    logs -= logs[known].mean() if known.any() else 0.0
    return np.exp(np.where(known, logs, 0.0)).astype(np.float32)
