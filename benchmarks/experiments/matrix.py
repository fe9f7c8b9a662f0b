"""Which releases of ONNX Runtime and OpenVINO compute every form of attention correctly.

`python -m benchmarks run matrix` writes every form of single sites, masks, decoder steps and registered models, with
inputs and outputs in float64. It installs each release by name into a folder of its own under `build/matrix`, and runs
every form with it, in a process of its own. It writes `benchmarks/results/matrix.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.errors import first_line
from attnforge.export.attention.canonicalize import Site, canonicalize
from attnforge.export.decoding.insert import with_cache
from attnforge.export.graphs.execute import in_float64, wide
from attnforge.export.lowering import onnxruntime as for_onnxruntime
from attnforge.export.lowering import openvino as for_openvino
from attnforge.export.lowering.attention import Attention, Candidate, attentions
from attnforge.export.lowering.cut import cut_of
from attnforge.export.lowering.tuning import ONNX_RUNTIME, Library, disagreement, workloads
from attnforge.export.sources.torch_module import capture
from attnforge.model.registry import MODELS, build_model
from attnforge.precision import precision_named
from attnforge.runtime.backends.registry import too_old
from attnforge.runtime.cases import sizes_at
from benchmarks.child import run
from benchmarks.experiment import Columns, Experiment, named, table_of, where
from tests.support import mask_idioms
from tests.support.attends import CPU, OPT
from tests.support.decoders import KINDS, PLACES, decoder_example

FOLDER = Path("build/matrix")

LIMIT = 1800.0
"""Seconds that a release may take."""

LIBRARIES: Mapping[str, Library] = {"onnxruntime": ONNX_RUNTIME, "openvino": for_openvino.LIBRARY}


RELEASES = [
    *(("onnxruntime", f"1.{end}") for end in ("24.4", "25.1", "26.0", "27.0", "28.0", "29.0", "30.0", "31.1", "32.0")),
    *(("openvino", f"2026.{end}") for end in ("0.0", "1.0", "2.1", "3.1", "4.1")),
]
"""Packages on PyPI, with a version. ONNX Runtime's package for CPUs has the CPU kernels of that for GPUs."""


class Model(NamedTuple):
    """A graph with canonical sites, and the usual size of each symbolic dim."""

    name: str
    model: ir.Model
    sites: Sequence[Site]
    sizes: Mapping[str, int]


def models() -> Iterator[Model]:
    """Yield single sites, masks, decoder steps and registered models."""
    for name, attends in CPU.items():
        yield Model(name, *attends.model(), OPT)
    names = [name for name, idiom in mask_idioms.IDIOMS.items() if idiom.proved]
    masks = mask_idioms.exported(names, is_dynamic=True).model
    yield Model("masks", masks, canonicalize(masks).sites, {"batch": 2, "n": 300, "m": 320})
    for kind in KINDS:
        step = capture(*decoder_example(kind), precision_named("fp32"))
        sites = canonicalize(step.model).sites
        with_cache(step.model, sites, step.inputs, step.outputs, PLACES)
        yield Model(f"decoder step, {kind}", step.model, sites, sizes_at(step.inputs, "opt"))
    for name in MODELS:
        made = capture(*build_model(name), precision_named("fp32"))
        yield Model(name, made.model, canonicalize(made.model).sites, sizes_at(made.inputs, "opt"))


def forms(library: str, site: str, a: Attention) -> Sequence[Candidate]:
    """Return the forms of a site that a library runs."""
    if library == "openvino":
        return [] if a.cached is not None else for_openvino.candidates_for(site, a)
    return for_onnxruntime.candidates_for(site, a)


@cache
def written() -> tempfile.TemporaryDirectory[str]:
    """Write every form of every site, and return the folder."""
    folder = tempfile.TemporaryDirectory()
    for model in models():
        for site, a in attentions(model.model, model.sites):
            cut = cut_of(model.model, a)
            every = {library: forms(library, site.name, a) for library in LIBRARIES}
            plain = in_float64(cut.lowered(every["onnxruntime"][0]))
            for work in workloads(a, model.sizes):
                feeds = cut.feeds(work.sizes, work.past)
                (expected, *_) = plain({name: wide(array) for name, array in feeds.items()}).values()
                for library, candidates in every.items():
                    for candidate in candidates:
                        case = Path(tempfile.mkdtemp(prefix=f"{library}-", dir=folder.name))
                        ir.save(cut.lowered(candidate), case / "model.onnx")
                        arrays: dict[str, Any] = {f"feed/{name}": array for name, array in feeds.items()}
                        np.savez(case / "arrays.npz", expected=expected, **arrays)
                        about = {
                            "site": f"{model.name}: {site.name}{work.text}", "form": candidate.form,
                            "tolerance": candidate.tolerance,
                        }  # fmt: skip
                        (case / "case.json").write_text(json.dumps(about), encoding="utf-8")
    return folder


def measure(release: tuple[str, str]) -> dict[str, Any]:
    """Install a release if it is not there yet, and run every form with it."""
    package, version = release
    site = (FOLDER / f"{package}-{version}").absolute()
    if not site.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
        subprocess.run([*pip, f"{package}=={version}"], check=True)
    log, out = site.with_suffix(f"{site.suffix}.log"), site.with_suffix(f"{site.suffix}.json")
    ended = run(
        "benchmarks.experiments.matrix", package, written().name, str(out), log=log, seconds=LIMIT,
        variables={"PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))},
    )  # fmt: skip
    if ended.code:
        raise RuntimeError(f"{package} {version} ended with {ended.code}; see {log}")
    figures: dict[str, Any] = json.loads(out.read_bytes())
    return figures


def all_forms(package: str, folder: Path) -> dict[str, Any]:
    """Run every form that was written for a library, and return the number that are right of each form, and what is
    wrong."""
    right: dict[str, int] = {}
    wrong: dict[str, str] = {}
    for case in sorted(folder.glob(f"{package}-*")):
        about = json.loads((case / "case.json").read_bytes())
        with np.load(case / "arrays.npz") as arrays:
            feeds = {name.removeprefix("feed/"): array for name, array in arrays.items() if name != "expected"}
            expected: Array = arrays["expected"]
        why = problem(LIBRARIES[package], ir.load(case / "model.onnx"), feeds, expected, about["tolerance"])
        right[about["form"]] = right.get(about["form"], 0) + (why is None)
        if why is not None:
            wrong[f"{about['form']} of {about['site']}"] = why
    return {"version": import_module(package).__version__, "right": right, "wrong": wrong}


def problem(
    library: Library, model: ir.Model, feeds: Mapping[str, Array], expected: Array, tolerance: float
) -> str | None:
    """Return why the output of a model is not the expected one; None if it is."""
    try:
        got = library.read(library.open(model, feeds)())
    except Exception as error:  # a library that refuses a graph is a result
        return f"refused: {first_line(error)}"
    return disagreement(got, expected, tolerance, "float64")


COLUMNS: Columns = {
    "release": "{name}".format_map,
    "right": lambda release: sum(release["right"].values()),
    "wrong": lambda release: len(release["wrong"]),
    "forms with a wrong or refused case": lambda release: (
        "; ".join(sorted({text.partition(" of ")[0] for text in release["wrong"]})) or "none"
    ),
}


def table(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    return f"{table_of(COLUMNS, named(figures['models']))}\n\n{where(figures)}"


EXPERIMENT = Experiment(
    "matrix.json",
    measure,
    {"matrix": table},
    broken=lambda figures: [
        f"{name}: {case}: {why}"
        for name, release in figures["models"].items()
        if too_old(name.split()[0], release["version"]) is None
        for case, why in release["wrong"].items()
    ],
    subjects={" ".join(release): release for release in RELEASES},
    threads=lambda: 1,
)


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(all_forms(sys.argv[1], Path(sys.argv[2]))), encoding="utf-8")
