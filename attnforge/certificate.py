"""The attention certificate: what became of every attention site of a deployed model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from attnforge.records import Record


class SiteTarget(Record):
    """An attention site as a target runs it.

    Attributes:
        form: the operators that the site was lowered to.
        why: why this form.
        kernel: the fused kernel that the target compiled; None where there is none.
        reason: why there is no kernel; None too where the target does not say what it compiles, as OpenVINO.
        measured: milliseconds of every form that was timed on the machine that deployed the bundle.
        dropped: forms that were tried and not timed, and why.
    """

    form: str
    why: str
    kernel: str | None = None
    reason: str | None = None
    measured: dict[str, float] = {}
    dropped: dict[str, str] = {}


End = int | str | None
"""A number, an expression of sizes, or None where an end is open."""

Ends = tuple[End, End]
"""The least and the most."""

Share = Annotated[float, Field(ge=0, le=1)]


class VisibleBlocks(Record):
    """Blocks of a fixed size along queries and keys.

    Attributes:
        size: of a block, in tokens.
        shifts: what is added to the index of a query, and of a key, before it is divided by the size.
        numbers: of the key's block minus the query's.
    """

    size: Annotated[int, Field(ge=1)]
    shifts: tuple[int | str, int | str] = (0, 0)
    numbers: Ends = (0, 0)


class VisibleRegion(Record):
    """Pairs of a query and a key for which every condition holds.

    Attributes:
        band: of the key's index minus the query's.
        blocks: None where there are none.
        queries: of the query's index.
        keys: of the key's index.
    """

    band: Ends = (None, None)
    blocks: VisibleBlocks | None = None
    queries: Ends = (None, None)
    keys: Ends = (None, None)


class SiteMask(Record):
    """What is proved of a site's mask.

    Attributes:
        text: all of it in short, as `band −255 … 0, residue: padding`.
        regions: every key that a query may see is in one of these.
        residue: what the mask depends on beside them: `padding`, `queries`, `condition`, `bias`, `pattern`.
        silent: what a query without visible keys gets: `never` where there is none, `empty` where it is the node's to
            say, `mean` for that of all values.
        example: the share of all products of queries and keys that is in the regions, at the example's sizes; None
            where only a run tells.
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
        site: the module that it stands in.
        written_as: the operators that the source has there.
        canonical: whether it became one canonical Attention node.
        form: the canonical form; None where it is not canonical.
        reason: why it is not canonical.
        targets: by target, how the target runs it.
        mask: what is proved of its mask; None where it has none, is not canonical, or the bundle is older.
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
        """Why a target does not run the site as one kernel; None where it does."""
        return self.targets[target].reason if target in self.targets else self.reason or "not canonical"


class Unfused(Record):
    """A site that a target does not run as one kernel.

    Attributes:
        site: the module that it stands in.
        target: the target.
        reason: why there is no kernel.
    """

    site: str
    target: str
    reason: str


class Certificate(Record):
    """What became of a model's attention.

    Attributes:
        sites: how many attention sites the model has.
        canonical: how many became one canonical Attention node.
        fused: by target, how many sites run as one kernel. They are counted in what a backend compiled, never in what
            it was given: TensorRT's in its plan, ONNX Runtime's in the graph that its CPU provider runs. OpenVINO is
            not among them, for it does not say what it compiles.
        unfused: every site that a target does not run as one kernel, and why.
        details: every site.
    """

    sites: int
    canonical: int
    fused: dict[str, int]
    unfused: list[Unfused]
    details: list[SiteRecord]

    @classmethod
    def of(cls, details: list[SiteRecord], targets: Sequence[str]) -> Certificate:
        """The certificate of sites whose records say what every target compiled.

        Args:
            details: the records of all sites.
            targets: that were built; a site without a record of one was not lowered for it.
        """
        unfused = [
            Unfused(site=site.site, target=target, reason=reason)
            for site in details
            for target in targets
            if (reason := site.why_unfused(target)) is not None
        ]
        return cls(
            sites=len(details),
            canonical=sum(site.canonical for site in details),
            fused={target: sum(site.is_fused(target) for site in details) for target in targets},
            unfused=unfused,
            details=details,
        )
