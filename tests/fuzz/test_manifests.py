"""Manifests with one or a few invalid fields."""

from __future__ import annotations

import copy as copying
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from pydantic import BaseModel

from attnforge.bundle import MANIFEST, Decoding, Manifest
from tests.fuzz.budget import tries
from tests.fuzz.changes import neighbours, numbers, texts
from tests.fuzz.conftest import copied
from tests.fuzz.subject import Subject
from tests.support.bundles import DeploySmall, small_inputs
from tests.support.decoders import DeployDecoder, ids

Step = str | int
FieldPath = tuple[Step, ...]
"""The path from the document to a field."""

MACHINE = {"system": "Linux", "processor": "any", "processors": 2, "instructions": ["avx2"], "gpus": []}


@pytest.fixture(scope="module", name="folder", params=["small", "decoder"])
def filled(
    request: pytest.FixtureRequest,
    small: DeploySmall,
    decoders: DeployDecoder,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A bundle whose manifest uses every field, except those of decoders for other models."""
    bundle, inputs = small("fp32"), small_inputs()
    if request.param == "decoder":
        bundle, inputs = decoders("window", "fp16"), {"input_ids": ids(2, 5)}
    folder = copied(bundle, tmp_path_factory.mktemp("fuzz") / "small", inputs)
    document = json.loads((folder / MANIFEST).read_text())
    fill(document)
    if document["decoding"] is not None:
        document["decoding"] |= {"stop": [7], "tokenizer": document["targets"]["onnxruntime"]["model"]}
    (folder / MANIFEST).write_text(Manifest.model_validate(document).model_dump_json())
    return folder


def fill(document: Any) -> None:
    """Add every record to the manifest that this bundle does not need."""
    sizes = dict(document["cases"][0]["sizes"])
    model = document["targets"]["onnxruntime"]["model"]
    document["targets"]["onnxruntime"] |= {
        "cuda_model": model,
        "tuning": {"processors": 2, "sizes": sizes, "seconds": 1.0},
        "session": {"machine": MACHINE, "version": "1.0", "threads": 1, "optimized": model, "measured": {"1": 1.0}},
        "attention_precision": None,
        "low_bit": 1,
    }
    document["targets"]["tensorrt_rtx"] |= {
        "attention_precision": "fp16",
        "without": {"layers": 1, "size": 1, "activation_memory": 1},
    }
    document["attention"]["details"][0]["mask"] = {
        "text": "blocks of 4, residue: padding",
        "regions": [{"band": [-3, 3], "blocks": {"size": 4, "shifts": [0, "n"], "numbers": [0, 0]}}],
        "residue": ["padding"], "silent": "never", "example": 0.5, "largest": 0.1,
    }  # fmt: skip
    region = {"module": "layer", "nodes": ["a", "b"], "why": "its error"}
    document |= {
        "mixed": {"low": "fp16", "max_error": 0.01, "exactly": True, "error": 0.001, "regions": [region],
                  "low_flops": 0.5, "trials": 2, "steps": ["all low"]},
        "quantised": {
            "type": "int8", "max_error": 0.1, "error": 0.01, "calibrated": 1, "share": 0.9, "kept": {"b": "its error"},
            "products": [{"name": "a", "module": "m", "by": "token", "block": 32, "balanced": True, "error": 0.01}],
            "steps": ["all quantised"], "tables": {"c": 0.01},
        },
        "metric": None,
        "choice": {"machine": MACHINE, "versions": {"onnxruntime": "1"}, "sizes": sizes, "picked": "onnxruntime-cpu",
                   "milliseconds": {"onnxruntime-cpu": 1.0}, "dropped": {"openvino": "slower"}, "seconds": 1.0},
        "max_eager_error": 0.2,
        "wrong": {"cause": "export", "stage": "plain", "evidence": "an error", "tensor": "a", "operator": "Add",
                  "module": "m", "line": "model.py:1: x + 1"},
        "skipped": {"tensorrt": "not installed"},
        "children": {"build": {"seconds": 1.0, "memory": 1}},
        "reused": ["references"],
    }  # fmt: skip


def paths(value: Any, path: FieldPath = ()) -> Iterator[FieldPath]:
    """Yield the path of every field, including whole records; for lists, only of the first and last element."""
    if path:
        yield path
    steps: list[Step] = list(value) if isinstance(value, dict) else []
    if isinstance(value, list) and value:
        steps = sorted({0, len(value) - 1})
    for step in steps:
        yield from paths(value[step], (*path, step))


def field_at(document: Any, path: FieldPath) -> Any:
    for step in path:
        document = document[step]
    return document


def test_the_manifest_under_test_has_every_field(folder: Path) -> None:
    """Otherwise a new record would never be tested."""
    document = json.loads((folder / MANIFEST).read_text())
    names = {step for path in paths(document) for step in path if isinstance(step, str)}
    is_decoder = document["decoding"] is not None
    seen: set[type[BaseModel]] = set()

    def records(record: type[BaseModel]) -> None:
        if record in seen:
            return
        seen.add(record)
        for name, field in record.model_fields.items():
            assert name in names, f"{record.__name__}.{name} is in no manifest here"
            if name == "decoding" and not is_decoder:
                continue
            for part in _types(field.annotation):
                if isinstance(part, type) and issubclass(part, BaseModel):
                    records(part)

    records(Decoding if is_decoder else Manifest)
    assert len(seen) > (2 if is_decoder else 10)


def _types(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _types(part)


@st.composite
def wrong(draw: st.DrawFn, document: Any) -> str:
    """Draw the text of a manifest with one to three changed fields."""
    document = copying.deepcopy(document)
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        known = list(paths(document))
        path = known[draw(st.integers(0, len(known) - 1))]
        holder, old = field_at(document, path[:-1]), field_at(document, path)
        how = draw(st.sampled_from(["other", "near", "elsewhere", "gone", "more", "many", "deep"]))
        if how == "gone":
            del holder[path[-1]]
        elif how == "more":
            added = draw(st.none() | numbers | texts)
            if isinstance(holder, dict):
                holder[draw(texts)] = added
            else:
                holder.append(added)
        elif how == "elsewhere":
            holder[path[-1]] = copying.deepcopy(field_at(document, known[draw(st.integers(0, len(known) - 1))]))
        elif how == "many":
            most = 2**22 // len(json.dumps(document))  # repetitions, as up to three changes multiply the size
            holder[path[-1]] = [old] * min(draw(st.sampled_from([2, 100, 10_000])), 1 + most)
        elif how == "deep":
            value: Any = old
            for _ in range(draw(st.sampled_from([1, 2, 200]))):
                value = draw(st.sampled_from([[value], {"a": value}]))
            holder[path[-1]] = value
        else:
            near = neighbours(old) if how == "near" else st.nothing()
            holder[path[-1]] = draw(
                near | numbers | texts | st.none() | st.booleans() | st.sampled_from([[], {}, [[]]])
            )
    return json.dumps(document)


@tries(few=60, many=10_000)
@given(data=st.data())
def test_a_manifest_is_accepted_rightly_or_refused_in_one_line(
    folder: Path, subject: Subject, data: st.DataObject
) -> None:
    manifest, truth = folder / MANIFEST, folder.parent / "truth.npz"
    whole = manifest.read_text()
    text = data.draw(wrong(json.loads(whole)))
    try:
        manifest.write_text(text)
        answer = subject.ask("use_bundle", str(folder), str(truth))
    finally:
        manifest.write_text(whole)
    event(answer.text if answer.kind == "accepted" else f"refused by {answer.text.split(':')[0][-40:]}")
    assert not (folder.parent / "canary").exists() and not Path("canary").exists()
    assert {path.name for path in folder.parent.iterdir()} <= {"small", "truth.npz", "small.cache"}


def test_the_manifest_unchanged_is_accepted(folder: Path, subject: Subject) -> None:
    assert subject.ask("use_bundle", str(folder), str(folder.parent / "truth.npz")).text == "passed"
