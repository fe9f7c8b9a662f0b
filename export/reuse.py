"""Results reused from an earlier deploy of the same model on the same machine: TensorRT plans, reference outputs,
and measurements. Each is keyed by the content of the files that it was made from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attnforge.arrays import Array
from attnforge.bundle import (
    CANONICAL,
    PLAIN,
    REFERENCE_EXAMPLE,
    REFERENCE_OUTPUTS,
    WEIGHTS,
    Case,
    Manifest,
    Tuning,
)
from attnforge.cache import DeployCache
from attnforge.export.lowering.attention import FormChoice
from attnforge.export.lowering.tuning import Tuner
from attnforge.export.measuring import Measured
from attnforge.export.reference import Data, ReferenceModel
from attnforge.export.tensorrt.process import Answer, Request
from attnforge.files import sha256
from attnforge.machine import this_machine, tool_versions
from attnforge.precision import Precision

OPTIMIZED = "optimized.onnx"


class Reuse:
    """Makes parts of one bundle, or takes them from the cache.

    Args:
        cache: the cache; it may be disabled.
        folder: the bundle's folder, while it is written.

    Attributes:
        reused: names of the results taken from the cache.
    """

    def __init__(self, cache: DeployCache, folder: Path) -> None:
        self._cache, self._folder = cache, folder
        self.reused: list[str] = []

    def reference(
        self,
        model: ReferenceModel,
        attention: Precision | None,
        data: Data,
        make: Callable[[], list[Case]],
        has_caches: bool = False,
    ) -> list[Case]:
        """The reference cases, their files written to the bundle. The exported graph identifies the module.

        Args:
            model: computes the outputs.
            attention: precision of attention alone, if it is not the bundle's.
            data: real inputs and labels.
            make: makes the cases and writes their files.
            has_caches: whether the model is a decoder, whose cases also store the expected contents of caches. Cases
                without them, for lack of memory, are not cached.
        """
        if not self._cache.keeps:
            return make()
        about = self._about("reference", CANONICAL, PLAIN) | {
            "caches": has_caches,
            "of": [model.reference, model.precision.name, attention.name if attention is not None else None],
            "inputs": [spec.model_dump(mode="json") for spec in model.inputs],
            "arrays": [_digests(model.example), *map(_digests, data.inputs)],
            "labels": [_digests({"labels": labels}) for labels in data.labels],
        }
        files = {Path(name).name: self._folder / name for name in (REFERENCE_OUTPUTS, REFERENCE_EXAMPLE)}
        if (entry := self._cache.get(about)) is not None:
            self.reused.append("reference")
            for name, file in files.items():
                file.parent.mkdir(exist_ok=True)
                shutil.copyfile(entry / name, file)
            return [Case.model_validate(case) for case in json.loads((entry / "cases.json").read_bytes())]
        cases = make()
        if has_caches and not any(case.caches for case in cases):
            return cases
        self._cache.put(about, {**files, "cases.json": _json([case.model_dump() for case in cases])})
        return cases

    def plan(self, request: Request, make: Callable[[], Answer]) -> Answer:
        """A builder's answer, with the plan written to its file. Refusals are not cached.

        Args:
            request: the request to the builder.
            make: runs the builder.
        """
        about = self._about("plan", request.onnx_file.relative_to(self._folder).as_posix()) | {
            "request": request.model_dump(mode="json", exclude={"onnx_file", "plan_file", "timing_cache", "device"}),
        }
        if (entry := self._cache.get(about)) is not None:
            self.reused.append(f"plan for {request.flavour}")
            shutil.copyfile(entry / "plan", request.plan_file)
            answer = Answer.model_validate_json((entry / "answer.json").read_bytes())
            return answer.model_copy(update={"memory": 0})
        answer = make()
        if answer.refusal is None and answer.errno is None:
            self._cache.put(about, {"plan": request.plan_file, "answer.json": answer.model_dump_json().encode()})
        return answer

    def forms(self, sizes: Mapping[str, int], target: str | None = None) -> dict[str, FormChoice]:
        """The measured forms of the canonical graph's sites, by site; empty if there are none.

        Args:
            sizes: the sizes at which they were measured.
            target: the target that they were measured for; None for ONNX Runtime.
        """
        if (entry := self._cache.get(self._forms(sizes, target))) is None:
            return {}
        self.reused.append("forms of attention sites")
        return {site: FormChoice(**form) for site, form in json.loads((entry / "forms.json").read_bytes()).items()}

    def tuning(self, tuner: Tuner | None, target: str | None = None) -> Tuning | None:
        """The record of what a tuner measured, whose forms are cached; None if nothing was.

        Args:
            tuner: the tuner, if there is one, with the forms that were taken from the cache.
            target: the target that they were measured for; None for ONNX Runtime.
        """
        if tuner is None or not (tuner.spent or tuner.measured):
            return None
        if not tuner.measured:
            kept = {site: asdict(form) for site, form in tuner.chosen.items()}
            self._cache.put(self._forms(tuner.sizes, target), {"forms.json": _json(kept)})
        return Tuning(processors=os.cpu_count() or 1, sizes=dict(tuner.sizes), seconds=round(tuner.spent, 3))

    def _forms(self, sizes: Mapping[str, int], target: str | None) -> dict[str, Any]:
        return self._about("measured forms", CANONICAL) | {"sizes": dict(sizes), "target": target}

    def measured(self, manifest: Manifest, measure: Callable[[], None]) -> None:
        """Add the session's settings and the choice of a backend to a manifest, which lists all files of its bundle.

        Args:
            manifest: modified.
            measure: measures and adds them.
        """
        about = self._about("measured") | {"files": manifest.files, "cases": [c.model_dump() for c in manifest.cases]}
        target = manifest.targets.get("onnxruntime")
        if (entry := self._cache.get(about)) is not None:
            self.reused.append("measured backends")
            kept = Measured.model_validate_json((entry / "measured.json").read_bytes())
            manifest.choice = kept.choice
            if target is not None and kept.session is not None:
                target.session = kept.session
                if kept.session.optimized is not None:
                    shutil.copyfile(entry / OPTIMIZED, self._folder / kept.session.optimized)
            return
        measure()
        session = target.session if target is not None else None
        results = Measured(session=session, choice=manifest.choice)
        files: dict[str, Path | bytes] = {"measured.json": results.model_dump_json().encode()}
        if session is not None and session.optimized is not None:
            files[OPTIMIZED] = self._folder / session.optimized
        self._cache.put(about, files)

    def _about(self, what: str, *files: str) -> dict[str, Any]:
        """The key of anything that is made here from some files of the bundle; empty if nothing is cached."""
        if not self._cache.keeps:
            return {}
        names = [name for name in (*files, WEIGHTS) if files and (self._folder / name).exists()]
        return {
            "what": what,
            "machine": this_machine().model_dump(),
            "tools": tool_versions(),
            "content": {name: sha256(self._folder / name) for name in names},
        }


def _digests(arrays: Mapping[str, Array]) -> dict[str, str]:
    """The sha256 of every array, with its dtype and shape."""
    return {
        name: f"{array.dtype.name}{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()}"
        for name, array in arrays.items()
    }


def _json(document: Any) -> bytes:
    return json.dumps(document).encode()
