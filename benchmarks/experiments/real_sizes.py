"""Hugging Face models at their published sizes: what deploying each costs beside torch's plain export.

`python -m benchmarks run real-sizes` measures every model of :mod:`.published`, and how cost grows with a
BERT's depth and width, and writes `benchmarks/results/real_sizes.json`. Every step of every model is a process of its
own, with a limit of time and of memory; a step that fails is a row with its reason. Results are written after every
model, and models that are in the results file are kept: a run that was ended goes on where it was.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from attnforge.bench.interval import fit_of
from attnforge.export.measuring import MEASURING
from attnforge.report.render import markdown_table
from benchmarks.experiment import Experiment, say, where
from benchmarks.experiments.real_sizes_steps import Order
from benchmarks.published import GROWTH, PUBLISHED, Published

GIB = 2**30
LEAST_GROWN = 3
"""Models that an exponent is fitted to, at the least."""

WHOLE, GROWN = ("plain", "deploy", "verify", "fused"), ("plain", "deploy")
"""The steps of a published model, and of one that shows growth."""


def measure(
    model: Published,
    tune: Annotated[bool, typer.Option(help="Deploy as by default, or by rules alone.")] = True,
    seconds: Annotated[float, typer.Option(help="Limit of a step's time.")] = 1200,
    gib: Annotated[float, typer.Option(help="Limit of the memory of a step's processes together.")] = 16,
) -> dict[str, Any]:
    """What every step of `model` gave: its figures, `seconds`, `cpu` seconds and `peak` bytes; or why it `failed`."""
    record: dict[str, Any] = {"kind": model.kind, "architecture": model.architecture, "tuned": tune}
    with tempfile.TemporaryDirectory() as folder:
        source = model.source(Path(folder))
        for step in GROWN if model.kind == "growth" else WHOLE:
            if step == "verify" and "failed" in record["deploy"]:
                continue
            say(f"{model.name}: {step} …")
            order = Order(
                step=step,
                model=source,
                options=dict(model.options),
                bundle=str(Path(folder) / "bundle"),
                tune=tune,
                answer=str(Path(folder) / "answer.json"),
            )
            record[step] = in_a_process(order, seconds, gib * GIB)
            say(f"  {record[step]}"[:400])
    return record


def in_a_process(order: Order, seconds: float, memory: float) -> dict[str, Any]:
    """Do a step in a process of its own, and end it with its children where it takes too much.

    Args:
        seconds: limit of wall time.
        memory: limit of the bytes that it and its children have in memory together.
    """
    answer, begun, why = Path(order.answer), time.perf_counter(), None
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.experiments.real_sizes_steps"]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.write(order.model_dump_json().encode())
        process.stdin.close()
        pid = 0
        try:
            while not pid:
                time.sleep(0.2)
                if time.perf_counter() - begun > seconds:
                    why = f"more than {seconds:.0f} s"
                elif _resident(process.pid) > memory:
                    why = f"more than {memory / GIB:.0f} GiB"
                if why is not None:
                    _end(process.pid)
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        finally:
            if not pid:  # interrupted: the step has a session of its own, and does not hear of it
                _end(process.pid)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
    figures = json.loads(answer.read_text(encoding="utf-8")) if answer.is_file() else {}
    if process.returncode != 0 or not figures:
        figures["failed"] = why or (said[-1] if said else f"its process ended with {process.returncode}")
    return {
        **figures,
        "seconds": round(time.perf_counter() - begun, 1),
        "cpu": round(usage.ru_utime + usage.ru_stime, 1),
    }


def _end(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _resident(group: int) -> int:
    """Bytes that the processes of a group have in memory together."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):  # a process that has ended meanwhile
            fields = status.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            total += int(fields[21]) * os.sysconf("SC_PAGE_SIZE") if int(fields[2]) == group else 0
    return total


def table(figures: dict[str, Any]) -> str:
    """The published models as Markdown, and below them why something of one failed."""
    published = {n: m for n, m in figures["models"].items() if m["kind"] != "growth"}
    header = (
        "model", "kind", "million parameters", "sites", "canonical", "fused, fp16", "verified", "export", "reference",
        "backends", "deploy, s", "plain, s", "ratio", "ratio of CPU time", "deploy, GiB", "builder, GiB", "plain, GiB",
    )  # fmt: skip
    text = markdown_table(header, [_row(name, model) for name, model in published.items()], 2)
    done = [model for model in published.values() if "passed" in model.get("verify", {})]
    sites, canonical = (sum(model["deploy"][count] for model in done) for count in ("sites", "canonical"))
    passed = sum(model["verify"]["passed"] for model in done)
    law = (
        f"{len(published)} models: {len(done)} are deployed, {canonical} of their {sites} sites are canonical, and "
        f"{passed} are verified."
    )
    reasons = [f"- {name}: {reason}" for name, model in published.items() for reason in _reasons(model)]
    return "\n\n".join(
        [
            text,
            f"{law} transformers {figures['tools']['transformers']}; {where(figures)}",
            *(["\n".join(reasons)] if reasons else []),
        ]
    )


def _row(name: str, model: Mapping[str, Any]) -> list[str]:
    deploy, plain, fused = (model.get(step, {}) for step in ("deploy", "plain", "fused"))
    verdict = model.get("verify", {}).get("passed")
    stages = deploy.get("stages", {})
    sites = deploy.get("sites", fused.get("sites"))
    builders = [child["memory"] for name, child in deploy.get("children", {}).items() if name != MEASURING]
    both = "failed" not in deploy and "failed" not in plain
    marked = "" if fused.get("precision", "fp16") == "fp16" else f" ({fused['precision']})"
    return [
        name,
        model["kind"],
        f"{deploy['parameters'] / 1e6:.0f}" if "parameters" in deploy else "–",
        _text(sites),
        _text(deploy.get("canonical")),
        _text(fused.get("fused")) + marked,
        {True: "yes", False: "no", None: "–"}[verdict],
        _text(stages.get("export"), ".0f"),
        _text(stages.get("reference"), ".0f"),
        _text(stages.get("measure backends"), ".0f"),
        *(_text(None if "failed" in step else step["seconds"], ".0f") for step in (deploy, plain)),
        *(_text(deploy[unit] / plain[unit] if both else None, ".1f") for unit in ("seconds", "cpu")),
        _gib(peak_of(deploy)),
        _gib(max(builders, default=None)),
        _gib(peak_of(plain)),
    ]


def peak_of(step: Mapping[str, Any]) -> int | None:
    """Bytes at the peak of a step's process, and of the one that it measures backends in."""
    measuring = step.get("children", {}).get(MEASURING, {"memory": 0})
    return max(step["peak"], measuring["memory"]) if "peak" in step else None


def _text(value: float | None, form: str = "") -> str:
    return "–" if value is None else format(value, form)


def _gib(count: float | None) -> str:
    return _text(None if not count else count / GIB, ".1f")


def _reasons(model: Mapping[str, Any]) -> Iterator[str]:
    """What failed of a model, was refused or left out, each in a line."""
    for step in WHOLE:
        figures = model.get(step, {})
        if "failed" in figures:
            yield f"{step}: {figures['failed']}"
    deploy, fused = model.get("deploy", {}), model.get("fused", {})
    yield from (f"not canonical: {reason}" for reason in deploy.get("reasons", ()))
    if fused.get("without"):
        yield f"fp16: {fused['without']}"
    yield from (f"TensorRT-RTX, fp16: {reason}" for reason in fused.get("unfused", ()))
    if "tensorrt_rtx" in deploy.get("skipped", {}):
        yield f"no plan of TensorRT-RTX: {deploy['skipped']['tensorrt_rtx']}"
    for backend, verdict in model.get("verify", {}).get("backends", {}).items():
        if not verdict["passed"]:
            yield f"{backend}: {verdict['missed']}"


def growth(figures: Mapping[str, Any]) -> str:
    """How seconds and memory of a BERT grow with its depth and with its width, as Markdown, with fitted exponents."""
    measured = {name: record for name, record in figures["models"].items() if record["kind"] == "growth"}
    lines: list[list[str]] = []
    for along, models in GROWTH.items():
        records = {m.name: r for m in models if "parameters" in (r := measured.get(m.name, {})).get("deploy", {})}
        if len(records) >= LEAST_GROWN:
            lines += _grown(along, records)
    reasons = [f"- {name}: {reason}" for name, record in measured.items() for reason in _reasons(record)]
    text = markdown_table(("BERT", "million parameters", *_COSTS), lines, 1) if lines else "Not measured."
    return "\n\n".join([text, *(["\n".join(reasons)] if reasons else [])])


_COSTS = {
    "deploy, s": ("deploy", "seconds"),
    "deploy, CPU s": ("deploy", "cpu"),
    "deploy, GiB": ("deploy", "peak"),
    "plain, s": ("plain", "seconds"),
    "plain, CPU s": ("plain", "cpu"),
    "plain, GiB": ("plain", "peak"),
}
"""Columns of the table of growth: the step and its figure."""


def _grown(along: str, records: Mapping[str, Mapping[str, Any]]) -> Iterator[list[str]]:
    parameters = [record["deploy"]["parameters"] for record in records.values()]
    costs = [[_figure(record[step], figure) for record in records.values()] for step, figure in _COSTS.values()]
    for i, (name, count) in enumerate(zip(records, parameters, strict=True)):
        cells = [
            _gib(cost[i]) if c.endswith("GiB") else _text(cost[i], ".0f") for c, cost in zip(_COSTS, costs, strict=True)
        ]
        yield [name, f"{count / 1e6:.0f}", *cells]
    fits = [fit_of(parameters, cost) for cost in costs]
    exponents = ["–" if fit is None else f"{fit.exponent.value:.2f}" for fit in fits]
    yield [f"**over {along}, parameters to the power of**", "", *exponents]


def _figure(step: Mapping[str, Any], name: str) -> float | None:
    if "failed" in step:
        return None
    return peak_of(step) if name == "peak" else step[name]


EXPERIMENT = Experiment(
    "real_sizes.json",
    measure,
    lambda figures: {"real-sizes": table(figures), "real-sizes-growth": growth(figures)},
    subjects={model.name: model for model in (*PUBLISHED, *chain(*GROWTH.values()))},
    kept=True,
    packages=["transformers"],
)
