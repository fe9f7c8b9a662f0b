"""Model repositories for Triton: what is written, what is refused, and that writes are atomic."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

import attnforge
from attnforge import atomic
from attnforge.bundle import SIGNATURE, WEIGHTS, Bundle, DimSpec, Engine, Manifest, TargetRecord, TensorSpec, sign
from attnforge.cli import main
from attnforge.errors import AttnforgeError, BundleError, SignatureError, UnavailableError, UnknownNameError, UsageError
from attnforge.export.graphs import saving
from attnforge.files import names_in
from attnforge.runtime.parity.verify import hold
from attnforge.serving.triton import configuration
from attnforge.serving.triton.model import FOLDER
from attnforge.serving.triton.options import Packaging
from attnforge.serving.triton.repository import PackagedModel, named, package
from tests.support.bundles import Deploy, DeploySmall, rewrite, small_example
from tests.support.keys import new_key

QUICK = Packaging(preferred=())
"""Nothing is measured."""


def parsed(folder: Path, model: str) -> Any:
    """Parse the configuration of a model, with fields that Triton knows only."""
    config = model_config_pb2.ModelConfig()
    return text_format.Parse((folder / model / "config.pbtxt").read_text(encoding="utf-8"), config)


def enumerated(config: Any, field: str, value: str) -> int:
    number: int = config.DESCRIPTOR.fields_by_name[field].enum_type.values_by_name[value].number
    return number


# --- the configuration ------------------------------------------------------------------------------------------------


def test_a_model_with_a_batch(registered: Deploy, tmp_path: Path) -> None:
    bundle, options = (
        registered("patch-attention-digits", "fp32"),
        Packaging(preferred=(4, 8), max_delay=500, threads=2),
    )
    (made,) = package([bundle], tmp_path / "repository", options)
    config = parsed(tmp_path / "repository", "patch-attention-digits-fp32")
    assert (config.name, config.backend, config.max_batch_size) == ("patch-attention-digits-fp32", "python", 32)
    assert [(tensor.name, list(tensor.dims)) for tensor in config.input] == [("image", [1, 8, 8])]
    assert [(tensor.name, list(tensor.dims)) for tensor in config.output] == [("output", [10])]
    assert config.input[0].data_type == model_config_pb2.TYPE_FP32
    assert list(config.dynamic_batching.preferred_batch_size) == [4, 8]
    assert config.dynamic_batching.max_queue_delay_microseconds == 500
    assert config.version_policy.WhichOneof("policy_choice") == "all"
    group = config.instance_group[0]
    assert (group.count, group.kind) == (1, enumerated(group, "kind", "KIND_AUTO"))
    assert config.parameters["session"].string_value == "auto"
    assert config.parameters["threads"].string_value == "2"
    cases = {case.name: case for case in bundle.manifest.cases if case.is_ordinary}
    assert {sample.name: sample.batch_size for sample in config.model_warmup} == {
        name: case.sizes["batch"] for name, case in cases.items()
    }
    assert made == PackagedModel(
        name=config.name, version=1, backend="python", folder=str(tmp_path / "repository" / config.name / "1"),
        max_batch=32, apart=None, preferred=[4, 8], measured={}, warmups=list(cases),
    )  # fmt: skip


def test_warm_up_files_are_of_their_dims(registered: Deploy, tmp_path: Path) -> None:
    package([registered("cross-attention", "fp16")], tmp_path / "repository", QUICK)
    model = tmp_path / "repository" / "cross-attention-fp16"
    config, sizes = parsed(model.parent, model.name), {"TYPE_FP16": 2, "TYPE_BOOL": 1}
    assert config.model_warmup
    for sample in config.model_warmup:
        assert sorted(sample.inputs) == sorted(tensor.name for tensor in config.input)
        for tensor in config.input:
            given = sample.inputs[tensor.name]
            numbers = 1
            for dim, configured in zip(given.dims, tensor.dims, strict=True):
                assert configured in (-1, dim)
                numbers *= dim
            kind = model_config_pb2.DataType.Name(given.data_type)
            assert (model / "warmup" / given.input_data_file).stat().st_size == numbers * sizes[kind]


def test_a_model_without_a_batch_has_whole_dims(small: DeploySmall, tmp_path: Path) -> None:
    (made,) = package([small("fp32")], tmp_path / "repository", Packaging(kind="cpu", instances=2))
    assert made.apart == "input kinds is int64[16] and does not lead with batch"
    config = parsed(tmp_path / "repository", "small-fp32")
    assert (config.max_batch_size, config.HasField("dynamic_batching")) == (0, False)
    assert {tensor.name: list(tensor.dims) for tensor in config.input} == {
        "x": [-1, -1, 16], "memory": [-1, -1, 16], "padding": [-1, -1], "kinds": [16],
    }  # fmt: skip
    assert config.instance_group[0].count == 2
    assert {sample.batch_size for sample in config.model_warmup} == {1}
    assert not config.optimization.input_pinned_memory.enable


@pytest.mark.parametrize(("most", "joins"), [(0, 0), (1, 1), (5, 5), (99, 32)])
def test_the_largest_batch_may_be_lowered(registered: Deploy, tmp_path: Path, most: int, joins: int) -> None:
    bundle = registered("patch-attention-digits", "fp32")
    (made,) = package([bundle], tmp_path / "repository", Packaging(preferred=(), max_batch=most), name="digits")
    config = parsed(tmp_path / "repository", "digits")
    assert config.max_batch_size == made.max_batch == joins
    assert config.HasField("dynamic_batching") == (joins > 1)
    assert list(config.input[0].dims) == ([-1] if joins == 0 else []) + [1, 8, 8]
    assert max(sample.batch_size for sample in config.model_warmup) == max(joins, 1)


def test_what_is_preferred_is_measured(registered: Deploy, tmp_path: Path) -> None:
    (made,) = package([registered("patch-attention-digits", "fp32")], tmp_path / "repository", Packaging(threads=1))
    assert list(made.measured) == [1, 2, 4, 8, 16, 32]
    assert all(rate > 0 for rate in made.measured.values())
    assert made.preferred[0] in made.measured
    config = parsed(tmp_path / "repository", made.name)
    assert list(config.dynamic_batching.preferred_batch_size) == made.preferred


def test_numbers_of_one_dim_or_none_are_reshaped() -> None:
    batch, config = DimSpec(symbol="batch", min=1, opt=2, max=8), model_config_pb2.ModelConfig()
    scores = TensorSpec(name='a "quoted" \\ name', dtype="bfloat16", dims=[batch])
    scale = TensorSpec(name="scale", dtype="float64", dims=[])
    message = {
        "input": [configuration.tensor(scores, batched=True)],
        "output": [configuration.tensor(scale, batched=False)],
    }
    text_format.Parse(configuration.text(message), config)
    assert list(config.input[0].dims) == list(config.output[0].dims) == [1]
    assert config.input[0].HasField("reshape") and not config.input[0].reshape.shape
    assert not config.output[0].HasField("reshape")  # which Triton refuses without a batch
    assert config.input[0].name == scores.name
    with pytest.raises(UnavailableError, match="not support dims of size 0"):
        configuration.tensor(TensorSpec(name="x", dtype="bool", dims=[0]), batched=False)


@pytest.mark.parametrize(
    ("text", "name"),
    [("vit-fp16", "vit-fp16"), ("hf:/models/BERT base", "hf-models-BERT-base"), ("..", "model"), (".a/ü.b-", "a-.b")],
)
def test_names_stand_in_addresses(text: str, name: str) -> None:
    assert named(text) == name


# --- the other backends of Triton -------------------------------------------------------------------------------------


def test_the_model_of_onnx_runtime(registered: Deploy, tmp_path: Path) -> None:
    bundle = registered("patch-attention-digits", "fp32")
    options = Packaging("onnxruntime", preferred=(8,), threads=3, kind="cpu")
    (made,) = package([bundle], tmp_path / "repository", options)
    config = parsed(tmp_path / "repository", made.name)
    assert (config.backend, config.platform) == ("onnxruntime", "onnxruntime_onnx")
    assert config.parameters["intra_op_thread_count"].string_value == "3"
    assert names_in(Path(made.folder)) == ["model.onnx"]
    run = runs(Path(made.folder) / "model.onnx")
    assert hold(bundle, "onnxruntime-cpu", run).missed is None


def runs(file: Path) -> Callable[[Any], dict[str, Any]]:
    session: Any = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))


def test_weights_in_a_separate_file_are_next_to_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in a folder named after the model, because Triton passes that folder's path to its backend."""
    monkeypatch.setattr(saving, "SHELVED", 2**10)
    module, args, shapes = small_example()
    bundle = attnforge.deploy(module, args, tmp_path / "bundle", shapes, targets=["onnxruntime"], tune=False)
    assert WEIGHTS in bundle.manifest.files
    (made,) = package([bundle], tmp_path / "repository", Packaging("onnxruntime"))
    assert names_in(Path(made.folder)) == ["model.onnx/model.onnx", f"model.onnx/{WEIGHTS}"]
    assert hold(bundle, "onnxruntime-cpu", runs(Path(made.folder) / "model.onnx" / "model.onnx")).missed is None


def with_plans(copy: Path, *plans: tuple[str, str], flavour: Any = "tensorrt", profiles: int = 1) -> Bundle:
    """Return the small bundle with fake TensorRT plans, given by compute capability and version."""

    def change(manifest: Manifest) -> None:
        ranges = dict.fromkeys(("batch", "tokens", "pairs"), (1, 2, 4))
        record = TargetRecord(model=manifest.targets["tensorrt_rtx"].model)
        for capability, version in plans:
            file = copy / "tensorrt" / f"engine.{capability}.{version}.plan"
            file.write_bytes(b"a plan")
            record.engines = [*record.engines, Engine(
                file=file.relative_to(copy).as_posix(), flavour=flavour, version=version,
                compute_capabilities=[capability], layers=1, size=6, build_seconds=1, profiles=[ranges] * profiles,
            )]  # fmt: skip
        manifest.targets = {**manifest.targets, "tensorrt": record}

    return rewrite(copy, change)


def test_plans_of_tensorrt_by_compute_capability(copy: Path, tmp_path: Path) -> None:
    bundle = with_plans(copy, ("SM80", "10.7.0"), ("SM120", "10.7.0"), profiles=2)
    (made,) = package([bundle], tmp_path / "repository", Packaging("tensorrt"))
    config = parsed(tmp_path / "repository", made.name)
    assert (config.backend, config.platform) == ("tensorrt", "tensorrt_plan")
    assert dict(config.cc_model_filenames) == {
        "8.0": "engine.SM80.10.7.0.plan", "12.0": "engine.SM120.10.7.0.plan",
    }  # fmt: skip
    assert sorted(config.cc_model_filenames.values()) == names_in(Path(made.folder))
    group = config.instance_group[0]
    assert group.kind == enumerated(group, "kind", "KIND_GPU") and list(group.profile) == ["0", "1"]
    assert config.parameters["tensorrt"].string_value == "10.7.0"


def test_plans_of_the_servers_tensorrt_alone(copy: Path, tmp_path: Path) -> None:
    bundle = with_plans(copy, ("SM80", "10.7.0"), ("SM89", "11.4.0"))
    with pytest.raises(UnavailableError, match=r"TensorRT 10\.7\.0 and 11\.4\.0, and a server has one"):
        package([bundle], tmp_path / "repository", Packaging("tensorrt"))
    with pytest.raises(UnavailableError, match=r"TensorRT 10\.7\.0, 11\.4\.0, not 11\.40"):
        package([bundle], tmp_path / "repository", Packaging("tensorrt", server_tensorrt="11.40"))
    assert not (tmp_path / "repository").exists()
    (made,) = package([bundle], tmp_path / "repository", Packaging("tensorrt", server_tensorrt="11.4"))
    assert names_in(Path(made.folder)) == ["engine.SM89.11.4.0.plan"]
    assert parsed(tmp_path / "repository", made.name).parameters["tensorrt"].string_value == "11.4.0"


def test_what_a_backend_of_triton_cannot_have_is_refused_in_one_line(
    small: DeploySmall, copy: Path, tmp_path: Path
) -> None:
    refused: list[tuple[Bundle, Packaging, str]] = [
        (small("bf16"), Packaging("onnxruntime"), "is bf16, which Triton's onnxruntime backend has no type for"),
        (small("fp32"), Packaging("tensorrt"), "its plans are for TensorRT-RTX, which no Triton backend loads"),
        (small("fp32"), Packaging(session="tensorrt"), "was deployed for onnxruntime, tensorrt_rtx, not for"),
    ]

    def open_output(manifest: Manifest) -> None:
        manifest.outputs[0].dims = [DimSpec(symbol="u0"), 16]

    def scalar_output(manifest: Manifest) -> None:
        manifest.outputs[0].dims = []

    with_plans(copy, ("SM80", "10.7.0"))
    other = Path(shutil.copytree(copy, tmp_path / "other"))
    refused.append(
        (rewrite(other, scalar_output), Packaging("onnxruntime"), "output has no dims, which Triton does not support")
    )
    refused.append((rewrite(copy, open_output), Packaging("tensorrt"), "the shape of output depends on the inputs'"))
    for bundle, options, words in refused:
        with pytest.raises(UnavailableError, match=words) as raised:
            package([bundle], tmp_path / "repository", options)
        assert "\n" not in str(raised.value)
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "other"}


# --- repositories -----------------------------------------------------------------------------------------------------


def test_the_bundle_is_whole_in_its_version(small: DeploySmall, tmp_path: Path) -> None:
    bundle = small("fp32")
    (made,) = package([bundle], tmp_path / "new" / "repository", QUICK)
    inside = Bundle(Path(made.folder) / FOLDER)
    assert inside.manifest == bundle.manifest and inside.unlisted() == []
    assert {path.name for path in Path(made.folder).iterdir()} == {FOLDER, "model.py"}
    assert len((Path(made.folder) / "model.py").read_text().splitlines()) <= 6
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"repository"}


def test_a_signature_stays_good(copy: Path, tmp_path: Path) -> None:
    key = new_key(tmp_path / "maker.key")
    with pytest.raises(SignatureError):
        package([copy], tmp_path / "repository", QUICK, trusted=key.with_suffix(".pub"))
    sign(copy, key)
    (made,) = package([copy], tmp_path / "repository", QUICK, trusted=key.with_suffix(".pub"))
    assert (Path(made.folder) / FOLDER / SIGNATURE).exists()
    Bundle(Path(made.folder) / FOLDER, trusted=key.with_suffix(".pub"))
    (copy / "notes.txt").write_text("mine")
    with pytest.raises(BundleError, match="its signature does not cover them"):
        package([copy], tmp_path / "other", QUICK)
    assert not (tmp_path / "other").exists()


@pytest.fixture
def standing(small: DeploySmall, tmp_path: Path) -> Path:
    """A repository of one model."""
    package([small("fp32")], tmp_path / "repository", QUICK)
    return tmp_path / "repository"


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names_in(folder)}


def test_another_version_and_another_model_are_added(standing: Path, small: DeploySmall) -> None:
    before = contents(standing)
    made = package([small("fp32"), small("fp16")], standing, Packaging(preferred=(), version=2))
    assert [(model.name, model.version, model.kept) for model in made] == [
        ("small-fp32", 2, True), ("small-fp16", 2, False),
    ]  # fmt: skip
    after = contents(standing)
    assert {name: after[name] for name in before} == before
    assert (standing / "small-fp32" / "2" / "model.py").exists() and (standing / "small-fp16" / "2").is_dir()


Spoil = Callable[[Path], object]

PLACES: dict[str, tuple[Spoil, dict[str, Any], str]] = {
    "the version exists": (lambda place: None, {}, r"small-fp32/1 exists; give the next version"),
    "a file": (lambda place: exchanged_for_a_file(place), {}, "is not a folder"),
    "another folder": (lambda place: (place / "thesis").mkdir(), {"version": 2}, "not a model repository: .*'thesis'"),
    "a model without configuration": (
        lambda place: (place / "small-fp32" / "config.pbtxt").unlink(),
        {"version": 2},
        "small-fp32 has no config.pbtxt to compare with",
    ),
    "other inputs": (
        lambda place: replace_in(place / "small-fp32" / "config.pbtxt", "TYPE_INT64", "TYPE_INT32"),
        {"version": 2},
        "small-fp32 has a different input in",
    ),
    "another backend": (lambda place: None, {"version": 2, "backend": "onnxruntime"}, "has a different backend in"),
}


def exchanged_for_a_file(place: Path) -> None:
    shutil.rmtree(place)
    place.write_text("mine")


def replace_in(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new))


@pytest.mark.parametrize("case", PLACES)
def test_what_stands_there_is_left_as_it_is(standing: Path, small: DeploySmall, case: str) -> None:
    spoil, options, words = PLACES[case]
    spoil(standing)
    before = contents(standing) if standing.is_dir() else standing.read_bytes()
    with pytest.raises(UsageError, match=words):
        package([small("fp32")], standing, Packaging(**{"preferred": (), **options}))
    assert (contents(standing) if standing.is_dir() else standing.read_bytes()) == before
    assert {path.name for path in standing.parent.iterdir()} == {"repository"}


def test_where_one_model_cannot_be_put_none_is(
    standing: Path, small: DeploySmall, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, real = contents(standing), atomic.rename_new

    def fails_later(old: Path, new: Path) -> None:
        if new.name == "2":
            raise FileExistsError(17, "File exists", str(old), None, str(new))
        real(old, new)

    monkeypatch.setattr("attnforge.serving.triton.repository.rename_new", fails_later)
    with pytest.raises(UsageError, match="small-fp32/2 appeared meanwhile"):
        package([small("fp16"), small("fp32")], standing, Packaging(preferred=(), version=2))
    assert contents(standing) == before
    assert {path.name for path in standing.parent.iterdir()} == {"repository"}


def test_nothing_is_packaged_into_a_bundle(copy: Path) -> None:
    from attnforge.serving.polygraphy.folder import package as for_polygraphy

    for make in (lambda out: package([copy], out), lambda out: for_polygraphy(copy, out)):
        with pytest.raises(UsageError, match=r"is inside the bundle .*copy; choose a folder outside it"):
            make(copy / "inner" / "out")
    Bundle(copy)


def test_a_full_disk_leaves_nothing(small: DeploySmall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("attnforge.bundle.output.shutil.copyfileobj", full)
    with pytest.raises(BundleError, match=r"the disk of .* is full"):
        package([small("fp32")], tmp_path / "repository", QUICK)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys
from pathlib import Path
from attnforge.serving.triton.options import Packaging
from attnforge.serving.triton.repository import package
bundle, repository, first = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
for version in range(first, first + 1000):
    package([bundle], repository, Packaging(preferred=(), max_batch=0, version=version))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is swept there")
def test_killed_at_any_moment_every_version_is_whole_and_nothing_stays(small: DeploySmall, tmp_path: Path) -> None:
    place, rng = tmp_path / "repository", random.Random(0)
    for start in (1, 2001, 4001, 6001):
        command = [sys.executable, "-c", KILLED, str(small("fp32").path), str(place), str(start)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            time.sleep(0.05 + 0.4 * rng.random())
            process.kill()
        assert process.returncode == -signal.SIGKILL
        for version in (place / "small-fp32").glob("[0-9]*"):
            Bundle(version / FOLDER)
            assert (version / "model.py").is_file() and parsed(place, "small-fp32").name == "small-fp32"
    package([small("fp32")], place, Packaging(preferred=(), max_batch=0, version=9000))
    assert {path.name for path in tmp_path.iterdir()} == {"repository"}
    assert {path.name for path in place.iterdir()} == {"small-fp32"}


def test_an_altered_bundle_is_not_packaged(copy: Path, tmp_path: Path) -> None:
    with (copy / "canonical.onnx").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(BundleError, match="was altered"):
        package([copy], tmp_path / "repository", QUICK)
    assert not (tmp_path / "repository").exists()


def test_names_and_options_that_cannot_be_meant(small: DeploySmall, tmp_path: Path) -> None:
    bundle, place = small("fp32"), tmp_path / "repository"
    wrong: list[tuple[Callable[[], object], type[AttnforgeError], str]] = [
        (lambda: package([bundle, bundle], place, QUICK), UsageError, "are both 'small-fp32'"),
        (lambda: package([bundle, bundle], place, QUICK, name="x"), UsageError, "cannot all be named 'x'"),
        (lambda: package([bundle], place, QUICK, name="../x"), UsageError, r"'\.\./x' is not a model name"),
        (lambda: package([bundle], Path("\0"), QUICK), UsageError, "cannot be a folder"),
        (lambda: package([tmp_path / "nothing"], place, QUICK), BundleError, "no bundle at"),
        (lambda: Packaging("pytorch"), UnknownNameError, "known: onnxruntime, python, tensorrt"),
        (lambda: Packaging(session="eager"), UnknownNameError, "unknown backend 'eager'"),
        (lambda: Packaging(kind="tpu"), UnknownNameError, "known: auto, cpu, gpu"),
        (lambda: Packaging(version=0), UsageError, "version is 0; give 1 to"),
        (lambda: Packaging(max_delay=-1), UsageError, "max_delay is -1"),
        (lambda: Packaging(instances=0), UsageError, "instances is 0"),
        (lambda: Packaging(threads=0), UsageError, "0 threads were asked for"),
        (lambda: Packaging("onnxruntime", session="openvino"), UsageError, "omit the Session's backend"),
        (lambda: Packaging("tensorrt", kind="cpu"), UsageError, "run on a GPU"),
    ]
    for call, kind, words in wrong:
        with pytest.raises(kind, match=words):
            call()
    assert list(tmp_path.iterdir()) == []


def test_a_preference_beyond_the_largest_batch_is_refused(registered: Deploy, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"33 samples are preferred, but .* takes 1 to 32"):
        package([registered("patch-attention-digits", "fp32")], tmp_path / "repository", Packaging(preferred=(8, 33)))


# --- the command line -------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: object) -> tuple[Any, str, str]:
    monkeypatch.setattr(sys, "argv", ["attnforge", "package", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


def test_the_command_line(
    small: DeploySmall, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "repository"
    usual = (small("fp32").path, "--for", "triton", "--out", place)
    code, out, _ = run(capsys, monkeypatch, *usual)
    assert code == 0 and "small-fp32, version 1, on python: requests are not joined" in " ".join(out.split())
    code, _, err = run(capsys, monkeypatch, *usual)
    assert code == 2 and "add a version to it (--version 2)" in err
    code, out, err = run(capsys, monkeypatch, *usual, "--version", 2, "--json")
    assert code == 0 and not err
    document = json.loads(out)
    assert document["repository"] == str(place)
    assert [(model["name"], model["version"], model["kept"]) for model in document["models"]] == [
        ("small-fp32", 2, True)
    ]
    for words, code, message in (
        ((usual[0], "--for", "tritn", "--out", tmp_path / "x"), 2, "unknown form 'tritn'; known: polygraphy, triton"),
        ((*usual[:4], tmp_path / "x", "--preferred", "8;9"), 2, "whole numbers with commas"),
        ((*usual[:4], tmp_path / "x", "--backend", "tensorrt"), 1, "no Triton backend loads"),
    ):
        ended, _, err = run(capsys, monkeypatch, *words)
        assert ended == code and message in " ".join(err.split()) and "Traceback" not in err
    assert not (tmp_path / "x").exists()


def test_serving_imports_no_torch(small: DeploySmall, tmp_path: Path) -> None:
    code = (
        "import sys; from attnforge.serving.triton.repository import package; import attnforge.serving.triton.model; "
        f"package([{str(small('fp32').path)!r}], {str(tmp_path / 'repository')!r}); "
        "assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
