"""The attention certificate: how every attention site of a deployed model was lowered and whether it was fused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from attnforge.records import Record


class SiteTarget(Record):
    """An attention site as a target runs it.

    Attributes:
        form: the operators that the site was lowered to.
        why: why this form was chosen.
        kernel: the fused kernel that the target compiled; None if there is none.
        reason: why there is no kernel; None also for a target that does not report what it compiles, such as OpenVINO.
        measured: milliseconds of every form that was timed on the machine that deployed the bundle.
        dropped: forms that were tried and not timed, with reasons.
    """

    form: str
    why: str
    kernel: str | None = None
    reason: str | None = None
    measured: dict[str, float] = {}
    dropped: dict[str, str] = {}


End = int | str | None
"""A number, an expression of sizes, or None for an open end."""

Ends = tuple[End, End]
"""Minimum and maximum."""

Share = Annotated[float, Field(ge=0, le=1)]


class VisibleBlocks(Record):
    """Blocks of a fixed size along queries and keys.

    Attributes:
        size: tokens per block.
        shifts: added to the index of a query, and of a key, before it is divided by the size.
        numbers: range of the key's block index minus the query's.
    """

    size: Annotated[int, Field(ge=1)]
    shifts: tuple[int | str, int | str] = (0, 0)
    numbers: Ends = (0, 0)


class VisibleRegion(Record):
    """Pairs of a query and a key that satisfy every condition.

    Attributes:
        band: range of the key's index minus the query's.
        blocks: condition on blocks; None if there is none.
        queries: range of the query's index.
        keys: range of the key's index.
    """

    band: Ends = (None, None)
    blocks: VisibleBlocks | None = None
    queries: Ends = (None, None)
    keys: Ends = (None, None)


class SiteMask(Record):
    """What is proved about a site's mask.

    Attributes:
        text: summary, such as `band −255 … 0, residue: padding`.
        regions: every key that a query may see is in one of these.
        residue: what else the mask depends on: `padding`, `queries`, `condition`, `bias`, `pattern`.
        silent: output of a fully masked row: `never` if there is no such row, `empty` if the node decides, `mean` for
            the mean of all values.
        example: share of all products of queries and keys that is in the regions, at the example's sizes; None if it
            is known only at run time.
        largest: the share at the largest sizes.
    """

    text: str
    regions: list[VisibleRegion]
    residue: list[str] = []
    silent: str
    example: Share | None = None
    largest: Share | None = None


class SiteRecord(Record):
    """An attention site of the model.

    Attributes:
        site: the module that contains it.
        written_as: the operators of the source.
        canonical: whether it became one canonical Attention node.
        form: the canonical form; None if it is not canonical.
        reason: why it is not canonical.
        targets: by target, how the target runs it.
        mask: what is proved about its mask; None if it has none, is not canonical, or the bundle is older.
    """

    site: str
    written_as: str
    canonical: bool
    form: str | None = None
    reason: str | None = None
    targets: dict[str, SiteTarget] = {}
    mask: SiteMask | None = None

    def is_fused(self, target: str) -> bool:
        """Whether a target runs the site as one kernel."""
        return target in self.targets and self.targets[target].kernel is not None

    def why_unfused(self, target: str) -> str | None:
        """Why a target does not run the site as one kernel; None if it does."""
        return self.targets[target].reason if target in self.targets else self.reason or "not canonical"


class Unfused(Record):
    """A site that a target does not run as one kernel.

    Attributes:
        site: the module that contains it.
        target: the target.
        reason: why there is no kernel.
    """

    site: str
    target: str
    reason: str


class Certificate(Record):
    """How a model's attention sites were lowered.

    Attributes:
        sites: number of attention sites of the model.
        canonical: number of sites that became one canonical Attention node.
        fused: by target, number of sites that run as one kernel. They are counted in what the backend compiled, never
            in its input: in TensorRT's plan, and in the graph that ONNX Runtime's CPU provider runs. OpenVINO is
            absent because it does not report what it compiles.
        unfused: every site that a target does not run as one kernel, with the reason.
        details: every site.
        other_softmaxes: by module, why a softmax is no attention. Every softmax and every attention operator that ran
            is part of a site or one of these. Empty in older bundles.
    """

    sites: int
    canonical: int
    fused: dict[str, int]
    unfused: list[Unfused]
    details: list[SiteRecord]
    other_softmaxes: dict[str, str] = {}

    @classmethod
    def of(
        cls, details: list[SiteRecord], targets: Sequence[str], other_softmaxes: Mapping[str, str] | None = None
    ) -> Certificate:
        """Return the certificate of sites, from records of what every target compiled.

        Args:
            details: the records of all sites.
            targets: targets that were built; a site without a record for one was not lowered for it.
            other_softmaxes: by module, why a softmax is no attention.
        """
        unfused = [
            Unfused(site=site.site, target=target, reason=reason)
            for site in details
            for target in targets
            if (reason := site.why_unfused(target)) is not None
        ]
        return cls(
            sites=len(details), canonical=sum(site.canonical for site in details),
            fused={target: sum(site.is_fused(target) for site in details) for target in targets}, unfused=unfused,
            details=details, other_softmaxes=dict(other_softmaxes or {}),
        )  # fmt: skip
