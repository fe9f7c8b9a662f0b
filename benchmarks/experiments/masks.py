"""Attention of which a mask hides most, against every other way to run it, held to limits.

`python -m benchmarks.experiments.masks` measures attention without weights, to the last 256 tokens and causal,
over 1,024 to 16,384 tokens, and whole models of 4,096 tokens. It writes `benchmarks/results/masks.json`, and ends with
1 where a limit is broken.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor, nn

import attnforge
from attnforge.bench import results as files
from attnforge.bench.experiment import Experiment
from attnforge.bench.results import Growth, Model, Results
from attnforge.bench.run import finished, measure, new_results
from attnforge.bench.tables import growth_table
from attnforge.bundle import Bundle
from attnforge.export.sources.named import build
from attnforge.machine import processors
from attnforge.model.registry import Example
from attnforge.report.render import markdown_table
from benchmarks.experiments.suite import measured_growth
from benchmarks.publish import RESULTS, show
from benchmarks.published import Published

COMMAND = "python -m benchmarks.experiments.masks"
FILE = RESULTS / "masks.json"

TOKENS = (1024, 2048, 4096, 8192, 16384)
EXAMPLE, HEADS, HEAD_SIZE = 4096, 8, 64
WINDOW = 256

IN_TORCH = ("eager", "torch-compile", "flex-attention")
"""Peers that run 16,384 tokens; others would hold all scores, 8 GiB, several times."""

FRUGAL = ("onnxruntime-cpu",)
"""The bundle's backend that runs as many."""

PEERS = (*IN_TORCH, "onnxruntime-plain", "onnxruntime-optimizer", "ort-fusions", "openvino-plain", "openvino-static")


class Bare(nn.Module):
    """Attention without weights: to the last :data:`WINDOW` keys, or to all that are not later."""

    def __init__(self, is_window: bool) -> None:
        super().__init__()
        self.is_window = is_window

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor]:
        """Attention of (batch, heads, tokens, head size) tensors; the result is of the same shape."""
        attend = nn.functional.scaled_dot_product_attention
        if not self.is_window:
            return {"out": attend(query, key, value, is_causal=True)}
        index = torch.arange(query.shape[2])
        queries = index[:, None]
        return {"out": attend(query, key, value, attn_mask=(index <= queries) & (index > queries - WINDOW))}

    def with_flex_attention(self) -> nn.Module:
        """The same through torch's compiled `flex_attention`, which skips blocks that the mask hides."""
        return Flexed(self.is_window)


class Flexed(nn.Module):
    """:class:`Bare` through `flex_attention`."""

    def __init__(self, is_window: bool) -> None:
        super().__init__()
        from torch.nn.attention.flex_attention import flex_attention

        self.is_window = is_window
        self.attend: Any = torch.compile(flex_attention, dynamic=False)
        self.blocks: dict[int, Any] = {}

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor]:
        """As :meth:`Bare.forward`."""
        from torch.nn.attention.flex_attention import create_block_mask

        tokens = query.shape[2]
        if tokens not in self.blocks:
            self.blocks[tokens] = create_block_mask(seen_by(self.is_window), None, None, tokens, tokens, device="cpu")
        return {"out": self.attend(query, key, value, block_mask=self.blocks[tokens])}


def seen_by(is_window: bool) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Which keys a query sees, as `flex_attention` asks for them: by batch, head, query and key."""

    def is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_causal = key <= query
        return is_causal & (key > query - WINDOW) if is_window else is_causal

    return is_seen


def bare(is_window: bool) -> Example:
    """Eight heads of 64 over 1 to 16,384 tokens, 4,096 in the example."""
    tokens = torch.export.Dim("tokens", min=1, max=max(TOKENS))
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(torch.randn(1, HEADS, EXAMPLE, HEAD_SIZE, generator=generator) for _ in range(3))
    return Example(Bare(is_window), inputs, {name: {2: tokens} for name in ("query", "key", "value")})


def window() -> Example:
    """Attention to the last 256 tokens."""
    return bare(is_window=True)


def causal() -> Example:
    """Causal attention."""
    return bare(is_window=False)


@dataclass(frozen=True)
class Subject:
    """What is measured, and its limits.

    Attributes:
        model: a published one, or the name of a callable as :func:`attnforge.export.sources.named.build` takes it.
        ratios: by the number of tokens, the most of the fastest peer's time that `auto` may take.
        peers: by the number of tokens.
        exponents: the most of time and memory over tokens; None where growth is not measured.
        extra_mib: the most that a call may add at the most tokens.
    """

    model: Published | str
    ratios: Mapping[int, float]
    peers: Mapping[int, Sequence[str]]
    exponents: tuple[float, float] | None = None
    extra_mib: float | None = None

    @property
    def name(self) -> str:
        """The model's."""
        return self.model.name if isinstance(self.model, Published) else self.model.rpartition(":")[2]


_WHOLE = {"batch": 1, "tokens": EXAMPLE, "max_tokens": EXAMPLE, "dynamic": "tokens"}
_OTHERS = ("eager", "onnxruntime-plain", "ort-fusions", "openvino-plain")

_HERE = "benchmarks.experiments.masks"
SUBJECTS = (
    Subject(f"{_HERE}:window", {EXAMPLE: 0.30}, {EXAMPLE: PEERS}, exponents=(1.15, 1.1)),
    Subject(
        f"{_HERE}:causal",
        {EXAMPLE: 0.70, 16384: 0.65},
        {EXAMPLE: PEERS, 16384: IN_TORCH},
        exponents=(inf, 1.1),
        extra_mib=64,
    ),
    Subject(
        Published("ModernBERT-base", "encoder", "ModernBertModel", {}, _WHOLE),
        {EXAMPLE: 0.7},
        {EXAMPLE: _OTHERS},
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


def main(
    results: Annotated[Path, typer.Option(help="Where to write the figures.")] = FILE,
    only: Annotated[list[str] | None, typer.Option(help="A model; repeat. The others keep their figures.")] = None,
    rounds: Annotated[int, typer.Option(help="How often every contender has a turn.")] = 9,
) -> None:
    """Measure, write the figures, and end with 1 where a limit is not kept."""
    console = Console(stderr=True)
    names = [subject.name for subject in SUBJECTS]
    if unknown := [name for name in only or () if name not in names]:
        raise typer.BadParameter(f"no model is called {unknown[0]!r}; there are {', '.join(names)}")
    start = time.perf_counter()

    def say(stage: str) -> None:
        console.print(f"{time.perf_counter() - start:6.0f} s  {stage}", style="dim", highlight=False, markup=False)

    measured = new_results(COMMAND, processors(), say, with_ceilings=False)
    if only and results.is_file():
        before = files.read(results)
        measured.models = [model for model in before.models if model.name not in only]
        measured.growth = [growth for growth in before.growth if growth.model not in only]
    for subject in SUBJECTS:
        if not only or subject.name in only:
            with tempfile.TemporaryDirectory() as folder:
                bundle = deployed(subject, Path(folder), say)
                experiment = Experiment(
                    [bundle], None, (), rounds, processors(), throughput=False, starts=False, memory=False, cases=False,
                    trust_source=True, seconds=120, progress=say,
                )  # fmt: skip
                for tokens, peers in subject.peers.items():
                    experiment.against = peers
                    experiment.backends = None if tokens <= EXAMPLE else FRUGAL
                    measured.models.append(measure(experiment, {"tokens": tokens}, None))
                if subject.exponents is not None:
                    experiment.against, experiment.memory, experiment.fresh_peers = ("eager",), True, ()
                    experiment.backends = FRUGAL
                    points = {tokens: (bundle, {"tokens": tokens}) for tokens in TOKENS}
                    measured.growth.append(measured_growth(experiment, "tokens", points))
            files.write(finished(measured, start), results)
    show(results, table)
    raise typer.Exit(bool(broken(files.read(results))))


def deployed(subject: Subject, folder: Path, say: Callable[[str], None]) -> Bundle:
    """The bundle of a subject, deployed as `attnforge deploy` does."""
    say(f"deploy {subject.name}")
    model = subject.model
    name, options = (model.source(folder), model.options) if isinstance(model, Published) else (model, {})
    example, source = build(name, dict(options), None)
    module, args, shapes = example
    return attnforge.deploy(
        module, args, folder / "bundle", shapes, targets=["onnxruntime"], name=subject.name, cache=False, source=source
    )


# --- what came out ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """A figure and its limit.

    Attributes:
        what: is limited.
        of: the model, and how many tokens.
        value: measured.
        most: the limit.
        against: what it was measured against.
    """

    what: str
    of: str
    value: float
    most: float
    against: str = ""


def claims(measured: Results) -> list[Claim]:
    """Every figure that has a limit."""
    found = []
    for subject in SUBJECTS:
        for model in measured.models:
            if model.name == subject.name:
                found += _ratio(model, subject.ratios[model.sizes["tokens"]])
        for growth in measured.growth:
            if growth.model == subject.name and subject.exponents is not None:
                found += _growth(growth, subject)
    return found


def _ratio(model: Model, most: float) -> list[Claim]:
    """What `auto` loads, against the fastest peer that is right."""
    peers = {c.name: c.ratio.value for c in model.contenders if not c.ours and c.ratio is not None and not c.wrong_in}
    if not peers:
        return []
    fastest = min(peers, key=lambda name: peers[name])
    of = f"{model.name}, {model.sizes['tokens']:,} tokens"
    return [Claim("time, of the fastest peer's", of, 1 / peers[fastest], most, fastest)]


def _growth(growth: Growth, subject: Subject) -> list[Claim]:
    """The laws of what is deployed on ONNX Runtime, and the memory of its largest call."""
    assert subject.exponents is not None
    (series,) = (series for series in growth.series if series.name == "onnxruntime-cpu")
    laws = zip(("time", "memory"), (series.time, series.memory), subject.exponents, strict=True)
    found = [
        Claim(f"{what} ~ tokens^", subject.name, law.exponent.value, most)
        for what, law, most in laws
        if law is not None and most != inf
    ]
    last = series.extra_mib[-1] if series.extra_mib else None
    if subject.extra_mib is not None and last is not None:
        found.append(Claim("MiB that a call adds", f"{subject.name}, {TOKENS[-1]:,} tokens", last, subject.extra_mib))
    return found


def broken(measured: Results) -> list[Claim]:
    """The limits that are not kept."""
    return [claim for claim in claims(measured) if claim.value > claim.most]


def table(figures: dict[str, Any]) -> str:
    """What is limited, and how time and memory grow, as Markdown."""
    measured = Results.model_validate(figures)
    header = ("model", "limited", "against", "measured", "at most", "kept")
    rows = [
        (
            claim.of,
            claim.what,
            claim.against,
            f"{claim.value:.2f}",
            f"{claim.most:g}",
            "yes" if claim.value <= claim.most else "no",
        )
        for claim in claims(measured)
    ]
    about = measured.environment
    where = f"{about.machine.processor}, {about.threads} threads; `{measured.command}`"
    grown = [f"{growth.model}\n\n{growth_table(growth)}" for growth in measured.growth]
    return "\n\n".join([markdown_table(header, rows, 3), *grown, where])


if __name__ == "__main__":
    typer.run(main)
