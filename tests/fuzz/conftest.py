"""Fixtures of the fuzz tests: the process under test, and the bundle that is altered."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnforge
from attnforge.arrays import Array
from attnforge.bundle import Bundle
from tests.fuzz.subject import Subject
from tests.support.bundles import DeploySmall, small_inputs


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run all tests that use the subject in one worker, and so with one subject."""
    for item in items:
        if "subject" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("fuzz"))


@pytest.fixture(scope="session")
def subject() -> Iterator[Subject]:
    subject = Subject()
    yield subject
    subject.close()


@pytest.fixture(scope="module")
def folder(small: DeploySmall, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the small bundle, next to its outputs (`truth.npz`)."""
    return copied(small("fp32"), tmp_path_factory.mktemp("fuzz") / "small", small_inputs())


def copied(bundle: Bundle, to: Path, inputs: dict[str, Array]) -> Path:
    """Copy a bundle, and write inputs (`in/NAME`) and the outputs for them to `truth.npz` next to it."""
    folder = Path(shutil.copytree(bundle.path, to))
    with attnforge.load(folder, "onnxruntime-cpu") as session:
        outputs: dict[str, Any] = dict(session.run(inputs))
    given: dict[str, Any] = {f"in/{name}": array for name, array in inputs.items()}
    np.savez(folder.parent / "truth.npz", **outputs, **given)
    return folder
