"""The measured steps of deploying one published model, each in its own process (:func:`in_a_process`).

`python -m benchmarks.deploy_steps REQUEST`, with a :class:`DeployRequest` as JSON, writes its figures, one JSON
document, to the request's answer file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnforge.bundle import Source
from attnforge.cache import VARIABLE
from attnforge.errors import CaptureError, first_line
from attnforge.memory import peak
from attnforge.records import Record
from benchmarks.child import run

if TYPE_CHECKING:
    from attnforge.model.registry import Example


class DeployRequest(Record):
    """The request to a process.

    Attributes:
        model: name that :func:`attnforge.export.sources.named.build` takes.
        options: options of the model.
        folder: folder for the bundle and the answer; an existing bundle is overwritten.
        tune: whether deploying measures forms and backends.
        targets: targets to deploy for; None for all that this machine can build.
        cached: keep a deploy cache in the folder; otherwise every deploy starts from scratch.
        step: name of one of :data:`STEPS`.
    """

    model: str
    options: dict[str, str | int]
    folder: Path
    tune: bool = True
    targets: list[str] | None = None
    cached: bool = False
    step: str = ""

    @property
    def bundle(self) -> Path:
        return self.folder / "bundle"

    @property
    def answer(self) -> Path:
        return self.folder / "answer.json"


def in_a_process(request: DeployRequest, step: str, seconds: float, memory: float) -> dict[str, Any]:
    """Run a step in its own process, and kill it with its children if it exceeds a limit.

    Args:
        request: the request, without the step.
        step: name of one of :data:`STEPS`.
        seconds: limit of wall time.
        memory: limit of the resident bytes of the process and its children together.

    Returns:
        the step's figures, `seconds` and `cpu` seconds; and `failed`, the reason, if it failed.
    """
    request.answer.unlink(missing_ok=True)
    log, text = request.folder / "log", request.model_copy(update={"step": step}).model_dump_json()
    ended = run("benchmarks.deploy_steps", text, log=log, seconds=seconds, memory=memory)
    figures = json.loads(request.answer.read_bytes()) if request.answer.is_file() else {}
    if ended.code != 0 or not figures:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        figures["failed"] = ended.why or (lines[-1] if lines else f"its process exited with code {ended.code}")
    return {**figures, "seconds": round(ended.seconds, 1), "cpu": round(ended.cpu, 1)}


# --- in that process --------------------------------------------------------------------------------------------------


def plain(request: DeployRequest) -> dict[str, Any]:
    """Run the path without attnforge: torch's export with its defaults, a load in ONNX Runtime, and one comparison with
    eager torch."""
    import numpy as np
    import onnxruntime as ort
    import torch

    from attnforge.quiet import quiet

    example, _ = _model(request)
    names = list(example.dynamic_shapes or ())
    file = request.bundle.with_suffix(".onnx")
    with quiet(), torch.no_grad():
        torch.onnx.export(
            example.module, example.args, file, dynamo=True, input_names=names,
            dynamic_shapes=example.dynamic_shapes, external_data=True, verbose=False,
        )  # fmt: skip
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    feeds = {value.name: arg.numpy() for value, arg in zip(session.get_inputs(), example.args, strict=True)}
    outputs = session.run(None, feeds)
    with torch.no_grad():
        eager = [tensor.numpy() for tensor in example.module(*example.args).values()]
    differences = [float(np.abs(o - e).max() / np.abs(e).max()) for o, e in zip(outputs, eager, strict=True)]
    return {"difference": float(np.max(differences))}  # NaN if any is NaN


def deploy(request: DeployRequest) -> dict[str, Any]:
    """Run `attnforge.deploy` with the request's options."""
    import attnforge

    os.environ[VARIABLE] = str(request.folder / "cache") if request.cached else "off"
    example, source = _model(request)
    parameters = sum(parameter.numel() for parameter in example.module.parameters())
    bundle = attnforge.deploy(
        example.module, example.args, request.bundle, example.dynamic_shapes, targets=request.targets,
        tune=request.tune, force=True, source=source,
    )  # fmt: skip
    manifest = bundle.manifest
    return {
        "parameters": parameters,
        "inputs": {spec.name: spec.text() for spec in manifest.inputs},
        "sites": manifest.attention.sites,
        "canonical": manifest.attention.canonical,
        "reasons": sorted({site.reason for site in manifest.attention.details if site.reason is not None}),
        "targets": list(manifest.targets),
        "skipped": manifest.skipped,
        "stages": manifest.seconds,
        "memory": manifest.memory,
        "children": {name: cost.model_dump() for name, cost in manifest.children.items()},
        "reused": manifest.reused,
        "picked": None if manifest.choice is None else manifest.choice.picked,
    }


def verify(request: DeployRequest) -> dict[str, Any]:
    """Run `attnforge.verify` on the bundle, with every backend of this machine."""
    import attnforge

    report = attnforge.verify(request.bundle)
    kept = ("passed", "error", "budget", "cases", "missed")
    backends = {name: {key: getattr(each, key) for key in kept} for name, each in report.backends.items()}
    return {"passed": report.passed, "backends": backends, "skipped": report.skipped}


def fused(request: DeployRequest) -> dict[str, Any]:
    """Count the sites that TensorRT-RTX compiles to its fused kernel in fp16, or in bf16 if torch exports no fp16."""
    from attnforge.export.attention.canonicalize import canonicalize
    from attnforge.export.sources.torch_module import capture
    from attnforge.precision import precision_named
    from benchmarks.rtx import compiled

    example, _ = _model(request)
    precision, without = "fp16", None
    try:
        captured = capture(example.module, example.args, example.dynamic_shapes, precision_named(precision))
    except CaptureError as error:
        precision, without = "bf16", first_line(error)
        captured = capture(example.module, example.args, example.dynamic_shapes, precision_named(precision))
    sites = canonicalize(captured.model).sites
    lowered, plan = compiled(captured.model, sites, captured.inputs, precision)
    unfused = [form for form in lowered if plan.kernel_of(form.node) is None]
    return {
        "sites": len(sites),
        "fused": len(lowered) - len(unfused),
        "unfused": sorted({form.unfused or plan.why_unfused(form.node) for form in unfused}),
        "precision": precision,
        "without": without,
    }


STEPS: dict[str, Callable[[DeployRequest], dict[str, Any]]] = {
    step.__name__: step for step in (plain, deploy, verify, fused)
}


def _model(request: DeployRequest) -> tuple[Example, Source]:
    from attnforge.export.sources.named import build

    return build(request.model, request.options, None)


def main(text: str) -> None:
    """Run the step of a request."""
    request = DeployRequest.model_validate_json(text)
    answer = STEPS[request.step](request)
    most = max([peak(), *answer.get("memory", {}).values()])
    request.answer.write_text(json.dumps({**answer, "peak": most}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
