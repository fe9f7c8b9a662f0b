"""What becomes of faults: each is put into a deployed subject, measured in float64, and given to `verify`."""

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
        verdict: see the top of this module.
        case: on which verify found it furthest over the budget, or where it passes, on which its effect is largest for
            the budget.
    """

    fault: Fault
    subject: str
    precision: str
    effect: float
    allowed: float
    verdict: str
    case: str


class Bench:
    """A deployed subject into which faults are put, one at a time.

    Args:
        bundle: the subject.
        name: of it.
        folder: for the altered bundle.
        backend: that runs it; `openvino` the graph of its own.

    Attributes:
        unaltered: what verify says of it as it is.
    """

    def __init__(self, bundle: Bundle, name: str, folder: Path, backend: str = BACKEND) -> None:
        self.name, self.precision, self._backend = name, bundle.manifest.precision, backend
        model = bundle.manifest.targets[OPENVINO if backend == OPENVINO else "onnxruntime"].model
        self._folder = Path(shutil.copytree(bundle.path, folder))
        self._file, self._model = self._folder / model, ir.load(bundle.path / model)
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
        """The output of a graph in float64, by case, all of them by default; of a decoder by the order of its tokens as
        well. A fault's own casts are kept. In few bits it is that of the graph as it is, which rounds far more than
        fp32 does."""
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
        if is_double:  # else left as it runs, for its integer products are to be those that do not saturate
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])
        for case in cases or self._inputs:
            feeds = {name: wide(array) if is_double else array for name, array in self._inputs[case].items()}
            (output,) = session.run(None, feeds)
            yield case, output

    def _exact_steps(self, steps: Driven, cases: Collection[str] | None) -> Iterator[tuple[str, Array]]:
        """The output of a decoder, by case and order."""
        (output,) = self._manifest.outputs
        for where, comparison in self._budgets.items():
            if cases is None or where in cases:
                yield where, steps.given(comparison.schedule, self._inputs[comparison.case])[output.name]

    def off_reference(self) -> float:
        """How far the unaltered graph in float64 is off the bundle's reference in float64, in the worst case."""
        (output,), kept = self._manifest.outputs, References.of(open_bundle(self._folder)).outputs
        cases = {case.name: case for case in every_case(self._manifest)}
        return max(
            relative_error(reference.sampled(exact, case), kept[reference.key(case, output.name, "float64")])
            for where, exact in self._truth.items()
            if (case := cases[self._budgets[where].case])
        )

    def altered(self, fault: Fault) -> tuple[ir.Model, Bundle]:
        """The graph with a fault, and the bundle that holds it until the next is put in.

        Raises:
            NotThere: the graph has no place for it, or is what it was.
        """
        model = self._model.clone()
        before = ir.to_proto(model).SerializeToString(deterministic=True)
        fault.alter(Graph(model))
        if fault.driver is None and ir.to_proto(model).SerializeToString(deterministic=True) == before:
            raise NotThere(f"{fault.name} changed nothing in {self.name}")
        ir.save(model, self._file)
        return model, rewrite(self._folder)

    def tried(self, fault: Fault) -> Row:
        """Put it in, measure what it does, and ask verify.

        Raises:
            NotThere: the graph has no place for it, or is what it was.
        """
        model, bundle = self.altered(fault)
        try:
            report = verified(bundle, self._backend) if fault.driver is None else verified_with(bundle, fault.driver)
        except (InputError, RunError):  # a kernel or a decoder refuses what the mistake leads to, and verify says so
            allowed = next(iter(self._budgets.values())).budget
            return Row(fault, self.name, self.precision, math.inf, allowed, "caught", "refused as it ran")
        caught = {max(report.failures, key=over).where} if report.failures else None
        effects = [self._effect(case, output) for case, output in self.exact(model, caught, fault.driver)]
        case, relative, share = max(effects, key=lambda one: one[2])
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
        """Whether a cache holds something else in float64 than it would without the fault."""
        feeds, held = self._inputs[failure.case], []
        for graph, kind in ((model, driver or Decoder), (self._model, Decoder)):
            steps = in_double(graph.clone(), self._manifest, kind)
            held.append(steps.given(failure.schedule, feeds)[failure.output])
        return relative_error(held[0].astype(np.float64), held[1].astype(np.float64)) > NOTHING

    def _effect(self, case: str, output: Array) -> tuple[str, float, float]:
        """The relative effect on a case, and its share of the budget."""
        truth, budget = self._truth[case], self._budgets[case]
        if not np.array_equal(np.isfinite(output), finite := np.isfinite(truth)):
            return case, math.inf, math.inf
        relative = relative_error(output[finite], truth[finite])
        largest = float(np.max(np.abs(output[finite] - truth[finite]), initial=0.0))
        share = max(relative / budget.budget, largest / budget.max_budget if budget.max_budget else math.inf * largest)
        return case, relative, share if largest else 0.0


def over(found: Comparison) -> float:
    """How far a comparison is over its budget; what is not finite where it should be is furthest."""
    if found.error <= found.budget and found.max_error <= found.max_budget:
        return math.inf
    return max(found.error / found.budget, found.max_error / found.max_budget if found.max_budget else math.inf)


def wide(array: Array) -> Array:
    """Floats in float64."""
    return array.astype(np.float64) if array.dtype.kind not in "biu" else array


def verified(bundle: Bundle, backend: str = BACKEND) -> BackendReport:
    return attnforge.verify(bundle, [backend]).backends[backend]


def is_sampled(fault: Fault, subject: str, precision: str) -> bool:
    """Whether the tests try a fault in a subject: in fp32 and in int8 every fault in one of its subjects, in 16 bits,
    fp8, int4 and in decoders every second.

    The sample stays the same where a fault is added.
    """
    number = zlib.crc32(fault.name.encode())
    if subject != fault.subjects[number % len(fault.subjects)]:
        return False
    if subject in DECODERS and not fault.is_inert and number // 16 % 2:
        return False
    return precision in ("fp32", "int8") or number // 16 % 2 == 0


class Faults:
    """The subjects as they are asked for, deployed once, and what becomes of the faults in them.

    Args:
        folder: for the bundles.
        is_tried: whether a fault is put into a subject of a precision; by default all are that can be.
    """

    def __init__(self, folder: Path, is_tried: Callable[[Fault, str, str], bool] = lambda *one: True) -> None:
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
