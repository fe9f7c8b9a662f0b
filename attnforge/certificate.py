"""The attention certificate: what became of every attention site of a deployed model."""

from __future__ import annotations

from collections.abc import Sequence

from attnforge.records import Record


class SiteTarget(Record):
    """An attention site as a target runs it.

    Attributes:
        form: the operators that the site was lowered to.
        why: why this form.
        kernel: the fused kernel that the target compiled; None where there is none.
        reason: why there is no kernel.
        measured: milliseconds of every form that was timed on the machine that deployed the bundle.
        dropped: forms that were tried and not timed, and why.
    """

    form: str
    why: str
    kernel: str | None = None
    reason: str | None = None
    measured: dict[str, float] = {}
    dropped: dict[str, str] = {}


class SiteRecord(Record):
    """An attention site of the model.

    Attributes:
        site: the module that it stands in.
        written_as: the operators that the source has there.
        canonical: whether it became one canonical Attention node.
        form: the canonical form; None where it is not canonical.
        reason: why it is not canonical.
        targets: by target, how the target runs it.
    """

    site: str
    written_as: str
    canonical: bool
    form: str | None = None
    reason: str | None = None
    targets: dict[str, SiteTarget] = {}

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
            it was given: TensorRT's in its plan, ONNX Runtime's in the graph that its CPU provider runs.
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
