"""Quantised deployments: forms for every product, and the gate that checks their error.

The cost of quantising is the error of the quantised graph against float64 with the original weights, or the task's
metric, on real data if there is any. The user says how large it may be. If quantising all products costs more, `auto`
keeps as few as it can in fp32, starting with those that have the largest error themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array, is_floating
from attnforge.bundle import Case, Quantised, QuantisedProduct
from attnforge.errors import BuildError, UsageError
from attnforge.export.attention.canonicalize import Site
from attnforge.export.diagnosis.stages import decomposed, module_of
from attnforge.export.flops import run_cost
from attnforge.export.graphs.execute import Runner, as_it_is
from attnforge.export.precision.calibration import calibrate
from attnforge.export.precision.cost import flops_of
from attnforge.export.precision.quantisation import (
    INT8,
    LEAST_WEIGHTS,
    SCHEMES,
    Form,
    Product,
    Table,
    error_of,
    products,
    quantise,
    tables,
)
from attnforge.export.precision.rounding import (
    RoundedOperands,
    round_operands,
    sites_for_fp8,
    sites_for_int8,
    sites_with_caches,
)
from attnforge.export.precision.search import judged_on
from attnforge.export.precision.trials import Answers, Assignment, Requirement, Trial, by_metric
from attnforge.export.reference import Data, Derived, ReferenceModel, stored_inputs
from attnforge.numbers import scientific
from attnforge.precision import Precision
from attnforge.progress import Progress, Steps
from attnforge.runtime.parity.budget import judge, relative_error

ADDS = 1.25
"""Maximum ratio of the outputs' error with rounded queries and keys to that without: `e` rounds neither, and OpenVINO
is checked against twice its error."""

LOWERED_AGAIN = 8
"""Maximum number of products that are quantised again after the gate is passed."""


class QuantisedReference(Derived):
    """The reference of a quantised deployment: the same Q/DQ in fp32 for eager, float64 with the original weights.

    Args:
        whole: the model in fp32.
        precision: the deployment's precision.
        model: the quantised canonical graph.
        sites: its attention sites.
    """

    def __init__(self, whole: ReferenceModel, precision: Precision, model: ir.Model, sites: list[Site]) -> None:
        super().__init__(whole, precision)
        self._model, self._sites = model, sites

    @property
    def reference(self) -> str:
        return f"{self._whole.reference} for float64, and its graph with the same Q/DQ in fp32 for eager"

    def eager(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._run(inputs)

    @cached_property
    def _run(self) -> Runner:
        return as_it_is(decomposed(self._model, self._sites))


@dataclass(frozen=True)
class ChosenForms:
    """A quantised graph that passes the gate.

    Attributes:
        model: the canonical graph, with Q/DQ.
        reference: the reference that the deployment is checked against.
        record: the manifest's record.
        caches: the sites whose keys and values are rounded to int8.
        scores: the sites whose queries and keys OpenVINO may round to int8; the model rounds neither.
    """

    model: ir.Model
    reference: QuantisedReference
    record: Quantised
    caches: list[RoundedOperands]
    scores: list[RoundedOperands]


def choose_forms(
    model: ir.Model,
    sites: list[Site],
    whole: ReferenceModel,
    precision: Precision,
    is_automatic: bool,
    requirement: Requirement,
    data: Data,
    progress: Progress,
    caches_in_int8: bool = False,
    scores_in_int8: bool = True,
) -> ChosenForms:
    """Quantise a graph within a requirement.

    Args:
        model: a canonical fp32 graph; not modified.
        sites: its attention sites.
        whole: the model in fp32.
        precision: int8, fp8 or int4; fp32 if only caches are quantised.
        is_automatic: whether products may stay in fp32 if the requirement is not met.
        requirement: what has to be met, on real data, or on ordinary cases if there is none.
        data: real inputs, also used for calibration.
        progress: receives each trial.
        caches_in_int8: whether keys and values are rounded to int8, as in a decoder's int8 caches; needs real data.
        scores_in_int8: whether OpenVINO may multiply queries and keys in int8, given int8 products and real data.

    Raises:
        UsageError: no product is worth quantising.
        BuildError: the requirement is not met; or the fp32 graph does not compute what the model does.
    """
    scheme = SCHEMES.get(precision.name)
    quantisable = products(model, scheme) if scheme is not None else []
    if scheme is not None and not quantisable:
        fitting = f", in more than one block of {scheme.blocks[0]} channels" if scheme.blocks else ""
        raise UsageError(
            f"no product of this model is worth {precision.bits} bits: none before its head has at least "
            f"{LEAST_WEIGHTS:,} weights{fitting}; deploy it in fp32 or at 16 bits"
        )
    stored, cases = stored_inputs(whole, data, run_cost(model))
    real = [case for case in cases if case.kind == "data"]
    answers = Answers.of(whole, real or judged_on(cases), stored)
    steps = Steps(progress)
    steps.begin("the graph in fp32")
    run = as_it_is(decomposed(model, sites))
    for case in answers.cases:
        _check_same(case, run(answers.inputs[case.name]), answers, whole.precision)
    inputs = [answers.inputs[case.name] for case in answers.cases]
    rows = tables(model) if scheme is not None else []
    forms: dict[str, Form] = {}
    if scheme is not None:
        steps.begin(f"ranges of {len(quantisable)} products")
        forms |= calibrate(decomposed(model, sites), quantisable, inputs, is_real=bool(real), scheme=scheme)
        forms |= {table.name: Form(error=error_of(table)) for table in rows}
    attended: list[RoundedOperands] = []
    not_in_fp8: dict[str, str] = {}
    if precision.name == "fp8":
        steps.begin("ranges of attention")
        attended, not_in_fp8 = sites_for_fp8(model, sites, inputs, is_real=bool(real))
    caches: list[RoundedOperands] = []
    if caches_in_int8:
        steps.begin("ranges of keys and values")
        caches = sites_with_caches(model, sites, inputs)
    rounded: list[RoundedOperands] = [*attended, *caches]
    forms |= {part.name: Form(error=part.error) for part in rounded}
    parts = _Parts(quantisable, rows, attended, caches)
    gate = _Gate(
        model,
        sites,
        scheme.name if scheme is not None else "an int8 cache",
        parts,
        forms,
        requirement,
        answers,
        steps,
    )
    high = gate.raise_until_passed() if is_automatic else gate.passed_whole()
    quantised = gate.quantised(high)
    sizes = cases[0].sizes
    reference = QuantisedReference(whole, precision, quantised, sites)
    scores: list[RoundedOperands] = []
    not_in_int8: dict[str, str] = {}
    if scores_in_int8 and scheme is INT8 and real:
        steps.begin("ranges of queries and keys")
        scores = sites_for_int8(model, sites, inputs)
    if scores and (why := gate.why_not_rounded(high, scores)) is not None:
        not_in_int8, scores = {score.name: why for score in scores}, []
    record = gate.record(high, sizes, len(real))
    record.kept |= not_in_fp8 | not_in_int8
    return ChosenForms(quantised, reference, record, [cache for cache in caches if cache.name not in high], scores)


def _check_same(case: Case, outputs: Mapping[str, Array], answers: Answers, precision: Precision) -> None:
    """Check the fp32 graph against the budget of its precision: eager's own error is the baseline of what is quantised,
    so an error that the graph already had would be allowed twice."""
    for name, array in outputs.items():
        exact = answers.exact[case.name][name]
        comparison = judge(case, name, array, answers.eager[case.name][name], exact, precision)
        if not comparison.passed:
            raise BuildError(
                f"the graph to be quantised does not compute what the model does: {case.name}, {name}: "
                f"{comparison.reason}"
            )


@dataclass(frozen=True)
class _Parts:
    """The products that may be quantised."""

    products: Sequence[Product]
    tables: Sequence[Table]
    attended: Sequence[RoundedOperands]
    caches: Sequence[RoundedOperands]


class _Gate:
    """Judges sets of quantised parts, each set once.

    Attributes:
        steps: what was tried, in order, and the outcome.
    """

    def __init__(
        self,
        model: ir.Model,
        sites: list[Site],
        quantised_to: str,
        parts: _Parts,
        forms: Mapping[str, Form],
        requirement: Requirement,
        answers: Answers,
        steps: Steps,
    ) -> None:
        self._model, self._sites, self._answers, self._progress = model, sites, answers, steps
        self._type, self._parts, self._forms, self._requirement = quantised_to, parts, forms, requirement
        self._by_error = sorted(forms, key=lambda name: -forms[name].error)
        self._trials: dict[Assignment, Trial] = {}
        self.steps: list[str] = []

    def quantised(self, high: Iterable[str]) -> ir.Model:
        """A copy of the graph with these parts in fp32 and all others quantised."""
        model, kept = self._model.clone(), set(high)
        quantise(model, {name: form for name, form in self._forms.items() if name not in kept})
        rounded: list[RoundedOperands] = [*self._parts.attended, *self._parts.caches]
        round_operands(model, [part for part in rounded if part.name not in kept])
        return model

    def passed_whole(self) -> Assignment:
        """Quantise all products.

        Raises:
            BuildError: they do not meet the requirement.
        """
        high: Assignment = frozenset()
        if not (trial := self._judge(high)).passed:
            worst = ", ".join(f"{name} ({scientific(self._forms[name].error)})" for name in self._by_error[:3])
            raise BuildError(
                f"{self._type} misses the requirement: {trial.text}; the largest errors are of {worst}. {self._remedy}"
            )
        return high

    @property
    def _remedy(self) -> str:
        if not self._parts.products:
            return "Deploy with unquantised caches, or allow more"
        return (
            f"Deploy with precision auto-{self._type}, which keeps products in fp32 as needed, give real data, which "
            "ranges are taken from, or allow more"
        )

    def raise_until_passed(self) -> Assignment:
        """The fewest worst products in fp32 that pass, and of these only those that are needed there.

        Raises:
            BuildError: no product may be quantised.
        """
        low, high = -1, len(self._by_error)
        count = 0
        while high - low > 1:
            if self._judge(frozenset(self._by_error[:count])).passed:
                high = count
            else:
                low = count
            count = (low + high) // 2
        raised = frozenset(self._by_error[:high])
        if high == len(self._by_error):
            raise BuildError(
                f"no product may be in {self._type} within the requirement; allow more, or deploy in fp32 or at 16 bits"
            )
        for name in reversed(self._by_error[max(high - LOWERED_AGAIN, 0) : max(high - 1, 0)]):
            if self._judge(raised - {name}).passed:
                raised -= {name}
        return raised

    def _judge(self, high: Assignment) -> Trial:
        if high not in self._trials:
            parts: list[tuple[Sequence[Product | Table | RoundedOperands], str]] = [
                (self._parts.products, "products"),
                (self._parts.tables, "tables"),
                (self._parts.attended, "attention sites"),
                (self._parts.caches, "caches"),
            ]
            counted = [
                f"{sum(part.name not in high for part in every)} of {len(every)} {kind}"
                for every, kind in parts
                if every
            ]
            text = " and ".join(counted) + " quantised"
            self._progress.begin(text)
            self._trials[high] = trial = self._judged(self.quantised(high))
            self.steps.append(f"{text}: {trial.text}")
        return self._trials[high]

    def why_not_rounded(self, high: Assignment, scores: Sequence[RoundedOperands]) -> str | None:
        """Why queries and keys may not be rounded as well; None if the requirement is met with little added error.

        Args:
            high: the parts in fp32.
            scores: the sites.
        """
        text = f"queries and keys of {len(scores)} attention sites in int8, for OpenVINO"
        self._progress.begin(text)
        model, without = self.quantised(high), self._judge(high)
        round_operands(model, scores)
        trial = self._judged(model)
        self.steps.append(f"{text}: {trial.text}")
        if not trial.passed:
            return f"OpenVINO's int8 product of queries and keys misses the requirement: {trial.text}"
        if trial.error > ADDS * without.error:
            return (
                f"OpenVINO's int8 product of queries and keys adds too much error: {trial.text}; "
                f"{scientific(without.error)} without it"
            )
        return None

    def _judged(self, quantised: ir.Model) -> Trial:
        run = as_it_is(decomposed(quantised, self._sites))
        scores = self._requirement.metric() if self._requirement.metric is not None else None
        error, worst, most = 0.0, None, self._requirement.max_error
        for case in self._answers.cases:
            outputs = run(self._answers.inputs[case.name])
            if scores is not None:
                scores.add(case, outputs, self._answers.stored(case))
            for name, array in outputs.items():
                exact = self._answers.exact[case.name][name]
                finite = np.isfinite(exact)
                if (
                    is_floating(array)
                    and (off := relative_error(array[finite].astype(np.float64), exact[finite])) >= error
                ):
                    error, worst = off, case
        share = error / most if most is not None else 0.0 if np.isfinite(error) else np.inf
        text = f"an error of {scientific(error)}" if np.isfinite(error) else "NaN or infinity"
        text += f" in {worst.name}" if worst is not None else ""
        text += f", with {most:g} allowed" if most is not None else ""
        trial = Trial(share, error, worst, text)
        return trial if scores is None else by_metric(trial, scores.report())

    def record(self, high: Assignment, sizes: Mapping[str, int], real: int) -> Quantised:
        """The manifest's record.

        Args:
            high: products in fp32.
            sizes: sizes of the dynamic dims at which operations are counted.
            real: number of cases of real data that the ranges were taken from.
        """
        parts = self._parts
        low = [product for product in parts.products if product.name not in high]
        attended = [part for part in parts.attended if part.name not in high]
        total = sum(flops_of(node, sizes) for node in self._model.graph) or 1.0
        low_bit = {*(product.name for product in low), *(part.site.node for part in attended)}
        why = "the requirement is not met if it is quantised"
        return Quantised(
            type=self._type if parts.products else "int8",  # type: ignore[arg-type]
            max_error=self._requirement.max_error,
            error=self._judge(high).error,
            calibrated=real,
            products=[_recorded(product, self._forms[product.name]) for product in low],
            tables={table.name: self._forms[table.name].error for table in parts.tables if table.name not in high},
            attention={part.name: self._forms[part.name].error for part in attended},
            caches={cache.site.name: cache.error for cache in parts.caches if cache.name not in high},
            kept={name: why for name in self._forms if name in high},
            share=sum(flops_of(node, sizes) for node in self._model.graph if node.name in low_bit) / total,
            steps=self.steps,
        )


def _recorded(product: Product, form: Form) -> QuantisedProduct:
    return QuantisedProduct(
        name=product.name,
        module=module_of(product.node),
        by=None if form.block is not None else "token" if form.scale is None else "tensor",
        block=form.block,
        balanced=form.balance is not None,
        error=form.error,
    )
