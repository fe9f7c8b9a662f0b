"""Choices of a session before anything runs: the plan for a device, the profile for a shape, the file of a cache."""

from __future__ import annotations

import inspect
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnforge
from attnforge import cache
from attnforge.bundle import Bundle, DimSpec, Engine, Range, TensorSpec
from attnforge.errors import InputError, UnavailableError, UnknownNameError, UsageError
from attnforge.export.tensorrt.build import profiles_of
from attnforge.runtime.backends import registry as backends
from attnforge.runtime.backends.backend import Options
from attnforge.runtime.plans import engine_for, profile_for
from tests.support.bundles import DeploySmall
from tests.support.keys import new_key

VERSION = "1.7.1"


def engine(*capabilities: str, version: str = VERSION, file: str = "") -> Engine:
    return Engine(
        file=file or "-".join(capabilities), flavour="tensorrt_rtx", version=version,
        compute_capabilities=list(capabilities), layers=1, size=1, build_seconds=0.1,
    )  # fmt: skip


# Plans


@pytest.mark.parametrize(
    ("engines", "capability", "chosen"),
    [
        ([engine("portable")], "SM80", "portable"),
        ([engine("portable")], "SM90", "portable"),
        ([engine("portable")], "SM120", "portable"),
        ([engine("portable"), engine("SM89")], "SM89", "SM89"),
        ([engine("SM89"), engine("portable")], "SM89", "SM89"),
        ([engine("SM89"), engine("portable")], "SM86", "portable"),
        ([engine("SM80", "SM89", "SM120")], "SM120", "SM80-SM89-SM120"),
        ([engine("SM89", file="old"), engine("SM89", file="new")], "SM89", "new"),
        ([engine("SM89", version="1.6", file="old"), engine("portable")], "SM89", "portable"),
    ],
)
def test_a_plan_for_exactly_this_device_is_preferred(engines: list[Engine], capability: str, chosen: str) -> None:
    plan = engine_for(engines, VERSION, capability)
    assert isinstance(plan, Engine) and plan.file == chosen


@pytest.mark.parametrize(
    ("engines", "capability", "message"),
    [
        ([engine("portable")], "SM75", r"portable \(SM80 and later\) and this device is SM75; .*rebuild=True"),
        ([engine("SM89", "SM120")], "SM90", "for SM120, SM89 and this device is SM90; build one"),
        ([engine("SM89", version="1.6")], "SM89", "rebuild=True"),
    ],
)  # fmt: skip
def test_a_plan_for_another_device_is_refused_with_a_remedy(
    engines: list[Engine], capability: str, message: str
) -> None:
    reason = engine_for(engines, VERSION, capability)
    assert isinstance(reason, str) and re.search(message, reason)


@pytest.mark.parametrize(("capability", "runs"), [("SM89", True), ("SM90", False), ("SM120", True)])
def test_a_gpu_that_tensorrt_rtx_does_not_support_is_named(
    capability: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A portable plan is for it by its number, but TensorRT-RTX 1.7 loads no plan on compute capability 9.0."""
    trt = pytest.importorskip("tensorrt_rtx")
    monkeypatch.setattr(backends, "cuda_devices", lambda: 1)
    monkeypatch.setattr(backends, "compute_capability", lambda device: capability)
    reason = backends.why_not_here("tensorrt_rtx")
    if runs:
        assert reason is None
    else:
        start = f"tensorrt_rtx {trt.__version__} does not support this GPU: its compute capability is SM90, and the "
        assert reason is not None and reason.startswith(start) and "SM89" in reason and "\n" not in reason


@pytest.mark.parametrize(
    ("library", "backend", "version", "reason"),
    [
        ("onnxruntime", "onnxruntime-cpu", "1.29.1", r"onnxruntime 1.29.1 .*; pip .* 'onnxruntime(-gpu)?>=1.30'"),
        ("onnxruntime", "onnxruntime-cpu", "1.30.0", None),
        ("openvino", "openvino", "2026.2.1-21919-abc", "openvino 2026.2.1 .*; pip .* 'openvino>=2026.3'"),
        ("openvino", "openvino", "2026.10.0-1-a", None),
    ],
)
def test_a_library_that_computes_attention_wrongly_runs_no_bundle(
    library: str, backend: str, version: str, reason: str | None, small: DeploySmall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m benchmarks run matrix` compares the releases."""
    pytest.importorskip(library)
    backends._no_openvino.cache_clear()
    monkeypatch.setattr(f"{library}.__version__", version)
    found = backends.why_unavailable(small("fp32"), backend)
    backends._no_openvino.cache_clear()
    assert (found is None) == (reason is None)
    assert reason is None or re.fullmatch(reason, str(found))


# Profiles

WHOLE: dict[str, Range] = {"batch": (1, 4, 64), "tokens": (1, 128, 4096)}
ONE: dict[str, Range] = {"batch": (1, 1, 1), "tokens": (1, 128, 512)}
LONG: dict[str, Range] = {"batch": (1, 4, 64), "tokens": (1024, 2048, 4096)}


@pytest.mark.parametrize(
    ("batch", "tokens", "profile"),
    [(1, 128, 1), (1, 16, 1), (4, 128, 0), (8, 100, 0), (4, 2048, 2), (4, 1500, 2), (1, 4096, 2), (64, 1, 0)],
)
def test_the_profile_with_the_nearest_optimum_is_chosen(batch: int, tokens: int, profile: int) -> None:
    assert profile_for([WHOLE, ONE, LONG], {"batch": batch, "tokens": tokens}) == profile


def test_of_equally_near_profiles_the_narrowest_is_chosen() -> None:
    narrow: dict[str, Range] = {"batch": (2, 4, 8), "tokens": (64, 128, 256)}
    assert profile_for([WHOLE, narrow, WHOLE], {"batch": 4, "tokens": 128}) == 1
    assert profile_for([WHOLE, WHOLE], {"batch": 4, "tokens": 128}) == 0


def test_static_plans_have_one_profile_and_sizes_outside_all_profiles_are_refused() -> None:
    assert profile_for([], {}) == 0
    with pytest.raises(
        InputError, match="no optimization profile of the plan includes batch 65, tokens 1; deploy again"
    ):
        profile_for([WHOLE, ONE], {"batch": 65, "tokens": 1})


ranges = st.lists(st.integers(1, 50), min_size=3, max_size=3).map(lambda three: (*sorted(three),))


@given(st.lists(ranges, min_size=1, max_size=5), st.integers(1, 50))
def test_the_nearest_profile_that_includes_the_size_is_chosen(bounds: list[Range], size: int) -> None:
    profiles = [{"n": bound} for bound in bounds]
    including = [i for i, (low, _, high) in enumerate(bounds) if low <= size <= high]
    if not including:
        with pytest.raises(InputError):
            profile_for(profiles, {"n": size})
        return
    chosen = profile_for(profiles, {"n": size})

    def factor(i: int) -> float:
        return max(size, bounds[i][1]) / min(size, bounds[i][1])

    assert chosen in including and factor(chosen) <= min(map(factor, including)) * (1 + 1e-6)


BATCH = DimSpec(symbol="batch", min=1, opt=4, max=64)
INPUTS = [
    TensorSpec(name="x", dtype="float32", dims=[BATCH, DimSpec(symbol="pairs", factor=2, min=2, opt=8, max=20), 16]),
    TensorSpec(name="mask", dtype="bool", dims=[BATCH, 16]),
]


def test_profiles_are_the_full_range_and_the_requested_ones() -> None:
    whole = {"batch": (1, 4, 64), "pairs": (1, 4, 10)}
    assert profiles_of(INPUTS) == [whole]
    assert profiles_of(INPUTS, [{"batch": (1, 1, 1)}, {"pairs": (2, 3, 4), "batch": (2, 2, 2)}]) == [
        whole,
        {"batch": (1, 1, 1), "pairs": (1, 4, 10)},
        {"batch": (2, 2, 2), "pairs": (2, 3, 4)},
    ]
    assert profiles_of([TensorSpec(name="x", dtype="float32", dims=[2, 3])]) == []


@pytest.mark.parametrize("wrong", [(0, 1, 2), (1, 65, 65), (2, 1, 3), (3, 3, 2), (1, 4, 65)])
def test_an_invalid_profile_is_refused(wrong: Range) -> None:
    with pytest.raises(
        UsageError, match=r"a profile has batch from .*; give min ≤ opt ≤ max within the dim's range, 1 to 64"
    ):
        profiles_of(INPUTS, [{"batch": wrong}])


def test_a_profile_of_an_unknown_dim_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown dim 'rows'; known: batch, pairs"):
        profiles_of(INPUTS, [{"rows": (1, 1, 1)}])


# Caches


def test_a_cache_belongs_to_one_device_version_and_plan(tmp_path: Path) -> None:
    bundle = tmp_path / "vit.bundle"
    known = {"version": "1.7.1.116", "device": "NVIDIA H200", "plan_sha256": "ab" * 32}
    file = cache.runtime_cache_file(bundle, **known)
    assert file == tmp_path / "vit.bundle.cache" / "tensorrt_rtx-1.7.1.116-nvidia-h200-abababababababab.kernels"
    changes = [{"version": "1.7.2"}, {"device": "NVIDIA A100-SXM4-80GB"}, {"plan_sha256": "cd" * 32}]
    assert len({file, *(cache.runtime_cache_file(bundle, **{**known, **change}) for change in changes)}) == 4
    timings = cache.timing_cache_file(bundle, "11.4.0", "NVIDIA H200")
    assert timings.parent == file.parent and timings.name == "tensorrt-11.4.0-nvidia-h200.timings"


def test_cache_files_are_read_back_and_replaced_as_a_whole(tmp_path: Path) -> None:
    file = cache.runtime_cache_file(tmp_path / "b", "1", "gpu", "0" * 64)
    assert cache.read(file) is None
    assert cache.write(file, b"first") and cache.read(file) == b"first"
    assert cache.write(file, b"second") and cache.read(file) == b"second"
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize("mode", [0o622, 0o662, 0o666])
def test_kernels_writable_by_others_are_not_read(tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "kernels"
    file.write_bytes(b"code")
    file.chmod(mode)
    assert cache.read(file) is None and "others may write to it" in caplog.text


def test_an_unwritable_folder_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "b.cache").write_text("a file where the folder would be")
    assert not cache.write(cache.timing_cache_file(tmp_path / "b", "1", "gpu"), b"x")


# Backends


def test_the_next_backend_is_used_where_the_best_cannot_be_opened(
    small: Callable[[str], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some plans turn out not to load only when they are opened."""
    bundle, real = small("fp32"), backends.open_backend  # deployed before anything is patched

    def refuse(opened: Bundle, backend: str, options: Options) -> Any:
        if backend != "onnxruntime-cpu":
            raise UnavailableError("it is of another device")
        return real(opened, backend, options)

    monkeypatch.setattr(backends, "open_backend", refuse)
    monkeypatch.setattr(backends, "why_not_unasked", lambda bundle, backend, device: None)
    monkeypatch.setattr(backends, "why_unavailable", lambda bundle, backend, device: None)
    with attnforge.load(bundle) as session:
        assert session.backend == "onnxruntime-cpu"
    with pytest.raises(UnavailableError, match=r"^tensorrt_rtx: it is of another device$"):
        attnforge.load(bundle, "tensorrt_rtx")


STRANGERS = backends.STRANGERS.format("tensorrt_rtx")


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer the checks before a run as on a machine with a GPU; nothing is loaded there."""
    pytest.importorskip("tensorrt_rtx")
    monkeypatch.setattr(backends, "cuda_devices", lambda: 1)
    monkeypatch.setattr(backends, "compute_capability", lambda device: "SM89")


def test_a_plan_is_loaded_by_default_only_for_the_user_who_built_it(
    small: Callable[[str], Bundle], on_a_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan may run code, so other users' plans must be requested by name or signed with a trusted key."""
    bundle = small("fp32")
    assert backends.why_not_unasked(bundle, "tensorrt_rtx") is None
    stranger = Bundle(shutil.copytree(bundle.path, tmp_path / "b"))
    (plan,) = stranger.manifest.targets["tensorrt_rtx"].engines
    code, plan.code = plan.code, None
    assert backends.why_not_unasked(stranger, "tensorrt_rtx") == STRANGERS
    plan.code = "0" * 64
    assert backends.why_not_unasked(stranger, "tensorrt_rtx") == STRANGERS
    plan.code = code
    stranger.manifest.files[plan.file] = "0" * 64  # another plan with this user's code
    assert backends.why_not_unasked(stranger, "tensorrt_rtx") == STRANGERS
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
    assert backends.why_not_unasked(bundle, "tensorrt_rtx") == STRANGERS
    assert backends.why_unavailable(bundle, "tensorrt_rtx") is None, "it was asked for by name"
    monkeypatch.setenv("XDG_STATE_HOME", os.devnull)
    assert backends.why_not_unasked(bundle, "tensorrt_rtx") == STRANGERS, "the user can keep no key"


def test_a_plan_signed_with_a_trusted_key_is_loaded_by_default(
    small: Callable[[str], Bundle], on_a_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("model_signing")
    folder, key = shutil.copytree(small("fp32").path, tmp_path / "b"), new_key(tmp_path / "a.key")
    attnforge.sign(folder, key)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
    assert backends.why_not_unasked(Bundle(folder, trusted=key.with_suffix(".pub")), "tensorrt_rtx") is None
    assert backends.why_not_unasked(Bundle(folder), "tensorrt_rtx") == STRANGERS


def test_an_untrusted_plan_is_skipped_and_logged(
    small: Callable[[str], Bundle], on_a_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
    candidates = ("tensorrt_rtx", "onnxruntime-cpu")
    backend = backends.open_first(small("fp32"), candidates, Options(), named=False)
    assert backend.name == "onnxruntime-cpu"
    assert f"is not loaded on tensorrt_rtx: {STRANGERS}" in caplog.text
    backend.close()


def test_a_library_that_keeps_files_gets_a_folder_outside_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []
    for user in ("theirs", "mine", "mine"):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / user))
        folder = cache.own_folder(tmp_path / "b", "onnxruntime")
        assert folder is not None and folder.is_dir() and folder.parent == cache.cache_folder(tmp_path / "b")
        folders.append(folder)
    assert folders[0] != folders[1] == folders[2] != cache.own_folder(tmp_path / "c", "onnxruntime")
    folders[1].rename(tmp_path / "elsewhere")
    folders[1].symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert cache.own_folder(tmp_path / "b", "onnxruntime") is None, "a link"
    folders[1].unlink()
    folders[1].mkdir()
    folders[1].chmod(0o777)
    assert cache.own_folder(tmp_path / "b", "onnxruntime") is None, "others may write to it"
    monkeypatch.setenv("XDG_STATE_HOME", os.devnull)
    assert cache.own_folder(tmp_path / "b", "onnxruntime") is None, "the user can keep no key"


def test_fused_sites_are_counted_only_for_the_backend_that_compiled_them(small: Callable[[str], Bundle]) -> None:
    """Of ONNX Runtime's providers, only the CPU provider compiled anything when the bundle was deployed."""
    certificate = small("fp32").manifest.attention
    counts = {name: backends.fused_by(certificate, name) for name in backends.BACKENDS}
    assert counts["onnxruntime-cpu"] == certificate.fused["onnxruntime"]
    assert counts["tensorrt_rtx"] == certificate.fused["tensorrt_rtx"] == 0, "TensorRT fuses no attention in fp32"
    assert counts["tensorrt"] == "the bundle was not deployed for tensorrt"
    for name in ("onnxruntime-tensorrt", "onnxruntime-cuda"):
        assert "counted" in str(counts[name])
    assert counts["openvino"] == "it does not report what it fuses"


@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_every_row_names_a_function_that_opens_a_bundle(backend: str) -> None:
    module, _, opener = backends.REGISTRY[backend].opener.partition(":")
    opened = getattr(pytest.importorskip(f"attnforge.runtime.backends.{module}"), opener)
    assert [*inspect.signature(opened).parameters] == ["bundle", "row", "options"]


def test_reasons_of_tensorrt_rtx_against_a_plan_are_reported() -> None:
    tensorrt = pytest.importorskip("attnforge.runtime.backends.tensorrt")
    trt = pytest.importorskip("tensorrt_rtx")
    assert list(tensorrt.invalid(0)) == []
    assert list(tensorrt.invalid(2 | 4)) == [tensorrt.INVALID[2], tensorrt.INVALID[4]]
    validity, bits = trt.Runtime(trt.Logger(trt.Logger.INTERNAL_ERROR)).get_engine_validity(b"no plan" * 100)
    assert validity == trt.EngineValidity.INVALID and list(tensorrt.invalid(bits)) == [tensorrt.INVALID[32]]


def test_errors_of_tensorrt_are_recorded(tmp_path: Path) -> None:
    tensorrt = pytest.importorskip("attnforge.runtime.backends.tensorrt")
    trt = pytest.importorskip("tensorrt_rtx")
    recorder = tensorrt._recorder(trt)
    assert recorder.last() == "it gave no reason, except possibly on standard error"
    runtime = trt.Runtime(trt.Logger(trt.Logger.INTERNAL_ERROR))
    runtime.error_recorder = recorder
    assert runtime.deserialize_cuda_engine(b"no plan" * 100) is None
    count = trt.IErrorRecorder.num_errors(recorder)  # as TensorRT calls it
    assert count >= 1
    assert "deserialize" in "".join(trt.IErrorRecorder.get_error_desc(recorder, i) for i in range(count))


@pytest.mark.parametrize(
    ("shape", "strides", "contiguous"),
    [
        ((2, 3), None, True), ((2, 3), (3, 1), True), ((2, 3), (1, 2), False), ((2, 3), (6, 2), False),
        ((1, 3), (99, 1), True), ((0, 3), (7, 7), True), ((), (), True), ((4, 1, 2), (2, 5, 1), True),
    ],
)  # fmt: skip
def test_arrays_without_gaps(shape: tuple[int, ...], strides: tuple[int, ...] | None, contiguous: bool) -> None:
    gpu = pytest.importorskip("attnforge.runtime.gpu")
    assert gpu.is_contiguous(shape, strides) is contiguous


@pytest.mark.parametrize(("precision", "tf32"), [("fp32", "0"), ("tf32", "1")])
def test_provider_options_of_onnxruntime_on_a_gpu(small: Callable[[str], Bundle], precision: str, tf32: str) -> None:
    module = pytest.importorskip("attnforge.runtime.backends.onnxruntime_gpu")
    bundle = small(precision)
    ((name, cuda),) = module.provider_options(bundle, "onnxruntime-cuda", Options(device=1), stream=4096)
    assert name == "CUDAExecutionProvider"
    assert cuda == {"device_id": "1", "user_compute_stream": "4096", "use_tf32": tf32, "enable_cuda_graph": "0"}
    (name, with_tensorrt), with_cuda = module.provider_options(bundle, "onnxruntime-tensorrt", Options(graphs=True), 1)
    assert name == "TensorrtExecutionProvider" and with_cuda[1]["enable_cuda_graph"] == "0"
    assert with_tensorrt["trt_cuda_graph_enable"] == "1"
    assert with_tensorrt["trt_profile_min_shapes"] == "x:1x2x16,memory:1x2x16,padding:1x2,kinds:16"
    assert with_tensorrt["trt_profile_opt_shapes"] == "x:2x5x16,memory:2x6x16,padding:2x6,kinds:16"
    assert with_tensorrt["trt_profile_max_shapes"] == "x:4x9x16,memory:4x12x16,padding:4x12,kinds:16"
    assert with_tensorrt["trt_engine_cache_path"] == str(cache.own_folder(bundle.path, "onnxruntime"))
    assert (
        "trt_engine_cache_enable"
        not in dict(module.provider_options(bundle, "onnxruntime-tensorrt", Options(cache=False), 1))[
            "TensorrtExecutionProvider"
        ]
    )


def test_every_backend_has_a_file_of_a_bundle(small: Callable[[str], Bundle]) -> None:
    def model_of(precision: str, backend: str) -> str:
        return backends.REGISTRY[backend].model(small(precision).manifest)

    assert model_of("fp32", "onnxruntime-tensorrt") == model_of("fp32", "tensorrt_rtx") == "tensorrt/model.onnx"
    assert model_of("fp32", "onnxruntime-cuda") == model_of("fp32", "onnxruntime-cpu") == "onnxruntime/model.onnx"
    assert model_of("fp16", "onnxruntime-cuda") == "onnxruntime/model.cuda.onnx"
    assert model_of("fp32", "openvino") == "openvino/model.onnx"
    without = small("fp32").manifest.model_copy(update={"targets": {}})
    assert backends.REGISTRY["openvino"].model(without) == "canonical.onnx"
