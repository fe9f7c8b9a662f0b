"""Altered Polygraphy results files, in their JSON and in their arrays."""

from __future__ import annotations

import base64
import io
import json
from base64 import b64encode
from pathlib import Path

import pytest
from hypothesis import event, given, note
from hypothesis import strategies as st

from attnforge.bundle import Bundle
from attnforge.polygraphy_files import write_results
from attnforge.runtime import cases as reference
from attnforge.runtime.parity.verify import stored_inputs
from attnforge.runtime.session import load
from tests.fuzz.budget import tries
from tests.fuzz.changes import changed_bytes
from tests.fuzz.subject import Subject
from tests.support.bundles import DeploySmall


@pytest.fixture(scope="module")
def bundle(small: DeploySmall) -> Bundle:
    return small("fp32")


@pytest.fixture(scope="module")
def whole(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a correct run."""
    file, specs, stored = (
        tmp_path_factory.mktemp("results") / "whole.json",
        bundle.manifest.inputs,
        stored_inputs(bundle),
    )
    with load(bundle, "onnxruntime-cpu") as session, file.open("wb") as stream:
        runs = ((c.name, session.run(reference.make_inputs(c, specs, stored))) for c in bundle.manifest.cases)
        write_results(stream, "mine", runs)
    return file


def test_the_file_unchanged_passes(bundle: Bundle, whole: Path, subject: Subject) -> None:
    assert subject.ask("judge_results", str(bundle.path), str(whole), str(whole)).text == "passed"


@tries(few=60, many=1_000)
@given(data=st.data())
def test_results_are_checked_rightly_or_refused_in_one_line(
    bundle: Bundle, whole: Path, subject: Subject, data: st.DataObject
) -> None:
    text = whole.read_bytes()
    if data.draw(st.booleans()):
        changed = data.draw(changed_bytes(text))
    else:
        document = json.loads(text)
        iterations = document["lst"][0][1]
        values = iterations[data.draw(st.integers(0, len(iterations) - 1))]["outputs"]["output"]["values"]
        stream = io.BytesIO(base64.b64decode(values["array"]))
        values["array"] = b64encode(data.draw(changed_bytes(stream.getvalue()))).decode()
        changed = json.dumps(document).encode()
    file = whole.with_name("wrong.json")
    file.write_bytes(changed)
    note(f"{len(changed)} bytes")
    event(subject.ask("judge_results", str(bundle.path), str(file), str(whole)).kind)
