"""A bundle as a folder for checking any Polygraphy run against its budget.

FOLDER/inputs.json       the inputs of every reference case: --load-inputs
FOLDER/float64.json      the outputs of the same weights in float64: --load-outputs
FOLDER/budget.py         checks results against the budget: --compare-func-script
FOLDER/bundle/…          the bundle, whose models can be run
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from attnforge.arrays import BFLOAT16, Array, without_bfloat16
from attnforge.atomic import new_folder
from attnforge.bundle import FLAVOURS, Bundle, Case, DimSpec, Manifest, Trusted, open_bundle, place_of
from attnforge.bundle.output import copy_whole
from attnforge.errors import UsageError
from attnforge.polygraphy_files import write_inputs, write_results
from attnforge.records import Record
from attnforge.runtime import cases as reference
from attnforge.runtime.inputs import shapes_of
from attnforge.runtime.parity.verify import References
from attnforge.version import __version__

INPUTS, FLOAT64, BUDGET, BUNDLE = "inputs.json", "float64.json", "budget.py", "bundle"

RUNNER = "float64: "
"""Prefix of the runner names of the float64 outputs, before the name of the case, which the comparison reads."""

SCRIPT = f'''"""Checks Polygraphy results against the budget of this bundle; written by attnforge {__version__}.

Run in this folder:

    polygraphy run MODEL --onnxrt --load-inputs {INPUTS} --load-outputs {FLOAT64} --compare-func-script {BUDGET}
"""

from pathlib import Path

from attnforge.serving.polygraphy.compare import budget_of

BUNDLE = Path(__file__).parent / "{BUNDLE}"

compare_outputs = budget_of(BUNDLE)
'''


class PackagedComparison(Record):
    """A folder that was written.

    Attributes:
        folder: its path.
        cases: names of the reference cases, in the order of the iterations.
        commands: commands that check each model of the bundle, by target, and the bundle itself.
        partly: names of outputs of which the bundle stores only some elements in some case; in `float64.json` these are
            flattened.
    """

    folder: str
    cases: list[str]
    commands: dict[str, str]
    partly: list[str]


def package(
    bundle: str | os.PathLike[str] | Bundle, out: str | os.PathLike[str], *, trusted: Trusted = None
) -> PackagedComparison:
    """Write the folder atomically.

    Args:
        bundle: the bundle or its folder.
        out: a new folder.
        trusted: files of public keys, one of which must have signed the bundle, as in :func:`attnforge.load`.

    Raises:
        BundleError: the bundle is missing, incomplete or altered; or the disk is full.
        UsageError: `out` exists, or cannot be written.
    """
    opened = open_bundle(bundle, trusted=trusted)
    if os.path.lexists(target := place_of(Path(out))):
        raise UsageError(f"{target} exists; choose another folder")
    manifest, references = opened.manifest, References.of(opened)
    outputs = [(f"{RUNNER}{case.name}", *_float64(opened, case, references)) for case in manifest.cases]
    with new_folder(target) as folder:
        with opened.steady():
            copy_whole(opened, folder / BUNDLE)
        with (folder / INPUTS).open("wb") as stream:
            write_inputs(stream, _inputs(opened, references))
        with (folder / FLOAT64).open("wb") as stream:
            write_results(stream, "float64", [(runner, arrays) for runner, arrays, _ in outputs])
        further = [f'{name} = budget_of(BUNDLE, "{name}")  # {BUDGET}:{name}\n' for name in _with_own_budget(manifest)]
        (folder / BUDGET).write_text("".join([SCRIPT, *further]), encoding="utf-8")
    partly = {name for _, _, flattened in outputs for name in flattened}
    return PackagedComparison(
        folder=str(target),
        cases=[case.name for case in manifest.cases],
        commands=_commands(opened, target),
        partly=[spec.name for spec in manifest.outputs if spec.name in partly],
    )


def _inputs(bundle: Bundle, references: References) -> Iterator[Mapping[str, Array]]:
    for case in bundle.manifest.cases:
        feeds = reference.make_inputs(case, bundle.manifest.inputs, references.inputs)
        yield {name: without_bfloat16(array) for name, array in feeds.items()}


def _float64(bundle: Bundle, case: Case, references: References) -> tuple[dict[str, Array], list[str]]:
    """Return a case's outputs in float64, and the names of those that are flattened: their shape is not determined by
    the inputs' sizes, or only part of them is stored."""
    inputs, outputs = bundle.manifest.inputs, bundle.manifest.outputs
    forms = ((reference.shape_of(spec, case.sizes), np.dtype(spec.dtype)) for spec in inputs)
    arrays, flattened = {}, []
    for spec, shape in zip(outputs, shapes_of(inputs, outputs, *forms).outputs, strict=True):
        array = references.outputs[reference.key(case, spec.name, "float64")]
        if shape is None or math.prod(shape) != array.size:
            flattened.append(spec.name)
        else:
            array = array.reshape(shape)
        arrays[spec.name] = array
    return arrays, flattened


def _with_own_budget(manifest: Manifest) -> list[str]:
    """Return the targets whose budget differs from the bundle's."""
    records = {name: manifest.targets.get(name) for name in FLAVOURS}
    return [name for name, record in records.items() if record is not None and record.attention_precision is not None]


def _commands(bundle: Bundle, folder: Path) -> dict[str, str]:
    """Return the commands that run each model of the bundle in Polygraphy, and the bundle with its runner."""
    manifest = bundle.manifest
    has_bfloat16 = any(spec.dtype == BFLOAT16.name for spec in (*manifest.inputs, *manifest.outputs))
    models: dict[str, tuple[str, list[str]]] = {}
    # a decoder step has other inputs
    for name, record in manifest.targets.items() if manifest.decoding is None else ():
        if name == "onnxruntime" and not has_bfloat16:  # Polygraphy runs it through NumPy, which has no bfloat16
            models[name] = record.model, ["--onnxrt"]
        elif name.startswith("tensorrt"):
            models[name] = record.model, ["--trt", *_profile(bundle), *(["--tf32"] * (manifest.precision == "tf32"))]
    models["attnforge"] = "canonical.onnx", ["--attnforge", str(folder / BUNDLE)]
    commands = {}
    for name, (model, runner) in models.items():
        words = [
            "polygraphy", "run", str(folder / BUNDLE / model), *runner, "--load-inputs", str(folder / INPUTS),
            "--load-outputs", str(folder / FLOAT64), "--compare-func-script",
            f"{folder / BUDGET}:{name}" if name in _with_own_budget(manifest) else str(folder / BUDGET),
        ]  # fmt: skip
        commands[name] = ("POLYGRAPHY_USE_TENSORRT_RTX=1 " if name == "tensorrt_rtx" else "") + shlex.join(words)
    return commands


def _profile(bundle: Bundle) -> list[str]:
    """Return the optimization profile of the inputs as Polygraphy's command-line options."""
    words = []
    for which in ("min", "opt", "max"):
        shapes = [
            f"{spec.name}:[{','.join(str(d if isinstance(d, int) else getattr(d, which)) for d in spec.dims)}]"
            for spec in bundle.manifest.inputs
            if any(isinstance(d, DimSpec) for d in spec.dims)
        ]
        words += [f"--trt-{which}-shapes", *shapes] if shapes else []
    return words
