"""The certificate: what became of every attention site, counted from what each backend compiled."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import onnx_ir as ir

from attnforge.bundle import Certificate, SiteRecord, SiteTarget, TensorSpec
from attnforge.certificate import Ends, SiteMask, VisibleBlocks, VisibleRegion
from attnforge.errors import UnfusedError
from attnforge.export.attention.canonicalize import Site
from attnforge.export.graphs.sizes import Unmeasurable
from attnforge.export.lowering.attention import Lowered
from attnforge.export.masks.affine import Affine
from attnforge.export.masks.regions import Interval, PairRegion
from attnforge.export.masks.visibility import Visibility, visibility
from attnforge.export.targets.target import Built
from attnforge.runtime.cases import sizes_at


def certify(
    sites: Sequence[Site],
    built: Mapping[str, Built],
    masks: Mapping[str, SiteMask] | None = None,
    other_softmaxes: Mapping[str, str] | None = None,
) -> Certificate:
    """The certificate of all sites, canonical or not, in the order in which they were found.

    Args:
        sites: the sites that canonicalize found.
        built: the result for each target, by target name.
        masks: proved properties of the sites' masks, by site name.
        other_softmaxes: by module, why a softmax is no attention.
    """
    records = [_record(site, built, (masks or {}).get(site.name)) for site in sites]
    counted = [name for name, target in built.items() if target.kernel_of is not None]
    return Certificate.of(records, counted, other_softmaxes)


def _record(site: Site, built: Mapping[str, Built], mask: SiteMask | None) -> SiteRecord:
    """The form of one site on every target; a site that is not canonical is not lowered for any target."""
    forms = {name: next((f for f in target.lowered if f.site == site.name), None) for name, target in built.items()}
    return SiteRecord(
        site=site.name,
        written_as=site.written_as,
        canonical=site.node is not None,
        form=site.form,
        reason=site.reason,
        targets={name: _compiled(form, built[name]) for name, form in forms.items() if form is not None},
        mask=mask,
    )


def _compiled(form: Lowered, target: Built) -> SiteTarget:
    """The form that a site was lowered to, with the kernel that runs it or the reason why none does."""
    kernel = target.kernel_of(form) if target.kernel_of is not None else None
    return SiteTarget(
        form=form.form,
        why=form.why,
        kernel=kernel,
        reason=None if kernel or target.why_unfused is None else form.unfused or target.why_unfused(form),
        measured=dict(form.measured),
        dropped=dict(form.dropped),
    )


# --- masks ------------------------------------------------------------------------------------------------------------


def masks_of(model: ir.Model, sites: Sequence[Site], inputs: Sequence[TensorSpec]) -> dict[str, SiteMask]:
    """The proved properties of the mask of every canonical site that has one or is causal, by site name.

    Args:
        model: the canonical graph.
        sites: the sites that canonicalize found.
        inputs: the model's inputs, with their example and maximum sizes.
    """
    example, largest = (sizes_at(inputs, bound) for bound in ("opt", "max"))
    nodes = {node.name: node for node in model.graph if node.op_type == "Attention"}
    known: dict[Hashable, SiteMask] = {}  # layers share their masks
    masks: dict[str, SiteMask] = {}
    for site in sites:
        node = nodes.get(site.node) if site.node is not None else None
        if node is None or (len(node.inputs) < 4 and not node.attributes.get_int("is_causal")):
            continue
        shapes = (str(x.shape) for x in node.inputs[:2] if x)
        key = tuple(node.inputs[3:4]), node.attributes.get_int("is_causal"), *shapes
        if key not in known:
            visible = visibility(node)
            known[key] = SiteMask(
                text=visible.text(),
                regions=[_region(region) for region in visible.regions],
                residue=sorted(visible.residue),
                silent=visible.silent,
                example=_share(visible, example),
                largest=_share(visible, largest),
            )
        masks[site.name] = known[key]
    return masks


def _share(visible: Visibility, sizes: Mapping[str, int]) -> float | None:
    try:
        return visible.share(sizes)
    except Unmeasurable:
        return None


def _region(region: PairRegion) -> VisibleRegion:
    band, queries, keys = map(_ends, (region.band.negated(), region.queries, region.keys))
    blocks = None
    if region.blocks is not None:
        shifts = (_number(region.blocks.query), _number(region.blocks.key))
        blocks = VisibleBlocks(size=region.blocks.size, shifts=shifts, numbers=_ends(region.blocks.numbers.negated()))
    return VisibleRegion(band=band, blocks=blocks, queries=queries, keys=keys)


def _ends(interval: Interval) -> Ends:
    least, most = (None if end is None else _number(end) for end in (interval.least, interval.most))
    return least, most


def _number(end: Affine) -> int | str:
    return end.text() if end.constant is None else end.constant


def check_fused(required: Sequence[str], certificate: Certificate) -> None:
    """Check that each required target runs every attention site as one fused kernel.

    Args:
        required: names of built targets.
        certificate: counts of what they compiled.

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
                f"{target} must fuse every attention site and leaves {missing} of {certificate.sites} unfused; nothing "
                "was written. Change what the reasons name, or deploy without requiring it",
                certificate,
            )
