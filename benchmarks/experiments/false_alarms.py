"""How often `verify` rejects what is right: models drawn at random, deployed, and held to the budget.

`python -m benchmarks run false-alarms` writes `benchmarks/results/false_alarms.json`. Models are drawn
twice: usual ones (:mod:`tests.support.random_models`), and ones whose inputs are hostile
(:mod:`tests.support.hostile_models`). Every model is deployed for ONNX Runtime and verified. For a 16-bit
model the plan of TensorRT-RTX is judged too, emulated without a GPU (:mod:`attnforge.export.precision.emulation`).
`--draw int8` puts the products of the usual models in 8 bits, and writes `benchmarks/results/false_alarms_int8.json`.
`--draw decoder` deploys random decoders (:mod:`tests.support.random_decoders`) with a cache, holds them
to the budget in every order of their tokens, and writes `benchmarks/results/false_alarms_decoder.json`.

A model that its precision does not hold, so that eager overflows on ordinary inputs, is rejected by rule
(:mod:`attnforge.runtime.parity.budget`). Such models are counted apart, as are models that deploy refuses.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import onnx_ir as ir
import torch
import typer

import attnforge
from attnforge.arrays import is_floating
from attnforge.bundle import CANONICAL, REFERENCE_OUTPUTS, Bundle, Manifest
from attnforge.errors import AttnforgeError, UnavailableError
from attnforge.export.diagnosis.stages import sites_of
from attnforge.export.graphs.saving import load_graph, save
from attnforge.export.lowering import tensorrt as for_tensorrt
from attnforge.export.precision.emulation import emulate
from attnforge.export.tensorrt.build import Plan, build
from attnforge.model.registry import Example
from attnforge.precision import PRECISIONS, precision_named
from attnforge.report.render import markdown_table
from attnforge.runtime import cases as reference
from attnforge.runtime.parity.budget import judge
from attnforge.runtime.parity.comparison import Comparison
from attnforge.runtime.parity.verify import stored_inputs
from benchmarks.experiment import Experiment, say
from benchmarks.published import deployed
from tests.support.hostile_models import draw_hostile, make_hostile
from tests.support.random_decoders import draw_decoder, make_decoder, places_of
from tests.support.random_models import Recipe, draw, make

MAX_ERROR = 0.9
"""What quantising may cost a random model: whether the deployment is the quantised model is asked here, not whether
that is a good one."""

QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


Draw = Literal["usual", "hostile", "int8", "decoder"]


def draw_in_8_bits(seed: int) -> Recipe:
    """A usual model's recipe, with its products in 8 bits."""
    return replace(draw(seed), precision="int8")


DRAWS: Mapping[Draw, tuple[Callable[[int], Recipe], Callable[[Recipe], Example]]] = {
    "usual": (draw, make),
    "hostile": (draw_hostile, make_hostile),
    "int8": (draw_in_8_bits, make),
    "decoder": (draw_decoder, make_decoder),
}
"""By name, what draws recipes and what makes their models."""


def measure(
    count: Annotated[int, typer.Option(help="How many models of each draw to deploy.")] = 200,
    first: Annotated[int, typer.Option(help="The first seed; the others follow it.")] = 0,
    drawn: Annotated[Draw | None, typer.Option("--draw", help="What to draw alone; else usual and hostile.")] = None,
) -> dict[str, Any]:
    """What became of the seeds of every draw."""
    outcomes: dict[Draw, list[Outcome]] = {}
    for name in (drawn,) if drawn is not None else ("usual", "hostile"):
        recipe_of, model_of = DRAWS[name]
        for seed in range(first, first + count):
            outcomes.setdefault(name, []).append(outcome := tried(recipe_of(seed), model_of))
            say(f"{name} {outcome.text()}")
    return figures_of(outcomes, first, count)


@dataclass
class Outcome:
    """What became of one recipe.

    Attributes:
        recipe: the recipe.
        refused: why it was not deployed; None where it was.
        wrong: why deploy would have refused it as wrong, which is a false alarm as well; None where it would not.
        comparisons: one for every output of every case, by what ran: `onnxruntime` or `tensorrt, emulated`.
    """

    recipe: Recipe
    refused: str | None = None
    wrong: str | None = None
    comparisons: dict[str, list[Comparison]] = field(default_factory=dict)

    @property
    def not_held(self) -> bool:
        """Whether eager's precision does not hold the model on ordinary inputs."""
        every = (c for comparisons in self.comparisons.values() for c in comparisons)
        return any("overflows: NaN or infinity" in (c.reason or "") for c in every)

    @property
    def rejected(self) -> dict[str, list[str]]:
        """What was said of comparisons that failed, by what ran; that of a model that is not held does not count."""
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
            return f"{name}: not held"
        margins = ", ".join(f"{what} {max(map(margin, cs), default=0.0):.2f}" for what, cs in self.comparisons.items())
        reasons = "; ".join(reason for reasons in self.rejected.values() for reason in reasons)
        return f"{name}: {margins}" + (f"; REJECTED {asdict(self.recipe)}: {reasons}" if reasons else "")


def tried(recipe: Recipe, make: Callable[[Recipe], Example] = make) -> Outcome:
    """Deploy the model of a recipe and hold it to the budget.

    Args:
        recipe: of a model.
        make: makes it.
    """
    outcome = Outcome(recipe)
    with tempfile.TemporaryDirectory() as folder:
        try:
            bundle = deployed(
                make(recipe), Path(folder) / "b", recipe.kind, precision=recipe.precision, tune=False, cache=False,
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
            outcome.comparisons["tensorrt, emulated"] = list(emulated(bundle))
    return outcome


def emulated(bundle: Bundle) -> Iterator[Comparison]:
    """The comparisons of a 16-bit bundle's graph as TensorRT-RTX compiles it, 16-bit storage emulated. What kernels
    store is read off the plan, which needs no GPU to be built; without TensorRT-RTX, every result counts as stored."""
    manifest, precision = bundle.manifest, precision_named(bundle.manifest.precision)
    model = load_graph(bundle, CANONICAL)
    lowered = for_tensorrt.lower(model, sites_of(manifest.attention)).sites
    plan = _plan(model, manifest)
    fused = [s.site for s in lowered if (s.unfused is None if plan is None else plan.kernel_of(s.node) is not None)]
    run = emulate(model, fused, plan)
    stored, outputs = stored_inputs(bundle), bundle.tensors(REFERENCE_OUTPUTS)
    for case in manifest.cases:
        for name, array in run(reference.make_inputs(case, manifest.inputs, stored)).items():
            eager, truth = (outputs[reference.key(case, name, which)] for which in ("eager", "float64"))
            stored_as = array.astype(precision.dtype) if is_floating(array) else array
            yield judge(case, name, reference.sampled(stored_as, case), eager, truth, precision)


def _plan(model: ir.Model, manifest: Manifest) -> Plan | None:
    """The plan of TensorRT-RTX; None where TensorRT-RTX is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        save(model, file)
        try:
            return build(file, "tensorrt_rtx", manifest.inputs, manifest.precision)
        except UnavailableError:
            return None


def margin(comparison: Comparison) -> float:
    """The share of its budget that an output takes up: above 1 it fails."""
    largest = comparison.max_error / comparison.max_budget if comparison.max_budget else float(comparison.max_error > 0)
    return max(comparison.error / comparison.budget, largest)


def figures_of(outcomes: Mapping[Draw, Sequence[Outcome]], first: int, count: int) -> dict[str, Any]:
    """What became of `count` seeds of every draw, from `first` on."""
    draws = {name: summary(of_draw) for name, of_draw in outcomes.items()}
    return {"seeds": [first, first + count - 1], "draws": draws}


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts, margins over all cases, and every rejection with its recipe."""
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
    """The figures as Markdown."""
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
            f"that their precision does not hold, {len(of_draw['refused'])} that were refused."
        )
    return "\n".join([markdown_table(header, rows, words=3), "", *counts, f"`{figures['command']}`"])


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """The table, by the name that its place has for these draws."""
    alone = [f"-{name}" for name in figures["draws"] if len(figures["draws"]) == 1]
    return {"".join(["false-alarms", *alone]): table(figures)}


EXPERIMENT = Experiment("false_alarms.json", measure, tables, variant="drawn", threads=torch.get_num_threads)
