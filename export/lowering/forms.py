"""The forms that a lowering can write for a site, and how a chosen one is written.

A lowering lists the forms of a site. The tuner (:mod:`.tuning`) measures all of them; without it the first that pays
decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from attnforge.export.graphs.build import Builder, insert, replace_value
from attnforge.export.graphs.sizes import Size, Unmeasurable, evaluated
from attnforge.export.lowering.attention import Attention

CONTRIB = "com.microsoft"

TOLERANCE = 1e-5
"""Relative difference from the products that fp32 rounding explains, with scores of magnitude one."""


Emit = Callable[[Builder, Attention, str], ir.Value]
"""Writes a form of a site, at any sizes, with a node of the given name."""


@dataclass(frozen=True)
class Candidate:
    """A form that a site can be lowered to. The first one of a site is its plain form, which the others are checked
    against and which always pays; the others are in order of preference.

    Attributes:
        form: name of the form.
        node: name of the node by which the site is identified in the compiled graph.
        emit: writes it.
        pays: whether it is worth it at the usual sizes.
        why: the reason for it in the certificate if no form is measured.
        fused: whether one kernel does the work.
        materialises_scores: whether all scores are in memory at once.
        projects: whether it also writes the projections of its operands.
        tolerance: maximum relative difference from the products.
    """

    form: str
    node: str
    emit: Emit
    pays: bool
    why: str
    fused: bool = True
    materialises_scores: bool = True
    projects: bool = False
    tolerance: float = TOLERANCE


def write(graph: ir.Graph, a: Attention, candidate: Candidate) -> None:
    """Replace a site by a form. The Attention node stays, without users."""
    result = insert(graph, a.node, lambda op: candidate.emit(op, a, candidate.node))
    replace_value(a.output.value, result)
    if candidate.form.startswith(CONTRIB):
        graph.opset_imports[CONTRIB] = 1


# --- sizes ------------------------------------------------------------------------------------------------------------

Sizes = Mapping[str, int]
"""The size of each symbolic dim."""

NO_SIZES: Sizes = {}


def usual(size: Size, sizes: Mapping[str, int]) -> int:
    """The usual number that a size is; its static factor if its symbols are unknown."""
    try:
        return evaluated(size, sizes)
    except Unmeasurable:
        return size.factor
