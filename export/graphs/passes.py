"""What every pass over a graph returns: onnx_ir's own `PassResult`, so that ours and theirs are used alike.

A pass is a function `pass_(model, …)` that changes `model` in place and returns `PassResult(model, modified)`; one that
works site by site returns a :class:`SitesResult`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from onnx_ir.passes import PassResult

SiteT = TypeVar("SiteT")


@dataclass
class SitesResult(PassResult, Generic[SiteT]):
    """The result of a pass that works site by site.

    Attributes:
        model: the graph that was passed.
        modified: whether the pass changed it.
        sites: a record of every site, in graph order, whether the pass changed it or not.
    """

    sites: list[SiteT]
