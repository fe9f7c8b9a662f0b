"""Polygraphy results from any source: valid ones are judged, invalid ones are refused with a one-line message."""

from __future__ import annotations

import base64
import copy
import io
import json
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnforge import polygraphy_files
from attnforge.arrays import BFLOAT16
from attnforge.bundle import Bundle, TensorSpec
from attnforge.cli import main
from attnforge.errors import InputError, UnknownNameError
from attnforge.polygraphy_files import KIND, write_results
from attnforge.runtime import cases as reference
from attnforge.runtime.parity.results import as_deployed, verify_results
from attnforge.runtime.parity.verify import hold, stored_inputs
from attnforge.runtime.session import load
from tests.support.bundles import DeploySmall

Document = dict[str, Any]


@pytest.fixture(scope="module")
def bundle(small: DeploySmall) -> Bundle:
    return small("fp32")


@pytest.fixture(scope="module")
def document(bundle: Bundle) -> Document:
    """The results of a correct run."""
    stream, stored = io.BytesIO(), stored_inputs(bundle)
    with load(bundle, "onnxruntime-cpu") as session:
        runs = [
            (case.name, session.run(reference.make_inputs(case, bundle.manifest.inputs, stored)))
            for case in bundle.manifest.cases
        ]
    write_results(stream, "mine", runs)
    document: Document = json.loads(stream.getvalue())
    return document


def npy(array: Any, allow_pickle: bool = False) -> str:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=allow_pickle)
    return base64.b64encode(stream.getvalue()).decode()


def array_of(document: Document, iteration: int = 0) -> Document:
    array: Document = document["lst"][0][1][iteration]["outputs"]["output"]["values"]
    return array


def with_output(change: Callable[[np.ndarray[Any, Any]], Any]) -> Callable[[Document], None]:
    """Return a change of the first case's output."""

    def altered(document: Document) -> None:
        values = array_of(document)
        values["array"] = npy(change(np.load(io.BytesIO(base64.b64decode(values["array"])))))

    return altered


def test_a_correct_run_is_judged_as_by_verify(bundle: Bundle, document: Document, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(document))
    report = verify_results(bundle, tmp_path / "run.json")
    with load(bundle, "onnxruntime-cpu") as session:
        assert report.backends == {"mine": hold(bundle, "", session.run)}
    assert report.passed and report.skipped == {} and report.cases == bundle.manifest.cases


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: a * 1.001, "error .* over the budget"),
        (lambda a: np.where(a == a.max(), np.nan, a).astype(a.dtype), "NaN at 1 positions"),
        (lambda a: np.full_like(a, np.inf), "infinity"),
        (lambda a: a[:-1], r"it is float32\[.* and must be float32\["),
        (lambda a: a.reshape(-1), r"it is float32\[\d+\] and must be"),
        (lambda a: a.astype(np.float64), "it is float64.* and must be float32"),
        (lambda a: a.astype(np.float16), "it is float16.* and must be float32"),
        (lambda a: np.zeros(a.shape, "V4"), "it is void32"),
        (lambda a: np.zeros(a.shape, "U3"), "it is str"),
        (lambda a: np.zeros(a.shape, [("x", "f4")]), "it is void"),
        (lambda a: np.zeros(0, a.dtype), "it is float32"),
    ],
)
def test_a_wrong_output_fails_with_its_reason(
    bundle: Bundle, document: Document, tmp_path: Path, change: Any, reason: str
) -> None:
    document = copy.deepcopy(document)
    with_output(change)(document)
    (tmp_path / "run.json").write_text(json.dumps(document))
    report = verify_results(bundle, tmp_path / "run.json").backends["mine"]
    assert not report.passed and [failure.case for failure in report.failures] == [bundle.manifest.cases[0].name]
    assert report.failures[0].reason is not None
    assert re.search(reason, report.failures[0].reason)


class Trap:
    def __reduce__(self) -> Any:
        return (sys.exit, ("unpickled",))


def set_array(text: str) -> Callable[[Document], None]:
    return lambda document: array_of(document).update(array=text)


def huge(shape: str, dtype: str = "<f4") -> str:
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    return base64.b64encode(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header).decode()


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


REFUSED: dict[str, tuple[Callable[[Document], object], str]] = {
    "another object": (lambda d: d.update({KIND: "AccuracyResults"}), "has no Polygraphy results"),
    "no list": (lambda d: d.update(lst={}), "has no list of runs"),
    "no run": (lambda d: d.update(lst=[]), "has no runner with results"),
    "no iterations": (lambda d: d["lst"][0][1].clear(), "has no runner with results"),
    "a run without a name": (lambda d: d["lst"].append([3, []]), "a run without a name"),
    "a run that is none": (lambda d: d["lst"].append("x"), "a run without a name"),
    "two of one name": (lambda d: d["lst"].append(d["lst"][0]), "two runners named 'mine'"),
    "one iteration less": (lambda d: d["lst"][0][1].pop(), r"mine has \d+ iterations, and .* has \d+ cases"),
    "an iteration that is none": (lambda d: d["lst"][0][1].append([]), "an iteration without outputs"),
    "another output": (
        lambda d: d["lst"][0][1][0].update(outputs={"y\n": d["lst"][0][1][0]["outputs"]["output"]}),
        "has no output 'output' of example; it has y",
    ),
    "an output that is none": (lambda d: d["lst"][0][1][0]["outputs"].update(output=3), "output is not an array"),
    "torch's tensor": (
        lambda d: d["lst"][0][1][0]["outputs"]["output"].update(values={"tensor": "x", KIND: "Tensor"}),
        "is a torch tensor, a pickle, which is not read",
    ),
    "a pickle in an array": (set_array(npy(np.array([Trap()]), allow_pickle=True)), "contains Python objects"),
    "a pickle": (set_array(base64.b64encode(pickle.dumps(Trap())).decode()), "is not an array that NumPy reads"),
    "no base64": (set_array("***"), "is not an array that NumPy reads"),
    "letters beyond ASCII": (set_array("äöü"), "is not an array that NumPy reads"),
    "nothing": (set_array(""), "is not an array that NumPy reads"),
    "a header alone": (
        set_array(huge("(300, 4)")),
        r"is truncated: it has \d+ bytes, and float32\[300, 4\] takes more",
    ),
    "a huge shape": (set_array(huge("(1099511627776, 1048576)")), "is truncated"),
    "numbers of no size": (set_array(huge("(99,)", "|V0")), "is not an array that NumPy reads"),
    "a shape of text": (set_array(huge("('x',)")), "is not an array that NumPy reads"),
    "a header that is code": (set_array(huge("__import__('os')")), "is not an array that NumPy reads"),
    "nested deeply": (set_array(huge(nested(3000))), "is not an array that NumPy reads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_and_hostile_results_are_refused_in_one_line(
    bundle: Bundle, document: Document, tmp_path: Path, case: str
) -> None:
    alter, message = REFUSED[case]
    document = copy.deepcopy(document)
    alter(document)
    (tmp_path / "run.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=message) as refused:
        verify_results(bundle, tmp_path / "run.json")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 1000


FILES = {
    "no JSON": (b"\x00\xff", "cannot be read as Polygraphy results"),
    "half of it": (b'{"polygraphy_class": "RunRes', "cannot be read as Polygraphy results"),
    "nested": (b"[" * 100_000, "cannot be read as Polygraphy results"),
    "a number of many digits": (b'{"lst": ' + b"9" * 5000 + b"}", "cannot be read as Polygraphy results"),
    "a list": (b"[1]", "has no Polygraphy results"),
    "not a number": (b"NaN", "has no Polygraphy results"),
    "many values": (b"[" + b"0," * 300_000 + b"0]", "more than 200,000 values"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_without_results_is_refused(bundle: Bundle, tmp_path: Path, case: str) -> None:
    data, message = FILES[case]
    (tmp_path / "run.json").write_bytes(data)
    with pytest.raises(InputError, match=message) as refused:
        verify_results(bundle, tmp_path / "run.json")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 1000


def test_missing_and_too_large_files_are_refused(
    bundle: Bundle, document: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (".", "absent.json", "a\0b"):
        with pytest.raises(InputError, match="cannot be read as Polygraphy results"):
            verify_results(bundle, f"{tmp_path}/{name}")
    (tmp_path / "run.json").write_text(json.dumps(document))
    monkeypatch.setattr(polygraphy_files, "available", lambda: 1000)
    with pytest.raises(InputError, match=r"reading it takes 4 times as much; this machine has"):
        verify_results(bundle, tmp_path / "run.json")


def test_an_unknown_backend_name_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown backend 'mine'"):
        verify_results(bundle, tmp_path / "run.json", "mine")


def test_float32_is_accepted_for_bfloat16_where_its_numbers_are_representable() -> None:
    spec = TensorSpec(name="y", dtype="bfloat16", dims=[3])
    exact = np.array([1, -0.5, np.nan], np.float32)
    assert as_deployed(exact, spec).dtype == BFLOAT16
    assert as_deployed(exact + np.float32(1e-4), spec).dtype == np.float32
    assert as_deployed(exact.astype(np.float64), spec).dtype == np.float64
    assert as_deployed(exact, spec.model_copy(update={"dtype": "float32"})).dtype == np.float32


def test_the_command_line(
    bundle: Bundle,
    document: Document,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(*words: object) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["attnforge", "verify", str(bundle.path), *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    file = tmp_path / "run.json"
    file.write_text(json.dumps(document))
    code, out, _ = run("--results", file)
    assert code == 0 and "mine" in out and "passed" in out
    code, out, err = run("--results", file, "--backend", "onnxruntime-cpu", "--html", tmp_path / "page.html", "--json")
    assert code == 0 and set(json.loads(out)["backends"]) == {"mine"} and "mine" in (tmp_path / "page.html").read_text()
    wrong = copy.deepcopy(document)
    with_output(lambda array: array + 1)(wrong)
    file.write_text(json.dumps(wrong))
    code, out, _ = run("--results", file)
    assert code == 1 and "over the budget" in " ".join(out.split())
    file.write_text("{}")
    code, _, err = run("--results", file)
    assert code == 2 and "has no Polygraphy results" in err and err.count("\n") == 1
    code, _, err = run("--results", file, "-b", "onnxruntime-cpu", "-b", "openvino")
    assert code == 2 and "--results takes one backend, and 2 were given" in err
