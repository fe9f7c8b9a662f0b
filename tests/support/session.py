"""What the tests share: bundles that are deployed once for all workers, and which tests need a GPU. `tests/conftest.py`
loads this in each process that runs tests."""

from __future__ import annotations

import functools
import gc
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest
import torch._dynamo.config
import torch._export.utils
from filelock import FileLock
from hypothesis import HealthCheck, Phase, settings
from onnxscript.values import TracedOnnxFunction
from torch.onnx._internal.exporter._registration import ONNXRegistry

import attnforge
from attnforge.bundle import Bundle
from attnforge.export.tensorrt.build import Builders
from attnforge.machine import cuda_devices
from benchmarks.servers.ray.cluster import local_cluster
from tests.support.builder import WarmBuilder
from tests.support.bundles import Deploy, DeploySmall, example_of, small_example
from tests.support.decoders import PLACES, DeployDecoder, decoder_example
from tests.support.exports import shared_in
from tests.support.html_pages import browser, chromium
from tests.support.tiers import DRAW, left_out

__all__ = ["browser", "chromium"]

settings.register_profile(
    "ci", max_examples=100, derandomize=True, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    phases=[Phase.explicit, Phase.generate],  # shrinking a graph takes minutes
)  # fmt: skip
settings.register_profile(
    "thorough", settings.get_profile("ci"), max_examples=4000, derandomize=False, phases=list(Phase)
)
settings.register_profile("drawn", settings.get_profile("ci"), max_examples=15)
settings.load_profile("ci" if DRAW is None else "drawn")

# Torch's cache of fake tensors pays for models of many layers, and is a fifth of a small one's export.
torch._dynamo.config.fake_tensor_cache_enabled = False

# Each export asks for the signatures of all 500 functions of onnxscript's library, which reads and parses the source of
# each whenever it is asked.
_signature_of = cast(property, TracedOnnxFunction.function_ir).fget
assert _signature_of is not None
TracedOnnxFunction.function_ir = property(functools.cache(_signature_of))  # type: ignore[method-assign,assignment]

# It also makes the table of these functions anew, and looks up each composite operator of torch fifty times.
ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))  # type: ignore[method-assign]
_look_up = torch._export.utils._materialize_cpp_cia_ops


@functools.cache
def _looked_up(count: int) -> None:
    _look_up()


torch._export.utils._materialize_cpp_cia_ops = lambda: _looked_up(
    len(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
)


CLUSTER = ExitStack()
"""The Ray cluster, while one runs."""

LAST_OF_RAY = pytest.StashKey[str]()
"""The last test that uses it: left alone, a cluster takes a twentieth of a processor for the rest of the run."""

EVERY = pytest.StashKey[list[pytest.Item]]()
"""All tests that were collected, those that a draw leaves out as well."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[EVERY] = [*items]
    if DRAW is not None and (left := left_out(items, DRAW)):
        config.hook.pytest_deselected(items=left)
        kept = set(items) - set(left)
        items[:] = [item for item in items if item in kept]
    for item in items:
        if item.get_closest_marker("xdist_group") is not None:
            continue
        if isinstance(item, pytest.Function) and "registered" in item.fixturenames and hasattr(item, "callspec"):
            item.add_marker(pytest.mark.xdist_group(f"registered-{item.callspec.params.get('name')}"))
    if cuda_devices() == 0:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[LAST_OF_RAY] = next(
        (item.nodeid for item in reversed(session.items) if "ray_cluster" in getattr(item, "fixturenames", ())), ""
    )
    grouped = [item for item in session.items if item.get_closest_marker("xdist_group")]
    if getattr(session.config.option, "loadgroup", False) and not all("@" in item.nodeid for item in grouped):
        pytest.exit(
            "pytest-xdist does not group tests under this pytest, so what a group shares would be made twice", 3
        )
    keep_what_stays()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    if item.nodeid == item.config.stash[LAST_OF_RAY]:
        CLUSTER.close()
    if len(gc.get_objects(generation=2)) > 50_000:
        keep_what_stays()


def keep_what_stays() -> None:
    """Let the collector look no more at what modules and caches hold by now."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run that its workers share."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def own_state(shared: Path) -> Iterator[None]:
    """The key of the cache is this run's own, and not that of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(shared / "state"))
        yield


@pytest.fixture(scope="session", autouse=True)
def warm_builder() -> Iterator[WarmBuilder]:
    """Builds TensorRT-RTX's plans, unless it is set `aside`."""
    warm = WarmBuilder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Builders, "_answer", lambda *request: warm.answer(*request))
        yield warm
    warm.close()


@pytest.fixture(scope="session", autouse=True)
def keep_memory() -> Iterator[None]:
    """What a deploy gives back of its memory takes a twentieth of the run: looking through all objects, twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnforge.export.deploy.give_back", lambda: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def share_exports(shared: Path) -> Iterator[None]:
    """A module that one deploy exported, no other deploy of the run exports again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnforge.export.sources.source.capture", shared_in(shared / "exports"))
        yield


def once(folder: Path, deploy: Callable[[], Bundle]) -> Bundle:
    """The bundle in `folder`, deployed by the first worker that asks for it."""
    with FileLock(f"{folder}.lock"):
        return Bundle(folder) if folder.exists() else deploy()


@pytest.fixture(scope="session")
def registered(shared: Path) -> Deploy:
    """`registered(name, precision)`: that model, deployed for every target that can be built here."""

    @functools.cache
    def deploy(name: str, precision: str) -> Bundle:
        folder = shared / f"{name}-{precision}"
        module, args, shapes = example_of(name)
        return once(folder, lambda: attnforge.deploy(module, args, folder, shapes, precision, name=name, tune=False))

    return deploy


@pytest.fixture(scope="session")
def small(shared: Path) -> DeploySmall:
    """`small(precision)`: :class:`Small`, deployed for ONNX Runtime and TensorRT-RTX. To alter it, take a `copy`."""
    targets = ("onnxruntime", "tensorrt_rtx")

    @functools.cache
    def deploy(precision: str) -> Bundle:
        folder = shared / f"small-{precision}"
        module, args, shapes = small_example()
        return once(
            folder,
            lambda: attnforge.deploy(module, args, folder, shapes, precision, targets, name="small", tune=False),
        )

    return deploy


@pytest.fixture
def copy(small: DeploySmall, tmp_path: Path) -> Path:
    """A copy of the small fp32 bundle that a test may alter."""
    return Path(shutil.copytree(small("fp32").path, tmp_path / "copy"))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster of this machine; what uses it is of the group `ray`, so that there is one. Two actors leave a
    processor for reading."""
    with CLUSTER:
        CLUSTER.enter_context(local_cluster(cpus=4))
        yield


@pytest.fixture(scope="session")
def decoders(shared: Path) -> DeployDecoder:
    """`decoders(kind, precision)`: a small decoder with a cache, for ONNX Runtime; in fp16 for TensorRT-RTX as well."""

    @functools.cache
    def deploy(kind: str, precision: str) -> Bundle:
        folder = shared / f"decoder-{kind}-{precision}"
        module, args, shapes = decoder_example(kind)
        targets = ("onnxruntime", "tensorrt_rtx") if precision == "fp16" else ("onnxruntime",)
        return once(
            folder,
            lambda: attnforge.deploy(module, args, folder, shapes, precision, targets, tune=False, cache_tokens=PLACES),
        )

    return deploy
