"""The result of a pass over a graph: onnx_ir's own `PassResult`, so that our passes and theirs are used alike.

A pass is a function `pass_(model, …)` that changes `model` in place and, where callers ask whether it did, returns
`PassResult(model, modified)`; a pass that works site by site returns a :class:`SitesResult`.
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
        model: the graph that was passed in.
        modified: whether the pass changed it.
        sites: one record per site, in graph order, whether the pass changed the site or not.
    """

    sites: list[SiteT]
