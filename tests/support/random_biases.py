"""Random masks with a bias by distance, as people and exporters write them, built directly in ONNX, and near misses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.export.graphs.sizes import ONE, Size, sizes_of
from tests.support.random_graphs import FLOAT, INT64, Graph

T = TypeVar("T")
TOKENS, BATCH = Size(1, ("tokens",)), Size(1, ("batch",))

FORMS = ("key", "last key", "distance", "absolute distance", "clamped distance", "two parts", "table by key",
         "end of a table", "table of pairs", "table by distance")  # fmt: skip
HIDING = ("where", "add", "triangle", "attribute")
FLAWS = (
    "data", "size of data", "samples", "over the length", "longer than", "odd length", "far keys alike", "sink",
    "steeper later", "root", "steps", "one head", "one query", "own key", "not hidden", "barely hidden",
    "window by length", "hole", "short table", "uneven table",
)  # fmt: skip
"""Ways in which a mask is no bias by distance."""


class Seeded:
    """Choices drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def pick(self, options: Sequence[T]) -> T:
        return self._rng.choice(options)

    def chance(self, percent: int) -> bool:
        return self._rng.random() * 100 < percent


@dataclass
class RandomBias(Graph):
    """A mask with a bias by distance.

    Attributes:
        flaw: one of :data:`FLAWS`, or empty.
        capacity: largest number of tokens.
        window: number of keys that a query sees; None for all earlier ones.
        slopes: slope of each head.
    """

    flaw: str = ""
    capacity: int = 0
    window: int | None = None
    slopes: tuple[float, ...] = ()
    node: ir.Node = field(init=False)

    @classmethod
    def draw(cls, seed: int, flaw: str = "") -> RandomBias:
        choices = Seeded(seed)
        pick, capacity, heads = choices.pick, choices.pick((6, 17, 30, 40, 66, 90, 500)), choices.pick((1, 2, 3, 6))
        slopes = [pick((1, -1, 1)) * pick((0.5, 0.3, 0.7071, 0.125)) / (head + 1) for head in range(heads)]
        window, dtype = pick((None, None, 1 + capacity // 3, 4)), pick((FLOAT, FLOAT, ir.DataType.FLOAT16))
        stored = tuple(np.array(slopes, np.float16).astype(float).tolist())
        result = cls(choices, dtype, flaw=flaw, capacity=capacity, window=window, slopes=stored)
        result._write()
        return result

    def _write(self) -> None:
        heads = Size(len(self.slopes))
        self.ids = self.input("ids", [BATCH, TOKENS], INT64)
        self.length = self.squeeze(self._size(TOKENS), [0])
        positions = self.op("Range", [self.number(0), self.length, self.number(1)], [TOKENS], INT64)
        self.key, self.query = positions, self.unsqueeze(positions, [1])
        self.distance = self.binary("Sub", self.key, self.query)
        tables = [form for form in FORMS if "table" in form]
        self.form = self.choices.pick(tables if self.flaw in ("short table", "uneven table") else FORMS)
        bias = self._flawed(self._bias())
        hides = {"not hidden": "none", "barely hidden": "add"}.get(self.flaw) or self.choices.pick(HIDING)
        mask = self._windowed(self._hidden(bias, hides))
        mask = self.unsqueeze(mask, [0])
        if self.choices.chance(40):
            mask = self.expand(mask, [BATCH, heads, TOKENS, TOKENS])
            if self.choices.chance(50):  # as in BLOOM
                mask = self.reshape(self.reshape(mask, [BATCH * heads, TOKENS, TOKENS]), [BATCH, heads, TOKENS, TOKENS])
        query = ir.Value(
            name="query", type=ir.TensorType(self.dtype), shape=ir.Shape(["batch", heads.factor, "tokens", 8])
        )
        self.node = ir.node("Attention", [query, query, query, mask], {"is_causal": int(hides == "attribute")})

    def number(self, n: int) -> ir.Value:
        return self.constant(np.int64(n), INT64)

    def real(self, x: ir.Value) -> ir.Value:
        return self.cast(x, self.dtype)

    def _slopes(self, factor: Array | float = 1.0) -> ir.Value:
        return self.constant(np.array(self.slopes)[:, None, None] * factor)

    # --- biases

    def _bias(self) -> ir.Value:
        """`(heads, tokens or 1, tokens)`."""
        form, key = self.form, self.real(self.key)
        if "table" in form:
            return self._looked_up()
        if form == "key":
            return self.binary("Mul", self._slopes(), key)
        if form == "last key":
            last = self.binary("Sub", self.binary("Add", self.key, self.number(1)), self.length)
            return self.binary("Mul", self.real(last), self._slopes())
        if form == "two parts":
            bias = self.binary("Mul", self._slopes(0.5), key)
            row = self.binary("Div", self.real(self.query), self.constant(3.0))
            return self.binary("Add", self.binary("Add", bias, row), bias)
        distance = self.distance
        if form == "absolute distance":
            distance = self.unary("Neg", self.unary("Abs", distance))
        elif form == "clamped distance":
            distance = self.op("Clip", [distance, None, self.number(0)], sizes_of(distance))
        return self.binary("Mul", self._slopes(), self.real(distance))

    def _looked_up(self) -> ir.Value:
        """A part of a constant."""
        size = self.capacity + (-1 if self.flaw == "short table" else self.choices.pick((0, 0, 5)))
        at, heads = np.arange(size), Size(len(self.slopes))
        if self.form == "table of pairs" and self.capacity < 100:
            table = np.array(self.slopes)[:, None, None] * (at - at[:, None])
            ends = self.op("Concat", [self.unsqueeze(self.length, [0])] * 2, [Size(2)], INT64, axis=0)
            parts = [self.constant(self._uneven(table)), self.ints(0, 0), ends, self.ints(1, 2)]
            return self.op("Slice", parts, [heads, TOKENS, TOKENS])
        if self.form == "table by distance" and self.capacity < 100:
            table = np.array(self.slopes)[:, None] * np.arange(1 - size, size)
            index = self.binary("Add", self.distance, self.number(size - 1))
            return self.op("Gather", [self.constant(self._uneven(table)), index], [heads, TOKENS, TOKENS], axis=1)
        table = self._uneven(np.array(self.slopes)[:, None, None] * (at - self.choices.pick((0, size - 1))))
        start, end = self.ints(0), self.unsqueeze(self.length, [0])
        if self.form == "end of a table":
            start, end = self.unary("Neg", end), self.ints(np.iinfo(np.int64).max)
        return self.op("Slice", [self.constant(table), start, end, self.ints(2)], [heads, ONE, TOKENS])

    def _uneven(self, table: Array) -> Array:
        if self.flaw == "uneven table":
            table[0, ..., ::3] += 0.05 * (1 + np.abs(table).max())
        return table

    # --- hiding

    def _hidden(self, bias: ir.Value, how: str) -> ir.Value:
        if how in ("none", "attribute"):
            return self.expand(bias, [sizes_of(bias)[0], TOKENS, TOKENS])
        fill = -100.0 if self.flaw == "barely hidden" else self.choices.pick((-np.inf, -6e4))
        later = self.binary("Greater", self.key, self.query)
        if how == "where":
            return self.where(later, self.constant(fill), bias)
        if how == "triangle":
            full = self.expand(self.constant(fill), [TOKENS, TOKENS])
            return self.binary("Add", bias, self.op("Trilu", [full, self.number(1)], [TOKENS, TOKENS], upper=1))
        return self.binary("Add", self.where(later, self.constant(fill), self.constant(0.0)), bias)

    def _windowed(self, mask: ir.Value) -> ir.Value:
        if self.flaw == "window by length":
            width = self.binary("Div", self.length, self.number(2))
        elif self.flaw == "hole":
            hole = self.binary("Equal", self.distance, self.number(-2))
            return self.where(hole, self.constant(-np.inf), mask)
        elif self.window is not None:
            width = self.number(self.window)
        else:
            return mask
        far = self.binary("LessOrEqual", self.distance, self.unary("Neg", width))
        return self.where(far, self.constant(-np.inf), mask)

    # --- flaws

    def _flawed(self, bias: ir.Value) -> ir.Value:
        one, two, three, half = (self.number(n) for n in (1, 2, 3, self.capacity // 2))
        if self.flaw in ("sink", "one head", "own key"):
            is_one = self.flaw == "one head"
            at = {"sink": self.key, "one head": self.binary("Mod", self.key, three), "own key": self.distance}[
                self.flaw
            ]
            odd = self.binary("Equal", at, self.number(0) if self.flaw == "own key" else two)
            more = self.constant(0.1 * (np.arange(len(self.slopes))[:, None, None] < (1 if is_one else 99)))
            return self.binary("Add", bias, self.binary("Mul", more, self.real(odd)))
        if self.flaw in ("far keys alike", "root", "steps"):
            if self.flaw == "root":
                x = self.unary("Sqrt", self.unary("Abs", self.real(self.distance)))
            elif self.flaw == "steps":
                x = self.real(self.binary("Div", self.key, two))
            else:
                x = self.real(self.op("Clip", [self.distance, self.number(-1), None], sizes_of(self.distance)))
            return self.binary("Mul", self._slopes(), x)
        factors: dict[str, Callable[[], ir.Value]] = {
            "data": lambda: self.op("Gather", [self.ids, self.number(0)], [TOKENS], axis=0),
            "size of data": self._size_of_data,
            "samples": lambda: self.squeeze(self._size(BATCH), [0]),
            "over the length": lambda: self.binary("Div", self.number(5000), self.length),
            "longer than": lambda: self._one_more(self.binary("Greater", self.length, half)),
            "odd length": lambda: self._one_more(self.binary("Equal", self.binary("Mod", self.length, two), one)),
            "steeper later": lambda: self._one_more(self.binary("Greater", self.query, half)),
            "one query": lambda: self._one_more(self.binary("Equal", self.query, half)),
        }
        return self.binary("Mul", bias, self.real(factors[self.flaw]())) if self.flaw in factors else bias

    def _one_more(self, condition: ir.Value) -> ir.Value:
        return self.binary("Add", self.number(1), self.cast(condition, INT64))

    def _size_of_data(self) -> ir.Value:
        """How many tokens are not 0, by the size of what finds them."""
        found = self.op("NonZero", [self.ids], [Size(2), Size(1, ("found",))], INT64)
        count = self.op("Shape", [found], [ONE], INT64, start=1, end=2)
        return self.binary("Add", self.squeeze(count, [0]), self.number(1))
