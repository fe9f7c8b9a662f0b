"""TensorRT-RTX plans of models whose masks hide most scores: every site must be fused, without needless scores.

`python -m benchmarks run mask-plans` builds fp16 plans of whole models of 4,096 tokens, needs no GPU, and
writes `benchmarks/results/mask_plans.json`. Kernels are counted in plans of dynamic and of static tokens, scores by the
shapes of the layers' tensors in plans of static tokens. It exits with 1 if a limit is exceeded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from math import inf, prod
from typing import Annotated, Any

import onnx_ir as ir
import typer

from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.graphs.sizes import shape_at
from attnforge.export.masks.visibility import visibility
from attnforge.export.sources.torch_module import Captured, capture
from attnforge.export.tensorrt.build import Plan
from attnforge.export.tensorrt.process import Layer
from attnforge.precision import precision_named
from benchmarks.experiment import Claim, Columns, Experiment, table_of, where
from benchmarks.experiments.masks import SUBJECTS
from benchmarks.published import CALLABLE, Published
from benchmarks.rtx import compiled

TOKENS = 4096
MOST_OF_NEEDED, MOST_OF_ALL = 1.3, 0.65
"""Maximum scores of a window, relative to the needed ones; and of causal attention, relative to all n²."""

_WHOLE = [subject.model for subject in SUBJECTS if subject.model.kind != CALLABLE]
_MISTRAL = next(model for model in _WHOLE if model.name.startswith("Mistral"))
MODELS = (
    *_WHOLE,
    replace(
        _MISTRAL,
        name="Llama, 12 layers, causal",
        architecture="LlamaForCausalLM",
        sizes={name: size for name, size in _MISTRAL.sizes.items() if name != "sliding_window"},
    ),
)


@dataclass(frozen=True)
class Attended:
    """Sites of a model that have the same mask.

    Attributes:
        mask: what is proved about it.
        sites: number of sites with it.
        fused, fused_dynamic: number of these that are fused, in plans of static and dynamic tokens.
        scores: scores that the layers of a site compute, over all heads; None if the plan does not show them.
        needed: scores that the mask does not hide.
        whole: scores of all queries and keys.
    """

    mask: str
    sites: int
    fused: int
    fused_dynamic: int
    scores: int | None
    needed: int
    whole: int

    @property
    def limit(self) -> float | None:
        """Maximum scores that a site may compute; None if the mask hides no keys."""
        if self.needed == self.whole:
            return None
        # of a window, which is less than half of all pairs, a share of what it needs
        return MOST_OF_NEEDED * self.needed if self.needed < self.whole / 2 else MOST_OF_ALL * self.whole

    @property
    def keeps(self) -> bool:
        """Whether every site is fused and within its limit."""
        within = self.limit is None or (self.scores is not None and self.scores <= self.limit)
        return self.fused == self.fused_dynamic == self.sites and within


def measure(
    model: Published,
    layers: Annotated[int | None, typer.Option(help="Layers of each model (default: the model's number).")] = None,
) -> list[dict[str, Any]]:
    """Build a model's plans, and count fused sites and scores."""
    return [asdict(attended) for attended in attended_in(model, layers)]


def attended_in(model: Published, layers: int | None = None, tokens: int = TOKENS) -> list[Attended]:
    """Return how TensorRT-RTX compiles every mask of a model in fp16.

    Args:
        model: the model, with random weights.
        layers: number of layers; by default the model's.
        tokens: tokens of the example, and the maximum.
    """
    if layers is not None:
        model = replace(model, sizes={**model.sizes, "num_hidden_layers": layers})
    _, fused_dynamic = plan_of(captured_as(model, tokens, "tokens"), tokens)
    needed, fused = plan_of(captured_as(model, tokens, "none"), tokens)
    sites_of: dict[Needed, list[str]] = {}
    for site, of_site in needed.items():
        sites_of.setdefault(of_site, []).append(site)
    attended = []
    for (mask, needs, whole), sites in sites_of.items():
        counts = [count for site in sites if (count := fused.get(site)) is not None]
        attended.append(
            Attended(
                mask=mask, sites=len(sites), fused=sum(site in fused for site in sites),
                fused_dynamic=sum(site in fused_dynamic for site in sites),
                scores=max(counts) if len(counts) == len(sites) else None, needed=needs, whole=whole,
            )
        )  # fmt: skip
    return attended


Needed = tuple[str, int, int]
"""The proved description of a mask; the scores that it does not hide; and all scores."""


def captured_as(model: Published, tokens: int, dynamic: str) -> Captured:
    """Capture a model in fp16, with one sample of `tokens` tokens in the example, and dynamic `tokens` or no dynamic
    dims (`none`)."""
    options: dict[str, str | int] = {"batch": 1, "tokens": tokens, "max_tokens": tokens, "dynamic": dynamic}
    return capture(*model.example(**options), precision_named("fp16"))


def plan_of(captured: Captured, tokens: int) -> tuple[dict[str, Needed], dict[str, int | None]]:
    """Return what every site needs, and the scores that every fused site computes in the plan; None if the plan does
    not show them."""
    model, sizes = captured.model, {"tokens": tokens}
    sites = canonicalize(model).sites
    nodes = {node.name: node for node in model.graph if node.op_type == "Attention"}
    needed = {site.name: _needed(nodes[site.node], sizes) for site in sites if site.node is not None}
    lowered, plan = compiled(model, sites, captured.inputs, "fp16", sizes)
    fused = [form for form in lowered if plan.kernel_of(form.node) is not None]
    return needed, {form.site: scores_of(plan, form.node) for form in fused}


def scores_of(plan: Plan, node: str) -> int | None:
    """Return the number of scores that the fused layers of a fused ONNX node compute together; None if a layer's
    tensors do not show it, as with dynamic dims."""
    names = {*plan.layers_of(node)}
    counts = [scores_of_layer(each) for each in plan.layers if each.name in names and each.is_fused_attention]
    return None if None in counts else sum(count for count in counts if count is not None)


def scores_of_layer(layer: Layer) -> int | None:
    """Return the number of scores that a fused attention layer computes, from its tensors: from three inputs `(…,
    queries, d_k)`, `(…, d_k, keys)` and `(…, keys, d_v)` it computes `(heads, queries, d_v)`. If the inputs can be
    assigned in two ways, the larger number; None if a dim is dynamic, or the tensors do not match."""
    if not layer.is_fused_attention or len(layer.outputs) != 1:
        return None
    *heads, queries, d_v = layer.outputs[0]
    keys = [
        value[-2]
        for query, key, value in permutations([x for x in layer.inputs if len(x) > 2], 3)
        if query[-2] == queries and query[-1] == key[-2] and key[-1] == value[-2] and value[-1] == d_v
    ]
    dims = [*heads, queries, max(keys, default=-1)]
    return None if min(dims) < 0 else prod(dims)


def _needed(node: ir.Node, sizes: Mapping[str, int]) -> Needed:
    (batch, heads, n_q, _), (_, _, n_k, _) = (shape_at(value, sizes) for value in node.inputs[:2])
    seen, whole = visibility(node), batch * heads * n_q * n_k
    return seen.text(), round(seen.share(sizes) * whole), whole


COLUMNS: Columns = {
    "model": "{model}".format_map,
    "mask": "{mask}".format_map,
    "sites": "{sites}".format_map,
    "fused, static tokens": "{fused}".format_map,
    "fused, dynamic": "{fused_dynamic}".format_map,
    "scores of those needed": lambda mask: f"{mask['scores'] / mask['needed']:.2f}",
    "of n²": lambda mask: f"{mask['scores'] / mask['whole']:.3f}",
    "kept": "{kept}".format_map,
}


def table(figures: dict[str, Any]) -> str:
    """Return how every mask is compiled, as Markdown."""
    rows = [
        {**asdict(mask), "model": model, "kept": "yes" if mask.keeps else "**no**"} for model, mask in _masks(figures)
    ]
    about = f"TensorRT-RTX {figures['tools'].get('tensorrt_rtx', '?')}"
    return f"{table_of(COLUMNS, rows, 2, '?')}\n\n{about}; {where(figures)}"


def _masks(figures: dict[str, Any]) -> Iterator[tuple[str, Attended]]:
    for model, masks in figures["models"].items():
        yield from ((model, Attended(**mask)) for mask in masks)


def claims(figures: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims about sites that are not fused, and about computed scores."""
    for model, mask in _masks(figures):
        of = f"{model}, {mask.mask}"
        yield Claim(f"{of}: sites that are not fused", 2 * mask.sites - mask.fused - mask.fused_dynamic, 0)
        if mask.limit is not None:
            yield Claim(f"{of}: scores", inf if mask.scores is None else mask.scores, mask.limit)


EXPERIMENT = Experiment(
    "mask_plans.json", measure, {"mask-plans": table}, claims, subjects={model.name: model for model in MODELS}
)
