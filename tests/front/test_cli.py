"""The command line, as its user runs it: its output on both streams, and its exit code.

Most commands run in this process, where nothing has to be imported again. Processes of their own show that a process
says and returns the same, that it finds modules where it was started, and what it does not import.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import typer
from onnx import numpy_helper
from PIL import Image
from safetensors.numpy import load_file, save_file

from attnforge.bench import calls
from attnforge.bench import run as measure
from attnforge.bench.limits import ceilings
from attnforge.bench.results import read
from attnforge.bundle import REFERENCE_OUTPUTS, Bundle, Source, write_manifest
from attnforge.cli import app, main, out
from attnforge.demo import Demo, Row
from attnforge.export.deploy import deploy
from attnforge.model.registry import MODELS, build_model
from attnforge.runtime import cases as reference
from attnforge.runtime.backends.registry import BACKENDS
from tests.support.bundles import rewrite

pytestmark = pytest.mark.xdist_group("cli")

Done = subprocess.CompletedProcess[str]

DIGITS = ("patch-attention-digits", "-o", "max_batch=16", "--no-data", "--no-tune")
"""The digit classifier, which is quick to deploy."""


def attnforge(*arguments: str | Path, cwd: Path | None = None) -> Done:
    command = [sys.executable, "-m", "attnforge", *map(str, arguments)]
    wide = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300, env=wide)


Here = Callable[..., Done]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    """`here(*arguments)` is the same as `attnforge(*arguments)`, but for the process; what libraries and processes
    write to its standard streams counts too."""

    monkeypatch.setattr(out, "width", 100)

    def run(*arguments: str | Path) -> Done:
        command = ["attnforge", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", command)
        capfd.readouterr()
        try:
            main()
            code = 0
        except SystemExit as ended:
            assert isinstance(ended.code, int)
            code = ended.code
        return Done(command, code, *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli") / "digits"


@pytest.fixture
def bundle(here: Here, folder: Path) -> Path:
    """A bundle of two sites in fp16, deployed by the command once."""
    if not folder.exists():
        fused = ("--precision", "fp16", "--require-fused", "tensorrt_rtx")
        done = here("deploy", *DIGITS, *fused, "--out", folder, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["attention"]["fused"] == {"onnxruntime": 2, "tensorrt_rtx": 2}
    return folder


def assert_one_line(done: Done, code: int, *words: str) -> None:
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0], (word, lines[0])


@pytest.mark.parametrize("arguments", [("deploy", "no-such-model"), ("verify", "no-such-bundle"), ("--version",)])
def test_a_process_says_and_returns_the_same(here: Here, arguments: tuple[str, ...]) -> None:
    apart, within = attnforge(*arguments), here(*arguments)
    assert (apart.returncode, apart.stdout, apart.stderr) == (within.returncode, within.stdout, within.stderr)


def test_models_lists_every_registered_model(here: Here) -> None:
    listed = json.loads(here("models", "--json").stdout)
    assert list(listed) == list(MODELS)
    assert listed["general-attention"]["options"][:2] == ["score", "align"]


def test_doctor_says_what_is_missing_and_what_to_do(here: Here) -> None:
    done = here("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["build"]["onnxruntime"] is None
    assert report["run"]["onnxruntime-cpu"] is None
    assert set(report["run"]) == set(BACKENDS)
    missing = [reason for reason in (*report["build"].values(), *report["run"].values()) if reason is not None]
    assert all("; pip install" in reason or "NVIDIA GPU" in reason for reason in missing)


def test_verify_is_one_json_document(bundle: Path) -> None:
    done = attnforge("verify", bundle, "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0
    backend = report["backends"]["onnxruntime-cpu"]
    assert report["passed"] and backend["passed"]
    assert backend["cases"] >= 8
    assert backend["error"] <= backend["budget"]


def test_verify_fails_where_the_model_is_another(here: Here, bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "wrong"
    shutil.copytree(bundle, copy)
    manifest = Bundle(copy).manifest
    file = copy / "onnxruntime/model.onnx"
    model = onnx.load(file)
    weight = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.05), weight.name))
    onnx.save(model, file)
    (copy / "manifest.json").unlink()
    write_manifest(copy, manifest)
    done = here("verify", copy, "--json")
    assert done.returncode == 1
    assert not json.loads(done.stdout)["passed"]
    assert json.loads(done.stdout)["backends"]["onnxruntime-cpu"]["failures"]


def test_inspect_has_the_certificate(here: Here, bundle: Path) -> None:
    attention = json.loads(here("inspect", bundle, "--json").stdout)["attention"]
    assert attention["sites"] == attention["canonical"] == 2
    assert attention["unfused"] == []
    assert "_mha_" in attention["details"][0]["targets"]["tensorrt_rtx"]["kernel"]


def test_inspect_shows_every_site_in_eighty_columns(here: Here, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out, "width", 80)
    shown = here("inspect", bundle).stdout
    _, *lines = shown.splitlines()  # the first ends in a path, which is kept in one piece
    assert max(map(len, lines)) <= 80
    text = " ".join(shown.split())
    assert "2 sites alike: " in text
    for record in Bundle(bundle).manifest.attention.details:
        assert record.site in text
        assert record.form is not None and record.form.startswith("Attention(heads 4, head size")
        assert record.form in text
    assert "2 of 2 fused by tensorrt_rtx" in text and "fused: _gemm_mha_" in text
    assert "deployed in" not in text and "deployed in" in here("inspect", bundle, "--verbose").stdout


def test_diagnose_says_where_errors_grow(here: Here, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads(here("diagnose", bundle, "--backend", "onnxruntime-cpu", "--json").stdout)
    monkeypatch.setattr(out, "width", 80)
    done = here("diagnose", bundle, "--backend", "onnxruntime-cpu", "--case", document["case"])
    assert done.returncode == 0 and document["finding"]["cause"] == "rounding"
    assert max(map(len, done.stdout.splitlines())) <= 80
    text = " ".join(done.stdout.split())
    assert text.startswith("rounding: ") and "tensor and module" in text and f"of case {document['case']}" in text
    for tensor in document["tensors"]:
        assert tensor["operator"] in text and tensor["module"] in text
    assert_one_line(here("diagnose", bundle, "--case", "none"), 2, "unknown case 'none'")


def test_diagnose_of_a_wrong_graph_is_one_document_and_exits_with_1(here: Here, bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "wrong"))
    model = onnx.load(copy / "onnxruntime/model.onnx")
    attention = next(node for node in model.graph.node if node.op_type == "MultiHeadAttention")
    scale = next(attribute for attribute in attention.attribute if attribute.name == "scale")
    scale.f *= 1.05
    onnx.save(model, copy / "onnxruntime/model.onnx")
    rewrite(copy)
    done = here("diagnose", copy, "--backend", "onnxruntime-cpu", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 1 and document["failing"] == ["onnxruntime-cpu"]
    assert document["finding"]["cause"] == "rewrite" and document["finding"]["stage"] == "onnxruntime"


def test_what_must_fuse_and_does_not_is_not_written(here: Here, bundle: Path, tmp_path: Path) -> None:
    manifest = (bundle / "manifest.json").read_bytes()
    arguments = ("deploy", *DIGITS, "--require-fused", "tensorrt_rtx")
    done = here(*arguments, "--out", bundle, "--force", "--json")
    document = json.loads(done.stdout)
    assert_one_line(done, 1, "tensorrt_rtx must fuse every attention site and leaves 2 of 2", "nothing was written")
    assert document["error"]["kind"] == "UnfusedError"
    assert document["error"]["message"] in " ".join(done.stderr.split())
    reasons = [site["reason"] for site in document["attention"]["unfused"] if site["target"] == "tensorrt_rtx"]
    assert len(reasons) == 2 and all("no fused attention kernel for float" in reason for reason in reasons)
    assert (bundle / "manifest.json").read_bytes() == manifest
    done = here(*arguments, "--out", tmp_path / "new")
    assert done.returncode == 1
    assert all(word in done.stdout for word in ("Attention(heads 4", "attentions.1", "TensorRT has no fused"))
    assert list(tmp_path.iterdir()) == []


def test_what_must_fuse_and_does_is_written(bundle: Path) -> None:
    assert Bundle(bundle).manifest.attention.fused == {"onnxruntime": 2, "tensorrt_rtx": 2}


def test_bench_against_peers(here: Here, bundle: Path, tmp_path: Path) -> None:
    against = ("--backend", "onnxruntime-cpu", "--against", "onnxruntime-plain")
    arguments = (*against, "--rounds", "2", "--quick", "--openings", "2")
    files = ("--out", tmp_path / "results.json", "--html", tmp_path / "page.html", "--plots", tmp_path / "plots")
    done = here("bench", bundle, *arguments, "--shapes", "batch=3", *files, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["models"][0]
    assert report["sizes"] == {"batch": 3}
    medians = {each["name"]: each["latency"]["median"]["value"] for each in report["contenders"]}
    assert [each["latency"]["openings"] for each in report["contenders"]] == [[1, 1], [1, 1]]
    assert set(medians) == {"onnxruntime-cpu", "onnxruntime-plain"} and all(ms > 0 for ms in medians.values())
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "onnxruntime-plain" in page and "2 rounds in 2 loads." in page
    assert list((tmp_path / "plots").glob("*.png"))
    assert read(tmp_path / "results.json").models[0].sizes == {"batch": 3}


def test_bench_has_baselines_where_their_source_is_trusted(here: Here, bundle: Path, tmp_path: Path) -> None:
    def model(of: Path, *arguments: str) -> dict[str, Any]:
        done = here("bench", of, "--backend", "onnxruntime-cpu", "--rounds", "1", "--quick", "--json", *arguments)
        assert done.returncode == 0, done.stderr
        measured: dict[str, Any] = json.loads(done.stdout)["models"][0]
        return measured

    names = {"onnxruntime-cpu", "eager", "onnxruntime-plain"}
    assert {each["name"] for each in model(bundle)["contenders"]} == names
    assert {each["name"] for each in model(bundle, "--against", "none")["contenders"]} == {"onnxruntime-cpu"}
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    for kind, reason in (("callable", "--trust-source"), ("module", "does not say how to make its module again")):
        stated = Source(kind=kind, name="theirs.py:model")  # type: ignore[arg-type]
        rewrite(copy, lambda manifest, stated=stated: setattr(manifest, "source", stated))  # type: ignore[misc]
        alone = model(copy)
        assert {each["name"] for each in alone["contenders"]} == {"onnxruntime-cpu"}
        alone_at = alone["contenders"][0]["precision"]
        assert all(reason in alone["skipped"][f"{name} {alone_at}"] for name in ("eager", "onnxruntime-plain"))
    assert_one_line(here("bench", copy, "--against", "none", "--against", "eager"), 2, "give none alone")


def test_a_backend_that_is_wrong_in_a_case_that_is_not_timed_fails_the_benchmark(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Store another reference output, as if the module had returned it for a constant image."""
    monkeypatch.setattr(
        measure, "measure_ceilings", partial(ceilings.measure_ceilings, precisions=("fp32",), seconds=0.02)
    )
    monkeypatch.setattr(calls, "BURST", 0.01)
    module, args, shapes = build_model("vit", embed_dim=32, num_layers=1)
    made = deploy(module, args, tmp_path / "b", shapes, targets=["onnxruntime"], tune=False)
    file = made.file(REFERENCE_OUTPUTS)
    outputs = load_file(file)
    wrong = next(case for case in made.manifest.cases if case.kind == "constant")
    for which in ("eager", "float64"):
        key = reference.key(wrong, made.manifest.outputs[0].name, which)
        outputs[key] = outputs[key] * np.asarray(1.01, outputs[key].dtype)
    save_file(outputs, file)
    rewrite(made.path)
    arguments = ("--backend", "onnxruntime-cpu", "--rounds", "1", "--out", tmp_path / "r.json")
    assert here("bench", made.path, *arguments, "--quick").returncode == 0  # it was not looked for
    done = here("bench", made.path, *arguments, "--force")
    assert done.returncode == 1 and "onnxruntime-cpu fp32 ← †" in done.stdout, done.stdout
    assert "† onnxruntime-cpu fp32 is wrong in constant, output: error" in done.stdout.replace("\n", " ")
    (one,) = read(tmp_path / "r.json").models[0].contenders
    assert one.wrong_in is not None and one.error <= one.budget


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_shows_whole_names_and_times(
    here: Here, bundle: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(out, "width", width)
    peers = ("--against", "onnxruntime-plain")
    done = here("bench", bundle, "--backend", "onnxruntime-cpu", *peers, "--rounds", "2", "--quick")
    lines = done.stdout.splitlines()
    head, ours, peer = (
        next(line for line in lines if word in line) for word in ("contender", "cpu fp16", "plain fp16")
    )
    assert "onnxruntime-cpu fp16 ←" in ours and "…" not in done.stdout
    assert head.split() == ["contender", "ms", "95%", "p99", "ratio", "error"]  # a quick run measures no more
    assert len(ours.split()) == 1 + len(peer.split()) == 8 and max(map(len, (head, ours, peer))) <= 80


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(sys.argv.pop(1).split()))  # importing them raises
from attnforge.cli import main
main()
"""


def test_light_commands_import_no_torch(bundle: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "digits.npy", np.zeros((1, 1, 8, 8), np.float32))
    run = ("run", bundle, tmp_path / "digits.npy", "--out", tmp_path / "logits.npz")
    for arguments, others in ((("--help",), ("numpy", "pydantic")), (("inspect", bundle), ("onnx",)), (run, ("onnx",))):
        command = [sys.executable, "-c", WITHOUT, " ".join(("torch", *others)), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (arguments, done.stderr)


def test_run_takes_arrays_and_images(here: Here, bundle: Path, tmp_path: Path) -> None:
    digit = np.random.default_rng(0).random((5, 1, 8, 8), np.float32)
    np.save(tmp_path / "digits.npy", digit)
    done = here("run", bundle, tmp_path / "digits.npy", "--out", tmp_path / "logits.npz", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outputs"]["output"] == {"shape": [5, 10], "dtype": "float16", "finite": True}
    with np.load(tmp_path / "logits.npz") as outputs:
        assert outputs["output"].shape == (5, 10)
    Image.fromarray((255 * digit[0, 0]).astype(np.uint8)).resize((40, 40)).save(tmp_path / "digit.png")
    done = here("run", bundle, tmp_path / "digit.png", "--out", tmp_path / "one.npz")
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "one.npz") as outputs:
        assert outputs["output"].shape == (1, 10)
    np.savez(tmp_path / "digits.npz", image=digit)
    assert here("run", bundle, tmp_path / "digits.npz", "--out", tmp_path / "again.npz").returncode == 0
    assert_one_line(here("run", bundle, tmp_path / "digit.png", "--out", tmp_path / "one.npz"), 2, "--force")


def test_own_callable(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from attnforge.model.attention import SelfAttention\n"
        "def attention(width=8):\n"
        "    batch = torch.export.Dim('batch', min=1, max=4)\n"
        "    return SelfAttention(int(width), 16), (torch.randn(2, 5, int(width)),), {'x': {0: batch}}\n"
        "def nothing():\n"
        "    return 3\n"
    )
    quick = ("--target", "onnxruntime", "--no-tune")
    done = attnforge("deploy", "mine:attention", "-o", "width=12", *quick, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["source"] == {
        "kind": "callable",
        "name": "mine:attention",
        "options": {"width": "12"},
        "weights": None,
        "random_weights": None,
    }
    assert (tmp_path / "attention-fp32/manifest.json").is_file()
    monkeypatch.chdir(tmp_path)
    assert_one_line(here("deploy", "mine:nothing"), 2, "must return (module, args, dynamic_shapes)")
    assert_one_line(here("deploy", "mine:missing"), 2, "cannot import")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("deploy", "no-such-model"), ("unknown model 'no-such-model'", "self-attention")),
        (("deploy", "vit", "--precision", "fp7"), ("unknown precision 'fp7'", "bf16")),
        (("deploy", "vit", "--target", "tpu"), ("unknown target 'tpu'", "tensorrt_rtx")),
        (("deploy", "vit", "--require-fused", "tpu"), ("unknown target 'tpu'", "tensorrt_rtx")),
        (
            ("deploy", "vit", "--target", "onnxruntime", "--require-fused", "tensorrt_rtx"),
            ("tensorrt_rtx", "not among the targets to build (onnxruntime)", "add it"),
        ),
        (
            ("deploy", "worked-example", "--precision", "fp16", "--attention-precision", "bf16"),
            ("the whole bundle is in fp16", "leave the attention precision out"),
        ),
        (("deploy", "vit", "--attention-precision", "fp32"), ("unknown attention precision 'fp32'", "bf16, fp16")),
        (
            ("deploy", "worked-example", "--attention-precision", "fp16", "--target", "onnxruntime"),
            ("only onnxruntime is built", "add a target"),
        ),
        (("deploy", "vit", "-o", "depth=3"), ("unknown option 'depth'", "num_layers")),
        (("deploy", "vit", "-o", "num_layers"), ("name=value",)),
        (("deploy", "multi-head-self-attention", "-o", "num_heads=7"), ("7",)),
        (("deploy", "vit", "--weights", "none.safetensors"), ("none.safetensors",)),
        (("deploy", "worked-example", "--compute-capability", "SM1"), ("unknown compute capability 'SM1'", "SM89")),
    ],
)
def test_misuse_of_deploy(here: Here, arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path) -> None:
    assert_one_line(here(*arguments, "--out", tmp_path / "out"), 2, *words)
    assert list(tmp_path.iterdir()) == []


def test_misuse_of_the_rest(here: Here, bundle: Path, tmp_path: Path) -> None:
    assert_one_line(here("verify", bundle, "-b", "abacus"), 2, "unknown backend 'abacus'", "onnxruntime-cpu")
    assert_one_line(here("verify", tmp_path), 1, "no bundle", "attnforge deploy")
    assert_one_line(here("run", bundle, tmp_path / "none.npy"), 2, "no file")
    assert_one_line(here("bench", bundle, "--shapes", "tokens=3"), 2, "unknown dim 'tokens'", "batch")
    assert_one_line(here("bench", bundle, "--shapes", "batch=9999"), 2, "9999", "16")
    assert_one_line(here("bench", bundle, "--rounds", "0"), 2, "1 or more")
    assert_one_line(here("bench", bundle, "--against", "abacus"), 2, "unknown peer 'abacus'", "torch-compile")
    assert_one_line(here("bench", bundle, "--compare", tmp_path / "none.json"), 2, "not a results file", "--out")
    out = tmp_path / "taken"
    out.mkdir()
    (out / "thesis.txt").write_text("all my work")
    assert_one_line(here("deploy", "worked-example", "--out", out), 2, "exists", "--force")
    assert_one_line(here("deploy", "worked-example", "--out", out, "--force"), 2, "not a bundle")
    assert (out / "thesis.txt").read_text() == "all my work"
    np.save(tmp_path / "wrong.npy", np.zeros((1, 3, 8, 8), np.float32))
    assert_one_line(here("run", bundle, tmp_path / "wrong.npy", "--out", tmp_path / "o.npz"), 2, "dim 1", "takes 1")


COMMANDS = (
    "models",
    "deploy",
    "run",
    "generate",
    "verify",
    "diagnose",
    "bench",
    "inspect",
    "sign",
    "package",
    "demo",
    "doctor",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_or_two(here: Here, command: str) -> None:
    done = here(command, "--help")
    assert done.returncode == 0
    assert 1 <= done.stdout.count("Example: attnforge ") <= 2


def test_every_option_has_help() -> None:
    group: Any = typer.main.get_command(app)
    assert [
        f"{name} {o.name}" for name, c in group.commands.items() for o in c.params if not getattr(o, "help", 0)
    ] == []


def test_without_a_command_it_says_what_to_do_first(here: Here) -> None:
    done = here()
    lines = [line.split()[:2] for line in done.stdout.splitlines()]
    assert done.returncode == 0 and lines == [["attnforge", name] for name in ("demo", "deploy", "doctor")]


def test_the_demo_ends_with_the_path_of_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row("digits", "fp32", "onnxruntime-cpu", error="1e-6", budget="4e-6")]
    Demo(True, "attnforge-demo/digits.html", 12.0, ["openvino did not run"], rows).show()
    assert capsys.readouterr().out.splitlines()[-1] == "attnforge-demo/digits.html"


def test_options_are_in_panels_with_the_most_used_first(here: Here) -> None:
    panels = re.findall(r"╭─ (.+?) ─+╮", here("deploy", "--help").stdout)
    assert panels[:3] == ["Arguments", "Options", "Source"] and "Decoders" in panels and "TensorRT" in panels


def test_a_folder_that_cannot_be_written_is_refused_before_the_model_is_made(
    tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnforge.export.sources.named.model_named", lambda *arguments: pytest.fail("it was made"))
    (tmp_path / "thesis.txt").touch()
    done = here("deploy", "vit", "--out", tmp_path, "--force")
    assert done.returncode == 2 and "is not a bundle, so it is not overwritten" in " ".join(done.stderr.split())
