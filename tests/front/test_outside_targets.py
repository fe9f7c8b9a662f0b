"""Targets of other packages: installed as a user installs them, and known to every command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attnforge.bundle import MANIFEST, Bundle

SOURCE = Path(__file__).parents[1] / "support" / "reference_target"

Attnforge = Callable[..., tuple[list[tuple[int, str]], str]]

COMMANDS = """
import json, os, signal, sys
import torch
import onnx.reference, onnxruntime, openvino, typer
from attnforge.export.sources.torch_module import capture
from attnforge.precision import precision_named

torch.set_num_threads(1)
capture(torch.nn.Linear(2, 2), (torch.ones(1, 2),), None, precision_named("fp32"))


def run(site, commands):
    sys.path.insert(0, site)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
    from attnforge.cli import main

    for words in commands:
        print("\\n###", flush=True)
        try:
            sys.argv[1:] = words
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code
        print("\\n#exit", code or 0, flush=True)


for line in sys.stdin:
    site, files, commands = json.loads(line)
    child = os.fork()
    if child == 0:
        signal.alarm(300)
        for number, file in enumerate(files, start=1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
        run(site, commands)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""
"""Loads what takes commands most of their time, but no target, and runs each list of commands in a copy of itself."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with the target in it."""
    folder = tmp_path_factory.mktemp("outside")
    source = shutil.copytree(SOURCE, folder / "source")  # setuptools writes next to its source
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    pip += ["--no-compile"]  # a test alters a file within a second, and Python looks at the seconds of its time
    subprocess.run([*pip, "--target", str(folder / "site"), str(source)], check=True, capture_output=True, timeout=120)
    return folder / "site"


@pytest.fixture(scope="module")
def loaded() -> Iterator[subprocess.Popen[str]]:
    """A process that runs :data:`COMMANDS`."""
    with subprocess.Popen(
        [sys.executable, "-c", COMMANDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


@pytest.fixture
def attnforge(loaded: subprocess.Popen[str], tmp_path: Path) -> Attnforge:
    """Run commands in one process that has the packages in `site`; returns the exit code and the output of each, and
    standard error."""

    def run(site: Path, *commands: list[str]) -> tuple[list[tuple[int, str]], str]:
        files = [tmp_path / "stdout", tmp_path / "stderr"]
        assert loaded.stdin is not None and loaded.stdout is not None
        for file in files:
            file.unlink(missing_ok=True)
        print(json.dumps([str(site), list(map(str, files)), commands]), file=loaded.stdin, flush=True)
        status = loaded.stdout.readline()
        output, errors = (file.read_text(encoding="utf-8") if file.is_file() else "" for file in files)
        assert status == "0\n", f"ended with {status!r}: {errors}"
        results = []
        for part in output.split("\n###\n")[1:]:
            printed, _, code = part.rpartition("\n#exit ")
            results.append((int(code), printed))
        return results, errors

    return run


def test_every_command_knows_a_target_of_another_package(attnforge: Attnforge, site: Path, tmp_path: Path) -> None:
    bundle = str(tmp_path / "b")
    deploy = ["deploy", "self-attention", "--no-tune", "--target", "onnx-reference"]
    results, _ = attnforge(
        site,
        ["doctor", "--json"],
        [*deploy, "--target", "onnxruntime", "--out", bundle],
        ["inspect", bundle],
        ["verify", bundle, "--json"],
        ["verify", bundle, "--backend", "onnx-reference", "--json"],
        ["bench", bundle, "--backend", "onnx-reference", "--against", "eager", "--quick", "--json"],
        [*deploy, "--require-fused", "onnx-reference", "--out", str(tmp_path / "c")],
        ["diagnose", bundle, "--backend", "onnx-reference", "--json"],
    )
    doctor, deployed, inspected, verified, alone, timed, required, diagnosed = results
    report = json.loads(doctor[1])
    assert report["build"]["onnx-reference"] is None and report["run"]["onnx-reference"] is None
    assert deployed[0] == 0 and "onnx-reference" in inspected[1]
    assert (Path(bundle) / "targets" / "onnx-reference" / "model.onnx").is_file()
    for code, output in (verified, alone):
        backend = json.loads(output)["backends"]["onnx-reference"]
        assert code == 0 and backend["passed"] and backend["cases"] > 5 and 0 < backend["error"] < backend["budget"]
    (model,) = json.loads(timed[1])["models"]
    assert timed[0] == 0 and "onnx-reference" in {contender["name"] for contender in model["contenders"]}
    assert required[0] == 2
    assert diagnosed[0] == 0


def test_a_wrong_answer_of_a_target_of_another_package_is_found(
    attnforge: Attnforge, site: Path, tmp_path: Path
) -> None:
    wrong = shutil.copytree(site, tmp_path / "wrong")
    file = wrong / "attnforge_reference_target.py"
    text = file.read_text(encoding="utf-8").replace(
        "evaluator.run(None, dict(inputs))", "[1.001 * evaluator.run(None, dict(inputs))[0]]"
    )
    file.write_text(text, encoding="utf-8")
    bundle = str(tmp_path / "b")
    targets = ["--target", "onnx-reference", "--target", "onnxruntime"]
    results, _ = attnforge(
        wrong, ["deploy", "self-attention", "--no-tune", *targets, "--out", bundle], ["verify", bundle, "--json"]
    )
    (code, _), (missed, output) = results
    assert code == 0 and missed == 1
    backends = json.loads(output)["backends"]
    assert not backends["onnx-reference"]["passed"] and backends["onnxruntime-cpu"]["passed"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('return "model.onnx"', 'return "../../canonical.onnx"'), "must write one file and return its name"),
        (('return "model.onnx"', 'return "other.onnx"'), "it wrote model.onnx, not 'other.onnx'"),
        (('return "model.onnx"', 'return None'), "it wrote model.onnx, not None"),
        (('return "model.onnx"', 'raise ValueError("no such operator")'), "cannot build this model: no such operator"),
        (("def run(", 'raise OSError("no driver")\n\n    def run('), "cannot open"),
        (("dict(zip(", "dict(zip(['y'], [0]), strict=False) if file else dict(zip("), "for output, not float32"),
        (("inputs))", "inputs))[:0]"), "failed: "),
    ],
)  # fmt: skip
def test_a_target_of_another_package_that_fails_is_one_line(
    attnforge: Attnforge, site: Path, tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    """Named, its failure is that of the command; otherwise deploy leaves it out, with none of its files."""
    broken = shutil.copytree(site, tmp_path / "broken")
    file = broken / "attnforge_reference_target.py"
    assert change[0] in file.read_text(encoding="utf-8")
    file.write_text(file.read_text(encoding="utf-8").replace(*change), encoding="utf-8")
    named, unnamed = str(tmp_path / "b"), str(tmp_path / "c")
    deploy = ["deploy", "self-attention", "--no-tune", "--out"]
    results, errors = attnforge(
        broken,
        [*deploy, named, "--target", "onnx-reference"],
        ["verify", named, "--backend", "onnx-reference"],
        [*deploy, unnamed] if "model.onnx" in change[0] else ["doctor"],
    )
    assert results[0][0] == 1 or results[1][0] == 1
    assert message in " ".join(errors.split()) and "Traceback" not in errors
    assert results[2][0] == 0
    if (Path(unnamed) / MANIFEST).is_file():
        assert message in Bundle(unnamed).manifest.skipped["onnx-reference"]
        assert not (Path(unnamed) / "targets" / "onnx-reference").exists()


def test_a_backend_that_cannot_open_its_file_is_skipped_unless_it_was_named(
    attnforge: Attnforge, site: Path, tmp_path: Path
) -> None:
    """As a plan is that this GPU or driver does not load."""
    bundle, closed = str(tmp_path / "b"), shutil.copytree(site, tmp_path / "closed")
    targets = ["--target", "onnx-reference", "--target", "onnxruntime"]
    attnforge(site, ["deploy", "self-attention", "--no-tune", *targets, "--out", bundle])
    file = closed / "attnforge_reference_target.py"
    text = file.read_text(encoding="utf-8").replace("evaluator =", 'raise OSError("no driver")\n    evaluator =')
    file.write_text(text, encoding="utf-8")
    results, errors = attnforge(closed, ["verify", bundle, "--json"], ["verify", bundle, "--backend", "onnx-reference"])
    report = json.loads(results[0][1])
    assert results[0][0] == 0 and report["backends"]["onnxruntime-cpu"]["passed"]
    assert report["skipped"]["onnx-reference"].endswith("no driver")
    assert results[1][0] == 1 and "onnx-reference cannot open" in errors


def test_a_backend_whose_run_fails_does_not_end_the_others_unless_it_was_named(
    attnforge: Attnforge, site: Path, tmp_path: Path
) -> None:
    bundle, failing, page = (
        str(tmp_path / "b"),
        shutil.copytree(site, tmp_path / "failing"),
        str(tmp_path / "page.html"),
    )
    targets = ["--target", "onnx-reference", "--target", "onnxruntime"]
    attnforge(site, ["deploy", "self-attention", "--no-tune", *targets, "--out", bundle])
    file = failing / "attnforge_reference_target.py"
    text = file.read_text(encoding="utf-8").replace("dict(inputs))", "dict(inputs))[0][None, :1]")
    file.write_text(text, encoding="utf-8")
    results, errors = attnforge(
        failing,
        ["verify", bundle, "--json", "--html", page],
        ["verify", bundle],
        ["verify", bundle, "--backend", "onnx-reference"],
    )
    report = json.loads(results[0][1])
    reference = report["backends"]["onnx-reference"]
    assert results[0][0] == 1 and not report["passed"] and report["backends"]["onnxruntime-cpu"]["passed"]
    assert not reference["passed"] and reference["cases"] == 0 and reference["comparisons"] == []
    assert reference["reason"].startswith("onnx-reference returned float32[1, 48, 64] for output, not float32[2, 48")
    assert reference["reason"] in " ".join(results[1][1].split()) and results[1][0] == 1
    assert reference["reason"] in " ".join(Path(page).read_text(encoding="utf-8").split())
    assert results[2][0] == 1 and reference["reason"] in " ".join(errors.split()) and "Traceback" not in errors


def test_files_that_may_hold_code_are_opened_by_name_only(attnforge: Attnforge, site: Path, tmp_path: Path) -> None:
    careful = shutil.copytree(site, tmp_path / "careful")
    file = careful / "attnforge_reference_target.py"
    file.write_text(file.read_text(encoding="utf-8").replace("runs_code=False, ", ""), encoding="utf-8")
    bundle = str(tmp_path / "b")
    targets = ["--target", "onnx-reference", "--target", "onnxruntime"]
    results, _ = attnforge(
        careful,
        ["deploy", "self-attention", "--no-tune", *targets, "--out", bundle],
        ["verify", bundle, "--json"],
        ["verify", bundle, "--backend", "onnx-reference", "--json"],
    )
    skipped = json.loads(results[1][1])["skipped"]["onnx-reference"]
    assert skipped.startswith("its file may hold code; if you trust who made the bundle, name the backend")
    assert json.loads(results[2][1])["backends"]["onnx-reference"]["passed"]


def test_a_package_that_cannot_be_imported_costs_a_line(attnforge: Attnforge, site: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(site, tmp_path / "broken")
    (broken / "attnforge_reference_target.py").write_text("import a_library_that_nobody_has\n", encoding="utf-8")
    results, errors = attnforge(broken, ["doctor", "--json"])
    (code, output), lines = results[0], errors.splitlines()
    assert code == 0 and "onnx-reference" not in json.loads(output)["build"]
    assert (
        len(lines) == 1 and "the target onnx-reference of attnforge-reference-target is left out: No module" in lines[0]
    )


def test_a_bundle_for_a_target_that_is_not_installed_runs_on_the_others(
    attnforge: Attnforge, site: Path, tmp_path: Path
) -> None:
    bundle, empty = str(tmp_path / "b"), tmp_path / "nothing"
    targets = ["--target", "onnx-reference", "--target", "onnxruntime"]
    attnforge(site, ["deploy", "self-attention", "--no-tune", *targets, "--out", bundle])
    results, _ = attnforge(empty, ["verify", bundle, "--json"], ["verify", bundle, "--backend", "onnx-reference"])
    (code, output), (unknown, _) = results
    assert code == 0 and json.loads(output)["backends"].keys() >= {"onnxruntime-cpu"}
    assert unknown == 2
