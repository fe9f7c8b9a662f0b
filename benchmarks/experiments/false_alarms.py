"""How often `verify` rejects correct deployments: random models, deployed and checked against the budget.

`python -m benchmarks run false-alarms` writes `benchmarks/results/false_alarms.json`. There are two random draws:
usual models (:mod:`tests.support.random_models`), and models with hostile inputs
(:mod:`tests.support.hostile_models`). Every model is deployed for ONNX Runtime and verified. For a 16-bit model the
plan of TensorRT-RTX is checked too, emulated without a GPU (:mod:`attnforge.export.precision.assign`).
`--draw int8` quantises the products of the usual models to 8 bits, and writes
`benchmarks/results/false_alarms_int8.json`. `--draw decoder` deploys random decoders
(:mod:`tests.support.random_decoders`) with a cache, checks them in every order of their tokens, and writes
`benchmarks/results/false_alarms_decoder.json`. `--draw summed` draws models of long sums and many layers
(:mod:`tests.support.summed_models`), and writes `benchmarks/results/false_alarms_summed.json`.

A model that overflows at its precision, in eager mode on ordinary inputs, is rejected by rule
(:mod:`attnforge.runtime.parity.budget`). Such models are counted separately, as are models that deploy refuses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
import onnx_ir as ir
import torch
import typer

import attnforge
from attnforge.arrays import is_floating
from attnforge.atomic import temporary_folder
from attnforge.bundle import CANONICAL, REFERENCE_OUTPUTS, Bundle
from attnforge.errors import AttnforgeError, BuildError, UnavailableError
from attnforge.export.diagnosis.stages import sites_of
from attnforge.export.graphs.execute import Runner, at_own_precision
from attnforge.export.graphs.nodes import inputs_of, is_op, maker_of
from attnforge.export.graphs.saving import load_graph
from attnforge.export.graphs.types import LOW
from attnforge.export.lowering import tensorrt as for_tensorrt
from attnforge.export.precision.assign import unrounded_in_fused_kernels
from attnforge.export.tensorrt.build import Plan
from attnforge.model.registry import Example
from attnforge.precision import PRECISIONS, precision_named
from attnforge.report.render import markdown_table
from attnforge.runtime import cases as reference
from attnforge.runtime.parity.budget import judge
from attnforge.runtime.parity.comparison import Comparison
from attnforge.runtime.parity.verify import stored_inputs
from benchmarks.experiment import Experiment, say
from benchmarks.published import deployed
from benchmarks.rtx import plan_of
from tests.support.hostile_models import draw_hostile, make_hostile
from tests.support.random_decoders import draw_decoder, make_decoder, places_of
from tests.support.random_models import Recipe, draw, make
from tests.support.summed_models import draw_summed, make_summed

MAX_ERROR = 0.9
"""Maximum error of quantising a random model: large, because this checks whether the deployment equals the quantised
model, not whether that model is good."""

QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


Draw = Literal["usual", "hostile", "int8", "decoder", "summed"]


def draw_in_8_bits(seed: int) -> Recipe:
    """Return a usual model's recipe, with its products in 8 bits."""
    return replace(draw(seed), precision="int8")


DRAWS: Mapping[Draw, tuple[Callable[[int], Recipe], Callable[[Recipe], Example]]] = {
    "usual": (draw, make),
    "hostile": (draw_hostile, make_hostile),
    "int8": (draw_in_8_bits, make),
    "decoder": (draw_decoder, make_decoder),
    "summed": (draw_summed, make_summed),
}
"""By name, the functions that draw recipes and build their models."""


def measure(
    count: Annotated[int, typer.Option(help="Number of models per draw.")] = 200,
    first: Annotated[int, typer.Option(help="First seed; the others follow it.")] = 0,
    drawn: Annotated[
        Draw | None, typer.Option("--draw", help="Run only this draw (default: usual and hostile).")
    ] = None,
) -> dict[str, Any]:
    """Deploy and verify the seeds of every draw."""
    outcomes: dict[Draw, list[Outcome]] = {}
    for name in (drawn,) if drawn is not None else ("usual", "hostile"):
        recipe_of, model_of = DRAWS[name]
        for seed in range(first, first + count):
            outcomes.setdefault(name, []).append(outcome := tried(recipe_of(seed), model_of))
            say(f"{name} {outcome.text()}")
    return figures_of(outcomes, first, count)


@dataclass
class Outcome:
    """The outcome of one recipe.

    Attributes:
        recipe: the recipe.
        refused: why deploy, or TensorRT-RTX, refused it; None if it was deployed.
        wrong: why deploy would have rejected it as wrong, which is a false alarm too; None if it would not.
        comparisons: one for every output of every case, by backend: `onnxruntime` or `tensorrt, emulated`.
    """

    recipe: Recipe
    refused: str | None = None
    wrong: str | None = None
    comparisons: dict[str, list[Comparison]] = field(default_factory=dict)

    @property
    def not_held(self) -> bool:
        """Whether the model overflows in eager mode at its precision, on ordinary inputs."""
        every = (c for comparisons in self.comparisons.values() for c in comparisons)
        return any("overflows: NaN or infinity" in (c.reason or "") for c in every)

    @property
    def rejected(self) -> dict[str, list[str]]:
        """Reasons of failed comparisons, by backend; empty for a model that overflows."""
        if self.not_held:
            return {}
        failed = {
            what: [f"{c.case}/{c.output}: {c.reason}" for c in comparisons if not c.passed]
            for what, comparisons in self.comparisons.items()
        }
        failed["deploy"] = [self.wrong] if self.wrong is not None else []
        return {what: reasons for what, reasons in failed.items() if reasons}

    def text(self) -> str:
        name = f"{self.recipe.seed} {self.recipe.kind} {self.recipe.precision}"
        if self.refused is not None:
            return f"{name}: refused: {self.refused}"
        if self.not_held:
            return f"{name}: overflows"
        margins = ", ".join(f"{what} {max(map(margin, cs), default=0.0):.2f}" for what, cs in self.comparisons.items())
        reasons = "; ".join(reason for reasons in self.rejected.values() for reason in reasons)
        return f"{name}: {margins}" + (f"; REJECTED {asdict(self.recipe)}: {reasons}" if reasons else "")


def tried(recipe: Recipe, make: Callable[[Recipe], Example] = make) -> Outcome:
    """Deploy the model of a recipe and check it against the budget.

    Args:
        recipe: recipe of the model.
        make: builds the model.
    """
    outcome = Outcome(recipe)
    with temporary_folder() as folder:
        try:
            bundle = deployed(
                make(recipe), folder / "b", recipe.kind, precision=recipe.precision, tune=False, cache=False,
                max_error=MAX_ERROR if recipe.precision == "int8" else None, cache_tokens=places_of(recipe),
                keep_wrong=True,
            )  # fmt: skip
        except AttnforgeError as error:
            outcome.refused = str(error)
            return outcome
        outcome.wrong = None if bundle.manifest.wrong is None else bundle.manifest.wrong.text()
        report = attnforge.verify(bundle, ["onnxruntime-cpu"])
        outcome.comparisons["onnxruntime"] = report.backends["onnxruntime-cpu"].comparisons
        if precision_named(recipe.precision).is_low and bundle.manifest.decoding is None:
            try:
                outcome.comparisons["tensorrt, emulated"] = list(emulated(bundle))
            except BuildError as error:
                outcome.refused = str(error)
    return outcome


def emulated(bundle: Bundle) -> Iterator[Comparison]:
    """Yield the comparisons of a 16-bit bundle's graph as TensorRT-RTX compiles it, with 16-bit storage emulated. The
    plan, which needs no GPU to be built, shows what kernels store; without TensorRT-RTX, every result counts as
    stored."""
    manifest, precision = bundle.manifest, precision_named(bundle.manifest.precision)
    model = load_graph(bundle, CANONICAL)
    lowered = for_tensorrt.lower(model, sites_of(manifest.attention))
    plan = None
    with suppress(UnavailableError):
        plan = plan_of(model, manifest.inputs, manifest.precision)
    fused = [s.site for s in lowered if (s.unfused is None if plan is None else plan.kernel_of(s.node) is not None)]
    run = as_compiled(model, fused, plan)
    stored, outputs = stored_inputs(bundle), bundle.tensors(REFERENCE_OUTPUTS)
    for case in manifest.cases:
        for name, array in run(reference.make_inputs(case, manifest.inputs, stored)).items():
            eager, truth = (outputs[reference.key(case, name, which)] for which in ("eager", "float64"))
            stored_as = array.astype(precision.dtype) if is_floating(array) else array
            yield judge(case, name, reference.sampled(stored_as, case), eager, truth, precision)


def as_compiled(model: ir.Model, fused: Collection[str], plan: Plan | None) -> Runner:
    """Return a runner of a graph that was lowered for TensorRT and emulates what the kernels of a plan store.

    Args:
        model: not modified.
        fused: names of the sites that TensorRT fuses.
        plan: compiled from `model`; shows which kernels add the bias to their product. Without a plan every product is
            rounded before its bias is added.
    """
    before_bias = [] if plan is None else _unrounded_before_bias(model, plan)
    return at_own_precision(model, unrounded=[*unrounded_in_fused_kernels(model, fused), *before_bias])


def _unrounded_before_bias(model: ir.Model, plan: Plan) -> list[ir.Value]:
    """Return the 16-bit products that a kernel of `plan` keeps in float32 until it has added the bias, as in eager."""
    values: list[ir.Value] = []
    for node in model.graph:
        if not is_op(node, "Add") or not any(value.is_initializer() for value in inputs_of(node)):
            continue
        for value in inputs_of(node):
            product = maker_of(value)
            if not is_op(product, "MatMul") or value.dtype not in LOW:
                continue
            if not {*plan.layers_of(str(product.name))}.isdisjoint(plan.layers_of(str(node.name))):
                values.append(value)
    return values


def margin(comparison: Comparison) -> float:
    """Return the share of the budget that an output uses; above 1 it fails."""
    largest = comparison.max_error / comparison.max_budget if comparison.max_budget else float(comparison.max_error > 0)
    return max(comparison.error / comparison.budget, largest)


def figures_of(outcomes: Mapping[Draw, Sequence[Outcome]], first: int, count: int) -> dict[str, Any]:
    """Return the figures of `count` seeds of every draw, starting at `first`."""
    return {"seeds": [first, first + count - 1], "draws": {name: summary(drawn) for name, drawn in outcomes.items()}}


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return counts, margins over all cases, and every rejection with its recipe."""
    deployed = [outcome for outcome in outcomes if outcome.refused is None and not outcome.not_held]
    margins: dict[str, dict[str, list[float]]] = {}
    for outcome in deployed:
        for what, comparisons in outcome.comparisons.items():
            margins.setdefault(what, {}).setdefault(outcome.recipe.precision, []).extend(map(margin, comparisons))
    return {
        "deployed": len(deployed),
        "by_precision": Counter(outcome.recipe.precision for outcome in deployed),
        "by_kind": Counter(outcome.recipe.kind for outcome in deployed),
        "margins": {
            what: {name: _quantiles(by_precision[name]) for name in PRECISIONS if name in by_precision}
            for what, by_precision in margins.items()
        },
        "rejected": [
            {**asdict(outcome.recipe), "what": what, "cases": reasons}
            for outcome in outcomes
            for what, reasons in outcome.rejected.items()
        ],
        "not_held": [asdict(outcome.recipe) for outcome in outcomes if outcome.not_held],
        "refused": [{**asdict(o.recipe), "why": o.refused} for o in outcomes if o.refused is not None],
    }


def _quantiles(margins: Sequence[float]) -> dict[str, float]:
    values = np.quantile(margins, [*QUANTILES.values()])
    return {"comparisons": len(margins), **{name: float(v) for name, v in zip(QUANTILES, values, strict=True)}}


def table(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    header = ("models", "run by", "precision", "comparisons", *QUANTILES, "rejected")
    rows, counts = [], []
    for name, of_draw in figures["draws"].items():
        for what, by_precision in of_draw["margins"].items():
            for precision, quantiles in by_precision.items():
                rejected = sum(r["what"] == what and r["precision"] == precision for r in of_draw["rejected"])
                cells = [f"{quantiles[quantile]:.3f}" for quantile in QUANTILES]
                rows.append((name, what, precision, quantiles["comparisons"], *cells, rejected))
        rejected = len({recipe["seed"] for recipe in of_draw["rejected"]})
        kinds = ", ".join(f"{count} {kind}" for kind, count in of_draw["by_kind"].items())
        counts.append(
            f"{of_draw['deployed']} {name} models ({kinds}), {rejected} rejected; {len(of_draw['not_held'])} more "
            f"overflow at their precision, {len(of_draw['refused'])} were refused."
        )
    return "\n".join([markdown_table(header, rows, words=3), "", *counts, f"`{figures['command']}`"])


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """Return the table, by the name of its marks for these draws."""
    alone = [f"-{name}" for name in figures["draws"] if len(figures["draws"]) == 1]
    return {"".join(["false-alarms", *alone]): table(figures)}


EXPERIMENT = Experiment("false_alarms.json", measure, tables, variant="drawn", threads=torch.get_num_threads)
