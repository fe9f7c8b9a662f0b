"""The certificate: what became of every attention site, counted in what each backend compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnforge.bundle import Certificate, SiteRecord, SiteTarget
from attnforge.errors import UnfusedError
from attnforge.export.attention.canonicalize import Site
from attnforge.export.lowering.attention import Lowered
from attnforge.export.targets.target import Built


def certify(sites: Sequence[Site], built: Mapping[str, Built]) -> Certificate:
    """The certificate of all sites, canonical or not, in graph order.

    Args:
        sites: as canonicalize found them.
        built: what was built for every target, by its name.
    """
    return Certificate.of([_record(site, built) for site in sites], list(built))


def _record(site: Site, built: Mapping[str, Built]) -> SiteRecord:
    """What every target made of one site; a site that is not canonical was lowered for none."""
    forms = {name: next((f for f in target.lowered if f.site == site.name), None) for name, target in built.items()}
    return SiteRecord(
        site=site.name,
        written_as=site.written_as,
        canonical=site.node is not None,
        form=site.form,
        reason=site.reason,
        targets={name: _compiled(form, built[name]) for name, form in forms.items() if form is not None},
    )


def _compiled(form: Lowered, target: Built) -> SiteTarget:
    """The form that a site was lowered to, and the kernel that runs it or the reason why none does."""
    kernel = target.kernel_of(form)
    return SiteTarget(
        form=form.form,
        why=form.why,
        kernel=kernel,
        reason=None if kernel else form.unfused or target.why_unfused(form),
        measured=dict(form.measured),
        dropped=dict(form.dropped),
    )


def check_fused(required: Sequence[str], certificate: Certificate) -> None:
    """Hold targets to running every attention site as one fused kernel.

    Args:
        required: names of targets that were built.
        certificate: counts what they compiled.

    Raises:
        UnfusedError: a target leaves a site unfused, or the model has no site.
    """
    if required and certificate.sites == 0:
        raise UnfusedError(
            "no attention site was found in this model, so none can be required to be fused", certificate
        )
    for target in required:
        if missing := certificate.sites - certificate.fused[target]:
            raise UnfusedError(
                f"{target} does not fuse {missing} of {certificate.sites} attention sites, which was required; nothing "
                "was written. Change what the reasons name, or deploy without requiring it",
                certificate,
            )
