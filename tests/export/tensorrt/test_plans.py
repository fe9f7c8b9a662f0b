"""Plans for each device: every registered model, compiled for one device in turn, with its attention fused. For
`portable`, which every model is deployed for, `tests/model/test_registered.py` counts what is fused.

The builder lists layers once per plan, however many devices the plan is for, so each device gets its own plan.
"""

from __future__ import annotations

import re

import pytest

from attnforge.model import MODELS
from tests.support.bundles import Deploy
from tests.support.pairs import pairs
from tests.support.plans import build

pytest.importorskip("tensorrt_rtx")

DEVICES = {
    "portable": ((), b"sm80"),
    "SM80": (("SM80",), b"sm80"),
    "SM86": (("SM86",), b"sm86"),
    "SM89": (("SM89",), b"sm89"),
    "SM120": (("SM120",), b"sm120"),
}
"""The compute capabilities that are requested, and the device named in the plan."""


@pytest.mark.parametrize(("name", "device"), pairs([*MODELS], [*DEVICES]))
def test_a_plan_for_any_device_fuses_every_site(registered: Deploy, name: str, device: str) -> None:
    bundle = registered(name, "fp16")
    capabilities, says = DEVICES[device]
    graph = bundle.file(bundle.manifest.targets["tensorrt_rtx"].model)
    plan = build(graph, "tensorrt_rtx", bundle.manifest.inputs, "fp16", capabilities)
    is_for_it = re.search(rb"\b%s\b" % says, plan.data) is not None
    assert is_for_it, f"the plan does not name {says.decode()}"

    certificate = bundle.manifest.attention
    expected = [d.site for d in certificate.details if (t := d.targets.get("tensorrt_rtx")) and t.kernel is not None]
    kernels = {d.site: plan.kernel_of(f"{d.site}/Softmax") for d in certificate.details}
    assert [site for site, kernel in kernels.items() if kernel is not None] == expected
    assert len(expected) == certificate.fused["tensorrt_rtx"]
    if name == "additive-attention":  # no inner product, so nothing to fuse
        assert expected == []
    elif name != "worked-example":  # three tokens of three features, which no kernel is made for; it may still fuse
        assert len(expected) == certificate.sites

    fused = [layer for layer in plan.layers if layer.is_fused_attention]
    assert len(fused) == len(expected)
    assert [layer.name for layer in fused if plan.data.find(layer.tactic.encode()) < 0] == [], "listed but not in it"
