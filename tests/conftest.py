"""What the tests share: bundles that are deployed once a session, and which of them need a GPU."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from torch.onnx._internal.exporter._registration import ONNXRegistry

import attnforge
from attnforge.bundle import Bundle
from attnforge.machine import cuda_devices
from tests.support.bundles import example_of, small_example

settings.register_profile(
    "ci", max_examples=100, derandomize=True, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    phases=[Phase.explicit, Phase.generate],  # shrinking a graph takes minutes
)  # fmt: skip
settings.register_profile(
    "thorough", settings.get_profile("ci"), max_examples=4000, derandomize=False, phases=list(Phase)
)
settings.load_profile("ci")

# The exporter makes its table of operators anew for each export, which is a fourth of what a small one takes.
ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))  # type: ignore[method-assign]

Deploy = Callable[[str, str], Bundle]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if cuda_devices() == 0:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Deploy:
    """`registered(name, precision)`: that model, deployed for every target that can be built here."""
    folder = tmp_path_factory.mktemp("bundles")

    @functools.cache
    def deploy(name: str, precision: str) -> Bundle:
        module, args, dynamic_shapes = example_of(name)
        return attnforge.deploy(
            module, args, folder / f"{name}-{precision}", dynamic_shapes, precision, name=name, tune=False
        )

    return deploy


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    """`small(precision)`: :class:`Small`, deployed for ONNX Runtime and TensorRT-RTX. To alter it, take a `copy`."""
    folder = tmp_path_factory.mktemp("small")

    @functools.cache
    def deploy(precision: str) -> Bundle:
        module, args, shapes = small_example()
        targets = ("onnxruntime", "tensorrt_rtx")
        return attnforge.deploy(module, args, folder / precision, shapes, precision, targets, name="small", tune=False)

    return deploy


@pytest.fixture
def copy(small: Callable[[str], Bundle], tmp_path: Path) -> Path:
    """A copy of the small fp32 bundle that a test may alter."""
    return Path(shutil.copytree(small("fp32").path, tmp_path / "copy"))
