"""int8 models compared in one run with the same models in fp32 and bf16, and with other quantisation tools.

`python -m benchmarks run eight-bits` deploys each model three times, quantises it with ONNX Runtime's and NNCF's
tools, checks all against the same gate on sentences that were not used for calibration, and times all in turns. It
writes `benchmarks/results/eight_bits.json`, and exits with 1 if a limit is exceeded.
"""

from __future__ import annotations

import pydoc_data.topics
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import attnforge
from attnforge.arrays import Array
from attnforge.atomic import temporary_folder
from attnforge.bench.contenders.engines import ENGINES
from attnforge.bench.contenders.peers import PeerJob
from attnforge.bench.contenders.quantised import QUANTISED
from attnforge.bench.interval import latency_of, ratio_of
from attnforge.bundle import WEIGHTS, Bundle
from attnforge.errors import first_line
from attnforge.export.sources.widened import Float64
from attnforge.machine import processors
from attnforge.model.registry import Example
from attnforge.runtime.parity.budget import relative_error
from attnforge.runtime.race import race
from benchmarks.experiment import Claim, Columns, Experiment, claims_table, named, say, table_of, where
from benchmarks.published import SENTENCES, Published, deployed
from tests.support.huggingface import minilm

TOKENS, BATCH = 128, 8
TRAINED = "all-MiniLM-L6-v2"
"""The subject with trained weights."""

SUBJECTS = {
    "BERT-base, random weights": Published("bert", "encoder", "BertModel", {}, {"tokens": TOKENS, "batch": 1}),
    TRAINED: Published("minilm", "encoder", SENTENCES, {}, {"tokens": TOKENS, "batch": 1}),
}
GATE = {"max_error": 0.1}
"""Maximum relative error of the embeddings of sentences, or of tokens, which is a cosine of 0.995."""

OF_FP32, OF_PEERS, OF_BF16, OF_SIZE = 1 / 1.8, 1.05, 1.0, 0.3
"""Maximum time of int8 relative to fp32, to the fastest quantised peer that passes, and to bf16; and maximum bytes
relative to fp32."""

CALIBRATE, TRY = 48, 240
"""Numbers of sentences for calibration, and of other sentences for the gate."""

Runner = Callable[[dict[str, Array]], Mapping[str, Array]]


def sentences(count: int) -> list[str]:
    """Return real English sentences, from the language reference that ships with Python."""
    unique: dict[str, None] = {}
    for text in pydoc_data.topics.topics.values():
        for paragraph in re.split(r"\n\s*\n", text):
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split())):
                if 40 <= len(sentence) <= 300 and re.fullmatch(r"[A-Z][a-z][\w ,;'’()-]+\.", sentence):
                    unique[sentence] = None
    return list(unique)[:count]


def tokenized(texts: Sequence[str], names: Sequence[str]) -> list[dict[str, Array]]:
    """Return batches of sentences as model inputs: ids of BERT's uncased vocabulary, padded in each batch."""
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(str(minilm()))
    batches = [list(texts[i : i + BATCH]) for i in range(0, len(texts), BATCH)]
    made = [tokens(batch, padding=True, truncation=True, max_length=TOKENS, return_tensors="np") for batch in batches]
    return [{name: encoded[name].astype(np.int64) for name in names} for encoded in made]


def measure(
    model: Published,
    rounds: Annotated[int, typer.Option(help="Timed rounds per contender.")] = 15,
    threads: int = processors(),
) -> dict[str, Any]:
    """Measure every contender's error, size and time, at a batch of one and all tokens."""
    with temporary_folder() as folder:
        return _measured(model.example(), folder, rounds, threads)


def _measured(example: Example, folder: Path, rounds: int, threads: int) -> dict[str, Any]:
    names = list(example.dynamic_shapes or {})
    texts = sentences(CALIBRATE + TRY)
    calibrating, tried = tokenized(texts[:CALIBRATE], names), tokenized(texts[CALIBRATE:], names)
    exact = Float64(example.module)
    truth = [_first(exact(feeds)) for feeds in tried]
    bundles = {}
    for precision in ("fp32", "bf16", "int8"):
        options: dict[str, Any] = {"data": calibrating, **GATE} if precision == "int8" else {}
        target = folder / precision
        bundles[precision] = deployed(example, target, target.name, precision=precision, cache=False, **options)
    (timed,) = tokenized([" ".join(sentences(16))], names)  # one sample of full length
    contenders: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        runs: dict[str, Runner] = {}
        for precision, bundle in bundles.items():
            session = stack.enter_context(attnforge.load(bundle, threads=threads))
            runs[f"attnforge {precision}"] = session.run
            contenders[f"attnforge {precision}"] = {"backend": session.backend, "mb": _megabytes(bundle)}
        job = PeerJob(bundles["int8"], timed, threads, folder, example.module)
        for name, peer in QUANTISED.items():
            say(name)
            try:
                runs[name] = peer.open(job, stack)
                contenders[name] = {}
            except Exception as error:  # a tool's refusal is a result
                contenders[name] = {"refused": first_line(error)}
        for name, run in runs.items():
            say(f"check {name}")
            answers = [_first(run(feeds)) for feeds in tried]
            largest = max(map(relative_error, answers, truth))
            passes = largest <= GATE["max_error"]
            contenders[name] |= {"error": largest, "cosine": _cosine(answers, truth), "passes": passes}
        for name in [name for name in runs if name in QUANTISED and QUANTISED[name].engine == "openvino"]:
            make = QUANTISED[name].file
            assert make is not None
            runs[name] = ENGINES["openvino-static"](job, make(job), stack)  # as our sessions do automatically
        say("time")
        times = race({name: partial(run, timed) for name, run in runs.items()}, rounds)
    for name, turns in times.items():
        contenders[name]["ms"] = latency_of(turns).median.model_dump()
        contenders[name]["of_int8"] = ratio_of(times["attnforge int8"], turns).model_dump()
    quantised = bundles["int8"].manifest.quantised
    assert quantised is not None
    return {
        "contenders": contenders,
        "sentences": len(texts) - CALIBRATE,
        "share": quantised.share,
        "by_token": sum(product.by == "token" for product in quantised.products),
        "products": len(quantised.products),
    }


def _first(outputs: Mapping[str, Any]) -> Array:
    return np.asarray(next(iter(outputs.values())), np.float64)


def _cosine(answers: Sequence[Array], truth: Sequence[Array]) -> float:
    """Return the least cosine between a row and that of float64."""

    def least(answer: Array, exact: Array) -> float:
        norms = np.linalg.norm(answer, axis=-1) * np.linalg.norm(exact, axis=-1)
        return float((np.sum(answer * exact, axis=-1) / norms).min())

    return min(map(least, answers, truth))


def _megabytes(bundle: Bundle) -> float:
    """Return the MB of the canonical graph and of the bundle's shared weights; for 16-bit precisions these include fp32
    copies for ONNX Runtime."""
    files = [bundle.path / "canonical.onnx", bundle.path / WEIGHTS]
    return sum(file.stat().st_size for file in files if file.exists()) / 1e6


def claims(figures: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims about int8's time and size relative to others."""
    for name, model in figures["models"].items():
        ratios = {key: each["of_int8"]["value"] for key, each in model["contenders"].items() if each.get("passes")}
        peers = [key for key in ratios if key in QUANTISED]
        fastest = [max(peers, key=lambda key: ratios[key])] if peers else []
        limits = {"attnforge fp32": OF_FP32, "attnforge bf16": OF_BF16, **dict.fromkeys(fastest, OF_PEERS)}
        yield from (Claim(f"{name}: int8's time", ratios[key], most, key) for key, most in limits.items())
        low, high = (model["contenders"][f"attnforge {precision}"]["mb"] for precision in ("int8", "fp32"))
        yield Claim(f"{name}: int8's weights on disk", low / high, OF_SIZE, "attnforge fp32")


COLUMNS: Columns = {
    "model": "{model}".format_map,
    "contender": lambda each: f"{each['name']}, {each['backend']}" if "backend" in each else each["name"],
    "ms (95%)": "{ms[value]:.1f} ({ms[low]:.1f}–{ms[high]:.1f})".format_map,
    "MB": "{mb:,.0f}".format_map,
    "error": "{error:.1e}".format_map,
    "least cosine": "{cosine:.4f}".format_map,
    "within 0.1": lambda each: each["refused"] if "refused" in each else "yes" if each["passes"] else "no",
}


def table(figures: dict[str, Any]) -> str:
    """Return every contender, and the limits, as Markdown."""
    rows = [{**each, "model": n} for n, model in figures["models"].items() for each in named(model["contenders"])]
    return "\n\n".join((table_of(COLUMNS, rows, 2, ""), claims_table(claims(figures)), where(figures)))


def summary(figures: dict[str, Any]) -> str:
    """Return what int8 costs the model with trained weights, and its peers, as a sentence."""
    contenders = figures["models"][TRAINED]["contenders"]
    ours = contenders["attnforge int8"]
    time, least = ours["ms"]["value"] / contenders["attnforge fp32"]["ms"]["value"], ours["cosine"]
    peers = ", ".join(
        f"{name} {row['cosine']:.3f}"
        for name, row in contenders.items()
        if "cosine" in row and not name.startswith("attnforge")
    )
    return (
        f"In int8, {TRAINED} takes {time:.2f} of its time in fp32, and the least cosine similarity with the exact "
        f"answers is {least:.3f} ({peers})."
    )


EXPERIMENT = Experiment(
    "eight_bits.json", measure, {"eight-bits": table, "eight-bits-summary": summary}, claims, subjects=SUBJECTS
)
