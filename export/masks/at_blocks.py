"""Compute a mask for blocks of queries and keys from the operands of its graph, without materialising all pairs.

The mask's graph is read backwards by indices, as in :mod:`.reader`. Values that vary by query or by key alone are
small: they are brought to four dims and cut as the caller says. Elementwise operators are repeated on the cut operands.
Values that have a number for every pair already (an input, a constant) are cut as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import islpy as isl
import onnx_ir as ir

from attnforge.export.attention.canonical import MASK_STEP
from attnforge.export.attention.layout import Axis, Layout, rearrange
from attnforge.export.attention.operands import scalar
from attnforge.export.graphs.build import Builder, broadcast_like, cast, constant, dims_of, drop, like, typed
from attnforge.export.graphs.nodes import BY_ELEMENT, input_of, is_op, maker_of, optional_input
from attnforge.export.graphs.sizes import ONE, Size
from attnforge.export.masks.affine import Affine, Atom, Dim, Quotient, Scalar, Variable
from attnforge.export.masks.indices import MOVES, Index, variables_of
from attnforge.export.masks.reader import BOOL, Interpreter, Reader
from attnforge.export.masks.scores import PAIR, Whole
from attnforge.export.masks.visibility import scores_index

INT64 = ir.DataType.INT64

Cut = Callable[[Builder, ir.Value], ir.Value]
"""Cuts a tensor `(B or 1, H or 1, n_q or 1, n_k or 1)` to blocks: a Slice of the last two dims, say, or a Reshape of
queries to blocks and a Gather of the keys of each block. It takes tensors of any type, and its results have one rank
and broadcast to one another."""

VARIABLES = tuple(Variable)
"""The variables of the dims of scores, in order."""

ELEMENTWISE = BY_ELEMENT - {"CastLike", "DequantizeLinear", "QuantizeLinear"}
"""Operators that can be repeated on cut operands: none has scales along an axis, or an operand of another shape."""


class NotByBlocks(Exception):
    """A mask cannot be computed by blocks; the message gives a reason that a user can act on."""


def mask_at_blocks(op: Builder, node: ir.Node, cut: Cut) -> ir.Value | None:
    """Write the mask of a canonical Attention node by blocks, without the node's own causality.

    Args:
        op: records the new nodes. If an error is raised, the caller must drop them
            (:func:`~attnforge.export.graphs.build.insert` does).
        node: a canonical node (:mod:`.canonical`).
        cut: cuts a tensor to blocks.

    Returns:
        The mask in the dims that `cut` gives, boolean or additive like the node's own; None if the node has no mask.

    Raises:
        NotByBlocks: the mask would have to be computed for all pairs.
    """
    return _Blocks(op, node, cut).mask(node)


def mask_by_key(op: Builder, node: ir.Node, is_triangle: bool = False) -> ir.Value | None:
    """Write the mask of a canonical Attention node that is the same for every query, `(B or 1, H or 1, 1, n_k or 1)`;
    otherwise as :func:`mask_at_blocks`.

    Args:
        is_triangle: whether the mask is needed only for pairs whose key is not later than the query.

    Raises:
        NotByBlocks: it is not proved to be the same for every query.
    """
    return _ByKey(op, node, is_triangle).mask(node)


def why_not_by_blocks(node: ir.Node) -> str | None:
    """Why :func:`mask_at_blocks` cannot write the mask of a node; None if it can."""
    return _why_not(lambda op: mask_at_blocks(op, node, _as_it_is))


def why_not_by_key(node: ir.Node, is_triangle: bool) -> str | None:
    """Why :func:`mask_by_key` cannot write the mask of a node; None if it can."""
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
        drop(op)
    return None


def _is_in_memory(value: ir.Value | None) -> bool:
    """Whether a value is an input, a constant, or a slice of one."""
    node = maker_of(value)
    if is_op(node, "Slice"):
        return _is_in_memory(node.inputs[0])
    return node is None or ir.convenience.get_const_tensor(node.outputs[0]) is not None


_NOT_REPEATED = frozenset({*MOVES, "Clip", "Concat", "Trilu"})
"""Operators that are not repeated on cut operands, but read as by a reader."""


class _Blocks(Interpreter[ir.Value]):
    """Writes values by blocks for a canonical node, whose operands give the numbers of queries and keys."""

    refusal = NotByBlocks

    def __init__(self, op: Builder, node: ir.Node, cut: Cut) -> None:
        self.op, self._cut = op, cut
        query, key = input_of(node, 0), input_of(node, 1)
        axes = dict(zip(VARIABLES, ((query, 0), (query, 1), (query, 2), (key, 2)), strict=True))
        self.sizes = [(Affine.dim(dims_of(value)[axis]), value, axis) for value, axis in axes.values()]
        self.whole = {variable: dims_of(value)[axis] for variable, (value, axis) in axes.items()}
        sizes = {variable: Size.of(dim) for variable, dim in self.whole.items()}
        self._axes = {variable: () if size == ONE else (Axis(size),) for variable, size in sizes.items()}
        super().__init__(Reader(*(Affine.dim(self.whole[variable]) for variable in (Variable.QUERY, Variable.KEY))))
        self.arithmetic = self

    def mask(self, node: ir.Node) -> ir.Value | None:
        """The mask of the node, cut to blocks; None if it has none."""
        if (mask := optional_input(node, 3)) is None:
            return None
        try:
            return self.read(mask, scores_index(self.scores, mask, input_of(node, 0), input_of(node, 1)))
        except isl.Error:
            raise NotByBlocks(f"the graph of {mask.name!r} is too large") from None

    def variables(self, index: Index) -> frozenset[Variable]:
        return variables_of(self.scores, index)

    def _uncached(self, value: ir.Value, index: Index) -> ir.Value:
        """A value at an index, cut to blocks."""
        if (number := scalar(value)) is not None:
            return self.cut(constant(self.op, [[[[number]]]], value.dtype))
        node = value.producer()
        is_small = not self.variables(index).issuperset(PAIR)
        is_part = is_op(node, "Gather", "GatherND") and _is_in_memory(node.inputs[0])
        if node is None or is_small or is_part or _is_in_memory(value):
            return self.cut(self._on_four_dims(value, index))
        if node.domain == "" and node.op_type in _NOT_REPEATED:
            return self._handled(node, index)
        if node.domain == "" and node.op_type in ELEMENTWISE:
            return self._again(node, index)
        raise NotByBlocks(f"{value.name!r} is computed for all pairs by {node.op_type}")

    def cut(self, value: ir.Value) -> ir.Value:
        result = self._cut(self.op, value)
        return like(result, result, value.dtype)

    # --- operators

    def _again(self, node: ir.Node, index: Index) -> ir.Value:
        """Repeat an operator on cut operands."""
        operands = [self.read(*operand) for operand in self.operands(node, index)]
        steps = {MASK_STEP: node.metadata_props[MASK_STEP]} if MASK_STEP in node.metadata_props else {}
        result = self.op.op(node.op_type, operands, dict(node.attributes), metadata_props=steps)
        return broadcast_like(result, *operands, dtype=node.outputs[0].dtype)

    def compute(self, op_type: str, a: ir.Value, b: ir.Value) -> ir.Value:
        """Compute an elementwise operator of two cut operands."""
        return broadcast_like(self.op.op(op_type, [a, b]), a, b)

    def either(self, x: Whole, yes: ir.Value, no: ir.Value | None) -> ir.Value:
        """`yes` where `x` is at least 0, else `no`, which is False or 0 by default."""
        op, dtype, condition = self.op, yes.dtype, self._not_negative(x)
        if dtype != BOOL:
            no = self.cut(constant(op, [[[[0]]]], dtype)) if no is None else no
            return broadcast_like(op.Where(condition, yes, no), condition, yes, no, dtype=dtype)
        kept = broadcast_like(op.And(condition, yes), condition, yes)
        if no is None:
            return kept
        others = broadcast_like(op.And(like(op.Not(condition), condition), no), condition, no)
        return broadcast_like(op.Or(kept, others), kept, others)

    # --- small values, and values that are in memory

    def _on_four_dims(self, value: ir.Value, index: Index) -> ir.Value:
        """A value in the dims of the scores, with size 1 for each dim along which it does not vary."""
        placed: list[Variable | None] = []
        for axis, at in enumerate(index):
            position = self.scores.closed(at)
            if position is None or len(position.variables) > 1:
                raise NotByBlocks(f"where {value.name!r} is read is not known")
            variable = next(iter(position.variables), None)
            if variable in placed and variable is not None:
                raise NotByBlocks(f"{value.name!r} is read twice by {variable.value}")
            placed.append(variable)
            value = self._along(value, axis, position, variable, self.variables(index).issuperset(PAIR))
        return self._rearranged(value, placed)

    def _rearranged(self, value: ir.Value, variables: Sequence[Variable | None]) -> ir.Value:
        """A value in the dims of the scores, given the variable of each of its dims, or None for one of size 1."""
        source = Layout(() if variable is None else self._axes[variable] for variable in variables)
        target = Layout(self._axes[variable] if variable in variables else () for variable in VARIABLES)
        return rearrange(self.op, value, source, target)

    def _along(
        self, value: ir.Value, axis: int, position: Affine, variable: Variable | None, in_memory: bool
    ) -> ir.Value:
        """A value with one dim gathered at a position, which depends on at most one variable."""
        op, dims = self.op, dims_of(value)
        dim: int | ir.SymbolicDim = 1
        if variable is None:
            if dims[axis] == 1:
                return value
            indices = typed(op.Unsqueeze(self._number(position), constant(op, [0])), INT64, [1])
        else:
            if position == Affine.atom(variable) and Size.of(dims[axis]) == Size.of(self.whole[variable]):
                return value
            indices, dim = self._inside(self._along_variable(position, variable), dims[axis]), self.whole[variable]
        if in_memory:
            raise NotByBlocks(f"{value.name!r} would be copied for all pairs")
        return typed(op.Gather(value, indices, axis=axis), value.dtype, [*dims[:axis], dim, *dims[axis + 1 :]])

    def _inside(self, indices: ir.Value, dim: int | ir.SymbolicDim) -> ir.Value:
        """Indices clamped to a dim: those outside belong to numbers that are not read."""
        last = self._number(Affine.dim(dim) - 1)
        return like(self.op.Max(like(self.op.Min(indices, last), indices), constant(self.op, 0)), indices)

    def _not_negative(self, whole: Whole) -> ir.Value:
        """Where a number is at least 0, by blocks."""
        x = self.scores.closed(whole)
        if x is None:
            raise NotByBlocks("where a part of it begins is not known")
        op, terms = self.op, dict(x.terms)
        if any(len(Affine.atom(atom).variables) > 1 or Affine.atom(atom).variables.difference(PAIR) for atom in terms):
            raise NotByBlocks(f"{x.text()} depends on more than a query and a key")
        of_key = Affine.of(0, {atom: n for atom, n in terms.items() if Variable.KEY in Affine.atom(atom).variables})
        key = self.cut(self._vector(of_key, Variable.KEY))
        query = self.cut(self._vector(of_key - x, Variable.QUERY))
        return broadcast_like(op.GreaterOrEqual(key, query), key, query, dtype=BOOL)

    def _vector(self, x: Affine, variable: Variable) -> ir.Value:
        """The numbers of an expression for every query or key, on four dims."""
        if not x.variables:
            return self._rearranged(self._number(x), [])
        return self._rearranged(self._along_variable(x, variable), [variable])

    # --- integers

    def _along_variable(self, x: Affine, variable: Variable) -> ir.Value:
        """`(n,)`: an expression for every value of a variable."""
        op, count = self.op, Affine.dim(self.whole[variable])
        numbers = typed(op.Range(constant(op, 0), self._number(count), constant(op, 1)), INT64, [self.whole[variable]])
        return self._sum(x, {variable: numbers}, numbers)

    def _number(self, x: Affine) -> ir.Value:
        """An expression without variables, as a scalar."""
        for size, value, axis in self.sizes:
            if x == size and x.constant is None:
                shape = self.op.Shape(value, start=axis, end=axis + 1)
                return typed(self.op.Squeeze(shape, constant(self.op, [0])), INT64, [])
        return self._sum(x, {}, constant(self.op, 0))

    def _sum(self, x: Affine, known: dict[Variable, ir.Value], like_: ir.Value) -> ir.Value:
        op = self.op
        result = constant(op, x.number)
        for atom, factor in x.terms:
            term = self._atom(atom, known, like_)
            term = term if factor == 1 else like(op.Mul(term, constant(op, factor)), term)
            result = like(op.Add(term, result), like_)
        return result

    def _atom(self, atom: Atom, known: dict[Variable, ir.Value], like_: ir.Value) -> ir.Value:
        op = self.op
        if isinstance(atom, Variable) and atom in known:
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

    def __init__(self, op: Builder, node: ir.Node, is_triangle: bool) -> None:
        super().__init__(op, node, _as_it_is)
        self._asked = self.scores.query.ge_set(self.scores.key) if is_triangle else self.scores.always

    def _uncached(self, value: ir.Value, index: Index) -> ir.Value:
        if value.dtype == BOOL and Variable.QUERY in self.variables(index):
            truth = self.reader.truth(value, index)
            for answer, opposite in ((True, self.scores.opposite(truth)), (False, truth)):
                if self.scores.is_never(self._asked.intersect(opposite)):
                    return constant(self.op, [[[[answer]]]], BOOL)
        return super()._uncached(value, index)

    def _on_four_dims(self, value: ir.Value, index: Index) -> ir.Value:
        if Variable.QUERY in self.variables(index):
            raise NotByBlocks(f"{value.name!r} differs by query")
        return super()._on_four_dims(value, index)

    def _vector(self, x: Affine, variable: Variable) -> ir.Value:
        if variable is Variable.QUERY and x.variables:
            raise NotByBlocks(f"{x.text()} differs by query")
        return super()._vector(x, variable)
