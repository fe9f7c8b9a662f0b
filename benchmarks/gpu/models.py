"""The models that are timed: deployed at one size at a time without reference outputs, and the truth that answers are
held to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnforge.arrays import Array
from attnforge.bundle import FLAVOURS, Bundle, Case, Manifest, Source, TensorSpec, write_manifest
from attnforge.machine import compute_capability, tool_versions
from attnforge.precision import Precision, precision_named
from attnforge.progress import Silent, Steps
from attnforge.runtime.parity.budget import judge
from benchmarks.gpu.device import Device
from benchmarks.gpu.running import attempt
from benchmarks.gpu.steps import HEADS, PATCH, Item, ParityCheck, capabilities

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import Tensor

    from attnforge.export.attention.canonicalize import Site
    from attnforge.export.sources.torch_module import Captured
    from attnforge.model.registry import Example

PLACES = 2**20
"""How many numbers of an output are compared at most."""


@dataclass
class Large:
    """A model that is exported once, small, and deployed at one size at a time.

    Attributes:
        captured: its canonical graph, with symbolic dims for all sizes.
        sites: its attention.
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
        from attnforge.runtime.backends.eager import doubled

        return doubled(self.module)

    def deploy(
        self,
        folder: Path,
        sizes: Mapping[str, int],
        targets: Sequence[str],
        item: Item,
        wanted: Sequence[str] | None = None,
    ) -> Bundle:
        """A bundle whose inputs have just these sizes, as torch.compile's have, and that holds no reference outputs.

        The targets and the certificate are made by the steps of :func:`attnforge.export.deploy.deploy`. That itself
        cannot serve: it computes reference outputs of every size on the CPU, hours at many tokens, and it would export
        the model anew for every size.

        Args:
            folder: to write the bundle to.
            sizes: of the graph's symbolic dims.
            targets: of `onnxruntime`, `tensorrt` and `tensorrt_rtx`.
            item: where sites that are fused and refusals of builders go.
            wanted: compute capabilities for TensorRT-RTX's plan; by default those that worked when it was tried.
        """
        from attnforge.cache import DeployCache
        from attnforge.export.certificate import certify
        from attnforge.export.graphs.saving import Shelf
        from attnforge.export.reuse import Reuse
        from attnforge.export.targets.registry import TARGETS
        from attnforge.export.targets.target import Built, Job
        from attnforge.export.tensorrt.build import Builders

        captured, model = self.captured, self._at(sizes)
        folder.mkdir(parents=True, exist_ok=True)  # a target that is refused writes nothing
        wanted = capabilities(self.device.run.results) if wanted is None else wanted
        with Builders() as builders:
            job = Job(
                out=folder,
                folder=folder,
                shelf=Shelf(folder),
                reuse=Reuse(DeployCache(None), folder),
                builders=builders,
                model=model,
                sites=self.sites,
                inputs=_fixed(captured.inputs, model.graph.inputs),
                precision=captured.precision,
                attention=None,
                measuring=0.0,
                compute_capabilities=wanted,
                profiles=(),
            )

            def build(target: str) -> Built:
                return TARGETS[target](job, Silent())(Steps(None))

            attempts = {target: attempt(item.failed, target, partial(build, target)) for target in targets}
        built: dict[str, Built] = {target: result for target, result in attempts.items() if result is not None}
        if wanted and "tensorrt_rtx" in built:
            # Said to be for this device whatever the plan was built for: whether it loads is what is tried.
            here = compute_capability(self.device.settings.device)
            built["tensorrt_rtx"].record.engines[0].compute_capabilities = [here]
        manifest = Manifest(
            name=type(captured.module).__name__,
            precision=captured.precision.name,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            tools=tool_versions(),
            source=Source(kind="module", name=type(captured.module).__qualname__),
            inputs=job.inputs,
            outputs=_fixed(captured.outputs, model.graph.outputs),
            attention=certify(self.sites, built),
            targets={target: result.record for target, result in built.items()},
            cases=[],
        )
        write_manifest(folder, manifest)
        item.values |= {f"fused by {name}": count for name, count in manifest.attention.fused.items()}
        return Bundle(folder)

    def _at(self, sizes: Mapping[str, int]) -> ir.Model:
        """The canonical graph with numbers for its symbolic dims."""
        import onnx_ir as ir

        from attnforge.export.flops import Uncountable, shape_at

        model = self.captured.model.clone()
        for value in (*model.graph.inputs, *(value for node in model.graph for value in node.outputs)):
            with suppress(Uncountable):  # a shape that depends on data stays as it is
                value.shape = ir.Shape(shape_at(value, sizes))
        return model


def _fixed(specs: Sequence[TensorSpec], values: Sequence[ir.Value]) -> list[TensorSpec]:
    """Inputs or outputs with the shapes of a graph's, which are numbers, for their dims."""
    shapes = [value.shape.numpy() for value in values if value.shape is not None]
    return [spec.model_copy(update={"dims": list(shape)}) for spec, shape in zip(specs, shapes, strict=True)]


@cache
def large_of(device: Device, make: Callable[[], Example], precision: str) -> Large:
    """A model, exported once in every process."""
    from attnforge.export.attention.canonicalize import canonicalize
    from attnforge.export.sources.torch_module import capture

    module, args, shapes = make()
    captured = capture(module, args, shapes, precision_named(precision))
    return Large(device, captured, canonicalize(captured.model).sites)


def targets_of(backends: Sequence[str]) -> list[str]:
    """The targets that these backends run."""
    return sorted({name if name in FLAVOURS else "onnxruntime" for name in backends})


@dataclass
class Truth:
    """What answers are held to: eager's and float64's numbers at some places of the output.

    Attributes:
        places: indices into the flat output.
        eager, exact: the numbers there, as float64.
    """

    case: Case
    precision: Precision
    places: Tensor
    eager: Array
    exact: Array

    def check(self, got: Any) -> ParityCheck:
        """Hold an output, an array or a tensor on any device, to the budget."""
        if isinstance(got, np.ndarray):
            numbers = got.reshape(-1)[self.places.cpu().numpy()].astype(np.float64)
        else:
            numbers = got.reshape(-1)[self.places.to(got.device)].double().cpu().numpy()
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
) -> Truth:
    """What the outputs for a batch of inputs are held to.

    Args:
        name: of the case.
        precision: whose budget applies.
        eager, exact: functions that run on one sample at a time, the second on inputs in float64.
        inputs: on the device, samples first.
    """
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


# --- patch-attention, the model that is timed most --------------------------------------------------------------------


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
        """Bytes of all scores, n² numbers a head."""
        return self.batch * HEADS * self.tokens**2 * precision_named(self.precision).dtype.itemsize

    def images(self, device: Device) -> Tensor:
        """Random images on the device, of unit variance, shape (batch, 3, side, side)."""
        generator = device.torch.Generator().manual_seed(self.side)
        images = device.torch.randn((self.batch, 3, self.side, self.side), generator=generator)
        return device.to_device(images, precision_named(self.precision))


def patch_attention() -> Example:
    """The registered model, with small images to be exported with."""
    from attnforge.model.registry import build_model

    return build_model("patch-attention", image_size=32, max_image_size=64)


def patch_truth(device: Device, large: Large, images: Tensor, point: PatchPoint) -> Truth:
    """What the model's answers to these images are held to."""
    return truth_of(device, point.name, precision_named(point.precision), large.module, large.exact, [images])
