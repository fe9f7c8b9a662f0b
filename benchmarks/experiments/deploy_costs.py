"""The cost of a deploy, checked against limits on models of real size.

`python -m benchmarks run deploy-costs` measures for every model of :data:`LIMITS`: torch's plain export, its
load and one comparison; a deploy with an empty cache; the same deploy again; and a verification. It writes
`benchmarks/results/deploy_costs.json`. Every step runs in its own process, and ratios compare steps of one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from attnforge.atomic import temporary_folder
from attnforge.model.registry import Example
from attnforge.report.render import fixed, markdown_table
from benchmarks.child import GIB
from benchmarks.deploy_steps import DeployRequest, in_a_process
from benchmarks.experiment import Claim, Experiment, not_held, where
from benchmarks.experiments import masks
from benchmarks.experiments.real_sizes import builder_of, peak_of
from benchmarks.published import CALLABLE, PUBLISHED, Published

AGAIN = 1 / 3
"""Maximum time of a second tuned deploy of the same model, relative to the first; without importing libraries and
building the model, which both do."""

FLOAT = 4
"""Bytes per parameter."""


@dataclass(frozen=True)
class Limit:
    """The maximum cost of deploying one model.

    Attributes:
        model: a published model, or a callable.
        tune: whether deploying measures forms and backends.
        targets: targets to deploy for; None for all that a machine without a GPU can build.
        ratio: time of a deploy relative to the plain path.
        seconds: time of a deploy.
        gib: memory of a deploy's largest process, except TensorRT's builder; None for that of the plain path plus
            twice the weights.
        verify_gib: memory of a verification.
    """

    model: Published
    tune: bool = True
    targets: list[str] | None = None
    ratio: float = inf
    seconds: float = inf
    gib: float | None = None
    verify_gib: float = inf

    @property
    def title(self) -> str:
        """Model and options."""
        return f"{self.model.name}, {self.how}"

    @property
    def how(self) -> str:
        """The options of the deploy, as on the command line."""
        options = [] if self.tune else ["--no-tune"]
        return " ".join([*options, *(f"--target {target}" for target in self.targets or ())]) or "default"


def bare_causal_attention() -> Example:
    """Return causal attention with 8 heads of 64 over 1 to 8,192 tokens; the largest case has 537 million scores."""
    return masks.bare("causal", most=8192)


_LLAMA = Published(
    "Llama, 1.1 billion parameters, 64 tokens", "decoder", "LlamaForCausalLM",
    {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
    },
    {"tokens": 64, "max_tokens": 64},
)  # fmt: skip
_BARE = Published("bare_causal_attention", CALLABLE, "benchmarks.experiments.deploy_costs:bare_causal_attention")
_NAMES = ("vit-base-patch16-224", "bert-base-uncased", "dinov2-base at 224", "distilbert-base-uncased")
_USUAL = [model for model in PUBLISHED if model.name in _NAMES]

LIMITS = (
    *(Limit(model, ratio=6) for model in _USUAL),
    *(Limit(model, tune=False, targets=["onnxruntime"], ratio=3) for model in _USUAL),
    Limit(_LLAMA, targets=["onnxruntime"], ratio=6, gib=13, verify_gib=8),
    Limit(_BARE, targets=["onnxruntime"], seconds=60, gib=1.5),
)


def measure(limit: Limit) -> dict[str, Any]:
    """Measure every step, with the figures of :func:`benchmarks.deploy_steps.in_a_process`."""
    with temporary_folder() as folder:
        request = DeployRequest(
            model=limit.model.source(folder), options=dict(limit.model.options), folder=folder,
            tune=limit.tune, targets=limit.targets, cached=True,
        )  # fmt: skip
        steps = {"plain": "plain", "deploy": "deploy", "again": "deploy", "verify": "verify"}
        return {title: in_a_process(request, step, 1800, 20 * GIB) for title, step in steps.items()}


def _pairs(figures: Mapping[str, Any]) -> list[tuple[Limit, dict[str, Any]]]:
    """Return every limit with the figures of its model."""
    return [(limit, record) for limit in LIMITS if (record := figures["models"].get(limit.title)) is not None]


def _failed(record: Mapping[str, Any]) -> list[str]:
    return [f"{step}: {record[step]['failed']}" for step in record if "failed" in record[step]]


def claims(figures: Mapping[str, Any]) -> Iterator[Claim]:
    """Yield a claim for every limited cost of deploys without failed steps."""
    for limit, record in _pairs(figures):
        if not _failed(record):
            plain, deploy, verify = (record[step] for step in ("plain", "deploy", "verify"))
            costs = {
                "the plain path's time": (deploy["seconds"] / plain["seconds"], limit.ratio),
                "seconds": (deploy["seconds"], limit.seconds),
                "GiB": (_gib(deploy), _most_gib(limit, record)),
                "GiB of a verification": (_gib(verify), limit.verify_gib),
                "the first deploy's time, again": (_again(record), AGAIN if limit.tune else inf),
            }
            for quantity, (cost, most) in costs.items():
                if most != inf:
                    yield Claim(f"{limit.title}: {quantity}", cost, most)


def broken(figures: Mapping[str, Any]) -> list[str]:
    """Return the steps that failed and the limits that are exceeded."""
    failed = [f"{limit.title}: {reason}" for limit, record in _pairs(figures) for reason in _failed(record)]
    return failed + not_held(claims(figures))


def _again(record: Mapping[str, Any]) -> float:
    """Return the seconds of the second deploy's stages relative to the first."""
    first, second = (sum(record[step]["stages"].values()) for step in ("deploy", "again"))
    return float(second / first)


def _most_gib(limit: Limit, record: Mapping[str, Any]) -> float:
    """Return the maximum GiB of one process of a deploy."""
    if limit.gib is not None:
        return limit.gib
    return float(record["plain"]["peak"] + 2 * FLOAT * record["deploy"]["parameters"]) / GIB


def _gib(step: Mapping[str, Any]) -> float:
    return (peak_of(step) or 0) / GIB


def table(figures: dict[str, Any]) -> str:
    """Return the costs and limits of each deploy as Markdown, followed by failures and exceeded limits."""
    header = (
        "model", "options", "deploy, s", "plain, s", "ratio", "at most", "GiB", "at most", "builder, GiB",
        "again, s", "stages, of the first's", "verify, GiB", "within the budget", "`auto` loads",
    )  # fmt: skip
    rows = [_row(limit, record) for limit, record in _pairs(figures) if not _failed(record)]
    lines = [f"- {line}" for line in broken(figures)]
    law = f"{len(figures['models'])} deploys, {len(lines) or 'no'} limits broken. {where(figures)}"
    return "\n\n".join([markdown_table(header, rows, 2), law, *(["\n".join(lines)] if lines else [])])


def _row(limit: Limit, record: Mapping[str, Any]) -> list[str]:
    plain, deploy, verify = (record[step] for step in ("plain", "deploy", "verify"))
    builder = builder_of(deploy)
    return [
        limit.model.name,
        limit.how,
        *(f"{step['seconds']:.1f}" for step in (deploy, plain)),
        f"{deploy['seconds'] / plain['seconds']:.2f}",
        f"{limit.seconds:.0f} s" if limit.ratio == inf else f"{limit.ratio:.0f}",
        f"{_gib(deploy):.2f}",
        f"{_most_gib(limit, record):.2f}",
        fixed(None if builder is None else builder / GIB, 2),
        f"{record['again']['seconds']:.1f}",
        f"{_again(record):.2f}",
        f"{_gib(verify):.2f}",
        ", ".join(name for name, backend in verify["backends"].items() if backend["passed"]),
        deploy["picked"] or "by rule",
    ]


EXPERIMENT = Experiment(
    "deploy_costs.json",
    measure,
    {"deploy-costs": table},
    claims,
    broken,
    subjects={limit.title: limit for limit in LIMITS},
)
