"""Large models: bundles without reference outputs, and the truth that answers are held to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnforge.arrays import Array
from attnforge.benchmarks.gpu.device import Device
from attnforge.benchmarks.gpu.running import attempt
from attnforge.benchmarks.gpu.steps import ParityCheck, capabilities
from attnforge.bundle import (
    FLAVOURS,
    PORTABLE,
    Bundle,
    Case,
    Certificate,
    Manifest,
    Source,
    TargetRecord,
    TensorSpec,
    write_manifest,
)
from attnforge.machine import compute_capability
from attnforge.precision import Precision, precision_named
from attnforge.runtime.parity.budget import judge

if TYPE_CHECKING:
    from torch import Tensor

    from attnforge.export.attention.canonicalize import Site
    from attnforge.export.sources.torch_module import Captured
    from attnforge.model.registry import Example

PLACES = 2**20


@dataclass
class Large:
    """A model that is exported once, small, and deployed at one size at a time.

    Attributes:
        captured: its graph, all of whose sizes are free.
        sites: of attention.
    """

    device: Device
    captured: Captured
    sites: list[Site]

    @cached_property
    def module(self) -> Any:
        """The module at its precision, on the device."""
        from attnforge.runtime.backends.eager import at_precision

        return at_precision(self.captured.module, self.captured.precision).to(self.device.name)

    @cached_property
    def exact(self) -> Any:
        """The same weights in float64."""
        from attnforge.runtime.backends.eager import in_float64

        return in_float64(self.module)

    def deploy(
        self,
        folder: Path,
        shapes: Sequence[Sequence[int]],
        output: Sequence[int],
        sizes: Mapping[str, int],
        targets: Sequence[str],
        failed: dict[str, str],
        wanted: Sequence[str] | None = None,
    ) -> Bundle:
        """A bundle whose inputs have just these shapes, as torch.compile's have, and which holds no reference outputs:
        on the CPU those of many tokens would take hours.

        Args:
            folder: to write it to.
            shapes: of the inputs.
            output: shape of the only output.
            sizes: what the symbols of the graph stand for.
            targets: of `onnxruntime`, `tensorrt` and `tensorrt_rtx`.
            failed: where a builder's refusal goes.
            wanted: what TensorRT-RTX's plan is to be for; by default what worked when it was tried.
        """
        from attnforge.export.tensorrt.rebuild import rebuilt
        from attnforge.machine import tool_versions

        captured = self.captured
        fixed = zip(captured.inputs, shapes, strict=True)
        inputs = [spec.model_copy(update={"dims": list(shape)}) for spec, shape in fixed]
        outputs = [captured.outputs[0].model_copy(update={"dims": list(output)})]
        records: dict[str, TargetRecord] = {}
        fused: dict[str, int] = {}
        if "onnxruntime" in targets:
            records["onnxruntime"] = self._for_onnxruntime(folder, inputs, outputs, sizes)
        for flavour in FLAVOURS:
            if flavour in targets:
                wanted = capabilities(self.device.run.results) if wanted is None else wanted
                make = partial(self._for_tensorrt, folder, flavour, inputs, outputs, fused, wanted)
                if (record := attempt(failed, flavour, make)) is not None:
                    records[flavour] = record
        manifest = Manifest(
            name=type(captured.module).__name__,
            precision=captured.precision.name,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            tools=tool_versions(),
            source=Source(kind="module", name=type(captured.module).__qualname__),
            inputs=inputs,
            outputs=outputs,
            attention=Certificate(
                sites=len(self.sites), canonical=sum(site.node is not None for site in self.sites), fused=fused,
                unfused=[], details=[],
            ),
            targets=records,
            cases=[],
        )  # fmt: skip
        write_manifest(folder, manifest)
        if "tensorrt" in records:
            attempt(failed, "tensorrt", partial(rebuilt, folder, "tensorrt", self.device.settings.device))
        return Bundle(folder)

    def _for_onnxruntime(
        self, folder: Path, inputs: list[TensorSpec], outputs: list[TensorSpec], sizes: Mapping[str, int]
    ) -> TargetRecord:
        from attnforge.export.lowering import onnxruntime as for_onnxruntime

        names = {"cpu": "onnxruntime/model.onnx"}
        if self.captured.precision.is_low:
            names["cuda"] = "onnxruntime/model.cuda.onnx"
        for place, name in names.items():
            graph = self.captured.model.clone()
            for_onnxruntime.lower(graph, self.sites, sizes, device=place)
            self._save(graph, folder / name, inputs, outputs)
        return TargetRecord(model=names["cpu"], cuda_model=names.get("cuda"))

    def _for_tensorrt(
        self,
        folder: Path,
        flavour: str,
        inputs: list[TensorSpec],
        outputs: list[TensorSpec],
        fused: dict[str, int],
        wanted: Sequence[str],
    ) -> TargetRecord:
        from attnforge.export.lowering import tensorrt as for_tensorrt
        from attnforge.export.tensorrt import build as engine

        record = TargetRecord(model="tensorrt/model.onnx")
        graph = self.captured.model.clone()
        lowered = for_tensorrt.lower(graph, self.sites).sites
        self._save(graph, folder / record.model, inputs, outputs)
        if flavour == "tensorrt":
            return record  # its plan is built from the bundle, for the device at hand
        plan = engine.build(folder / record.model, flavour, inputs, self.captured.precision.name, wanted)
        fused[flavour] = sum(plan.kernel_of(one.node) is not None for one in lowered)
        file = f"tensorrt/engine.{flavour}.plan"
        (folder / file).write_bytes(plan.data)
        # Said to be for this device whatever it was built for: whether it loads is what is asked.
        here = [compute_capability(self.device.settings.device)] if wanted else [PORTABLE]
        record.engines = [plan.record(file, flavour, here)]
        return record

    @staticmethod
    def _save(graph: Any, file: Path, inputs: list[TensorSpec], outputs: list[TensorSpec]) -> None:
        import onnx_ir as ir

        from attnforge.export.graphs.saving import save

        for values, specs in ((graph.graph.inputs, inputs), (graph.graph.outputs, outputs)):
            for value, spec in zip(values, specs, strict=True):
                value.shape = ir.Shape([dim for dim in spec.dims if isinstance(dim, int)])
        save(graph, file)


@cache
def large_of(device: Device, make: Callable[[], Example], precision: str) -> Large:
    """A model, exported once a process."""
    from attnforge.export.attention.canonicalize import canonicalize
    from attnforge.export.sources.torch_module import capture

    module, args, shapes = make()
    captured = capture(module, args, shapes, precision_named(precision))
    return Large(device, captured, canonicalize(captured.model).sites)


def targets_of(backends: Sequence[str]) -> list[str]:
    return sorted({name if name in FLAVOURS else "onnxruntime" for name in backends})


@dataclass
class Truth:
    """What answers are held to: eager's numbers and float64's, at some places of the output."""

    case: Case
    precision: Precision
    places: Tensor
    eager: Array
    exact: Array

    def check(self, got: Any) -> ParityCheck:
        if isinstance(got, np.ndarray):
            numbers = got.reshape(-1)[self.places.cpu().numpy()].astype(np.float64)
        else:
            numbers = got.reshape(-1)[self.places.to(got.device)].double().cpu().numpy()
        found = judge(self.case, "output", numbers, self.eager, self.exact, self.precision)
        return ParityCheck(passed=found.passed, error=found.error, budget=found.budget, reason=found.reason)


def truth_of(
    device: Device,
    name: str,
    precision: Precision,
    eager: Callable[..., Tensor],
    exact: Callable[..., Tensor],
    inputs: Sequence[Tensor],
) -> Truth:
    """Run both functions on every sample of the batch by itself, `exact` on the inputs in float64."""
    torch = device.torch
    samples = [[tensor[i : i + 1] for tensor in inputs] for i in range(len(inputs[0]))]
    with device.products(precision_named("fp32")):
        plain = torch.cat([eager(*sample).reshape(-1) for sample in samples])
        truth = torch.cat([exact(*(tensor.double() for tensor in sample)).reshape(-1) for sample in samples])
    count = plain.numel()
    if count <= PLACES:
        places = torch.arange(count)
    else:
        places = torch.randint(count, (PLACES,), generator=torch.Generator().manual_seed(0))
    at = places.to(plain.device)
    flat = [tensor[at].double().cpu().numpy() for tensor in (plain, truth)]
    return Truth(Case(name=name, sizes={}, kind="normal", seed=0), precision, places, *flat)
