"""Every idiom becomes one canonical node per site, and both lowerings compute the same function."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from attnforge.bundle import DimSpec
from tests.support.idioms import IDIOMS
from tests.support.idioms.catalogue import EXAMPLE, Form, Part, Sizes, inputs, parts
from tests.support.idioms.together import Exported, Outputs, agree, export, feeds, near, session_of

SIZES: dict[Form, Sequence[Sizes]] = {
    "static": [EXAMPLE["static"]],
    "dynamic": [EXAMPLE["dynamic"], (1, 1, 1), (3, 17, 17), (3, 7, 32), (4, 32, 5), (2, 13, 13)],
}
PARTS = parts()
EVERY = [
    pytest.param(part, name, id=f"{name}-{part.form}", marks=pytest.mark.xdist_group(f"{part.group}-fp32"))
    for part in PARTS
    for name in part.names
]


@dataclass
class Run:
    """The results of eager, float64 and every target at one of the sizes."""

    sizes: Sizes
    eager: Outputs
    truth: Outputs
    targets: dict[str, Outputs]


@functools.lru_cache(maxsize=1)  # a worker runs one part after another
def exported(part: Part) -> Exported:
    return export({name: IDIOMS[name] for name in part.names}, part.form)


@functools.lru_cache(maxsize=1)  # a worker runs one part after another
def runs(part: Part) -> list[Run]:
    together = exported(part)
    models = {"onnxruntime": together.for_onnxruntime(part.form), "tensorrt": together.for_tensorrt()[0]}
    sessions = {target: session_of(model) for target, model in models.items()}
    runs = []
    for seed, sizes in enumerate(SIZES[part.form], start=1):
        args = inputs(sizes, seed)
        results = {target: together.named(session.run(None, feeds(args)), args) for target, session in sessions.items()}
        runs.append(Run(sizes, together.eager(args), together.truth(args), results))
    return runs


@pytest.mark.parametrize(("part", "name"), EVERY)
def test_canonical(part: Part, name: str) -> None:
    together = exported(part)
    sites = together.sites_of(name)
    assert len(sites) == IDIOMS[name].sites
    for site in sites:
        assert site.reason is None and site.written_as
        (node,) = (node for node in together.captured.model.graph if node.name == site.node)
        assert node.op_type == "Attention" and "scale" in node.attributes


@pytest.mark.parametrize(("part", "name"), EVERY)
def test_same_function(part: Part, name: str) -> None:
    """At every size, the error of both lowerings is at most 2e-6 or twice eager's error, and they are near eager."""
    for run in runs(part):
        for target, outputs in run.targets.items():
            assert np.isfinite(outputs[name][0]).any(), (run.sizes, target)
            agree(outputs[name], run.eager[name], run.truth[name])
            near(outputs[name], run.eager[name])


@pytest.mark.xdist_group(f"{PARTS[0].group}-fp32")
def test_dims_stay_dynamic() -> None:
    specs = exported(PARTS[0]).captured.inputs
    dims = {spec.name: [isinstance(dim, DimSpec) for dim in spec.dims] for spec in specs}
    assert dims["x"] == dims["memory"] == [True, True, False] and dims["mask"] == [True, True, True]


def test_there_are_sixty_and_they_vary() -> None:
    dynamic, static = ([idiom for idiom in IDIOMS.values() if form in idiom.forms] for form in ("dynamic", "static"))
    assert len(dynamic) >= 60 and len(static) >= 60
    assert sum(idiom.dynamic_shapes is not None for idiom in dynamic) > 0.9 * len(dynamic)
