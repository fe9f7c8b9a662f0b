"""What a deploy may cost, held to its limits on models of real size.

`python -m benchmarks.experiments.deploy_costs` measures, of every model of :data:`LIMITS`: torch's plain export,
its opening and one comparison; a deploy with an empty cache; the same deploy again; and a verification. It writes
`benchmarks/results/deploy_costs.json`. Every step is a process of its own, and a ratio is of two steps of one run.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor, nn

from attnforge.export.measuring import MEASURING
from attnforge.machine import processors
from attnforge.model.registry import Example
from attnforge.report.render import markdown_table
from benchmarks.experiments.real_sizes import GIB, in_a_process, peak_of
from benchmarks.experiments.real_sizes_steps import Order
from benchmarks.publish import RESULTS, show, where, write_figures
from benchmarks.published import PUBLISHED, Published

COMMAND = "python -m benchmarks.experiments.deploy_costs"
FILE = RESULTS / "deploy_costs.json"

AGAIN = 1 / 3
"""Most time of a second tuned deploy of the same model, in the first one's; without the importing of libraries and the
making of the model, which both do."""

FLOAT = 4
"""Bytes of a parameter."""


@dataclass(frozen=True)
class Limit:
    """The most that deploying one model may cost.

    Attributes:
        model: a published one, or the name of a callable as :func:`attnforge.export.sources.named.build` takes it.
        tune: whether deploying measures forms and backends.
        targets: None for all that a machine without a GPU can build.
        ratio: time of a deploy, in the plain path's.
        seconds: time of a deploy.
        gib: memory of a deploy's largest process but for TensorRT's builder; None for the plain path's and twice the
            weights.
        verify_gib: memory of a verification.
    """

    model: Published | str
    tune: bool = True
    targets: tuple[str, ...] | None = None
    ratio: float = inf
    seconds: float = inf
    gib: float | None = None
    verify_gib: float = inf

    @property
    def name(self) -> str:
        """The model's."""
        return self.model.name if isinstance(self.model, Published) else self.model.rpartition(":")[2]

    @property
    def title(self) -> str:
        """Model and options."""
        return f"{self.name}, {self.how}"

    @property
    def how(self) -> str:
        """The options of the deploy, as the command line has them."""
        options = [] if self.tune else ["--no-tune"]
        return " ".join([*options, *(f"--target {target}" for target in self.targets or ())]) or "default"


class Causal(nn.Module):
    """Causal attention without weights."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor]:
        """Attention of (batch, heads, tokens, head size) tensors; the result is of the same shape."""
        return {"out": nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)}


def bare_causal_attention() -> Example:
    """Eight heads of 64 over 1 to 8,192 tokens, 4,096 in the example: the largest case has 537 million scores."""
    tokens = torch.export.Dim("tokens", min=1, max=8192)
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(torch.randn(1, 8, 4096, 64, generator=generator) for _ in range(3))
    return Example(Causal(), inputs, {name: {2: tokens} for name in ("query", "key", "value")})


_LLAMA = Published(
    "Llama, 1.1 billion parameters, 64 tokens", "decoder", "LlamaForCausalLM",
    {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
    },
    {"tokens": 64, "max_tokens": 64},
)  # fmt: skip
_USUAL = [
    model
    for model in PUBLISHED
    if model.name in ("vit-base-patch16-224", "bert-base-uncased", "dinov2-base at 224", "distilbert-base-uncased")
]

LIMITS = (
    *(Limit(model, ratio=6) for model in _USUAL),
    *(Limit(model, tune=False, targets=("onnxruntime",), ratio=3) for model in _USUAL),
    Limit(_LLAMA, targets=("onnxruntime",), ratio=6, gib=13, verify_gib=8),
    Limit("benchmarks.experiments.deploy_costs:bare_causal_attention", targets=("onnxruntime",), seconds=60, gib=1.5),
)


def main(
    results: Annotated[Path, typer.Option(help="Where to write the figures.")] = FILE,
    only: Annotated[list[str] | None, typer.Option(help="A model; repeat. The others keep their figures.")] = None,
) -> None:
    """Measure, write the figures after every model, and end with 1 where a limit is not kept."""
    console = Console()
    names = list(dict.fromkeys(limit.name for limit in LIMITS))
    if unknown := [name for name in only or () if name not in names]:
        raise typer.BadParameter(f"no model is called {unknown[0]!r}; there are {', '.join(names)}")
    records: dict[str, Any] = {}
    if only and results.is_file():
        records = json.loads(results.read_text(encoding="utf-8"))["models"]
    for limit in LIMITS:
        if not only or limit.name in only:
            console.print(f"{limit.title} …", style="dim", markup=False)
            records[limit.title] = measured(limit)
            write_figures(COMMAND, processors(), results, models=records)
    show(results, table)
    raise typer.Exit(any(_broken(limit, record) for limit, record in _pairs(records)))


def measured(limit: Limit) -> dict[str, Any]:
    """What every step gave, as :func:`benchmarks.experiments.real_sizes.in_a_process` has it."""
    model = limit.model
    record: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        order = Order(
            step="",
            model=model.source(folder) if isinstance(model, Published) else model,
            options=dict(model.options) if isinstance(model, Published) else {},
            bundle=str(folder / "bundle"),
            answer=str(folder / "answer.json"),
            tune=limit.tune,
            targets=None if limit.targets is None else list(limit.targets),
            cache=str(folder / "cache"),
        )
        for title, step in {"plain": "plain", "deploy": "deploy", "again": "deploy", "verify": "verify"}.items():
            record[title] = in_a_process(order.model_copy(update={"step": step}), 1800, 20 * GIB)
    return record


def _pairs(records: Mapping[str, Any]) -> list[tuple[Limit, dict[str, Any]]]:
    """Every limit with what was measured of its model."""
    return [(limit, records[limit.title]) for limit in LIMITS if limit.title in records]


def _broken(limit: Limit, record: Mapping[str, Any]) -> list[str]:
    """The limits that a model does not keep, each with what was measured."""
    plain, deploy, verify = (record[step] for step in ("plain", "deploy", "verify"))
    failed = [f"{step}: {record[step]['failed']}" for step in record if "failed" in record[step]]
    if failed:
        return failed
    costs = {
        "of the plain path's time": (deploy["seconds"] / plain["seconds"], limit.ratio),
        "s": (deploy["seconds"], limit.seconds),
        "GiB": (_gib(deploy), _most_gib(limit, record)),
        "GiB of a verification": (_gib(verify), limit.verify_gib),
        "of the first deploy's time, again": (_again(record), AGAIN if limit.tune else inf),
    }
    return [f"{cost:.2f} {name}, {most:.2f} at most" for name, (cost, most) in costs.items() if cost > most]


def _again(record: Mapping[str, Any]) -> float:
    """Seconds of the second deploy's stages, in those of the first."""
    first, second = (sum(record[step]["stages"].values()) for step in ("deploy", "again"))
    return float(second / first)


def _most_gib(limit: Limit, record: Mapping[str, Any]) -> float:
    """GiB that a deploy may have in one process."""
    if limit.gib is not None:
        return limit.gib
    return float(record["plain"]["peak"] + 2 * FLOAT * record["deploy"]["parameters"]) / GIB


def _gib(step: Mapping[str, Any]) -> float:
    return (peak_of(step) or 0) / GIB


def table(figures: dict[str, Any]) -> str:
    """What each deploy cost and may cost, as Markdown, and below it what was not kept."""
    header = (
        "model", "options", "deploy, s", "plain, s", "ratio", "at most", "GiB", "at most", "builder, GiB",
        "again, s", "stages, of the first's", "verify, GiB", "within the budget", "`auto` loads",
    )  # fmt: skip
    rows, broken = [], []
    for limit, record in _pairs(figures["models"]):
        broken += [f"- {limit.title}: {reason}" for reason in _broken(limit, record)]
        if not any("failed" in record[step] for step in record):
            rows.append(_row(limit, record))
    law = f"{len(figures['models'])} deploys, {len(broken) or 'no'} limits broken. {where(figures)}"
    return "\n\n".join([markdown_table(header, rows, 2), law, *(["\n".join(broken)] if broken else [])])


def _row(limit: Limit, record: Mapping[str, Any]) -> list[str]:
    plain, deploy, verify = (record[step] for step in ("plain", "deploy", "verify"))
    builders = [child["memory"] for name, child in deploy["children"].items() if name != MEASURING]
    most = f"{limit.seconds:.0f} s" if limit.ratio == inf else f"{limit.ratio:.0f}"
    return [
        limit.name,
        limit.how,
        *(f"{step['seconds']:.1f}" for step in (deploy, plain)),
        f"{deploy['seconds'] / plain['seconds']:.2f}",
        most,
        f"{_gib(deploy):.2f}",
        f"{_most_gib(limit, record):.2f}",
        f"{max(builders) / GIB:.2f}" if builders else "–",
        f"{record['again']['seconds']:.1f}",
        f"{_again(record):.2f}",
        f"{_gib(verify):.2f}",
        ", ".join(name for name, backend in verify["backends"].items() if backend["passed"]),
        deploy["picked"] or "by rule",
    ]


if __name__ == "__main__":
    typer.run(main)
