"""A mask at blocks of queries and keys, from what it is computed of, so that no mask of all pairs is ever in memory.

The mask's graph is followed backwards by indices, as in :mod:`.mask_reader`. What varies by query or by key alone is
small: it is brought to four dims and cut as the caller says. Operators that work element by element are written again
on what was cut. What holds a number for every pair already (an input, a constant) is cut as it stands.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from attnforge.export.attention.affine import KEY, QUERY, Affine, Atom, Dim, Place, Quotient, Scalar
from attnforge.export.attention.canonical import MASK_STEP
from attnforge.export.attention.indices import START, Index, broadcast, pieces, places_of
from attnforge.export.attention.layout import Size
from attnforge.export.attention.mask_reader import BOOL, INT64, Reader
from attnforge.export.attention.moves import MOVES
from attnforge.export.attention.operands import scalar
from attnforge.export.attention.truth import ALWAYS, at_least_zero
from attnforge.export.attention.visibility import scores_index
from attnforge.export.graphs.build import Builder, cast, constant, dims_of, like, typed
from attnforge.export.graphs.nodes import input_of, is_op, optional_input, rank_of

Cut = Callable[[Builder, ir.Value], ir.Value]
"""Brings a tensor `(B or 1, H or 1, n_q or 1, n_k or 1)` to blocks: a Slice of the last two dims, say, or a Reshape of
queries to blocks and a Gather of the keys of each. It gets tensors of any type, and its results are of one rank and
broadcast to one another."""

PLACES = (Place.BATCH, Place.HEAD, Place.QUERY, Place.KEY)
PAIR = frozenset({Place.QUERY, Place.KEY})

ELEMENTWISE = frozenset(
    {
        *("Abs", "Add", "And", "Cast", "Div", "Equal", "Exp", "Floor", "Greater", "GreaterOrEqual", "IsInf", "IsNaN"),
        *("Less", "LessOrEqual", "Log", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "Relu", "Sqrt", "Sub"),
        *("Tanh", "Where", "Xor"),
    }
)
"""Operators whose results have at an index only what the operands have there."""


class NotByBlocks(Exception):
    """Why a mask cannot be computed at blocks, in words that a user can act on."""


def mask_at_blocks(op: Builder, node: ir.Node, cut: Cut) -> ir.Value | None:
    """The mask of a canonical Attention node, at blocks; its own causality is not in it.

    Args:
        op: records the new nodes. Where an error is raised, they are to be dropped
            (:func:`~attnforge.export.graphs.build.insert` does).
        node: as :mod:`.canonical` has it.
        cut: what blocks are.

    Returns:
        the mask in the dims that `cut` gives, boolean or added as the node's own; None where the node has no mask.

    Raises:
        NotByBlocks: the mask would have to be computed for all pairs.
    """
    query, key, mask = input_of(node, 0), input_of(node, 1), optional_input(node, 3)
    return None if mask is None else _Blocks(op, query, key, cut).at(mask, scores_index(mask, query, key))


def mask_by_key(op: Builder, node: ir.Node, is_triangle: bool = False) -> ir.Value | None:
    """The mask of a canonical Attention node that is the same for every query, `(B or 1, H or 1, 1, n_k or 1)`; else as
    :func:`mask_at_blocks`.

    Args:
        is_triangle: whether only pairs of a query and a key that is not later are asked for.

    Raises:
        NotByBlocks: it is not proved to be the same for every query.
    """
    query, key, mask = input_of(node, 0), input_of(node, 1), optional_input(node, 3)
    return None if mask is None else _ByKey(op, query, key, is_triangle).at(mask, scores_index(mask, query, key))


def why_not_by_blocks(node: ir.Node) -> str | None:
    """Why :func:`mask_at_blocks` cannot write the mask of a node; None where it can."""
    return _why_not(lambda op: mask_at_blocks(op, node, _as_it_is))


def why_not_by_key(node: ir.Node, is_triangle: bool) -> str | None:
    """Why :func:`mask_by_key` cannot write the mask of a node; None where it can."""
    return _why_not(lambda op: mask_by_key(op, node, is_triangle))


def _as_it_is(op: Builder, value: ir.Value) -> ir.Value:
    return value


def _why_not(write: Callable[[Builder], object]) -> str | None:
    op = Builder()
    try:
        write(op)
    except NotByBlocks as reason:
        return str(reason)
    finally:
        for written in op.nodes:  # so that they do not count as users of what they read
            for i in range(len(written.inputs)):
                written.replace_input_with(i, None)
    return None


class _Blocks:
    """Writes values at blocks.

    Args:
        query, key: of the site; they tell the counts of queries and keys.
    """

    def __init__(self, op: Builder, query: ir.Value, key: ir.Value, cut: Cut) -> None:
        self.op, self._cut = op, cut
        axes = {Place.BATCH: (query, 0), Place.HEAD: (query, 1), Place.QUERY: (query, 2), Place.KEY: (key, 2)}
        self.sizes = [(Affine.dim(dims_of(value)[axis]), value, axis) for value, axis in axes.values()]
        self.whole = {place: dims_of(value)[axis] for place, (value, axis) in axes.items()}
        self.reader = Reader({place: Affine.dim(self.whole[place]) - 1 for place in PAIR})
        self._written: dict[tuple[ir.Value, Index], ir.Value] = {}

    def at(self, value: ir.Value | None, index: Index) -> ir.Value:
        """A value at an index, cut to blocks."""
        assert value is not None
        key = value, index
        if key not in self._written:
            self._written[key] = self._new(value, index)
        return self._written[key]

    def _new(self, value: ir.Value, index: Index) -> ir.Value:
        if rank_of(value) != len(index) or value.dtype is None:
            raise NotByBlocks(f"the shape of {value.name!r} is not known")
        if (number := scalar(value)) is not None:
            return self.cut(constant(self.op, [[[[number]]]], value.dtype))
        node = value.producer()
        if not places_of(index) >= PAIR:
            return self.cut(self._on_four_dims(value, index))
        if node is None or ir.convenience.get_const_tensor(value) is not None:
            return self.cut(self._on_four_dims(value, index))
        if is_op(node, *ELEMENTWISE):
            return self._again(node, index)
        if is_op(node, *MOVES):
            return self._moved(node, index)
        if is_op(node, "Trilu"):
            return self._triangle(node, index)
        if is_op(node, "Concat"):
            return self._joined(node, index)
        raise NotByBlocks(f"{value.name!r} is computed for all pairs by {node.op_type}")

    def cut(self, value: ir.Value) -> ir.Value:
        result = self._cut(self.op, value)
        assert value.dtype is not None and result.shape is not None
        result.type = ir.TensorType(value.dtype)
        return result

    def _like(self, result: ir.Value, dtype: ir.DataType | None, *operands: ir.Value) -> ir.Value:
        """A result with its type, and the shape that operands of one rank broadcast to."""
        dims = [next((dim for dim in column if dim != 1), 1) for column in zip(*map(dims_of, operands), strict=True)]
        return typed(result, dtype, dims)

    # --- operators

    def _again(self, node: ir.Node, index: Index) -> ir.Value:
        """An operator on operands at blocks."""
        operands = [self.at(x, broadcast(x, node.outputs[0], index)) for x in node.inputs]
        steps = {MASK_STEP: node.metadata_props[MASK_STEP]} if MASK_STEP in node.metadata_props else {}
        result = self.op.op(node.op_type, operands, dict(node.attributes), metadata_props=steps)
        return self._like(result, node.outputs[0].dtype, *operands)

    def _moved(self, node: ir.Node, index: Index) -> ir.Value:
        source = node.inputs[0]
        before = MOVES[node.op_type](self.reader, node, index)
        if before is None:
            raise NotByBlocks(f"how {node.op_type} moves {node.outputs[0].name!r} is not known")
        picks = node.op_type in ("Slice", "Gather", "GatherND")
        if picks and source is not None and (source.producer() is None or ir.convenience.get_const_tensor(source)):
            return self.cut(self._on_four_dims(node.outputs[0], index))  # a piece of what is in memory
        return self.at(source, before)

    def _triangle(self, node: ir.Node, index: Index) -> ir.Value:
        k = optional_input(node, 1)
        offset = START if k is None else self.reader.position(k, (START,) * rank_of(k))
        row, column = index[-2:]
        if offset is None or row is None or column is None:
            raise NotByBlocks(f"the triangle of {node.outputs[0].name!r} is not known")
        above = column - row - offset
        kept = self._not_negative(above if node.attributes.get_int("upper", 1) else -above)
        return self._either(kept, self.at(node.inputs[0], index), None)

    def _joined(self, node: ir.Node, index: Index) -> ir.Value:
        axis = node.attributes["axis"].as_int() % len(index)
        result: ir.Value | None = None
        for part, position, size in reversed(pieces(list(node.inputs), index[axis], axis) or []):
            if at_least_zero(position, self.reader.largest).constant is False:
                continue
            is_inside = at_least_zero(size - position - 1, self.reader.largest).constant
            if result is not None and is_inside is False:
                continue
            mine = self.at(part, (*index[:axis], position, *index[axis + 1 :]))
            whole = result is None or is_inside is True
            result = mine if whole else self._either(self._not_negative(size - position - 1), mine, result)
        if result is None:
            raise NotByBlocks(f"where {node.outputs[0].name!r} is joined is not known")
        return result

    def _either(self, condition: ir.Value, yes: ir.Value, no: ir.Value | None) -> ir.Value:
        """`yes` where a condition holds, else `no`, or nothing: False, or 0."""
        op, dtype = self.op, yes.dtype
        assert dtype is not None
        if dtype != BOOL:
            no = self.cut(constant(op, [[[[0]]]], dtype)) if no is None else no
            return self._like(op.Where(condition, yes, no), dtype, condition, yes, no)
        kept = self._like(op.And(condition, yes), BOOL, condition, yes)
        if no is None:
            return kept
        others = self._like(op.And(self._like(op.Not(condition), BOOL, condition), no), BOOL, condition, no)
        return self._like(op.Or(kept, others), BOOL, kept, others)

    # --- what is small, and what is in memory

    def _on_four_dims(self, value: ir.Value, index: Index) -> ir.Value:
        """A value in the dims of the scores, each 1 where it does not vary along it."""
        placed: list[Place | None] = []
        for axis, position in enumerate(index):
            if position is None or len(position.places) > 1:
                raise NotByBlocks(f"where {value.name!r} is read is not known")
            place = next(iter(position.places), None)
            if place in placed and place is not None:
                raise NotByBlocks(f"{value.name!r} is read twice by {place.value}")
            placed.append(place)
            value = self._along(value, axis, position, place, in_memory=places_of(index) >= PAIR)
        op, order = self.op, sorted((place for place in placed if place is not None), key=PLACES.index)
        perm = [i for i, place in enumerate(placed) if place is None] + [placed.index(place) for place in order]
        if perm != sorted(perm):
            dims = dims_of(value)
            value = typed(op.Transpose(value, perm=perm), value.dtype, [dims[i] for i in perm])
        dims, dtype = dims_of(value)[len(perm) - len(order) :], value.dtype
        if extra := len(perm) - len(order):
            value = typed(op.Squeeze(value, constant(op, list(range(extra)))), dtype, dims)
        if missing := [i for i, place in enumerate(PLACES) if place not in order]:
            full = [1 if place not in order else dims[order.index(place)] for place in PLACES]
            value = typed(op.Unsqueeze(value, constant(op, missing)), dtype, full)
        return value

    def _along(self, value: ir.Value, axis: int, position: Affine, place: Place | None, in_memory: bool) -> ir.Value:
        """A value whose dim is indexed by a place alone, or by nothing: what it is not at that position is left out."""
        op, dims = self.op, dims_of(value)
        dim: int | ir.SymbolicDim = 1
        if place is None:
            if dims[axis] == 1:
                return value
            at = typed(op.Unsqueeze(self._number(position), constant(op, [0])), INT64, [1])
        else:
            if position == Affine.atom(place) and Size.of(dims[axis]) == Size.of(self.whole[place]):
                return value
            at, dim = self._inside(self._along_place(position, place), dims[axis]), self.whole[place]
        if in_memory:
            raise NotByBlocks(f"{value.name!r} would be copied for all pairs")
        return typed(op.Gather(value, at, axis=axis), value.dtype, [*dims[:axis], dim, *dims[axis + 1 :]])

    def _inside(self, at: ir.Value, dim: int | ir.SymbolicDim) -> ir.Value:
        """Indices that are within a dim: others are those of numbers that nobody reads."""
        last = self._number(Affine.dim(dim) - 1)
        return like(self.op.Max(like(self.op.Min(at, last), at), constant(self.op, 0)), at)

    def _not_negative(self, x: Affine) -> ir.Value:
        """Where `x ≥ 0`, at blocks."""
        op, terms = self.op, dict(x.terms)
        if any(len(Affine.atom(atom).places) > 1 or Affine.atom(atom).places - PAIR for atom in terms):
            raise NotByBlocks(f"{x.text()} depends on more than a query and a key")
        of_key = Affine.of(0, {atom: n for atom, n in terms.items() if Place.KEY in Affine.atom(atom).places})
        of_query = of_key - x
        key, query = (
            self.cut(self._vector(part, place)) for part, place in ((of_key, Place.KEY), (of_query, Place.QUERY))
        )
        return self._like(op.GreaterOrEqual(key, query), BOOL, key, query)

    def _vector(self, x: Affine, place: Place) -> ir.Value:
        """A number for every query or key, on four dims."""
        op, i = self.op, PLACES.index(place)
        if not x.places:
            return typed(op.Unsqueeze(self._number(x), constant(op, [0, 1, 2, 3])), INT64, [1, 1, 1, 1])
        dims = [self.whole[place] if axis == i else 1 for axis in range(4)]
        others = [axis for axis in range(4) if axis != i]
        return typed(op.Unsqueeze(self._along_place(x, place), constant(op, others)), INT64, dims)

    # --- whole numbers

    def _along_place(self, x: Affine, place: Place) -> ir.Value:
        """`(n,)`: an expression for every index of a place."""
        op, count = self.op, Affine.dim(self.whole[place])
        numbers = typed(op.Range(constant(op, 0), self._number(count), constant(op, 1)), INT64, [self.whole[place]])
        return self._sum(x, {place: numbers}, numbers)

    def _number(self, x: Affine) -> ir.Value:
        """An expression without indices, as a scalar."""
        for size, value, axis in self.sizes:
            if x == size and x.constant is None:
                shape = self.op.Shape(value, start=axis, end=axis + 1)
                return typed(self.op.Squeeze(shape, constant(self.op, [0])), INT64, [])
        return self._sum(x, {}, constant(self.op, 0))

    def _sum(self, x: Affine, known: dict[Place, ir.Value], like_: ir.Value) -> ir.Value:
        op = self.op
        result = constant(op, x.number)
        for atom, factor in x.terms:
            term = self._atom(atom, known, like_)
            term = term if factor == 1 else like(op.Mul(term, constant(op, factor)), term)
            result = like(op.Add(term, result), like_)
        return result

    def _atom(self, atom: Atom, known: dict[Place, ir.Value], like_: ir.Value) -> ir.Value:
        op = self.op
        if isinstance(atom, Place) and atom in known:
            return known[atom]
        if isinstance(atom, Quotient):
            numerator, divisor = self._sum(atom.numerator, known, like_), constant(op, atom.divisor)
            whole = like(op.Sub(numerator, like(op.Mod(numerator, divisor), numerator)), numerator)
            return like(op.Div(whole, divisor), numerator)
        if isinstance(atom, Dim) and any(size == Affine.atom(atom) for size, _, _ in self.sizes):
            return self._number(Affine.atom(atom))
        if isinstance(atom, Scalar) and not atom.index:
            return cast(op, atom.value, INT64)
        raise NotByBlocks(f"{Affine.atom(atom).text()} cannot be computed here")


class _ByKey(_Blocks):
    """Writes values that are the same for every query."""

    def __init__(self, op: Builder, query: ir.Value, key: ir.Value, is_triangle: bool) -> None:
        super().__init__(op, query, key, _as_it_is)
        self._asked = at_least_zero(QUERY - KEY, self.reader.largest) if is_triangle else ALWAYS

    def _new(self, value: ir.Value, index: Index) -> ir.Value:
        if value.dtype == BOOL and rank_of(value) == len(index) and Place.QUERY in places_of(index):
            truth = self.reader.truth(value, index)
            for answer, other in ((True, ~truth), (False, truth)):
                if (self._asked & other).constant is False:
                    return constant(self.op, [[[[answer]]]], BOOL)
        return super()._new(value, index)

    def _on_four_dims(self, value: ir.Value, index: Index) -> ir.Value:
        if Place.QUERY in places_of(index):
            raise NotByBlocks(f"{value.name!r} differs by query")
        return super()._on_four_dims(value, index)

    def _vector(self, x: Affine, place: Place) -> ir.Value:
        if place is Place.QUERY and x.places:
            raise NotByBlocks(f"{x.text()} differs by query")
        return super()._vector(x, place)
