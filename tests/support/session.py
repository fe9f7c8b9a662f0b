"""Shared fixtures: bundles that are deployed once for all workers, and the markers of tests.

`tests/conftest.py` loads this in each process that runs tests.
"""

from __future__ import annotations

import functools
import gc
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch._dynamo.config
from filelock import FileLock
from hypothesis import HealthCheck, Phase, settings

import attnforge
from attnforge.bundle import Bundle
from attnforge.machine import cuda_devices
from attnforge.runtime.backends.registry import why_not_here
from benchmarks.servers.ray.cluster import local_cluster
from tests.support.builders import builders
from tests.support.bundles import Deploy, DeploySmall, example_of, small_example
from tests.support.decoders import PLACES, DeployDecoder, decoder_example
from tests.support.exports import shared_in
from tests.support.html_pages import browser, chromium

__all__ = ["browser", "chromium"]

settings.register_profile(
    "ci", max_examples=100, derandomize=True, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    phases=[Phase.explicit, Phase.generate],  # shrinking a graph takes minutes
)  # fmt: skip
settings.register_profile(
    "thorough", settings.get_profile("ci"), max_examples=4000, derandomize=False, phases=list(Phase)
)
settings.load_profile("ci")

# torch's fake tensor cache pays off for models with many layers, and takes a tenth of the export of a small one.
torch._dynamo.config.fake_tensor_cache_enabled = False

QUICK = (
    "golden/", "export/attention/test_layout.py", "export/attention/test_operators.py",
    "export/attention/test_walks.py", "export/graphs/", "export/masks/test_at_blocks.py",
    "export/masks/test_constants.py", "export/masks/test_shape.py", "export/masks/test_visibility_properties.py",
    "export/sources/test_widened.py", "front/test_machine.py", "model/test_attention.py", "model/test_general.py",
    "model/test_identities.py", "model/test_patch.py", "model/test_refusals.py", "model/test_slips.py",
    "model/test_transformer.py", "model/test_worked_example.py", "runtime/test_race.py",
    "serving/test_open_inference.py",
)  # fmt: skip
"""Files and folders of `make quick`, which export and deploy nothing; all other tests are marked `slow`."""

CLUSTER = ExitStack()
"""The running Ray cluster, if any."""

LAST_OF_RAY = pytest.StashKey[str]()
"""The last test that uses the cluster: an idle cluster takes a twentieth of a CPU for the rest of the run."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    quick = tuple(f"tests/{path}" for path in QUICK)
    if missing := [path for path in quick if not config.rootpath.joinpath(path).exists()]:
        raise pytest.UsageError(f"{', '.join(missing)} of QUICK (tests/support/session.py) are not there")
    for item in items:
        if not item.nodeid.startswith(quick):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("xdist_group") is not None:
            continue
        if isinstance(item, pytest.Function) and "registered" in item.fixturenames and hasattr(item, "callspec"):
            item.add_marker(pytest.mark.xdist_group(f"registered-{item.callspec.params.get('name')}"))
    for item in items:
        if (gpu := item.get_closest_marker("gpu")) is not None:
            reasons = [why_not_here(backend) for backend in gpu.args] if cuda_devices() else ["no CUDA device"]
            for reason in filter(None, reasons):
                item.add_marker(pytest.mark.skip(reason=reason))


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
    """Exclude the objects in modules and caches from garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder shared by the workers of this run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def own_state(shared: Path) -> Iterator[None]:
    """Use a cache key of this run instead of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(shared / "state"))
        yield


@pytest.fixture(autouse=True)
def own_seed() -> None:
    """Draw the same weights in a test whatever ran before it in its process."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def share_exports(shared: Path) -> Iterator[None]:
    """Export each module only once in a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnforge.export.sources.source.capture", shared_in(shared / "exports"))
        yield


@pytest.fixture(scope="session", autouse=True)
def share_libraries() -> Iterator[None]:
    """Load the libraries of TensorRT's builder only once in a worker; the tests of the builder's process
    (`export/tensorrt/test_build.py`) start it as `deploy` does."""
    with builders() as server, pytest.MonkeyPatch.context() as patch:
        if server is not None:
            patch.setattr("attnforge.children.command", server.command)
        yield


def once(folder: Path, deploy: Callable[[], Bundle]) -> Bundle:
    """Return the bundle in `folder`, deployed by the first worker that requests it."""
    with FileLock(f"{folder}.lock"):
        return Bundle(folder) if folder.exists() else deploy()


@pytest.fixture(scope="session")
def registered(shared: Path) -> Deploy:
    """`registered(name, precision)`: a registered model, deployed for every target that can be built here."""

    @functools.cache
    def deploy(name: str, precision: str) -> Bundle:
        folder = shared / f"{name}-{precision}"
        module, args, shapes = example_of(name)
        return once(folder, lambda: attnforge.deploy(module, args, folder, shapes, precision, name=name, tune=False))

    return deploy


@pytest.fixture(scope="session")
def small(shared: Path) -> DeploySmall:
    """`small(precision)`: :class:`Small`, deployed for ONNX Runtime and TensorRT-RTX. Use `copy` to alter it."""
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
    """A Ray cluster on this machine. Its tests are in the group `ray`, so that there is only one. Two actors leave a
    CPU for reading."""
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
