"""Fixtures shared by the export tests: the deliberately broken models and the healthy one, each deployed once."""

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
"""Deploys a model of `BROKEN`, or `healthy`, given name and precision. To alter the bundle, copy it."""


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
