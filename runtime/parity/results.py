"""Check results of an external run of a bundle's cases against the parity budget: those of `polygraphy run`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from attnforge.arrays import BFLOAT16, Array
from attnforge.bundle import Bundle, TensorSpec, Trusted, open_bundle
from attnforge.errors import InputError, check_known, shortened
from attnforge.polygraphy_files import Outputs, array_of, read_results
from attnforge.runtime.backends.registry import BACKENDS
from attnforge.runtime.parity.metrics import Metric, chosen_metric
from attnforge.runtime.parity.verify import References, Report, Run, hold, reported


def verify_results(
    bundle: str | os.PathLike[str] | Bundle,
    results: str | os.PathLike[str],
    backend: str | None = None,
    *,
    metric: str | Metric | None = None,
    least: float | None = None,
    trusted: Trusted = None,
) -> Report:
    """Check the results of a Polygraphy run against the parity budget, as :func:`~attnforge.verify` checks a backend.

    Args:
        bundle: the bundle, or its folder. Its cases, in the manifest's order, are the iterations of the run.
        results: file of `polygraphy run --save-outputs`, with any number of runners.
        backend: the backend whose model was run, if its budget differs from the bundle's: that of a target which
            computes attention at another precision.
        metric: as in :func:`~attnforge.verify`.
        least: as in :func:`~attnforge.verify`.
        trusted: public key files, one of which must have signed the bundle, as in :func:`attnforge.load`.

    Returns:
        the report, whose backends are the runners.

    Raises:
        BundleError: there is no complete, unaltered bundle.
        InputError: the file contains no results, or results of other cases or outputs than the bundle's.
        UnknownNameError: no such backend.
    """
    opened = open_bundle(bundle, trusted=trusted)
    if backend is not None:
        check_known("backend", backend, BACKENDS)
    file, manifest = Path(results), opened.manifest
    runs = read_results(file)
    if not any(runs.values()):
        raise InputError(f"{shortened(str(file))} has no runner with results")
    for runner, iterations in runs.items():
        _check(f"{shortened(str(file))}, {shortened(runner, 80)}", iterations, opened)
    references, reports = References.of(opened), {}
    for runner, iterations in runs.items():
        run = _replay(manifest.outputs, iterations, f"{shortened(str(file))}, {shortened(runner, 80)}")
        scores = chosen_metric(opened, metric, least)
        reports[runner] = hold(opened, backend or "", run, references=references, scores=scores)
    return reported(opened, reports)


def _check(where: str, iterations: list[Outputs], bundle: Bundle) -> None:
    """Check that results cover all cases and outputs of a bundle.

    Raises:
        InputError: they do not.
    """
    cases, names = bundle.manifest.cases, [spec.name for spec in bundle.manifest.outputs]
    if len(iterations) != len(cases):
        raise InputError(
            f"{where} has {len(iterations)} iterations, and {bundle.path} has {len(cases)} cases; run it on the inputs "
            "of attnforge package --for polygraphy"
        )
    for case, outputs in zip(cases, iterations, strict=True):
        if missing := [name for name in names if name not in outputs]:
            has = shortened(", ".join(outputs) or "none", 200)
            raise InputError(f"{where} has no output {missing[0]!r} of {case.name}; it has {has}")


def _replay(specs: list[TensorSpec], iterations: list[Outputs], where: str) -> Run:
    """A run that returns the outputs of one iteration after another, each decoded when it is requested."""
    left = iter(iterations)

    def run(_: object) -> dict[str, Array]:
        outputs = next(left)
        return {spec.name: as_deployed(array_of(outputs[spec.name], f"{where}, {spec.name}"), spec) for spec in specs}

    return run


def as_deployed(array: Array, spec: TensorSpec) -> Array:
    """An output of a library without bfloat16, in the dtype of the model's output: bfloat16 if all its numbers, in
    float32, are representable in bfloat16.

    Args:
        array: the output.
        spec: the model's output.
    """
    if spec.dtype != BFLOAT16.name or array.dtype != np.float32:
        return array
    rounded = array.astype(BFLOAT16)
    return rounded if np.array_equal(rounded.astype(np.float32), array, equal_nan=True) else array
