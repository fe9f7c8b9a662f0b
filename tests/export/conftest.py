"""What the tests of export share: the models that break on purpose, and the healthy one, deployed once for all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

import attnforge
from attnforge.bundle import Bundle
from tests.support.broken import BROKEN, healthy, made
from tests.support.session import once

DeployBroken = Callable[[str, str], Bundle]
"""A model of `BROKEN`, or `healthy`, by name and precision, deployed. To alter it, take a copy."""


@pytest.fixture(scope="session")
def broken(shared: Path) -> DeployBroken:
    """`broken(name, precision)`: that model, deployed for ONNX Runtime and TensorRT-RTX."""

    @functools.cache
    def deploy(name: str, precision: str) -> Bundle:
        module, args, shapes = made(healthy if name == "healthy" else BROKEN[name].make)
        folder, targets = shared / f"{name}-{precision}", ("onnxruntime", "tensorrt_rtx")
        return once(
            folder,
            lambda: attnforge.deploy(module, args, folder, shapes, precision, targets, tune=False, keep_wrong=True),
        )

    return deploy
