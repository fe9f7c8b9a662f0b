"""Test faults: put each into a deployed subject, measure its effect in float64, and run `verify`."""

from __future__ import annotations

import functools
import math
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

import attnforge
from attnforge.arrays import Array
from attnforge.bundle import OPENVINO, Bundle, open_bundle
from attnforge.errors import InputError, RunError
from attnforge.export.graphs.float64 import to_double
from attnforge.precision import precision_named
from attnforge.runtime import cases as reference
from attnforge.runtime.backends.onnxruntime import session_options
from attnforge.runtime.decoding.decoder import Decoder
from attnforge.runtime.parity.budget import relative_error
from attnforge.runtime.parity.comparison import Comparison
from attnforge.runtime.parity.verify import BackendReport, References, every_case, stored_inputs
from tests.support.bundles import rewrite
from tests.support.faults.catalogue import FAULTS
from tests.support.faults.driving import BACKEND, Driven, in_double
from tests.support.faults.driving import verified as verified_with
from tests.support.faults.graph import KEPT, Fault, Graph, NotThere
from tests.support.faults.subjects import DECODERS, deploy

NOTHING = 1e-12
VERDICTS = ("caught", "below rounding", "no effect")
NEVER = ("UNSEEN", "ESCAPE", "FALSE ALARM")


@dataclass(frozen=True)
class Row:
    """A fault in one subject at one precision.

    Attributes:
        effect, allowed: the relative error in float64 on `case`, and the budget there.
        verdict: see :mod:`tests.support.faults`.
        case: the one furthest over the budget according to verify, or if it passes, the one with the largest effect for
            its budget.
    """

    fault: Fault
    subject: str
    precision: str
    effect: float
    allowed: float
    verdict: str
    case: str


class Bench:
    """Puts faults into a deployed subject, one at a time.

    Args:
        bundle: the subject.
        name: its name.
        folder: where the altered bundle is written.
        backend: the backend that runs it; `openvino` runs its own graph.

    Attributes:
        unaltered: verify's report on the unaltered subject.
    """

    def __init__(self, bundle: Bundle, name: str, folder: Path, backend: str = BACKEND) -> None:
        self.name, self.precision, self._backend = name, bundle.manifest.precision, backend
        model = bundle.manifest.targets[OPENVINO if backend == OPENVINO else "onnxruntime"].model
        self._folder = Path(shutil.copytree(bundle.path, folder))
        self._file, self._model = self._folder / model, ir.load(bundle.path / model)
        self._bytes = serialized(self._model.clone())
        manifest, stored = bundle.manifest, stored_inputs(bundle)
        self._manifest = manifest
        self._inputs = {
            case.name: reference.make_inputs(case, manifest.inputs, stored) for case in every_case(manifest)
        }
        self.unaltered = verified(bundle, backend)
        self._outputs = {spec.name for spec in manifest.outputs}
        self._budgets = {c.where: c for c in self.unaltered.comparisons if c.output in self._outputs}
        self._truth = dict(self.exact(self._model.clone()))

    def exact(
        self, model: ir.Model, cases: Collection[str] | None = None, driver: type[Decoder] | None = None
    ) -> Iterator[tuple[str, Array]]:
        """Yield the output of a graph in float64 for each case, by default all; for a decoder, also for each order of
        its tokens. A fault's own casts are kept. A low-bit graph runs as it is, since it rounds far more than fp32."""
        if self._manifest.decoding is not None:
            yield from self._exact_steps(in_double(model, self._manifest, driver or Decoder), cases)
            return
        is_double = not precision_named(self.precision).is_quantised
        if is_double:
            to_double(model)
        for node in model.graph:
            if (to := node.metadata_props.get(KEPT)) is not None:
                node.attributes["to"] = ir.AttrInt64("to", int(to))
                node.outputs[0].type = ir.TensorType(ir.DataType(int(to)))
        options = session_options(threads=1)
        options.log_severity_level = 4
        if is_double:  # otherwise optimise as usual, so that integer products are the ones that do not saturate
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])
        for case in cases or self._inputs:
            feeds = {name: wide(array) if is_double else array for name, array in self._inputs[case].items()}
            (output,) = session.run(None, feeds)
            yield case, output

    def _exact_steps(self, steps: Driven, cases: Collection[str] | None) -> Iterator[tuple[str, Array]]:
        """Yield the output of a decoder for each case and order of tokens."""
        (output,) = self._manifest.outputs
        for where, comparison in self._budgets.items():
            if cases is None or where in cases:
                yield where, steps.given(comparison.schedule, self._inputs[comparison.case])[output.name]

    def off_reference(self) -> float:
        """Return the largest error of the unaltered graph in float64 against the bundle's float64 reference."""
        (output,), kept = self._manifest.outputs, References.of(open_bundle(self._folder)).outputs
        cases = {case.name: case for case in every_case(self._manifest)}
        return max(
            relative_error(reference.sampled(exact, case), kept[reference.key(case, output.name, "float64")])
            for where, exact in self._truth.items()
            if (case := cases[self._budgets[where].case])
        )

    def altered(self, fault: Fault) -> tuple[ir.Model, Bundle]:
        """Return the graph with a fault, and the bundle that contains it until the next call.

        Raises:
            NotThere: the graph lacks what the fault alters, or did not change.
        """
        model = self._model.clone()
        fault.alter(Graph(model))
        if (altered := serialized(model)) == self._bytes and fault.driver is None:
            raise NotThere(f"{fault.name} changed nothing in {self.name}")
        self._file.write_bytes(altered)
        return model, rewrite(self._folder)

    def tried(self, fault: Fault) -> Row:
        """Put the fault in, measure its effect, and run verify.

        Raises:
            NotThere: the graph lacks what the fault alters, or did not change.
        """
        model, bundle = self.altered(fault)
        try:
            report = verified(bundle, self._backend) if fault.driver is None else verified_with(bundle, fault.driver)
        except (InputError, RunError):  # a kernel or decoder refuses the result of the fault, and verify reports it
            allowed = next(iter(self._budgets.values())).budget
            return Row(fault, self.name, self.precision, math.inf, allowed, "caught", "refused as it ran")
        caught = {max(report.failures, key=over).where} if report.failures else None
        effects = [self._effect(case, output) for case, output in self.exact(model, caught, fault.driver)]
        case, relative, share = max(effects, key=lambda effect: effect[2])
        nothing = all(effect <= NOTHING for _, effect, _ in effects)
        if not report.passed:
            in_caches = [failure for failure in report.failures if failure.output not in self._outputs]
            seen = in_caches and self._is_seen(model, in_caches[0], fault.driver)
            verdict = "FALSE ALARM" if nothing and not seen else "caught"
        elif nothing:
            verdict = "no effect" if fault.is_inert else "UNSEEN"
        else:
            verdict = "below rounding" if share <= 1 else "ESCAPE"
        return Row(fault, self.name, self.precision, relative, self._budgets[case].budget, verdict, case)

    def _is_seen(self, model: ir.Model, failure: Comparison, driver: type[Decoder] | None) -> bool:
        """Return whether the contents of a cache in float64 differ from those without the fault."""
        feeds, caches = self._inputs[failure.case], []
        for graph, kind in ((model, driver or Decoder), (self._model, Decoder)):
            steps = in_double(graph.clone(), self._manifest, kind)
            caches.append(steps.given(failure.schedule, feeds)[failure.output])
        return relative_error(caches[0].astype(np.float64), caches[1].astype(np.float64)) > NOTHING

    def _effect(self, case: str, output: Array) -> tuple[str, float, float]:
        """Return the case, the relative effect on it, and the effect's share of the budget."""
        truth, budget = self._truth[case], self._budgets[case]
        if not np.array_equal(np.isfinite(output), finite := np.isfinite(truth)):
            return case, math.inf, math.inf
        relative = relative_error(output[finite], truth[finite])
        largest = float(np.max(np.abs(output[finite] - truth[finite]), initial=0.0))
        share = max(relative / budget.budget, largest / budget.max_budget if budget.max_budget else math.inf * largest)
        return case, relative, share if largest else 0.0


def over(comparison: Comparison) -> float:
    """Return by what factor a comparison exceeds its budget; infinity for values that should be finite."""
    if comparison.error <= comparison.budget and comparison.max_error <= comparison.max_budget:
        return math.inf
    most = comparison.max_error / comparison.max_budget if comparison.max_budget else math.inf
    return max(comparison.error / comparison.budget, most)


def serialized(model: ir.Model) -> bytes:
    data: bytes = ir.to_proto(model).SerializeToString(deterministic=True)
    return data


def wide(array: Array) -> Array:
    """Convert floating-point arrays to float64."""
    return array.astype(np.float64) if array.dtype.kind not in "biu" else array


def verified(bundle: Bundle, backend: str = BACKEND) -> BackendReport:
    return attnforge.verify(bundle, [backend]).backends[backend]


def is_sampled(fault: Fault, subject: str, precision: str) -> bool:
    """Return whether the tests try a fault in a subject: in fp32 and int8 every fault in one of its subjects, in
    16 bits, fp8, int4 and decoders every second one.

    Adding a fault does not change the sample.
    """
    number = zlib.crc32(fault.name.encode())
    if subject != fault.subjects[number % len(fault.subjects)]:
        return False
    if subject in DECODERS and not fault.is_inert and number // 16 % 2:
        return False
    return precision in ("fp32", "int8") or number // 16 % 2 == 0


class Faults:
    """Deploys each requested subject once, and tests the faults in it.

    Args:
        folder: where the bundles are written.
        is_tried: whether to test a fault in a subject at a precision; by default all possible combinations are tested.
    """

    def __init__(self, folder: Path, is_tried: Callable[[Fault, str, str], bool] = lambda *_: True) -> None:
        self._folder, self._is_tried = folder, is_tried
        self.bench = functools.cache(self._bench)
        self.rows = functools.cache(self._rows)

    def _bench(self, name: str, precision: str) -> Bench:
        bundle = deploy(name, precision, self._folder / f"{name}-{precision}")
        return Bench(bundle, name, self._folder / f"{name}-{precision}-altered")

    def _rows(self, name: str, precision: str) -> list[Row]:
        faults = [fault for fault in FAULTS if name in fault.subjects and precision not in fault.not_in]
        bench = self.bench(name, precision)
        return [bench.tried(fault) for fault in faults if self._is_tried(fault, name, precision)]
