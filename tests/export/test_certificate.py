"""Masks in the certificate."""

from __future__ import annotations

from attnforge.certificate import SiteMask
from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.certificate import certify, masks_of
from tests.support.mask_idioms import exported


def test_masks_in_the_certificate() -> None:
    captured = exported(["is_causal", "bottom-right causal", "shifted blocks", "padding"], is_dynamic=True)
    sites = canonicalize(captured.model).sites
    masks = masks_of(captured.model, sites, captured.inputs)
    records = certify(sites, {}, masks).details
    causal, corner, blocks, padding = (record.mask for record in records)
    assert causal is not None and corner is not None and blocks is not None and padding is not None
    assert causal.text == "band −∞ … 0" and causal.regions[0].band == (None, 0)
    assert causal.example == 17 / 32 and causal.largest == 4097 / 8192
    assert corner.regions[0].band == (None, "m − n")
    (region,) = blocks.regions
    assert region.blocks is not None and (region.blocks.size, region.blocks.shifts) == (4, (2, 2))
    assert padding.residue == ["padding"] and padding.largest == 1.0
    assert all(SiteMask.model_validate_json(m.model_dump_json()) == m for m in masks.values())
