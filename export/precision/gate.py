"""Quantised deployments: forms for every product, and the gate that checks their error.

The cost of quantising is the error of the quantised graph against float64 with the original weights, or the task's
metric, on real data if there is any. The user says how large it may be. If quantising all products costs more, `auto`
keeps as few as it can in fp32, starting with those that have the largest error themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.bundle import Quantised, QuantisedProduct
from attnforge.errors import BuildError, UsageError
from attnforge.export.attention.canonicalize import Site
from attnforge.export.diagnosis.stages import decomposed, module_of
from attnforge.export.flops import known_flops, run_cost
from attnforge.export.graphs.execute import Runner, as_it_is
from attnforge.export.graphs.qdq import SCHEMES
from attnforge.export.options import DeployOptions
from attnforge.export.precision.calibration import calibrate
from attnforge.export.precision.judge import Answer, Assignment, Judge, Part, Requirement, Trial, answers_of, judged_on
from attnforge.export.precision.quantisation import (
    INT8,
    LEAST_WEIGHTS,
    Product,
    Quantisation,
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
from attnforge.export.precision.search import by_error, lower_again
from attnforge.export.reference import Data, Derived, ReferenceModel, inputs_and_cases
from attnforge.numbers import scientific
from attnforge.precision import Precision
from attnforge.progress import Progress, Steps
from attnforge.runtime.parity import budget

ADDS = 1.25
"""Maximum ratio of the outputs' error with rounded queries and keys to that without: `e` rounds neither, and OpenVINO
is checked against twice its error."""

LOWERED_AGAIN = 8
"""Maximum number of products that are quantised again after the gate is passed."""


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
    reference: ReferenceModel
    record: Quantised
    caches: list[RoundedOperands]
    scores: list[RoundedOperands]


def choose_forms(
    model: ir.Model, sites: list[Site], whole: ReferenceModel, options: DeployOptions, data: Data, progress: Progress
) -> ChosenForms:
    """Quantise a graph within the requirement of the options. The rounding of queries and keys, for OpenVINO, and that
    of keys and values in caches need real data.

    Args:
        model: a canonical fp32 graph; not modified.
        sites: its attention sites.
        whole: the model in fp32.
        options: the precision, which is fp32 if only caches are quantised; whether products may stay in fp32 if the
            requirement is not met; and the requirement, on real data, or on ordinary cases if there is none.
        data: real inputs, also used for calibration.
        progress: receives each trial.

    Raises:
        UsageError: no product is worth quantising.
        BuildError: the requirement is not met; or the fp32 graph does not compute what the model does.
    """
    precision = options.quantised or whole.precision
    graph = QuantisedGraph(model, sites, precision)
    stored, cases = inputs_and_cases(whole, data, run_cost(model))
    real = [case for case in cases if case.kind == "data"]
    answers, steps = answers_of(whole, real or judged_on(cases), stored), Steps(progress)
    steps.begin("the graph in fp32")
    _check_same(as_it_is(decomposed(model, sites)), answers, whole.precision)
    inputs = [answer.inputs for answer in answers]
    graph.calibrate(inputs, bool(real), options.cache_precision is not None, steps)
    judge = Judge(graph.run, answers, Requirement.of(options, data), graph.text, steps)
    high = _raised(graph, judge) if options.keeps_some else _none_raised(graph, judge)
    quantised, record = graph.quantised(high), graph.record(judge, high, cases[0].sizes, len(real))
    scores: list[RoundedOperands] = []
    if options.cache_tokens is None and graph.scheme is INT8 and real:
        steps.begin("ranges of queries and keys")
        scores = sites_for_int8(model, sites, inputs)
    if scores:
        steps.begin(text := f"queries and keys of {len(scores)} attention sites in int8, for OpenVINO")
        round_operands(rounded := quantised.clone(), scores)
        trial = judge.run(as_it_is(decomposed(rounded, sites)), answers)
        record.steps.append(f"{text}: {trial.text}")
        if (why := _why_not_rounded(trial, judge(high))) is not None:
            record.kept |= {score.name: why for score in scores}
            scores = []
    reference = _reference(whole, precision, quantised, sites)
    caches = [cache for cache in graph.caches if cache.name not in high]
    return ChosenForms(quantised, reference, record, caches, scores)


def _reference(whole: ReferenceModel, precision: Precision, model: ir.Model, sites: list[Site]) -> ReferenceModel:
    """The reference of a quantised deployment: the same Q/DQ in fp32 for eager, float64 with the original weights."""
    text = f"{whole.reference} for float64, and its graph with the same Q/DQ in fp32 for eager"
    opened = cache(lambda: as_it_is(decomposed(model, sites)))  # only once it is needed
    return Derived(whole, precision, text, lambda inputs: opened()(inputs))


def _check_same(run: Runner, answers: Sequence[Answer], precision: Precision) -> None:
    """Check the fp32 graph against the budget of its precision: eager's own error is the baseline of what is quantised,
    so an error that the graph already had would be allowed twice."""
    for answer in answers:
        for name, array in run(answer.inputs).items():
            comparison = budget.judge(answer.case, name, array, answer.eager[name], answer.exact[name], precision)
            if not comparison.passed:
                raise BuildError(
                    f"the graph to be quantised does not compute what the model does: {answer.case.name}, {name}: "
                    f"{comparison.reason}"
                )


def _none_raised(graph: QuantisedGraph, judge: Judge) -> Assignment:
    """Quantise all parts.

    Raises:
        BuildError: they do not meet the requirement.
    """
    high: Assignment = frozenset()
    if not (trial := judge(high)).passed:
        worst = sorted(graph.parts, key=lambda part: -part.error)[:3]
        is_real = any(answer.case.kind == "data" for answer in judge.answers)
        remedy = (
            f"Deploy with precision auto-{graph.type}, which keeps products in fp32 as needed, "
            f"{'' if is_real else 'give real data, which ranges are taken from, '}or allow more"
            if graph.products
            else "Deploy with unquantised caches, or allow more"
        )
        raise BuildError(
            f"{graph.type} misses the requirement: {trial.text}; the largest errors are of "
            f"{', '.join(f'{part.name} ({scientific(part.error)})' for part in worst)}. {remedy}"
        )
    return high


def _raised(graph: QuantisedGraph, judge: Judge) -> Assignment:
    """The fewest parts with the largest errors in fp32 that pass, and of these only those that are needed there.

    Raises:
        BuildError: no part may be quantised.
    """
    raised = by_error(judge, graph.parts)
    if len(raised) == len(graph.parts):
        raise BuildError(
            f"no product may be in {graph.type} within the requirement; allow more, or deploy in fp32 or at 16 bits"
        )
    high = frozenset(part.name for part in raised)
    *_, high = high, *lower_again(judge, high, ([part.name] for part in reversed(raised[-LOWERED_AGAIN:])))
    return high


def _why_not_rounded(trial: Trial, without: Trial) -> str | None:
    """Why queries and keys may not be rounded as well; None if the requirement is met with little added error.

    Args:
        trial: the result of rounding them.
        without: the result of the same graph without.
    """
    if not trial.passed:
        return f"OpenVINO's int8 product of queries and keys misses the requirement: {trial.text}"
    if trial.error > ADDS * without.error:
        return (
            f"OpenVINO's int8 product of queries and keys adds too much error: {trial.text}; "
            f"{scientific(without.error)} without it"
        )
    return None


class QuantisedGraph:
    """A canonical fp32 graph, and its assignments of precisions: every part in fp32 or in fewer bits.

    Args:
        model: not modified.
        sites: its attention sites.
        precision: int8, fp8 or int4; fp32 if only caches are quantised.

    Attributes:
        scheme: the scheme of products; None without.
        products, tables: those that may be quantised.
        forms: the form of every product's input, and a form of every table, by name.
        attended: the attention sites that may be in fp8.
        not_in_fp8: why any other may not, in a graph with fp8 products.
        caches: the sites whose keys and values may be rounded to int8.

    Raises:
        UsageError: no product is worth quantising.
    """

    def __init__(self, model: ir.Model, sites: list[Site], precision: Precision) -> None:
        self.model, self.sites, self.scheme = model, sites, SCHEMES.get(precision.name)
        self.products: Sequence[Product] = []
        self.tables: Sequence[Table] = []
        self.forms: dict[str, Quantisation] = {}
        self.attended: Sequence[RoundedOperands] = []
        self.not_in_fp8: dict[str, str] = {}
        self.caches: Sequence[RoundedOperands] = []
        if (scheme := self.scheme) is None:
            return
        self.products, self.tables = products(model, scheme), tables(model)
        if not self.products:
            fitting = f", in more than one block of {scheme.blocks[0]} channels" if scheme.blocks else ""
            raise UsageError(
                f"no product of this model is worth {precision.bits} bits: none before its head has at least "
                f"{LEAST_WEIGHTS:,} weights{fitting}; deploy it in fp32 or at 16 bits"
            )

    @property
    def type(self) -> str:
        """What parts are quantised to, in words."""
        return self.scheme.name if self.scheme is not None else "an int8 cache"

    def calibrate(self, data: Sequence[Mapping[str, Array]], is_real: bool, caches_in_int8: bool, steps: Steps) -> None:
        """Find the ranges and the error of every part.

        Args:
            data: inputs of the model.
            is_real: whether they are like what the model will see.
            caches_in_int8: whether caches are parts.
            steps: receives each step.
        """
        if self.scheme is not None:
            steps.begin(f"ranges of {len(self.products)} products")
            self.forms = calibrate(decomposed(self.model, self.sites), self.products, data, is_real, self.scheme)
            self.forms |= {table.name: Quantisation(error=error_of(table)) for table in self.tables}
        if self.type == "fp8":
            steps.begin("ranges of attention")
            self.attended, self.not_in_fp8 = sites_for_fp8(self.model, self.sites, data, is_real)
        if caches_in_int8:
            steps.begin("ranges of keys and values")
            self.caches = sites_with_caches(self.model, self.sites, data)

    @property
    def parts(self) -> list[Part]:
        looked_up = {table.name for table in self.tables}
        return [
            *(Part(name, "tables" if name in looked_up else "products", f.error) for name, f in self.forms.items()),
            *(Part(site.name, "attention sites", site.error) for site in self.attended),
            *(Part(cache.name, "caches", cache.error) for cache in self.caches),
        ]

    def quantised(self, high: Assignment) -> ir.Model:
        """A copy of the graph with the parts `high` in fp32 and all others quantised."""
        model = self.model.clone()
        quantise(model, {name: form for name, form in self.forms.items() if name not in high})
        round_operands(model, [part for part in (*self.attended, *self.caches) if part.name not in high])
        return model

    def run(self, high: Assignment) -> Runner:
        """Its runner, in fp32."""
        return as_it_is(decomposed(self.quantised(high), self.sites))

    def text(self, high: Assignment) -> str:
        every = Counter(part.kind for part in self.parts)
        low = Counter(part.kind for part in self.parts if part.name not in high)
        return " and ".join(f"{low[kind]} of {count} {kind}" for kind, count in every.items()) + " quantised"

    def record(self, judge: Judge, high: Assignment, sizes: Mapping[str, int], real: int) -> Quantised:
        """The manifest's record.

        Args:
            judge: judged the assignments.
            high: parts in fp32.
            sizes: sizes of the dynamic dims at which operations are counted.
            real: number of cases of real data that the ranges were taken from.
        """
        low = [product for product in self.products if product.name not in high]
        attended = [site for site in self.attended if site.name not in high]
        flops = [(node.name, known_flops(node, sizes)) for node in self.model.graph]
        low_bit = {*(product.name for product in low), *(site.site.node for site in attended)}
        why = "the requirement is not met if it is quantised"
        return Quantised(
            type=self.scheme.name if self.scheme is not None else "int8",  # type: ignore[arg-type]
            max_error=judge.requirement.max_error,
            error=judge(high).error,
            calibrated=real,
            products=[_recorded(product, self.forms[product.name]) for product in low],
            tables={table.name: self.forms[table.name].error for table in self.tables if table.name not in high},
            attention={site.name: site.error for site in attended},
            caches={cache.site.name: cache.error for cache in self.caches if cache.name not in high},
            kept={part.name: why for part in self.parts if part.name in high} | self.not_in_fp8,
            share=sum(count for name, count in flops if name in low_bit) / (sum(count for _, count in flops) or 1.0),
            steps=[f"{self.text(tried)}: {trial.text}" for tried, trial in judge.trials.items()],
        )


def _recorded(product: Product, form: Quantisation) -> QuantisedProduct:
    return QuantisedProduct(
        name=product.name,
        module=module_of(product.node),
        by=None if form.block is not None else "token" if form.scale is None else "tensor",
        block=form.block,
        balanced=form.balance is not None,
        error=form.error,
    )
