"""Hugging Face models at their published sizes: the cost of deploying each, compared with torch's plain export.

`python -m benchmarks run real-sizes` measures every model of :mod:`benchmarks.published`, and how cost grows with a
BERT's depth and width, and writes `benchmarks/results/real_sizes.json`. Every step of every model runs in its own
process, limited in time and memory; a step that fails is reported with its reason. Results are written after every
model, and models in the results file are kept, so an interrupted run can be resumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated, Any

import typer

from attnforge.atomic import temporary_folder
from attnforge.export.measuring import MEASURING
from attnforge.report.render import fixed, markdown_table
from benchmarks.child import GIB
from benchmarks.deploy_steps import DeployRequest, in_a_process
from benchmarks.experiment import Columns, Experiment, named, say, table_of, where
from benchmarks.growth import fit_of
from benchmarks.published import GROWTH, PUBLISHED, Published

LEAST_GROWN = 3
"""Minimum number of models for fitting an exponent."""

WHOLE, GROWN = ("plain", "deploy", "verify", "fused"), ("plain", "deploy")
"""The steps of a published model, and of a model of the growth series."""


def measure(
    model: Published,
    tune: Annotated[bool, typer.Option(help="Deploy with tuning, or by rules only.")] = True,
    seconds: Annotated[float, typer.Option(help="Time limit of a step.")] = 1200,
    gib: Annotated[float, typer.Option(help="Memory limit of a step's processes together, in GiB.")] = 16,
) -> dict[str, Any]:
    """Measure every step of `model`: its figures, `seconds`, `cpu` seconds and `peak` bytes; or why it `failed`."""
    record: dict[str, Any] = {"kind": model.kind, "architecture": model.architecture, "tuned": tune}
    with temporary_folder() as folder:
        request = DeployRequest(model=model.source(folder), options=dict(model.options), folder=folder, tune=tune)
        for step in GROWN if model.kind == "growth" else WHOLE:
            if step == "verify" and "failed" in record["deploy"]:
                continue
            say(f"{model.name}: {step} …")
            record[step] = in_a_process(request, step, seconds, gib * GIB)
            say(f"  {record[step]}"[:400])
    return record


def peak_of(step: Mapping[str, Any]) -> int | None:
    """Return the peak bytes of a step's process or of its process that measures backends, whichever is larger."""
    measuring = step.get("children", {}).get(MEASURING, {"memory": 0})
    return max(step["peak"], measuring["memory"]) if "peak" in step else None


def builder_of(step: Mapping[str, Any]) -> int | None:
    """Return the peak bytes of the largest process that built a plan; None if none was built."""
    children = step.get("children", {})
    return max((child["memory"] for name, child in children.items() if name != MEASURING), default=None)


COLUMNS: Columns = {
    "model": "{name}".format_map,
    "kind": "{kind}".format_map,
    "million parameters": lambda model: f"{model['deploy']['parameters'] / 1e6:.0f}",
    "sites": lambda model: (model["deploy"] or model["fused"])["sites"],
    "canonical": "{deploy[canonical]}".format_map,
    "fused, fp16": lambda model: _fused(**model["fused"]),
    "verified": lambda model: "yes" if model["verify"]["passed"] else "no",
    "export": "{deploy[stages][export]:.0f}".format_map,
    "reference": "{deploy[stages][reference]:.0f}".format_map,
    "backends": "{deploy[stages][measure backends]:.0f}".format_map,
    "deploy, s": "{deploy[seconds]:.0f}".format_map,
    "plain, s": "{plain[seconds]:.0f}".format_map,
    "ratio": lambda model: f"{model['deploy']['seconds'] / model['plain']['seconds']:.1f}",
    "ratio of CPU time": lambda model: f"{model['deploy']['cpu'] / model['plain']['cpu']:.1f}",
    "deploy, GiB": lambda model: _gib(peak_of(model["deploy"])),
    "builder, GiB": lambda model: _gib(builder_of(model["deploy"])),
    "plain, GiB": lambda model: _gib(peak_of(model["plain"])),
}


def table(figures: dict[str, Any]) -> str:
    """Return the published models as Markdown, followed by the reasons of failures."""
    published = {n: m for n, m in figures["models"].items() if m["kind"] != "growth"}
    done = [model for model in published.values() if "passed" in model.get("verify", {})]
    sites, canonical = (sum(model["deploy"][count] for model in done) for count in ("sites", "canonical"))
    law = (
        f"{len(published)} models: {len(done)} are deployed, {canonical} of their {sites} sites are canonical, and "
        f"{sum(model['verify']['passed'] for model in done)} are verified."
    )
    text = table_of(COLUMNS, map(_done, named(published)), 2)
    about = f"{law} transformers {figures['tools']['transformers']}; {where(figures)}"
    return "\n\n".join([text, about, *_reasons_of(published)])


def _done(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's record without the figures of failed steps."""
    return {key: {} if key in WHOLE and "failed" in figures else figures for key, figures in model.items()}


def _fused(fused: int, precision: str = "fp16", **others: Any) -> str:
    return str(fused) if precision == "fp16" else f"{fused} ({precision})"


def _gib(count: int | None) -> str:
    return fixed(None if count is None else count / GIB, 1)


def _reasons_of(models: Mapping[str, Any]) -> list[str]:
    """Return what failed, was refused or was left out, as a Markdown list; empty if there is nothing."""
    reasons = [f"- {name}: {reason}" for name, model in models.items() for reason in _reasons(model)]
    return ["\n".join(reasons)] if reasons else []


def _reasons(model: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{step}: {model[step]['failed']}" for step in WHOLE if "failed" in model.get(step, {}))
    deploy, fused = model.get("deploy", {}), model.get("fused", {})
    yield from (f"not canonical: {reason}" for reason in deploy.get("reasons", ()))
    if fused.get("without"):
        yield f"fp16: {fused['without']}"
    yield from (f"TensorRT-RTX, fp16: {reason}" for reason in fused.get("unfused", ()))
    if "tensorrt_rtx" in deploy.get("skipped", {}):
        yield f"no TensorRT-RTX plan: {deploy['skipped']['tensorrt_rtx']}"
    backends = model.get("verify", {}).get("backends", {})
    yield from (f"{name}: {backend['missed']}" for name, backend in backends.items() if not backend["passed"])


def growth(figures: Mapping[str, Any]) -> str:
    """Return how time and memory of a BERT grow with depth and width, as Markdown, with fitted exponents."""
    measured = {name: record for name, record in figures["models"].items() if record["kind"] == "growth"}
    lines: list[list[str]] = []
    for along, models in GROWTH.items():
        records = {m.name: r for m in models if "parameters" in (r := measured.get(m.name, {})).get("deploy", {})}
        if len(records) >= LEAST_GROWN:
            lines += _grown(along, records)
    text = markdown_table(("BERT", "million parameters", *_COSTS), lines, 1) if lines else "Not measured."
    return "\n\n".join([text, *_reasons_of(measured)])


_COSTS = {
    f"{step}, {unit}": (step, figure)
    for step in reversed(GROWN)
    for unit, figure in {"s": "seconds", "CPU s": "cpu", "GiB": "peak"}.items()
}
"""Columns of the table of growth: the step and its figure."""


def _grown(along: str, records: Mapping[str, Mapping[str, Any]]) -> Iterator[list[str]]:
    parameters = [record["deploy"]["parameters"] for record in records.values()]
    costs = {cost: [_cost(record[cost[0]], cost[1]) for record in records.values()] for cost in _COSTS.values()}
    for i, (name, count) in enumerate(zip(records, parameters, strict=True)):
        cells = [fixed(series[i], 1 if figure == "peak" else 0) for (_, figure), series in costs.items()]
        yield [name, f"{count / 1e6:.0f}", *cells]
    fits = [fit_of(parameters, series) for series in costs.values()]
    exponents = [fixed(None if fit is None else fit.exponent.value, 2) for fit in fits]
    yield [f"**over {along}, parameters to the power of**", "", *exponents]


def _cost(step: Mapping[str, Any], figure: str) -> float | None:
    if figure != "peak" or "failed" in step:
        return None if "failed" in step else step[figure]
    return None if (peak := peak_of(step)) is None else peak / GIB


EXPERIMENT = Experiment(
    "real_sizes.json",
    measure,
    {"real-sizes": table, "real-sizes-growth": growth},
    subjects={model.name: model for model in (*PUBLISHED, *chain(*GROWTH.values()))},
    kept=True,
    packages=["transformers"],
)
