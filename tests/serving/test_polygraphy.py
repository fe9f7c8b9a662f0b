"""Bundles in Polygraphy: the runner, the folder for checking runs, and that both agree with verify."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from polygraphy.comparator import RunResults
from polygraphy.json import load_json

from attnforge.bundle import SIGNATURE, Bundle, TargetRecord, sign
from attnforge.cli import main
from attnforge.errors import BundleError, SignatureError, UsageError
from attnforge.files import names_in
from attnforge.model.registry import MODELS
from attnforge.runtime import cases as reference
from attnforge.runtime.parity.results import verify_results
from attnforge.runtime.parity.verify import References
from attnforge.serving.polygraphy import folder
from attnforge.serving.polygraphy.folder import BUDGET, BUNDLE, FLOAT64, INPUTS, package
from tests.support.bundles import Deploy, DeploySmall, rewrite
from tests.support.faults.bench import verified
from tests.support.keys import new_key
from tests.support.polygraphy import BACKEND, budget_options, of_faults, polygraphy, verdicts


@pytest.fixture(scope="module")
def held(small: DeploySmall, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small bundle in fp32, packaged."""
    return Path(package(small("fp32"), tmp_path_factory.mktemp("polygraphy") / "held").folder)


def runner(bundle: Path) -> list[object]:
    return ["--attnforge", bundle, "--attnforge-backend", BACKEND]


def alone(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a Polygraphy command as a user would."""
    command = [str(Path(sys.executable).with_name("polygraphy")), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# --- the folder -------------------------------------------------------------------------------------------------------


def test_polygraphy_reads_what_the_bundle_keeps(held: Path) -> None:
    bundle = Bundle(held / BUNDLE)
    references, cases = References.of(bundle), bundle.manifest.cases
    inputs, float64 = load_json(str(held / INPUTS)), RunResults.load(str(held / FLOAT64))
    assert list(float64.keys()) == ["float64"]
    for case, feeds, result in zip(cases, inputs, float64["float64"], strict=True):
        made = reference.make_inputs(case, bundle.manifest.inputs, references.inputs)
        assert list(feeds) == list(made) and result.runner_name == f"float64: {case.name}"
        for name, array in made.items():
            assert feeds[name].dtype == array.dtype
            np.testing.assert_array_equal(feeds[name], array)
        for spec in bundle.manifest.outputs:
            kept = references.outputs[reference.key(case, spec.name, "float64")]
            assert result[spec.name].dtype == np.float64 and result[spec.name].ndim == len(spec.dims)
            np.testing.assert_array_equal(result[spec.name].reshape(-1), kept)


def test_of_an_output_that_is_kept_in_part_the_kept_numbers_stand_there(registered: Deploy, tmp_path: Path) -> None:
    bundle = registered("cross-attention", "fp16")
    made = package(bundle, tmp_path / "held")
    assert made.partly == ["output"] and made.cases == [case.name for case in bundle.manifest.cases]
    float64 = RunResults.load(str(tmp_path / "held" / FLOAT64))["float64"]
    assert {result["output"].shape for result in float64 if result["output"].ndim == 1} == {(reference.SAMPLED,)}
    assert any(result["output"].ndim == 3 for result in float64)


def test_the_commands_are_those_of_the_models(held: Path, small: DeploySmall, copy: Path, tmp_path: Path) -> None:
    bundle = small("fp32")
    made = package(bundle, tmp_path / "with spaces")
    assert set(made.commands) == {"onnxruntime", "attnforge"} | (set(bundle.manifest.targets) & {"tensorrt_rtx"})
    assert f"'{tmp_path}/with spaces/bundle/onnxruntime/model.onnx' --onnxrt" in made.commands["onnxruntime"]

    def add_tensorrt(manifest: Any) -> None:
        model = manifest.targets["onnxruntime"].model
        manifest.targets["tensorrt_rtx"] = TargetRecord(model=model, attention_precision="fp16")

    made = package(rewrite(copy, add_tensorrt), tmp_path / "low")
    command = made.commands["tensorrt_rtx"]
    assert command.startswith("POLYGRAPHY_USE_TENSORRT_RTX=1 polygraphy run ")
    assert "--trt --trt-min-shapes 'x:[1,2,16]' 'memory:[1,2,16]' 'padding:[1,2]' --trt-opt-shapes 'x:[2,5," in command
    assert command.endswith(f"{BUDGET}:tensorrt_rtx")
    assert 'tensorrt_rtx = budget_of(BUNDLE, "tensorrt_rtx")' in (tmp_path / "low" / BUDGET).read_text()


@pytest.fixture
def copy(small: DeploySmall, tmp_path: Path) -> Path:
    """A copy of the small bundle that may be altered."""
    return Path(shutil.copytree(small("fp32").path, tmp_path / "copy"))


def test_what_stands_there_is_left_as_it_is(small: DeploySmall, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    for name in ("folder", "file", "file/below", "a\0b"):
        with pytest.raises(UsageError) as refused:
            package(small("fp32"), tmp_path / name)
        assert "\n" not in str(refused.value)
    assert names_in(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "mine"


def test_an_altered_bundle_and_a_full_disk_leave_nothing(
    copy: Path, small: DeploySmall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "canonical.onnx").write_bytes(b"altered")
    with pytest.raises(BundleError, match="was altered"):
        package(copy, tmp_path / "held")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "write_results", full)
    with pytest.raises(BundleError, match=r"the disk of .* is full"):
        package(small("fp32"), tmp_path / "held")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_a_signature_stays_good_and_is_asked_for(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = new_key(tmp_path / "maker.key")
    public = key.with_suffix(".pub")
    with pytest.raises(SignatureError):
        package(copy, tmp_path / "held", trusted=public)
    words = ["run", copy / "canonical.onnx", "--attnforge", copy, "--attnforge-backend", BACKEND]
    code, printed = polygraphy(*words, "--attnforge-trusted", public)
    assert code == 1 and "no signature" in printed and "Traceback" not in printed
    sign(copy, key)
    package(copy, tmp_path / "held", trusted=public)
    assert (tmp_path / "held" / BUNDLE / SIGNATURE).exists()
    code, printed = polygraphy(*words, "--attnforge-trusted", public)
    assert code == 0, printed
    monkeypatch.setenv("ATTNFORGE_TRUSTED", str(new_key(tmp_path / "other.key").with_suffix(".pub")))
    code, printed = polygraphy(*words)
    assert code == 1 and "Traceback" not in printed


# --- the runner -------------------------------------------------------------------------------------------------------


def test_polygraphy_compares_onnxruntime_with_the_bundle(held: Path, tmp_path: Path) -> None:
    """As a user would run it, with the plugin from the package's entry point."""
    model = held / BUNDLE / "onnxruntime/model.onnx"
    done = alone(
        "run", model, "--onnxrt", *runner(held / BUNDLE), "--load-inputs", held / INPUTS,
        "--save-outputs", tmp_path / "run.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = verify_results(held / BUNDLE, tmp_path / "run.json")
    assert report.passed and [name[:10] for name in report.backends] == ["onnxrt-run", "attnforge-"]
    errors = {of.error for of in report.backends.values()}
    assert errors == {verified(Bundle(held / BUNDLE)).error}


def test_a_run_is_checked_against_the_budget_case_by_case(held: Path) -> None:
    code, printed = polygraphy("run", held / BUNDLE / "onnxruntime/model.onnx", "--onnxrt", *budget_options(held))
    assert code == 0, printed
    for case in Bundle(held / BUNDLE).manifest.cases:
        assert f"{case.name} | output | error " in printed
    assert printed.count("within the budget") == len(Bundle(held / BUNDLE).manifest.cases)


def test_inputs_of_polygraphys_own_are_of_the_least_shapes(held: Path) -> None:
    code, printed = polygraphy("run", held / BUNDLE / "onnxruntime/model.onnx", *runner(held / BUNDLE), "--onnxrt")
    assert code == 0 and "Will generate data of shape: [1, 2, 16]" in printed, printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attnforge", "nowhere"], "no bundle at nowhere"),
        (["--attnforge", "BUNDLE", "--attnforge-backend", "nothing"], "unknown backend 'nothing'; known: auto"),
        (["--attnforge", "BUNDLE", "--attnforge-backend", "tensorrt"], "tensorrt"),
        (["--attnforge", "BUNDLE", "--attnforge-trusted", "nowhere.pub"], r"nowhere\.pub"),
        (["--attnforge", "BUNDLE", "--input-shapes", "x:[9,5,16]"], r"batch|shape"),
        (["--onnxrt", "--attnforge", "BUNDLE", "HELD"], "must be the float64 outputs of .* checks several"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_line(held: Path, words: list[str], message: str) -> None:
    filled: list[object] = []
    for word in words:
        filled += budget_options(held) if word == "HELD" else [held / BUNDLE if word == "BUNDLE" else word]
    code, printed = polygraphy("run", held / BUNDLE / "onnxruntime/model.onnx", *filled)
    assert code == 1 and "Traceback" not in printed
    (line,) = [line for line in printed.splitlines() if "[!]" in line]
    assert re.search(message, line)


def test_a_result_without_an_output_fails(held: Path, tmp_path: Path) -> None:
    results = json.loads((held / FLOAT64).read_text(encoding="utf-8"))
    results["lst"][0][0] = "mine"
    for iteration in results["lst"][0][1]:
        iteration["runner_name"], iteration["outputs"] = "mine", {"other": iteration["outputs"]["output"]}
    (tmp_path / "mine.json").write_text(json.dumps(results))
    words = ["--load-outputs", tmp_path / "mine.json", held / FLOAT64, "--compare-func-script", held / BUDGET]
    code, printed = polygraphy("run", *words)
    assert code == 1 and "mine has no output output" in printed and "Passed: 0/" in printed


def test_neither_the_plugin_nor_the_runner_loads_torch() -> None:
    code = (
        "import sys; from attnforge.serving.polygraphy import plugin; light = len(sys.modules);"
        "assert 'numpy' not in sys.modules, 'the plugin is for every polygraphy run';"
        "from attnforge.serving.polygraphy import compare, folder, runner; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- what verify says -------------------------------------------------------------------------------------------------

SEEDED = {
    ("cross", "fp32"): {"scale-missing", "padding-ignored", "keys-clipped", "epsilon-1e-6"},
    ("vit", "fp16"): {"scale-1%", "patches-transposed"},
}
"""A few faults; `python -m benchmarks run polygraphy` tries all, in every subject at every precision."""


@pytest.mark.parametrize(("name", "precision"), SEEDED)
def test_polygraphy_says_what_verify_says_of_faults(name: str, precision: str, tmp_path: Path) -> None:
    found = list(of_faults(name, precision, tmp_path, SEEDED[name, precision]))
    assert [one for one in found if not one.agree] == []
    assert found[0].fault is None and found[0].run
    assert {one.run for one in found[1:]} == {True, False} or all(not one.run for one in found[1:])
    assert len(found) > 2


@pytest.mark.parametrize(
    ("name", "precision"), [("patch-attention-digits", "fp32"), ("multi-head-self-attention", "bf16")]
)
def test_polygraphy_says_what_verify_says_of_registered_models(
    registered: Deploy, name: str, precision: str, tmp_path: Path
) -> None:
    assert name in MODELS
    bundle = registered(name, precision)
    package(bundle, tmp_path / "held")
    said = verdicts(bundle, tmp_path / "held", tmp_path, verified(bundle))
    assert said.agree and said.run


def test_in_bfloat16_numbers_cross_as_float32(small: DeploySmall, tmp_path: Path) -> None:
    bundle = small("bf16")
    made = package(bundle, tmp_path / "held")
    assert "onnxruntime" not in made.commands
    assert load_json(str(tmp_path / "held" / INPUTS))[0]["x"].dtype == np.float32
    assert verdicts(bundle, tmp_path / "held", tmp_path, verified(bundle)).agree
    results = RunResults.load(str(tmp_path / "run.json"))
    assert results[0][1][0]["output"].dtype == np.float32


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, str, str]]:
    def run(*words: object) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["attnforge", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return run


def test_the_command_line(small: DeploySmall, tmp_path: Path, command: Callable[..., tuple[Any, str, str]]) -> None:
    bundle = small("fp32").path
    usual = ("package", bundle, "--for", "polygraphy", "--out")
    code, out, err = command(*usual, tmp_path / "held")
    lines = out.splitlines()
    assert code == 0 and not err and lines[-1] == f"written to: {tmp_path / 'held'}"
    assert lines[0].startswith("check onnxruntime against the budget of ") and BUDGET in lines[0]
    code, out, err = command(*usual, tmp_path / "other", "--json")
    assert code == 0 and json.loads(out)["folder"] == str(tmp_path / "other")
    for words, message in (
        ((*usual, tmp_path / "held"), "exists; choose another folder"),
        (("package", bundle, *usual[1:], tmp_path / "x"), "2 bundles were given"),
        ((*usual, tmp_path / "x", "--version", 2), "--version applies to triton only; leave it out for polygraphy"),
        ((*usual, tmp_path / "x", "-b", "python"), "--backend applies to triton only"),
    ):
        code, _, err = command(*words)
        assert (code, err.count("\n")) == (2, 1) and message in err
    assert not (tmp_path / "x").exists()
