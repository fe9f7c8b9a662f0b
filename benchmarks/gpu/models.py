"""The timed models, deployed at one size at a time without reference outputs, and the truth that answers are checked
against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from attnforge.arrays import Array
from attnforge.bundle import Bundle, Case, Manifest, Source, TensorSpec, write_manifest
from attnforge.cache import DeployCache
from attnforge.export.attention.canonicalize import Site, canonicalize
from attnforge.export.certificate import certify
from attnforge.export.graphs.saving import Shelf
from attnforge.export.graphs.sizes import Unmeasurable, shape_at
from attnforge.export.reuse import Reuse
from attnforge.export.sources.torch_module import Captured, capture
from attnforge.export.targets.registry import TARGETS
from attnforge.export.targets.target import Built, Job
from attnforge.export.tensorrt.build import Builders
from attnforge.machine import compute_capability, tool_versions
from attnforge.model.registry import Example, build_model
from attnforge.precision import Precision, precision_named
from attnforge.progress import Silent, Steps
from attnforge.runtime.backends.eager import at_precision, doubled
from attnforge.runtime.backends.registry import REGISTRY
from attnforge.runtime.parity.budget import judge
from benchmarks.gpu.device import Device
from benchmarks.gpu.lean import plans
from benchmarks.gpu.running import attempt
from benchmarks.gpu.steps import HEADS, PATCH, Item, ParityCheck, capabilities

MOST_COMPARED = 2**20
"""Maximum number of elements of an output that are compared."""


@dataclass
class Large:
    """A model that is exported once, at a small size, and deployed at one size at a time.

    Attributes:
        device: the device.
        captured: its canonical graph, with symbolic dims for all sizes.
        sites: its attention sites.
    """

    device: Device
    captured: Captured
    sites: list[Site]

    @cached_property
    def module(self) -> Any:
        """The module at its precision, on the device."""
        return at_precision(self.captured.module, self.captured.precision).to(self.device.name)

    @cached_property
    def exact(self) -> Any:
        """The same weights in float64."""
        return doubled(self.module)

    def deploy(
        self,
        folder: Path,
        sizes: Mapping[str, int],
        targets: Sequence[str],
        item: Item,
        wanted: Sequence[str] | None = None,
    ) -> Bundle:
        """Write a bundle whose inputs have exactly these sizes, as with torch.compile, without reference outputs.

        The targets and the certificate are made by the steps of :func:`attnforge.export.deploy.deploy`, which cannot be
        used itself: it computes reference outputs of every size on the CPU, which takes hours at many tokens, and it
        would export the model again for every size.

        Args:
            folder: folder of the bundle.
            sizes: sizes of the graph's symbolic dims.
            targets: targets, of `onnxruntime`, `tensorrt` and `tensorrt_rtx`.
            item: receives the numbers of fused sites and the refusals of builders.
            wanted: compute capabilities for TensorRT-RTX's plan; by default those that worked when it was tried.
        """
        if list(targets) == ["tensorrt"] and plans.in_use():
            inner = Item()
            made = self.deploy(folder, sizes, ["tensorrt_rtx"], inner, ["SM80"])
            if not inner.failed:
                attempt(inner.failed, "tensorrt", partial(plans.add_plan, folder))
            item.failed |= dict.fromkeys(["tensorrt"] if inner.failed else [], " ".join(inner.failed.values()))
            return made
        captured, model = self.captured, self._at(sizes)
        folder.mkdir(parents=True, exist_ok=True)  # a target that is refused writes nothing
        wanted = capabilities(self.device.run.results) if wanted is None else wanted
        with Builders() as builders:
            job = Job(
                out=folder, folder=folder, shelf=Shelf(folder), reuse=Reuse(DeployCache(None), folder),
                builders=builders, model=model, sites=self.sites, inputs=_fixed(captured.inputs, model.graph.inputs),
                precision=captured.precision, attention=None, measuring=0.0, compute_capabilities=wanted, profiles=(),
            )  # fmt: skip

            def build(target: str) -> Built:
                return TARGETS[target](job, Silent())(Steps(None))

            attempts = {target: attempt(item.failed, target, partial(build, target)) for target in targets}
        built: dict[str, Built] = {target: result for target, result in attempts.items() if result is not None}
        if wanted and "tensorrt_rtx" in built:
            # Declare the plan to be for this device whatever it was built for, to try whether it loads.
            here = compute_capability(self.device.settings.device)
            built["tensorrt_rtx"].record.engines[0].compute_capabilities = [here]
        manifest = Manifest(
            name=type(captured.module).__name__, precision=captured.precision.name,
            created=datetime.now(UTC).isoformat(timespec="seconds"), tools=tool_versions(),
            source=Source(kind="module", name=type(captured.module).__qualname__), inputs=job.inputs,
            outputs=_fixed(captured.outputs, model.graph.outputs), attention=certify(self.sites, built),
            targets={target: result.record for target, result in built.items()}, cases=[],
        )  # fmt: skip
        write_manifest(folder, manifest)
        item.values |= {f"fused by {name}": count for name, count in manifest.attention.fused.items()}
        return Bundle(folder)

    def _at(self, sizes: Mapping[str, int]) -> ir.Model:
        """Return the canonical graph with numbers for its symbolic dims."""
        model = self.captured.model.clone()
        for value in (*model.graph.inputs, *(value for node in model.graph for value in node.outputs)):
            with suppress(Unmeasurable):  # a shape that depends on data stays as it is
                value.shape = ir.Shape(shape_at(value, sizes))
        return model


def _fixed(specs: Sequence[TensorSpec], values: Sequence[ir.Value]) -> list[TensorSpec]:
    """Return inputs or outputs whose dims are the fixed shapes of a graph's values."""
    shapes = [value.shape.numpy() for value in values if value.shape is not None]
    return [spec.model_copy(update={"dims": list(shape)}) for spec, shape in zip(specs, shapes, strict=True)]


@cache
def large_of(device: Device, make: Callable[[], Example], precision: str) -> Large:
    """Return a model, exported once per process."""
    module, args, shapes = make()
    captured = capture(module, args, shapes, precision_named(precision))
    return Large(device, captured, canonicalize(captured.model).sites)


def targets_of(backends: Sequence[str]) -> list[str]:
    """Return the targets of these backends."""
    return sorted({target_of(name) for name in backends})


def target_of(backend: str) -> str:
    """Return the target of a backend; of several, the one that is built on any machine."""
    return REGISTRY[backend].targets[-1]


@dataclass
class ReferenceElements:
    """The reference for answers: eager's and float64's elements at some positions of the output.

    Attributes:
        case: the case that answers are judged as.
        precision: precision whose budget applies.
        positions: indices into the flat output.
        eager, exact: the elements there, as float64.
    """

    case: Case
    precision: Precision
    positions: Tensor
    eager: Array
    exact: Array

    def check(self, got: Any) -> ParityCheck:
        """Check an output, an array or a tensor on any device, against the budget."""
        if isinstance(got, np.ndarray):
            numbers = got.reshape(-1)[self.positions.cpu().numpy()].astype(np.float64)
        else:
            numbers = got.reshape(-1)[self.positions.to(got.device)].double().cpu().numpy()
        comparison = judge(self.case, "output", numbers, self.eager, self.exact, self.precision)
        return ParityCheck(
            passed=comparison.passed, error=comparison.error, budget=comparison.budget, reason=comparison.reason
        )


def truth_of(
    device: Device,
    name: str,
    precision: Precision,
    eager: Callable[..., Tensor],
    exact: Callable[..., Tensor],
    inputs: Sequence[Tensor],
) -> ReferenceElements:
    """Compute the reference for the outputs of a batch of inputs.

    Args:
        device: the device.
        name: name of the case.
        precision: precision whose budget applies.
        eager, exact: functions that run on one sample at a time, the second on floating-point inputs in float64.
        inputs: inputs on the device, samples first.
    """
    samples = [[tensor[i : i + 1] for tensor in inputs] for i in range(len(inputs[0]))]
    with device.products(precision_named("fp32")):
        plain = torch.cat([eager(*sample).reshape(-1) for sample in samples])
        widened = [[tensor.double() if tensor.is_floating_point() else tensor for tensor in s] for s in samples]
        truth = torch.cat([exact(*sample).reshape(-1) for sample in widened])
    count = plain.numel()
    if count <= MOST_COMPARED:
        positions = torch.arange(count)
    else:
        positions = torch.randint(count, (MOST_COMPARED,), generator=torch.Generator().manual_seed(0))
    on_device = positions.to(plain.device)
    flat = [tensor[on_device].double().cpu().numpy() for tensor in (plain, truth)]
    return ReferenceElements(Case(name=name, sizes={}, kind="normal", seed=0), precision, positions, *flat)


# --- patch-attention, the main timed model ----------------------------------------------------------------------------


@dataclass(frozen=True)
class PatchPoint:
    """One size of patch-attention at one precision."""

    precision: str
    side: int
    batch: int

    @property
    def tokens(self) -> int:
        """Number of patches."""
        return (self.side // PATCH) ** 2

    @property
    def name(self) -> str:
        """Key of the task."""
        return f"{self.precision}, batch {self.batch}, {self.tokens} tokens"

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the model's symbolic dims."""
        return {"batch": self.batch, "rows": self.side // PATCH, "cols": self.side // PATCH}

    @property
    def score_bytes(self) -> int:
        """Bytes of all scores, n² numbers per head."""
        return self.batch * HEADS * self.tokens**2 * precision_named(self.precision).dtype.itemsize

    def images(self, device: Device) -> Tensor:
        """Return random images of unit variance on the device, shape (batch, 3, side, side)."""
        generator = torch.Generator().manual_seed(self.side)
        images = torch.randn((self.batch, 3, self.side, self.side), generator=generator)
        return device.to_device(images, precision_named(self.precision))


def patch_attention() -> Example:
    """Return the registered model, with small images for the export."""
    return build_model("patch-attention", image_size=32, max_image_size=64)


def patch_truth(device: Device, large: Large, images: Tensor, point: PatchPoint) -> ReferenceElements:
    """Compute the reference for the model's answers to these images."""
    return truth_of(device, point.name, precision_named(point.precision), large.module, large.exact, [images])
