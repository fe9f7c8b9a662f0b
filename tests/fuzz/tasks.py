"""The tasks of the process under test (:mod:`.subject`).

Each task returns a note on the input that it accepted, raises an error of attnforge, or fails.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

import attnforge
from attnforge.arrays import Array
from attnforge.bundle import Bundle, TensorSpec
from attnforge.cli import printing, terminal
from attnforge.errors import InputError
from attnforge.input_files import read_inputs
from attnforge.polygraphy_files import array_of, read_results
from attnforge.runtime.parity.budget import relative_error
from attnforge.runtime.parity.results import verify_results
from attnforge.runtime.parity.verify import stored_inputs

BACKEND = "onnxruntime-cpu"


def _differ(got: dict[str, Array], wanted: dict[str, Array], tolerance: float) -> str | None:
    """Describe how outputs differ from the expected ones by far more than any budget, or return None."""
    for name, right in wanted.items():
        answer = got[name]
        if answer.shape != right.shape:
            return f"{name} has shape {answer.shape}, not {right.shape}"
        answer, right = answer.astype(np.float64), right.astype(np.float64)
        finite = np.isfinite(right)
        if not np.array_equal(finite, np.isfinite(answer)):
            return f"{name} is finite at other positions"
        if (error := relative_error(answer[finite], right[finite])) > tolerance:
            return f"{name} is off by {error:.2g}"
    return None


def use_bundle(folder: str, truth: str) -> str:
    """Open, show, verify and run a bundle; if it passes, it must give the outputs of the unaltered one.

    Args:
        folder: the bundle.
        truth: `.npz` with inputs, as `in/NAME`, and the outputs for them.
    """
    with np.load(truth) as kept:
        arrays = dict(kept)
    inputs = {name.removeprefix("in/"): array for name, array in arrays.items() if name.startswith("in/")}
    right = {name: array for name, array in arrays.items() if not name.startswith("in/")}
    bundle = Bundle(folder)
    _show(bundle)
    report = attnforge.verify(folder, [BACKEND])
    with attnforge.load(folder, BACKEND) as session:
        try:
            outputs = session.run(inputs)
            if bundle.manifest.decoding is not None:
                session.decoder().prefill([[1, 2, 3]])
        except InputError:  # the manifest names other inputs
            return f"passed: {report.passed}, other inputs"
    if not report.passed:
        return "not passed"
    missing = right.keys() - outputs.keys()
    assert not missing, f"it passed without the output {missing}"
    difference = _differ(outputs, right, 1e-3)
    assert difference is None, f"it passed, and {difference}"
    return "passed"


def explain_bundle(folder: str) -> str:
    """Diagnose a bundle, which also reads the graphs that no backend runs."""
    return attnforge.diagnose(folder).finding.cause


def _show(bundle: Bundle) -> None:
    """Run `attnforge inspect`, with terminal output and as JSON."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        printing.print_bundle(bundle)
        terminal.print_json(printing.summary(bundle))
    control = re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text.getvalue())
    assert control is None, f"the terminal output contains {control!r}"


def deploy_source(file: str, out: str) -> str:
    """Deploy an ONNX file; if it passes, it must give the outputs of ONNX Runtime for the file itself."""
    bundle = attnforge.deploy(
        file, None, out, _ranges(file), targets=["onnxruntime"], tune=False, cache=False, trust_source=False
    )
    report = attnforge.verify(bundle.path, [BACKEND])
    if not report.passed:
        return "not passed"
    inputs = stored_inputs(bundle)
    with attnforge.load(bundle.path, BACKEND) as session:
        outputs = session.run(inputs)
    right = _original(file, inputs)
    if right is None:
        return "passed, and ONNX Runtime does not accept the original file"
    difference = _differ(outputs, right, 1e-2)
    assert difference is None, f"it passed, and {difference}"
    return "passed"


def _ranges(file: str) -> dict[str, tuple[int, int, int]]:
    """Return a range for every named dim of the file's inputs."""
    try:
        graph = onnx.load(file, load_external_data=False).graph
    except Exception:  # protobuf's errors have no common type; deploy must report that it is not a model
        return {}
    return {d.dim_param: (1, 2, 4) for v in graph.input for d in v.type.tensor_type.shape.dim if d.dim_param}


def _original(file: str, inputs: dict[str, Array]) -> dict[str, Array] | None:
    """Return ONNX Runtime's outputs for the file, or None if it refuses the file for an irrelevant fault."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_outputs()]
        feeds = {value.name: inputs[value.name] for value in session.get_inputs()}
        return dict(zip(names, session.run(names, feeds), strict=True))
    except Exception:  # ONNX Runtime has an exception type per status code
        return None


def read_files(specs: list[TensorSpec], texts: list[str]) -> str:
    """Read input files; accepted arrays must have the shape, type and values of the file."""
    arrays = read_inputs(specs, texts)
    by_name = {spec.name: spec for spec in specs}
    for name, array in arrays.items():
        spec = by_name[name]
        if np.issubdtype(array.dtype, np.floating):
            assert array.dtype.name == spec.dtype, f"{name} has dtype {array.dtype}"
    if len(texts) == 1 and texts[0].endswith(".npy"):
        right = np.load(texts[0], allow_pickle=False)
        np.testing.assert_allclose(arrays[specs[0].name], right.astype(arrays[specs[0].name].dtype))
    return ", ".join(f"{name} {array.dtype}{array.shape}" for name, array in arrays.items())


def judge_results(folder: str, file: str, whole: str) -> str:
    """Check Polygraphy results against a bundle's budget; if they pass, they must be close to the unaltered ones."""
    report = verify_results(folder, file)
    if not report.passed:
        return "not passed"
    bundle = Bundle(folder)
    ((_, right),) = read_results(Path(whole)).items()
    for runner, iterations in read_results(Path(file)).items():
        for case, got, wanted in zip(bundle.manifest.cases, iterations, right, strict=True):
            if case.is_ordinary:
                arrays = [
                    {name: array_of(text, name) for name, text in o.items() if name in wanted} for o in (got, wanted)
                ]
                difference = _differ(arrays[0], arrays[1], 1e-3)
                assert difference is None, f"{runner} passed, and {difference}"
    return "passed"


TASKS: dict[str, Callable[..., str]] = {
    task.__name__: task for task in (use_bundle, explain_bundle, deploy_source, read_files, judge_results)
}
