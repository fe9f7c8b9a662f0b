"""Exports of many idioms at once, because every export takes at least a second.

Each idiom is a submodule with its own weights, so its sites have its name and share nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnforge.arrays import Array
from attnforge.export.attention.canonicalize import Site, canonicalize
from attnforge.export.lowering import onnxruntime as for_onnxruntime
from attnforge.export.lowering import tensorrt as for_tensorrt
from attnforge.export.lowering.attention import Lowered
from attnforge.export.sources.torch_module import Captured, capture
from attnforge.precision import precision_named
from attnforge.runtime.backends.eager import as_written, doubled
from tests.support.idioms.catalogue import DIMS, EXAMPLE, Form, Idiom, inputs

Outputs = dict[str, list[Array]]
"""Outputs, by idiom."""


class Together(nn.Module):
    """A module with all idioms as submodules."""

    def __init__(self, idioms: Mapping[str, Idiom]) -> None:
        super().__init__()
        self.takes = {name: idiom.takes for name, idiom in idioms.items()}
        self.idioms = nn.ModuleDict({name: idiom.make() for name, idiom in idioms.items()})

    def forward(
        self, x: Tensor, memory: Tensor, mask: Tensor, allowed: Tensor, padding: Tensor, bias: Tensor, cache: Tensor,
        tokens_first: Tensor, columns: Tensor, sequence: Tensor, seventeen: Tensor, sample: Tensor, pixels: Tensor,
        grid: Tensor, sixteen: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        args = (
            x, memory, mask, allowed, padding, bias, cache, tokens_first, columns, sequence, seventeen, sample, pixels,
            grid, sixteen,
        )  # fmt: skip
        shared = dict(zip(DIMS, args, strict=True))
        return tuple(output for name in self.idioms for output in self.one(name, shared))

    def one(self, name: str, shared: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        result = self.idioms[name](*(shared[taken] for taken in self.takes[name]))
        return result if isinstance(result, tuple) else (result,)


@dataclass
class Exported:
    """Idioms exported together, and their canonical sites."""

    captured: Captured
    sites: list[Site]
    other_softmaxes: dict[str, str] = field(default_factory=dict)

    @property
    def module(self) -> Together:
        assert isinstance(self.captured.module, Together)
        return self.captured.module

    @property
    def args(self) -> dict[str, Tensor]:
        return dict(zip(DIMS, self.captured.args, strict=True))

    def sites_of(self, idiom: str) -> list[Site]:
        return [site for site in self.sites if _is_in(site.name, idiom)]

    def others_of(self, idiom: str) -> list[str]:
        """The reasons of the softmaxes that are no attention."""
        return [reason for name, reason in self.other_softmaxes.items() if _is_in(name, idiom)]

    def eager(self, args: Mapping[str, Tensor]) -> Outputs:
        return outputs_of(self.module, args)

    def truth(self, args: Mapping[str, Tensor]) -> Outputs:
        """Eager in float64, with the same weights."""
        wide = {name: arg.double() if arg.is_floating_point() else arg for name, arg in args.items()}
        with sdpa_kernel(SDPBackend.MATH):
            widened = doubled(self.module)
            assert isinstance(widened, Together)
            return outputs_of(widened, wide)

    def run(self, model: ir.Model, args: Mapping[str, Tensor]) -> Outputs:
        """Run `model` in ONNX Runtime."""
        return self.named(session_of(model).run(None, feeds(args)), args)

    def named(self, results: Sequence[Array], args: Mapping[str, Tensor]) -> Outputs:
        rest = list(results)
        return {name: [rest.pop(0) for _ in outputs] for name, outputs in self.eager(args).items()}

    def for_onnxruntime(self, form: Form) -> ir.Model:
        model = self.captured.model.clone()
        batch, tokens, keys = EXAMPLE[form]
        for_onnxruntime.lower(model, self.sites, {"batch": batch, "tokens": tokens, "keys": keys})
        return model

    def for_tensorrt(self) -> tuple[ir.Model, dict[str, Lowered]]:
        """Return the graph in TensorRT's form, and how each site was lowered."""
        model = self.captured.model.clone()
        return model, {lowered.site: lowered for lowered in for_tensorrt.lower(model, self.sites)}


def _is_in(name: str, idiom: str) -> bool:
    return f"{name}.".replace("#", ".").startswith(f"idioms.{idiom}.")


def outputs_of(module: Together, args: Mapping[str, Tensor]) -> Outputs:
    with torch.no_grad(), as_written():
        return {name: [output.numpy() for output in module.one(name, args)] for name in module.idioms}


def feeds(args: Mapping[str, Tensor]) -> dict[str, Array]:
    return {name: arg.numpy() for name, arg in args.items()}


def export(idioms: Mapping[str, Idiom], form: Form, precision: str = "fp32") -> Exported:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = Together(idioms).eval()
    shapes = DIMS if form == "dynamic" else None
    # With symbolic sizes, torch's fake tensor cache is slower than computing the outputs again.
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=form == "static"):
        captured = capture(module, tuple(inputs(EXAMPLE[form]).values()), shapes, precision_named(precision))
    canonical = canonicalize(captured.model, captured.without_effect, captured.lost)
    return Exported(captured, canonical.sites, canonical.other_softmaxes)


def session_of(model: ir.Model) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    data = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def relative_error(got: Array, expected: Array) -> float:
    """Return the error relative to the norm of the finite values of `expected`, in float64."""
    finite = np.isfinite(expected)
    wide, wanted = got[finite].astype(np.float64), expected[finite].astype(np.float64)
    return float(np.linalg.norm(wide - wanted)) / max(float(np.linalg.norm(wanted)), np.finfo(np.float64).tiny)


def agree(got: Sequence[Array], eager: Sequence[Array], truth: Sequence[Array], tolerance: float = 2e-6) -> None:
    """Check that shape and NaN positions are eager's, and the error at most `tolerance`, or twice eager's."""
    for one, by_eager, exact in zip(got, eager, truth, strict=True):
        assert one.shape == by_eager.shape
        np.testing.assert_array_equal(np.isnan(one), np.isnan(by_eager))
        assert relative_error(one, exact) <= max(tolerance, 2 * relative_error(by_eager, exact))


def near(got: Sequence[Array], eager: Sequence[Array], tolerance: float = 2e-6) -> None:
    """Check agreement with eager in the same precision."""
    for one, by_eager in zip(got, eager, strict=True):
        assert one.shape == by_eager.shape
        np.testing.assert_array_equal(np.isnan(one), np.isnan(by_eager))
        assert relative_error(one, by_eager) <= tolerance
