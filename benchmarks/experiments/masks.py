"""Attention whose mask hides most scores, compared with all peers, with the limit of the machine and with requirements.

`python -m benchmarks run masks` measures attention without weights, under masks of several kinds, over 1,024 to 16,384
tokens, and whole models of 4,096 tokens. It writes `benchmarks/results/masks.json`, and exits with 1 if a requirement
is not met. The limit is the share of the products that a mask leaves, at the speed of the fastest attention without a
mask, which is that of eager or of one of the bundle's backends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from attnforge.atomic import temporary_folder
from attnforge.bench.experiment import Experiment as Bench
from attnforge.bench.experiment import finished
from attnforge.bench.results import Growth, Model, Results
from attnforge.bench.run import measure as measure_bundles
from attnforge.bench.run import new_results
from attnforge.machine import processors
from attnforge.model.registry import Example
from benchmarks.experiment import OF_LIMIT, Claim, Experiment, claims_table, say, where
from benchmarks.experiments.suite import measured_growth
from benchmarks.growth import growth_table
from benchmarks.published import CALLABLE, Published

TOKENS = (1024, 2048, 4096, 8192, 16384)
EXAMPLE, HEADS, HEAD_SIZE = 4096, 8, 64
WINDOW = 256

IN_TORCH = ("eager", "torch-compile", "flex-attention")
"""Peers that run 16,384 tokens; others would materialise all scores, 8 GiB, several times."""

GROWING = ("onnxruntime-cpu",)
"""The bundle's backend whose growth is measured."""

PEERS = (*IN_TORCH, "onnxruntime-plain", "onnxruntime-optimizer", "ort-fusions", "openvino-plain", "openvino-static")


CHUNK, PREFIX = 512, 256

Seen = Callable[[Tensor, Tensor], Tensor]

MASKS: dict[str, Seen] = {
    "window": lambda query, key: (key <= query) & (key > query - WINDOW),
    "both sides": lambda query, key: (query - key).abs() <= WINDOW // 2,
    "chunks": lambda query, key: query // CHUNK == key // CHUNK,
    "prefix": lambda query, key: (key <= query) | (key < PREFIX),
    "causal": lambda query, key: key <= query,
    "no mask": lambda query, key: (query >= 0) & (key >= 0),
}
"""Whether a query sees a key, by their indices."""


class Bare(nn.Module):
    """Attention without weights under a mask of :data:`MASKS`."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor]:
        """Return attention of (batch, heads, tokens, head size) tensors, in the same shape."""
        attend = nn.functional.scaled_dot_product_attention
        if self.mask in ("causal", "no mask"):
            return {"out": attend(query, key, value, is_causal=self.mask == "causal")}
        index = torch.arange(query.shape[2])
        return {"out": attend(query, key, value, attn_mask=MASKS[self.mask](index[:, None], index))}

    def with_flex_attention(self) -> nn.Module:
        """Return the same attention through torch's compiled `flex_attention`, which skips hidden blocks."""
        return Flexed(self.mask)


class Flexed(nn.Module):
    """:class:`Bare` through `flex_attention`."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        from torch.nn.attention.flex_attention import flex_attention

        self.mask = mask
        self.attend: Any = torch.compile(flex_attention, dynamic=False)
        self.blocks: dict[int, Any] = {}

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor]:
        """See :meth:`Bare.forward`."""
        from torch.nn.attention.flex_attention import create_block_mask

        tokens, is_seen = query.shape[2], MASKS[self.mask]
        if tokens not in self.blocks:
            self.blocks[tokens] = create_block_mask(
                lambda batch, head, query, key: is_seen(query, key), None, None, tokens, tokens, device="cpu"
            )
        return {"out": self.attend(query, key, value, block_mask=self.blocks[tokens])}


def bare(mask: str, most: int = max(TOKENS)) -> Example:
    """Return attention under a mask: 8 heads of 64, 1 to `most` tokens, 4,096 in the example."""
    tokens = torch.export.Dim("tokens", min=1, max=most)
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(torch.randn(1, HEADS, EXAMPLE, HEAD_SIZE, generator=generator) for _ in range(3))
    return Example(Bare(mask), inputs, {name: {2: tokens} for name in ("query", "key", "value")})


window, both_sides, chunks = partial(bare, "window"), partial(bare, "both sides"), partial(bare, "chunks")
prefix, causal, no_mask = partial(bare, "prefix"), partial(bare, "causal"), partial(bare, "no mask")


@dataclass(frozen=True)
class Subject:
    """A measured model, and its limits.

    Attributes:
        model: a published model, or a callable.
        mask: of :data:`MASKS`; None for whole models.
        precision: of the bundle.
        ratios: maximum time of `auto` relative to the fastest peer, by number of tokens.
        peers: peers by number of tokens.
        exponents: maximum exponents of time and memory over tokens; None if growth is not measured.
        extra_mib: maximum MiB that a call adds at the largest number of tokens.
    """

    model: Published
    ratios: Mapping[int, float]
    peers: Mapping[int, Sequence[str]]
    mask: str | None = None
    precision: str = "fp32"
    exponents: tuple[float, float] | None = None
    extra_mib: float | None = None


_WHOLE = {"batch": 1, "tokens": EXAMPLE, "max_tokens": EXAMPLE, "dynamic": "tokens"}
_OTHERS = ("eager", "onnxruntime-plain", "ort-fusions", "openvino-plain")

FASTEST = 0.85
"""Maximum time of attention under a mask that leaves little, relative to the fastest peer."""


def _bare(
    mask: str, ratios: Mapping[int, float], peers: Sequence[str] = IN_TORCH, precision: str = "fp32", **limits: Any
) -> Subject:
    name, source = mask if precision == "fp32" else f"{mask}, {precision}", mask.replace(" ", "_")
    by_tokens = {tokens: peers if tokens == EXAMPLE else [p for p in peers if p in IN_TORCH] for tokens in ratios}
    return Subject(Published(name, CALLABLE, f"{__name__}:{source}"), ratios, by_tokens, mask, precision, **limits)


SUBJECTS = (
    _bare("no mask", {EXAMPLE: inf, 16384: inf}, ("eager",)),
    _bare("window", {EXAMPLE: FASTEST}, PEERS, exponents=(1.15, 1.1)),
    _bare("both sides", {EXAMPLE: FASTEST}),
    _bare("chunks", {EXAMPLE: FASTEST}),
    _bare("prefix", {EXAMPLE: FASTEST}),
    _bare("causal", {EXAMPLE: 0.9, 16384: 0.9}, PEERS, exponents=(inf, 1.1), extra_mib=64),
    _bare("no mask", {EXAMPLE: inf, 16384: inf}, ("eager",), precision="bf16"),
    _bare("causal", {EXAMPLE: 0.9, 16384: 0.9}, PEERS, precision="bf16"),
    Subject(
        Published("ModernBERT-base", "encoder", "ModernBertModel", {}, _WHOLE), {EXAMPLE: 0.7}, {EXAMPLE: _OTHERS}
    ),
    Subject(
        Published(
            "Mistral, 12 layers, window of 512", "decoder", "MistralForCausalLM",
            {
                "hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 12, "num_attention_heads": 8,
                "num_key_value_heads": 2, "vocab_size": 8000, "sliding_window": 512, "max_position_embeddings": EXAMPLE,
            },
            _WHOLE,
        ),
        {EXAMPLE: 0.7},
        {EXAMPLE: _OTHERS},
    ),
)  # fmt: skip


def measure(subject: Subject, rounds: Annotated[int, typer.Option(help="Timed rounds per contender.")] = 9) -> Results:
    """Measure the times of a subject, and how its time and memory grow."""
    measured, start = new_results("", processors(), say, with_ceilings=False), time.perf_counter()
    with temporary_folder() as folder:
        bundle = subject.model.deployed(folder, precision=subject.precision)
        bench = Bench(
            [bundle], None, (), rounds, processors(), throughput=False, starts=False, memory=False, cases=False,
            trust_source=True, seconds=120, progress=say,
        )  # fmt: skip
        for tokens, peers in subject.peers.items():
            bench.against = peers
            model = measure_bundles(bench, {"tokens": tokens}, None)
            for made in model.deployed:  # from a temporary folder
                made.source = made.source.replace(f"{folder}/", "")
            measured.models.append(model)
        if subject.exponents is not None:
            bench.against, bench.memory, bench.fresh_peers = ("eager",), True, ()
            bench.backends = GROWING
            points = {tokens: (bundle, {"tokens": tokens}) for tokens in TOKENS}
            measured.growth.append(measured_growth(bench, "tokens", points))
    return finished(measured, start)


# --- results ----------------------------------------------------------------------------------------------------------


def claims(figures: dict[str, Any]) -> Iterator[Claim]:
    """Yield a claim for every figure with a limit."""
    measured = Results.model_validate(figures)
    for subject in SUBJECTS:
        for model in measured.models:
            if model.name == subject.model.name and subject.ratios[model.sizes["tokens"]] < inf:
                yield from _ratio(model, subject.ratios[model.sizes["tokens"]])
                yield from _of_limit(subject, model, measured.models)
        for growth in measured.growth:
            if growth.model == subject.model.name and subject.exponents is not None:
                yield from _growth(growth, subject)


def _ratio(model: Model, most: float) -> Iterator[Claim]:
    """Yield the claim about the backend that `auto` loads, relative to the fastest peer that is right."""
    peers = {c.name: c.ratio.value for c in model.contenders if not c.ours and c.ratio is not None and not c.wrong_in}
    if peers:
        fastest = min(peers, key=lambda name: peers[name])
        of = f"{model.name}, {model.sizes['tokens']:,} tokens"
        yield Claim(f"{of}: time, of the fastest peer's", 1 / peers[fastest], most, fastest)


def _of_limit(subject: Subject, model: Model, models: Sequence[Model]) -> Iterator[Claim]:
    """Yield the claim about the time of the backend that `auto` loads, relative to the limit's."""
    tokens = model.sizes["tokens"]
    (unmasked, *_) = (s.model.name for s in SUBJECTS if s.mask == "no mask" and s.precision == subject.precision)
    whole = [each for each in models if each.name == unmasked and each.sizes["tokens"] == tokens]
    ours = [contender.latency.median.value for contender in model.contenders if contender.picked]
    if subject.mask is not None and whole and ours:
        index = torch.arange(tokens)
        left = int(MASKS[subject.mask](index[:, None], index).sum()) / tokens**2
        best = min(contender.latency.median.value for contender in whole[0].contenders if not contender.wrong_in)
        yield Claim(f"{model.name}, {tokens:,} tokens: time, of the limit's", ours[0] / (left * best), 1 / OF_LIMIT)


def _growth(growth: Growth, subject: Subject) -> Iterator[Claim]:
    """Yield the claims about growth of the deployed model on ONNX Runtime, and about the memory of its largest call."""
    assert subject.exponents is not None
    (series,) = (series for series in growth.series if series.name == "onnxruntime-cpu")
    for quantity, law, most in zip(("time", "memory"), (series.time, series.memory), subject.exponents, strict=True):
        if law is not None and most != inf:
            yield Claim(f"{subject.model.name}: p of {quantity} ~ tokensᵖ", law.exponent.value, most)
    last = series.extra_mib[-1] if series.extra_mib else None
    if subject.extra_mib is not None and last is not None:
        yield Claim(f"{subject.model.name}, {TOKENS[-1]:,} tokens: MiB added per call", last, subject.extra_mib)


def table(figures: dict[str, Any]) -> str:
    """Return the claims, and how time and memory grow, as Markdown."""
    grown = [f"{growth.model}\n\n{growth_table(growth)}" for growth in Results.model_validate(figures).growth]
    return "\n\n".join([claims_table(claims(figures)), *grown, where(figures)])


EXPERIMENT = Experiment(
    "masks.json", measure, {"masks": table}, claims, subjects={subject.model.name: subject for subject in SUBJECTS}
)
