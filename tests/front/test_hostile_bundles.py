"""Untrusted bundles: no name leads outside them, links and pipes are refused, and what was checked is what runs."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import attnforge
from attnforge import cache
from attnforge.bundle import CANONICAL, MANIFEST, Bundle, Manifest, output, reading
from attnforge.bundle.schema import SessionSettings
from attnforge.errors import AttnforgeError, BundleError, ReplacedError, UsageError
from attnforge.export.diagnosis.stages import stages
from attnforge.export.tensorrt.rebuild import rebuild, rebuilt
from attnforge.files import open_inside, open_regular
from attnforge.machine import Machine, processors
from attnforge.runtime.backends.onnxruntime import session_options
from tests.support.bundles import rewrite, small_inputs

MODEL = "onnxruntime/model.onnx"
PLAN = "tensorrt/engine.tensorrt_rtx.plan"
MACHINE: dict[str, Any] = {"system": "", "processor": "", "processors": 1, "instructions": [], "gpus": []}


def edit(folder: Path, change: Callable[[Any], object]) -> None:
    """Change only the manifest's JSON."""
    document = json.loads((folder / MANIFEST).read_text())
    change(document)
    (folder / MANIFEST).write_text(json.dumps(document))


def refused(folder: Path, words: str = "") -> None:
    """Check that loading, verifying and inspecting a bundle fail at once with one line."""
    for use in (attnforge.load, attnforge.verify, Bundle, attnforge.diagnose):
        start = time.perf_counter()
        with pytest.raises(BundleError, match=words) as raised:
            use(folder)
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 2_000
        assert time.perf_counter() - start < 10


# --- names ------------------------------------------------------------------------------------------------------------

NAMES = ["../victim.txt", "/etc/hostname", "tensorrt/../../victim.txt", "C:/victim.txt", "a\\b", "./a", "a//b", "", "."]
NAMES += ["nul\0", "line\nbreak", "n" * 10_000]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:20]))
@pytest.mark.parametrize(
    "put",
    [
        lambda d, name: d["files"].update({name: "0" * 64}),
        lambda d, name: d["targets"]["tensorrt_rtx"]["engines"][0].update(file=name),
        lambda d, name: d["targets"]["onnxruntime"].update(model=name),
        lambda d, name: d["targets"]["onnxruntime"].update(cuda_model=name),
        lambda d, name: d["targets"]["onnxruntime"].update(
            session={"machine": MACHINE,
                     "version": ort.__version__, "optimized": name}
        ),
    ],
    ids=["files", "engine", "model", "cuda model", "optimized model"],
)  # fmt: skip
def test_a_name_that_leads_out_of_the_bundle_is_refused(
    copy: Path, name: str, put: Callable[[Any, str], object]
) -> None:
    victim = copy.parent / "victim.txt"
    victim.write_text("mine")
    edit(copy, lambda document: put(document, name))
    with pytest.raises(BundleError, match="is not a valid manifest"):
        Bundle(copy, check_plans=False, lazily=True)
    with pytest.raises(BundleError):
        rebuilt(copy, "tensorrt_rtx")
    assert victim.read_text() == "mine"


def test_an_engine_that_files_do_not_list_is_an_error_of_the_bundle(copy: Path) -> None:
    edit(copy, lambda document: document["files"].pop(PLAN))
    refused(copy, f"has no {PLAN}, which the manifest names")
    with pytest.raises(BundleError):
        attnforge.load(copy, "tensorrt_rtx", rebuild=True)


def test_files_that_nobody_lists_are_named(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("json.py", "onnxruntime/extra.so"):
        (copy / name).write_text("raise SystemExit")
    (copy / "link").symlink_to("/etc/hostname")
    assert Bundle(copy).unlisted() == ["json.py", "link", "onnxruntime/extra.so"]
    assert "json.py, link, onnxruntime/extra.so" in caplog.text
    report = attnforge.verify(copy)
    assert report.passed and any("json.py" in warning for warning in report.warnings)


def test_names_of_files_give_a_terminal_no_orders(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    (copy / "a\x1b[31m\nb").touch()
    report = attnforge.verify(copy)
    assert all("\x1b" not in text and "\n" not in text for text in (*report.warnings, *caplog.messages))


def test_threads_of_a_manifest_are_at_most_the_processors() -> None:
    settings = SessionSettings(machine=Machine(**MACHINE), version="1", threads=1024)
    assert session_options(None, settings).intra_op_num_threads <= processors()
    assert session_options(1024, settings).intra_op_num_threads == 1024


# --- links, pipes and weights elsewhere -------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [MODEL, "onnxruntime", MANIFEST, "reference/outputs.safetensors"])
@pytest.mark.parametrize("inside", [False, True], ids=["to the outside", "within"])
def test_no_link_is_followed(copy: Path, what: str, inside: bool) -> None:
    moved = (copy if inside else copy.parent) / "moved"
    (copy / what).rename(moved)
    (copy / what).symlink_to(moved, target_is_directory=moved.is_dir())
    with pytest.raises(BundleError):
        attnforge.verify(copy)


def test_a_link_to_a_bundle_is_a_bundle(copy: Path) -> None:
    (copy.parent / "latest").symlink_to(copy, target_is_directory=True)
    assert attnforge.verify(copy.parent / "latest").passed


@pytest.mark.parametrize("what", [MODEL, MANIFEST, "reference/example.safetensors", PLAN])
def test_a_pipe_is_no_file(copy: Path, what: str) -> None:
    (copy / what).unlink()
    os.mkfifo(copy / what)
    for use in (Bundle, attnforge.verify):
        with pytest.raises(BundleError, match="not a regular file"):
            use(copy)


def test_a_manifest_of_any_length_and_depth_is_refused_at_once(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ('{"schema_version": 1, "name": ' + "[" * 200_000, json.dumps({"schema_version": 1, "n" * 10**7: 1})):
        (copy / MANIFEST).write_text(text)
        refused(copy, "is not a valid manifest")
        with pytest.raises(UsageError, match="not a bundle"), output.writing(copy, force=True):
            pytest.fail("it must not be overwritten")
    (copy / MANIFEST).write_text(json.dumps({"schema_version": 1, "inputs": [[]] * 10**6}))
    refused(copy, "more than 200,000 values")
    monkeypatch.setattr(reading, "MOST_MANIFEST", 1000)
    refused(copy, "more than 1,000 bytes")


def outsourced(folder: Path, name: str, location: str) -> onnx.ModelProto:
    """Move the first large weight of a model of the bundle to another file."""
    model = onnx.load(str(folder / name))
    weight = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    weight.data_location = onnx.TensorProto.EXTERNAL
    (folder / name).parent.joinpath(location).write_bytes(weight.raw_data)
    entry = weight.external_data.add()
    entry.key, entry.value = "location", location
    weight.ClearField("raw_data")
    onnx.save(model, folder / name)
    return model


@pytest.mark.parametrize("name", [MODEL, CANONICAL, "tensorrt/model.onnx"])
@pytest.mark.parametrize("location", ["hidden.bin", "../../outside.bin"])
def test_weights_in_a_file_that_nobody_lists_are_refused(copy: Path, name: str, location: str) -> None:
    outsourced(copy, name, "hidden.bin")
    model = onnx.load(str(copy / name), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = location if entry.key == "location" else entry.value
    onnx.save(model, copy / name)
    rewrite(copy)
    edit(copy, lambda document: [document["files"].pop(file) for file in list(document["files"]) if "hidden" in file])
    bundle = Bundle(copy, lazily=True)
    for use in (bundle.file, bundle.model):
        with pytest.raises(BundleError, match="which the manifest does not list"):
            use(name)
    if name == "tensorrt/model.onnx":
        with pytest.raises(BundleError, match="which the manifest does not list"):
            rebuild(bundle, "tensorrt_rtx", "SM80")


VALUES = np.array([5, 7], np.float32)


def external(*locations: str, name: str = "values") -> onnx.TensorProto:
    """A tensor of two numbers stored in another file."""
    tensor = onnx.TensorProto(dims=[2], data_type=onnx.TensorProto.FLOAT, name=name, data_location="EXTERNAL")
    for location in locations:
        tensor.external_data.add(key="location", value=location)
    return tensor


def sparse(tensor: onnx.TensorProto) -> onnx.SparseTensorProto:
    return onnx.SparseTensorProto(values=tensor, indices=numpy_helper.from_array(np.arange(2), "at"), dims=[2])


def within(graph: onnx.GraphProto, tensor: onnx.TensorProto) -> None:
    """An If operator with the tensor in its branches."""
    node = helper.make_node("Constant", [], ["within"], sparse_value=sparse(tensor))
    inner = helper.make_graph([node], "branch", [], [helper.make_tensor_value_info("within", 1, [2])])
    graph.node.append(helper.make_node("If", ["condition"], ["either"], then_branch=inner, else_branch=inner))


def in_function(model: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    nodes = [helper.make_node("Constant", [], ["y"], sparse_value=sparse(tensor))]
    model.functions.append(helper.make_function("own", "f", [], ["y"], nodes, [helper.make_opsetid("", 20)]))


def in_training(model: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    model.training_info.add().algorithm.initializer.append(tensor)


def constant_of(**attribute: Any) -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["of values"], **attribute)


PLACED: dict[str, Callable[[onnx.ModelProto, onnx.TensorProto], object]] = {
    "an initializer": lambda model, tensor: model.graph.initializer.append(tensor),
    "a sparse initializer": lambda model, tensor: model.graph.sparse_initializer.append(sparse(tensor)),
    "a constant": lambda model, tensor: model.graph.node.append(constant_of(value=tensor)),
    "a sparse constant": lambda model, tensor: model.graph.node.append(constant_of(sparse_value=sparse(tensor))),
    "sparse indices": lambda model, tensor: model.graph.sparse_initializer.add().indices.CopyFrom(tensor),
    "a list of tensors": lambda model, tensor: model.graph.node.append(helper.make_node("T", [], ["y"], ts=[tensor])),
    "a branch": lambda model, tensor: within(model.graph, tensor),
    "a function": in_function,
    "training": in_training,
}


@pytest.mark.parametrize("where", PLACED)
def test_weights_are_found_wherever_a_model_has_them(copy: Path, where: str) -> None:
    model = onnx.load(str(copy / MODEL))
    PLACED[where](model, external("hidden.bin"))
    onnx.save(model, copy / MODEL)
    (copy / "onnxruntime/hidden.bin").write_bytes(VALUES.tobytes())
    rewrite(copy)
    assert Bundle(copy, lazily=True).model_files(MODEL) == [MODEL, "onnxruntime/hidden.bin"]
    edit(copy, lambda document: document["files"].pop("onnxruntime/hidden.bin"))
    bundle = Bundle(copy, lazily=True)
    for use in (bundle.file, bundle.model, bundle.model_files):
        with pytest.raises(BundleError, match=r"'hidden\.bin', which the manifest does not list"):
            use(MODEL)


@pytest.mark.parametrize(
    "locations",
    [["../canonical.onnx"], ["/etc/hostname"], ["*/_ORT_MEM_ADDR_/*"], ["sub/in.bin"], ["./in.bin"],
     ["in.bin", "../canonical.onnx"], ["../canonical.onnx", "in.bin"]],
)  # fmt: skip
def test_weights_outside_the_folder_of_the_model_are_refused(copy: Path, locations: list[str]) -> None:
    """Not even where a file of the bundle has that name: OpenVINO takes the third for an address in memory."""
    model = onnx.load(str(copy / MODEL))
    model.graph.sparse_initializer.append(sparse(external(*locations)))
    onnx.save(model, copy / MODEL)
    for name in ("in.bin", "sub/in.bin", "*/_ORT_MEM_ADDR_/*"):
        file = copy / "onnxruntime" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(VALUES.tobytes())
    rewrite(copy)
    with pytest.raises(BundleError, match="which the manifest does not list in the same folder") as raised:
        attnforge.load(copy, "onnxruntime-cpu")
    assert "\n" not in str(raised.value)


def test_the_libraries_do_read_sparse_weights_of_other_files(tmp_path: Path) -> None:
    """Therefore a bundle must list them."""
    nodes = [
        helper.make_node("Constant", [], ["c"], sparse_value=sparse(external("hidden.bin"))),
        helper.make_node("Add", ["x", "c"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy")
    opsets = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x], [y]), opset_imports=opsets, ir_version=9),
              tmp_path / "model.onnx")  # fmt: skip
    (tmp_path / "hidden.bin").write_bytes(VALUES.tobytes())
    zeros, file = np.zeros(2, np.float32), str(tmp_path / "model.onnx")
    session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {"x": zeros})[0], VALUES)
    openvino = pytest.importorskip("openvino")
    np.testing.assert_array_equal(openvino.Core().compile_model(file, "CPU")(zeros)[0], VALUES)


def test_weights_in_openvinos_own_format_are_listed(copy: Path) -> None:
    """It reads its format under any model's name, with weights in a file next to it that the model does not name."""
    openvino = pytest.importorskip("openvino")
    model = copy / "openvino" / "model.onnx"
    whole = openvino.Core().read_model(str(model))
    openvino.save_model(whole, copy.parent / "model.xml", compress_to_fp16=False)
    (copy.parent / "model.bin").rename(model.with_name("model.bin"))
    (copy.parent / "model.xml").rename(model)
    model.with_name("model.onnx.data").touch()  # the graph is given as a file
    rewrite(copy)
    openvino.Core().compile_model(str(model), "CPU")
    edit(copy, lambda document: document["files"].pop("openvino/model.bin"))
    with pytest.raises(BundleError, match=r"weights in 'model\.bin', which the manifest does not list"):
        attnforge.load(copy, "openvino")


def test_a_model_that_holds_a_compiled_one_is_refused(copy: Path) -> None:
    """ONNX Runtime's provider of TensorRT would load the plan in it, which is code."""
    model = onnx.load(str(copy / MODEL))
    compiled: dict[str, Any] = {"embed_mode": 1, "ep_cache_context": b"a plan", "main_context": 1}
    model.graph.node.append(helper.make_node("EPContext", [], ["y"], domain="com.microsoft", **compiled))
    onnx.save(model, copy / MODEL)
    rewrite(copy)
    with pytest.raises(BundleError, match="contains a compiled model"):
        attnforge.load(copy, "onnxruntime-cpu")


def test_a_model_of_another_ending_is_refused(copy: Path) -> None:
    """Models are checked according to it."""
    (copy / MODEL).rename(copy / "onnxruntime/model.bin")
    edit(copy, lambda document: document["targets"]["onnxruntime"].update(model="onnxruntime/model.bin"))
    edit(copy, lambda document: document["files"].update({"onnxruntime/model.bin": document["files"].pop(MODEL)}))
    refused(copy, "is not a valid manifest")


def test_weights_reached_through_a_link_are_refused(copy: Path) -> None:
    outsourced(copy, MODEL, "hidden.bin")
    rewrite(copy)
    assert attnforge.verify(copy, ["onnxruntime-cpu"]).passed  # as an older bundle may have them
    hidden = copy / "onnxruntime/hidden.bin"
    hidden.rename(copy.parent / "hidden.bin")
    hidden.symlink_to(copy.parent / "hidden.bin")
    with pytest.raises(BundleError, match="is a link"):
        Bundle(copy, lazily=True).model(MODEL)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_text("y")
    (tmp_path / "way").symlink_to("folder", target_is_directory=True)
    with open_inside(tmp_path, "folder/file") as stream:
        assert stream.read() == b"y"
    with open_regular(tmp_path / "link", follow=True) as stream:
        assert stream.read() == b"x"
    for name in ("link", "folder", "way/file", "absent", "file/file"):
        with pytest.raises(OSError):
            open_inside(tmp_path, name)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(OSError):
            open_inside(tmp_path, "way/file")
        with pytest.raises(OSError):
            open_regular(Path("/dev/null"))
    assert len(os.listdir("/proc/self/fd")) == before


# --- the cache of a bundle --------------------------------------------------------------------------------------------


def test_the_cache_follows_no_link_and_reads_nothing_of_others(tmp_path: Path) -> None:
    folder = tmp_path / "small.cache"
    file = folder / "kernels"
    assert cache.write(file, b"kernels") and cache.read(file) == b"kernels"
    (tmp_path / "elsewhere").write_bytes(b"evil")
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    assert cache.read(file) is None
    file.unlink()
    os.mkfifo(file)
    assert cache.read(file) is None
    file.unlink()
    cache.write(file, b"kernels")
    folder.chmod(0o777)  # others may replace it with their own file
    assert cache.read(file) is None
    folder.chmod(0o700)
    file.chmod(0o666)
    assert cache.read(file) is None


def test_a_cache_that_somebody_else_wrote_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when an untrusted archive contains a bundle and its cache: unpacked, both belong to this user."""
    file = tmp_path / "small.cache/kernels"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
    assert cache.write(file, b"evil") and cache.read(file) == b"evil"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))
    assert cache.read(file) is None
    assert cache.write(file, b"kernels") and cache.read(file) == b"kernels"
    whole = file.read_bytes()
    for altered in (whole[:-1], whole[1:], whole[:-1] + bytes([whole[-1] ^ 1]), b"evil" + whole[4:], b"", whole[-32:]):
        file.write_bytes(altered)
        assert cache.read(file) is None
    other = file.with_name("other kernels")
    other.write_bytes(whole)
    other.chmod(0o600)
    assert cache.read(other) is None  # another plan's kernels
    file.write_bytes(whole)
    assert cache.read(file) == b"kernels"
    key = tmp_path / "mine/attnforge/cache.key"
    key.chmod(0o644)  # others have read it, and could have written the file
    assert cache.read(file) is None and not cache.write(file, b"kernels")


def test_a_cache_that_is_a_link_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/kernels").write_bytes(b"evil")
    (tmp_path / "elsewhere/kernels").chmod(0o600)
    (tmp_path / "small.cache").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert cache.read(tmp_path / "small.cache/kernels") is None
    assert not cache.write(tmp_path / "small.cache/more", b"x")


# --- what was checked is what runs ------------------------------------------------------------------------------------


@pytest.fixture
def other(copy: Path) -> Path:
    """A bundle with the same inputs and outputs, and other weights."""
    folder = Path(shutil.copytree(copy, copy.parent / "other"))
    for name in (MODEL, CANONICAL, "plain.onnx"):
        model = onnx.load(str(folder / name))
        for tensor in model.graph.initializer:
            if tensor.data_type == onnx.TensorProto.FLOAT:
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 2, tensor.name))
        onnx.save(model, folder / name)
    rewrite(folder, lambda manifest: setattr(manifest, "name", "other"))
    return folder


def answers(folder: Path) -> Any:
    with attnforge.load(folder, "onnxruntime-cpu") as session:
        return session.run(small_inputs())["output"]


@pytest.mark.parametrize("whole", [True, False], ids=["as bytes", "by its path"])
@pytest.mark.parametrize("how", ["folder", "there and back", "file"])
def test_a_model_that_is_replaced_after_the_check_does_not_run_under_this_manifest(
    copy: Path, other: Path, monkeypatch: pytest.MonkeyPatch, whole: bool, how: str
) -> None:
    if not whole:
        monkeypatch.setattr(reading, "READ_WHOLE", 0)
    right = {"small": answers(copy), "other": answers(other)}
    assert np.abs(right["small"] - right["other"]).max() > 1e-3
    real, aside, swaps = ort.InferenceSession, copy.parent / "aside", [1]

    def swapped(*args: Any, **options: Any) -> Any:
        back = None
        if swaps:
            swaps.pop()
            if how == "file":
                shutil.copyfile(other / MODEL, copy / MODEL)
            else:
                copy.rename(aside)
                other.rename(copy)
                back = how == "there and back"
        try:
            return real(*args, **options)
        finally:
            if back:
                copy.rename(other)
                aside.rename(copy)

    monkeypatch.setattr(ort, "InferenceSession", swapped)
    if how == "file" and not whole:
        with pytest.raises(BundleError, match=r"was altered|was replaced"):
            attnforge.load(copy, "onnxruntime-cpu")
        return
    with attnforge.load(copy, "onnxruntime-cpu") as session:
        np.testing.assert_allclose(session.run(small_inputs())["output"], right[session.bundle.manifest.name], 1e-5)


def test_loads_of_a_bundle_that_is_replaced_all_the_time(copy: Path, other: Path) -> None:
    right = {"small": answers(copy), "other": answers(other)}
    link, ended = copy.parent / "latest", threading.Event()
    link.symlink_to(copy, target_is_directory=True)

    def replace() -> Iterator[None]:
        for i in range(1_000_000):
            new = copy.parent / "new"
            new.symlink_to((copy, other)[i % 2], target_is_directory=True)
            new.rename(link)
            yield

    def replacing() -> None:
        for _ in replace():
            if ended.wait(0.0005):
                return

    thread = threading.Thread(target=replacing)
    thread.start()
    seen: set[str] = set()
    try:
        for _ in range(60):
            try:
                with attnforge.load(link, "onnxruntime-cpu") as session:
                    name = session.bundle.manifest.name
                    np.testing.assert_allclose(session.run(small_inputs())["output"], right[name], 1e-5)
                    seen.add(name)
            except ReplacedError:
                pass
    finally:
        ended.set()
        thread.join()
    assert seen


# --- values -----------------------------------------------------------------------------------------------------------


def at(document: Any, *path: str | int) -> Any:
    for part in path:
        document = document[part]
    return document


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("name",), "nul\0"),
        (("name",), "n" * 50_000_000),
        (("precision",), "fp7"),
        (("inputs", 0, "name"), "\x1b]0;title\x07"),
        (("inputs", 0, "dtype"), "object"),
        (("inputs", 0, "dtype"), "float33"),
        (("inputs", 0, "dims", 0, "factor"), 0),
        (("inputs", 0, "dims", 0, "factor"), -1),
        (("inputs", 0, "dims", 0, "min"), None),
        (("inputs", 0, "dims", 0, "max"), 0),
        (("inputs", 0, "dims", 0, "opt"), 10**6),
        (("inputs", 0, "dims", 0, "symbol"), "(" * 100_000),
        (("inputs", 0, "dims", 2), -16),
        (("inputs", 0, "dims", 2), 2**60),
        (("inputs", 0, "dims"), [1] * 100_000),
        (("inputs", 1, "name"), "x"),
        (("inputs", 3, "low"), 5),
        (("inputs", 3, "high"), 10**30),
        (("inputs", 3, "excludes"), "-inf"),
        (("seconds", "export"), 1e308),
        (("outputs", 0, "dtype"), "str"),
        (("cases", 1, "seed"), -1),
        (("cases", 1, "seed"), 2**70),
        (("cases", 1, "scale"), -1.0),
        (("cases", 1, "scale"), "NaN"),
        (("cases", 1, "kind"), "odd"),
        (("cases", 1, "name"), "example"),
        (("cases", 1, "sizes"), {}),
        (("cases", 1, "sizes"), {"batch": -1, "tokens": 3, "pairs": 1}),
        (("cases", 1, "spread"), {"output": [-1.0, 0.0]}),
        (("targets", "tensorrt_rtx", "engines", 0, "profiles"), [{"batch": [1, 2, 4]}]),
        (("targets", "tensorrt_rtx", "engines", 0, "profiles", 0, "batch"), [4, 2, 1]),
        (("targets", "tensorrt_rtx", "attention_precision"), "fp7"),
        (("files", MODEL), "abc"),
        (("targets", "onnxruntime", "session"), {"machine": MACHINE, "version": "1", "threads": 100_000}),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_values_that_cannot_be_are_refused_before_anything_is_done(
    copy: Path, path: tuple[str | int, ...], value: Any
) -> None:
    edit(copy, lambda document: at(document, *path[:-1]).__setitem__(path[-1], value))
    refused(copy, "is not a valid manifest")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(copy: Path, value: str) -> None:
    text = (copy / MANIFEST).read_text().replace('"scale": 16.0', f'"scale": {value}')
    (copy / MANIFEST).write_text(text)
    refused(copy, "is not a valid manifest")


@pytest.mark.parametrize("depth", [900, 1_300])
def test_an_expression_of_sizes_is_no_way_to_hang(copy: Path, depth: int) -> None:
    """A shape that cannot be inferred is unknown; it is checked on the model's outputs."""
    edit(copy, lambda document: document["outputs"][0]["dims"][0].update(symbol="+".join("1" * depth)))
    with attnforge.load(copy, "onnxruntime-cpu") as session:
        try:
            session.run(small_inputs())
        except AttnforgeError as error:
            assert "\n" not in str(error)


def test_a_bundle_without_cases_is_not_diagnosed(copy: Path) -> None:
    edit(copy, lambda document: document.update(cases=[]))
    with pytest.raises(BundleError, match="has no reference case to diagnose"):
        attnforge.diagnose(copy)


def test_a_case_without_its_inputs_or_outputs_is_refused(copy: Path) -> None:
    def renamed(manifest: Manifest) -> None:
        manifest.cases[2].name = "another"

    rewrite(copy, renamed)
    with pytest.raises(BundleError, match=r"outputs\.safetensors has no 'another/output/eager', which a case needs"):
        attnforge.verify(copy)

    def of_data(manifest: Manifest) -> None:
        manifest.cases[2].kind = "data"

    rewrite(copy, of_data)
    with pytest.raises(BundleError, match="which a case needs"):
        attnforge.verify(copy)


def test_dims_that_the_graph_does_not_have_reserve_no_memory(copy: Path) -> None:
    edit(copy, lambda manifest: manifest["outputs"][0]["dims"].__setitem__(-1, 2**31 - 1))
    with pytest.raises(
        BundleError, match=r"^the manifest says that output is .*, but its graph has \d+ for 2147483647; "
    ):
        attnforge.load(copy, "onnxruntime-cpu")


# --- files of another kind than they should be ------------------------------------------------------------------------

JUNK = [b"", b"junk", b"\0" * 4096, b"\xff" * 100, b"\x08\x0a" * 50]


@pytest.mark.parametrize("data", JUNK, ids=["empty", "text", "zeros", "ones", "fields"])
@pytest.mark.parametrize(
    "name", [MODEL, CANONICAL, "plain.onnx", "reference/outputs.safetensors", "reference/example.safetensors"]
)
def test_a_file_of_another_kind_is_one_line(copy: Path, name: str, data: bytes) -> None:
    (copy / name).write_bytes(data)
    bundle = rewrite(copy)
    for use in (attnforge.verify, attnforge.diagnose, lambda b: attnforge.verify(b, ["openvino"]), stages):
        try:
            use(bundle)
        except AttnforgeError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", [MODEL, CANONICAL, "reference/outputs.safetensors"])
def test_a_file_with_other_bytes_is_one_line(copy: Path, name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = bytearray((copy / name).read_bytes())
    if seed < 3:
        for position in rng.integers(0, len(data), 8):
            data[position] = rng.integers(0, 256)
    else:
        data = data[: int(rng.integers(1, len(data)))]
    (copy / name).write_bytes(data)
    bundle = rewrite(copy)
    for use in (lambda b: attnforge.verify(b, ["onnxruntime-cpu"]), attnforge.diagnose):
        try:
            use(bundle)
        except AttnforgeError as error:
            assert "\n" not in str(error)
