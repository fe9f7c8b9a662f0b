"""Embeddings of many texts: bundles in three precisions, compared with sentence-transformers and with a limit.

`python -m benchmarks run embeddings` deploys all-MiniLM-L6-v2, embeds texts of 3 to 200 words in sorted batches with
each bundle and with sentence-transformers in turns, and writes `benchmarks/results/embeddings.json`; it exits with 1 if
a requirement is not met. The limit is the time of all needed products at the speed of the linear layers of one
block, deployed alone in the same precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn

import attnforge
from attnforge.arrays import Array
from attnforge.atomic import temporary_folder
from attnforge.bench.interval import latency_of, ratio_of
from attnforge.bundle import Bundle
from attnforge.model.registry import Example
from attnforge.runtime.race import race
from benchmarks.experiment import OF_LIMIT, Claim, Columns, Experiment, claims_table, named, table_of, where
from benchmarks.experiments.eight_bits import CALIBRATE, GATE, SUBJECTS, TRAINED, sentences, tokenized
from benchmarks.published import deployed
from tests.support.huggingface import minilm

TEXTS, WORDS, BATCH, TOKENS = 320, (3, 200), 32, 256
ASKED = {"fp32": 1.4, "bf16": 2.4, "int8": 4.0}
"""Throughput by precision that is asked for, relative to sentence-transformers'."""

PEER = "sentence-transformers"

Feeds = dict[str, Array]


def measure(rounds: Annotated[int, typer.Option(help="Timed rounds per contender.")] = 5) -> dict[str, Any]:
    """Measure the time in which each contender embeds all texts."""
    with temporary_folder() as folder, ExitStack() as stack:
        return _measured(folder, stack, rounds)


def _measured(folder: Path, stack: ExitStack, rounds: int) -> dict[str, Any]:
    from sentence_transformers import SentenceTransformer

    peer = SentenceTransformer(str(minilm()), device="cpu")
    batches = _batches(peer.tokenizer)
    example = SUBJECTS[TRAINED].example(batch=BATCH, tokens=160, max_batch=BATCH, max_tokens=TOKENS)
    linear = [module for module in peer.modules() if isinstance(module, nn.Linear)][:-1]  # without the unused pooler
    layers = linear[:6]  # of one block: queries, keys, values, output, and two of the feed-forward network
    shapes = np.array([feeds["input_ids"].shape for feeds in batches])
    rows = torch.randn(BATCH, TOKENS, layers[0].in_features, generator=torch.Generator().manual_seed(0))
    names = list(example.dynamic_shapes or {})
    calibrating = tokenized(sentences(CALIBRATE), names)
    runs: dict[str, Callable[[], Any]] = {PEER: lambda: [_by_torch(peer, feeds) for feeds in batches]}
    backends = {}
    for precision in ASKED:
        eight: dict[str, Any] = {"data": calibrating, **GATE} if precision == "int8" else {}
        bundle = deployed(example, folder / precision, precision=precision, cache=False, **eight)
        session = stack.enter_context(attnforge.load(bundle))
        backends[precision] = session.backend
        runs[precision] = _passes(session, [{name: feeds[name] for name in names} for feeds in batches])
        alone = stack.enter_context(attnforge.load(_linear(layers, rows, folder, precision), session.backend))
        runs[f"linear layers, {precision}"] = partial(_products, alone, rows, shapes)
    answers = {name: np.concatenate(run()) for name, run in runs.items() if not name.startswith("linear")}
    times = race(runs, rounds)
    block = shapes.prod(1).sum() * sum(layer.weight.numel() for layer in layers)  # products of its linear layers
    attention = (shapes[:, 0] * shapes[:, 1] ** 2).sum() * 2 * layers[0].in_features
    blocks = len(linear) / len(layers) * (1 + attention / block)
    return {
        "contenders": {
            name: {
                "backend": backends.get(name, "torch"),
                "ms": latency_of(times[name]).median.model_dump(),
                "of_peer": ratio_of(times[PEER], times[name]).model_dump(),
                "cosine": float((answer * answers[PEER]).sum(-1).min()),
            }
            for name, answer in answers.items()
        },
        "limits": {
            precision: latency_of(times[f"linear layers, {precision}"]).median.value * blocks for precision in ASKED
        },
        "texts": TEXTS,
    }


def _batches(tokenizer: Any) -> list[Feeds]:
    """Return the texts as inputs: sorted by tokens, and padded to the longest of each batch."""
    words, random = " ".join(sentences(10_000)).split(), np.random.default_rng(0)
    lengths = random.integers(WORDS[0], WORDS[1], TEXTS, endpoint=True)
    starts = random.integers(0, len(words) - lengths)
    texts = [" ".join(words[start : start + length]) for start, length in zip(starts, lengths, strict=True)]
    ids = sorted(tokenizer(texts, truncation=True, max_length=TOKENS)["input_ids"], key=len)
    padded = [tokenizer.pad({"input_ids": ids[i : i + BATCH]}, return_tensors="np") for i in range(0, TEXTS, BATCH)]
    return [{name: np.asarray(array, np.int64) for name, array in feeds.items()} for feeds in padded]


def _linear(layers: Sequence[nn.Module], rows: torch.Tensor, folder: Path, precision: str) -> Bundle:
    """Deploy the linear layers alone, one after another. A tiny one follows, since the last stays in fp32 in int8."""
    size = torch.export.Dim("tokens", min=2, max=TOKENS)
    shapes: dict[str, Any] = {"input": {0: torch.export.Dim("batch", min=1, max=BATCH), 1: size}}
    eight: dict[str, Any] = {"data": [{"input": rows[:2].numpy()}], "max_error": 0.5} if precision == "int8" else {}
    example = Example(nn.Sequential(*layers, nn.Linear(rows.shape[-1], 1)), (rows[:, :160],), shapes)
    return deployed(example, folder / f"linear-{precision}", precision=precision, cache=False, tune=False, **eight)


def _passes(session: attnforge.Session, batches: Sequence[Mapping[str, Array]]) -> Callable[[], list[Array]]:
    output = session.outputs[0].name
    return lambda: [np.asarray(session.run(dict(feeds))[output], np.float32) for feeds in batches]


def _products(session: attnforge.Session, rows: torch.Tensor, shapes: Array) -> None:
    rows = rows.to(getattr(torch, session.inputs[0].dtype))
    for batch, tokens in shapes:
        session.run({"input": rows[:batch, :tokens]})


@torch.inference_mode()
def _by_torch(model: Any, feeds: Feeds) -> Array:
    answer = model({name: torch.from_numpy(array) for name, array in feeds.items()})["sentence_embedding"]
    return np.asarray(answer.numpy())


def claims(figures: dict[str, Any]) -> Iterator[Claim]:
    """Yield for each precision a claim about its throughput, and one about its share of the limit."""
    for precision, asked in ASKED.items():
        ours, limit = figures["contenders"][precision], figures["limits"][precision]
        peer = figures["contenders"][PEER]["ms"]["value"]
        yield Claim(f"{precision}: time, of sentence-transformers'", ours["ms"]["value"] / peer, 1 / asked, PEER)
        yield Claim(f"{precision}: time, of the limit's", ours["ms"]["value"] / limit, 1 / OF_LIMIT)


COLUMNS: Columns = {
    "contender": lambda each: f"{each['name']}, {each['backend']}",
    "texts a second": lambda each: f"{1e3 * each['texts'] / each['ms']['value']:.0f}",
    "throughput (95%)": "{of_peer[value]:.2f} ({of_peer[low]:.2f}–{of_peer[high]:.2f})".format_map,
    "least cosine": "{cosine:.4f}".format_map,
}


def table(figures: dict[str, Any]) -> str:
    """Return the contenders, and the claims, as Markdown."""
    rows = [{**each, "texts": figures["texts"]} for each in named(figures["contenders"])]
    return "\n\n".join((table_of(COLUMNS, rows), claims_table(claims(figures)), where(figures)))


EXPERIMENT = Experiment("embeddings.json", measure, {"embeddings": table}, claims)
