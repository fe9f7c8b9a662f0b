"""Sessions on a GPU, on every backend that the machine has. All are skipped without a GPU; `make gpu` runs them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attnforge
from attnforge import cache
from attnforge.arrays import BFLOAT16, Array
from attnforge.bundle import FLAVOURS, Bundle, Manifest
from attnforge.errors import BundleError, InputError, UnavailableError
from attnforge.export.targets.registry import why_not_buildable
from attnforge.runtime.backends.registry import ON_GPU
from attnforge.runtime.parity.verify import hold
from attnforge.runtime.session import Session
from benchmarks.gpu.parity import second_opinion
from tests.support.bundles import rewrite, small_example
from tests.support.bundles import small_inputs as arrays

pytestmark = pytest.mark.gpu
needs_torch = pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch has no CUDA")
SHAPES = [(4, 9, 12), (1, 2, 2), (3, 7, 10), (4, 9, 12), (2, 5, 6)]


def on_device(inputs: dict[str, Array], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    tensors = {name: torch.from_numpy(array).cuda() for name, array in inputs.items()}
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def eager(inputs: dict[str, Array]) -> Array:
    with torch.no_grad():
        output: Array = (
            small_example()
            .module.double()(
                *(
                    torch.from_numpy(a).double() if a.dtype == np.float32 else torch.from_numpy(a)
                    for a in inputs.values()
                )
            )
            .numpy()
        )
    return output


def agree(given: Any, expected: Array, tolerance: float = 1e-5) -> None:
    array = given.detach().double().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given, np.float64)
    assert array.shape == expected.shape
    assert np.linalg.norm(array - expected) <= tolerance * np.linalg.norm(expected)


@pytest.fixture(scope="module")
def here(small: Callable[[str], Bundle], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    """`here(precision)`: the small bundle with a plan for every TensorRT of this machine, deployed once each."""
    folder = tmp_path_factory.mktemp("here")
    made: dict[str, Bundle] = {}
    has_plans = any(why_not_buildable(flavour) is None for flavour in FLAVOURS)
    profiles = [{"batch": (1, 1, 1), "tokens": (2, 2, 9)}] if has_plans else []

    def deploy(precision: str) -> Bundle:
        if precision not in made:
            module, args, shapes = small_example()
            made[precision] = attnforge.deploy(
                module, args, folder / precision, shapes, precision, name="small", tune=False, profiles=profiles
            )
        return made[precision]

    return deploy


def opened(bundle: Bundle, backend: str, **options: Any) -> Session:
    """Return a session, or skip the test with the reason why the backend is unavailable."""
    try:
        return attnforge.load(bundle, backend, **options)
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(params=ON_GPU)
def session(request: pytest.FixtureRequest, here: Callable[[str], Bundle]) -> Iterator[Session]:
    with opened(here("fp32"), request.param) as loaded:
        yield loaded


def test_numpy_in_numpy_out(session: Session) -> None:
    for i, shape in enumerate(SHAPES * 3):
        inputs = arrays(*shape, seed=i)
        output = session(*inputs.values())
        assert isinstance(output, np.ndarray) and output.dtype == np.float32
        agree(output, eager(inputs))


@needs_torch
@pytest.mark.parametrize("side", [False, True])
def test_tensors_stay_on_the_device_and_on_their_stream(session: Session, side: bool) -> None:
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for i, shape in enumerate(SHAPES * 3):
            inputs = arrays(*shape, seed=i)
            given = on_device(inputs)
            given["x"] = given["x"] * 2 / 2  # enqueued on this stream just before the run
            output = session(*given.values())
            assert isinstance(output, Tensor) and output.is_cuda and output.dtype == torch.float32
            agree(output + 0, eager(inputs))  # and just after it


@needs_torch
def test_outputs_are_not_overwritten_while_they_are_referenced(session: Session) -> None:
    feeds = [arrays(seed=i) for i in range(12)]
    outputs = [session(*on_device(inputs).values()) for inputs in feeds]
    assert len({tensor.data_ptr() for tensor in outputs}) == len(outputs)
    for inputs, output in zip(feeds, outputs, strict=True):
        agree(output, eager(inputs))


@needs_torch
def test_outputs_go_to_the_callers_tensors(session: Session) -> None:
    inputs = arrays()
    into = torch.full((3, 4, 16), float("nan"), device="cuda")
    assert session.run(on_device(inputs), out={"output": into})["output"] is into
    agree(into, eager(inputs))
    with pytest.raises(InputError, match="is on the host, and the inputs are on the GPU"):
        session.run(on_device(inputs), out={"output": into.cpu()})
    with pytest.raises(InputError, match="it must be"):
        session.run(on_device(inputs), out={"output": into[:2].contiguous()})
    agree(session.run(inputs, out={"output": (host := np.zeros((3, 4, 16), np.float32))})["output"], eager(inputs))
    agree(host, eager(inputs))


class Interface:
    """An object that offers `__cuda_array_interface__` and nothing else."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__ | {"version": 3}
        self.kept = tensor


@needs_torch
def test_arrays_of_any_library(session: Session) -> None:
    inputs = arrays()
    output = session(*(Interface(tensor) for tensor in on_device(inputs).values()))
    agree(torch.utils.dlpack.from_dlpack(output), eager(inputs))
    given: dict[str, Any] = {**on_device(inputs), "padding": inputs["padding"]}  # one input on the host
    agree(session.run(given)["output"], eager(inputs))
    given["x"] = given["x"].transpose(0, 1).contiguous().transpose(0, 1)
    agree(session.run(given)["output"], eager(inputs))
    with pytest.raises(InputError, match="is strided; make it contiguous first"):
        session.run({**given, "x": Interface(given["x"])})
    given["x"] = torch.cat([torch.zeros(1, device="cuda"), given["x"].flatten()])[1:].view(3, 4, 16)  # not aligned
    agree(session.run(given)["output"], eager(inputs))
    given["x"] = torch._neg_view(-given["x"])  # whose memory has the other sign
    agree(session.run(given)["output"], eager(inputs))


@needs_torch
def test_arrays_on_the_host_may_change_once_a_call_has_returned(session: Session) -> None:
    """Pinned ones too, which the device can read at any time."""
    inputs = arrays()
    padding = torch.from_numpy(inputs["padding"].copy()).pin_memory()
    given = {**on_device(inputs), "padding": padding}
    session.run(given)
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # about 0.1 s, in which the call returns
    output = session.run(given)["output"]
    padding.logical_not_()
    agree(output, eager(inputs))


@needs_torch
@pytest.mark.parametrize("backend", ON_GPU)
@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_half_precisions(here: Callable[[str], Bundle], backend: str, precision: str, dtype: torch.dtype) -> None:
    inputs = arrays()
    with opened(here(precision), backend) as session:
        output = session(*on_device(inputs, dtype).values())
        assert output.dtype == dtype and output.is_cuda
        agree(output, eager(inputs), tolerance=0.03)
        as_numpy = [
            a.astype(BFLOAT16 if precision == "bf16" else np.float16) if a.dtype == np.float32 else a
            for a in inputs.values()
        ]
        agree(session(*as_numpy).astype(np.float64), eager(inputs), tolerance=0.03)


@pytest.mark.parametrize("backend", FLAVOURS)
def test_graphs_are_captured_replayed_bounded_and_freed(here: Callable[[str], Bundle], backend: str) -> None:
    with opened(here("fp32"), backend, contexts=1) as session:
        session.warm_up()
        assert session.memory.graphs == 1
        before = session.memory
        inputs = arrays(2, 5, 6)
        for _ in range(20):
            agree(session(*inputs.values()), eager(inputs))
        assert session.memory == before
        for shape in [(b, t, 2 * p) for b in (1, 2, 3, 4) for t in (2, 3, 4) for p in (1, 2)]:
            inputs_of_shape = arrays(*shape)
            for _ in range(3):
                agree(session(*inputs_of_shape.values()), eager(inputs_of_shape))
        assert 1 < session.memory.graphs <= 16
    with opened(here("fp32"), backend, graphs=False) as session:
        session.warm_up()
        assert session.memory.graphs == 0
        agree(session(*inputs.values()), eager(inputs))


@needs_torch
def test_graphs_on_request_in_onnxruntime(here: Callable[[str], Bundle]) -> None:
    with opened(here("fp32"), "onnxruntime-cuda", graphs=True) as session:
        for i in range(6):
            inputs = arrays(seed=i)
            agree(session(*on_device(inputs).values()), eager(inputs))


def test_many_threads(session: Session) -> None:
    feeds = [arrays(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    expected = [eager(inputs) for inputs in feeds]

    def work(seed: int) -> None:
        order = random.Random(seed)
        for _ in range(100):
            i = order.randrange(len(feeds))
            if torch.cuda.is_available() and order.random() < 0.5:
                with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                    agree(session(*on_device(feeds[i]).values()), expected[i])
            else:
                agree(session(*feeds[i].values()), expected[i])

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(work, range(16)))


@needs_torch
def test_a_pending_run_can_be_waited_for(session: Session) -> None:
    inputs = arrays()
    for given in (inputs, on_device(inputs)):
        pending = session.run_async(given)
        agree(pending.result()["output"], eager(inputs))
        assert pending.done()


@needs_torch
def test_a_thousand_loads_and_closes_do_not_leak_memory(session: Session) -> None:
    def cycle(n: int) -> None:
        for _ in range(n):
            with attnforge.load(session.bundle, session.backend, contexts=1) as loaded:
                loaded(*arrays().values())

    cycle(20)
    free = torch.cuda.mem_get_info()[0]
    cycle(1000 if session.backend in FLAVOURS else 50)
    assert free - torch.cuda.mem_get_info()[0] < 64 * 2**20


@pytest.mark.parametrize("backend", FLAVOURS)
def test_plans_that_cannot_be_loaded_are_built_again(
    here: Callable[[str], Bundle], tmp_path: Path, backend: str
) -> None:
    opened(here("fp16"), backend).close()
    copy = Path(shutil.copytree(here("fp16").path, tmp_path / "copy"))
    file = copy / Bundle(copy).manifest.targets[backend].engines[0].file
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BundleError, match=r"was altered .*rebuild=True"):
        attnforge.load(copy, backend)
    with attnforge.load(copy, backend, rebuild=True) as session:
        agree(session(*half(arrays()).values()).astype(np.float64), eager(arrays()), tolerance=0.03)

    here_version = Bundle(copy).manifest.targets[backend].engines[0].version

    def age(manifest: Manifest) -> None:
        for engine in manifest.targets[backend].engines:
            engine.version = "1.0.0"

    rewrite(copy, age)
    with pytest.raises(UnavailableError, match=r"which may not load it; .*rebuild=True"):
        attnforge.load(copy, backend)
    with attnforge.load(copy, backend, rebuild=True) as session:
        assert [engine.version for engine in session.bundle.manifest.targets[backend].engines] == [here_version]


def half(inputs: dict[str, Array]) -> dict[str, Array]:
    return {name: a.astype(np.float16) if a.dtype == np.float32 else a for name, a in inputs.items()}


def test_compiled_kernels_are_kept_for_the_next_start(here: Callable[[str], Bundle], tmp_path: Path) -> None:
    copy = Bundle(shutil.copytree(here("fp16").path, tmp_path / "copy"))
    for _ in range(2):
        with opened(copy, "tensorrt_rtx") as session:
            session.warm_up()
    kept = list(cache.cache_folder(copy.path).glob("*.kernels"))
    assert len(kept) == 1 and kept[0].stat().st_size > 0


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_polygraphy_runs_the_same_plan_within_the_budget(
    here: Callable[[str], Bundle], flavour: str, precision: str, tmp_path: Path
) -> None:
    """A second runtime runs the same plan. If only one of them is wrong, the plan is not the cause."""
    with opened(here(precision), flavour) as session:
        ours = hold(session.bundle, flavour, session.run)
    theirs = second_opinion(here(precision), flavour, 0, tmp_path, 300)
    assert ours.passed and theirs.passed, theirs.missed


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_every_backend_is_within_the_parity_budget(here: Callable[[str], Bundle], precision: str) -> None:
    report = attnforge.verify(here(precision))
    assert set(report.backends) & set(ON_GPU), report.skipped
    assert report.passed, {name: parity.failures for name, parity in report.backends.items()}
