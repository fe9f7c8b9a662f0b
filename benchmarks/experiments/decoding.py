"""A decoder of about 100 million parameters, token by token, against every other way to decode it, held to limits.

`python -m benchmarks.experiments.decoding` deploys a Llama with random weights and a cache of 2,048 tokens, and
times steps behind 128 and 1,024 tokens of context. It writes `benchmarks/results/decoding.json`, and ends with 1 where
a limit is broken or the bundle's answer is wrong.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import attnforge
from attnforge.bench.decoding import results as files
from attnforge.bench.decoding.results import DecodingContender, DecodingResults, StepTime
from attnforge.bench.decoding.run import benchmark_decoding
from attnforge.bench.interval import ratio_of
from attnforge.bundle import Bundle
from attnforge.export.sources.named import build
from attnforge.records import Interval
from attnforge.report.render import NOTHING, error, fixed, markdown_table, percent, places, with_interval
from benchmarks.experiments.claims import MeasuredClaim
from benchmarks.publish import RESULTS, show
from benchmarks.published import Published

COMMAND = "python -m benchmarks.experiments.decoding"
FILE = RESULTS / "decoding.json"

SIZES: Mapping[str, Any] = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
    "intermediate_size": 2048, "vocab_size": 16000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
"""Of a Llama of 100.1 million parameters."""

CACHE_TOKENS, MAX_TOKENS = 2048, 256

CONTEXTS = (128, 1024)
PROMPTS = (16, 128, 512)

EAGER = "eager-static"
EAGER_AT_MOST, PEER_AT_MOST, LEAST_SHARE = 0.9, 1.0, 0.6


def main(
    results: Annotated[Path, typer.Option(help="Where to write the figures.")] = FILE,
    rounds: Annotated[int, typer.Option(help="How often every contender has a turn.")] = 24,
    openings: Annotated[int, typer.Option(help="How often every contender is opened.")] = 4,
) -> None:
    """Measure, write the figures, and end with 1 where a limit is not kept."""
    console, start = Console(stderr=True), time.perf_counter()

    def say(stage: str) -> None:
        console.print(f"{time.perf_counter() - start:6.0f} s  {stage}", style="dim", highlight=False, markup=False)

    with tempfile.TemporaryDirectory() as folder:
        bundle = deployed(Path(folder), say)
        measured = benchmark_decoding(
            bundle, against=["all"], contexts=CONTEXTS, prompts=PROMPTS, rounds=rounds, openings=openings,
            trust_source=True, command=COMMAND, progress=say,
        )  # fmt: skip
    measured.source = f"LlamaForCausalLM {' '.join(f'{name}={size}' for name, size in SIZES.items())}"
    files.write(measured, results)
    show(results, table)
    raise typer.Exit(bool(broken(files.read(results))))


def deployed(
    folder: Path,
    say: Callable[[str], None],
    sizes: Mapping[str, Any] = SIZES,
    cache_tokens: int = CACHE_TOKENS,
    max_tokens: int = MAX_TOKENS,
) -> Bundle:
    """The bundle, for 1 or 2 samples.

    Args:
        folder: where it is written, with the configuration beside it.
        say: told what is done.
        sizes: of the Llama.
        cache_tokens: that its caches hold.
        max_tokens: that one call of the model takes at most.
    """
    say("deploy the decoder")
    options = {"inputs": "input_ids", "batch": 2, "max_batch": 2, "tokens": max_tokens // 2, "max_tokens": max_tokens}
    llama = Published("llama-100m", "decoder", "LlamaForCausalLM", sizes, options)
    example, source = build(llama.source(folder), options, None)
    module, args, shapes = example
    return attnforge.deploy(
        module, args, folder / "bundle", shapes, targets=["onnxruntime"], name=llama.name, tune=False, cache=False,
        source=source, cache_tokens=cache_tokens,
    )  # fmt: skip


# --- what came out ----------------------------------------------------------------------------------------------------


def claims(measured: DecodingResults) -> Iterator[MeasuredClaim]:
    """Every figure that has a limit, at every context. A peer that was wrong has no time and is not compared with."""
    for context in measured.contexts:
        best, where = measured.best, f"behind {context:,} tokens"
        ours = best.at(context) if best is not None else None
        peers = [(peer, step) for peer in measured.contenders if not peer.ours and (step := peer.at(context))]
        eager = next((pair for pair in peers if pair[0].name == EAGER), None)
        others = [pair for pair in peers if pair[0].name != EAGER]
        fastest = min(others, key=lambda pair: pair[1].latency.median.value, default=None)
        yield _against(f"ms a token, of {EAGER}'s, {where}", EAGER_AT_MOST, measured, ours, eager)
        yield _against(f"ms a token, of the best other peer's, {where}", PEER_AT_MOST, measured, ours, fastest)
        limit = measured.limits.get(context)
        over = None
        if ours is not None and limit is not None:
            over = ratio_of(ours.latency.rounds, limit.latency.rounds, ours.latency.openings)
        said = f"ms a token, of the limit by bandwidth, {where} ({percent(LEAST_SHARE)} of the limit at least)"
        yield MeasuredClaim(said, round(1 / LEAST_SHARE, 4), over)


def _against(
    claim: str,
    at_most: float,
    measured: DecodingResults,
    ours: StepTime | None,
    other: tuple[DecodingContender, StepTime] | None,
) -> MeasuredClaim:
    if ours is None or other is None:
        return MeasuredClaim(claim, at_most, None)
    peer, step = other
    ratio = ratio_of(ours.latency.rounds, step.latency.rounds, step.latency.openings)
    return MeasuredClaim(claim, at_most, ratio, against=peer.name)


def broken(measured: DecodingResults) -> list[str]:
    """The claims that do not hold, and contenders of the bundle's own that were not timed."""
    names = [claim.claim for claim in claims(measured) if claim.holds == "**no**"]
    return names if measured.best is not None else [*names, "no backend of the bundle's was timed"]


def table(figures: dict[str, Any]) -> str:
    """The claims, the time of a step by context, and the time to first token, as Markdown."""
    measured = DecodingResults.model_validate(figures)
    about = measured.environment
    load = "" if about.load_before is None else f"; load {about.load_before:.2g} before"
    where = f"{about.machine.processor}, {about.threads} threads{load}; `{measured.command}`"
    parts = [_claims_table(measured), *(_steps_table(measured, context) for context in measured.contexts)]
    if measured.prompts:
        parts.append(_first_tokens_table(measured))
    parts += [f"Not timed, for its logits are wrong: {name}: {why}." for name, why in measured.wrong.items()]
    if measured.skipped:
        parts.append("Not run: " + "; ".join(f"{name}: {why}" for name, why in measured.skipped.items()) + ".")
    return "\n\n".join([*parts, where])


def _claims_table(measured: DecodingResults) -> str:
    rows = []
    for claim in claims(measured):
        value = claim.measured if isinstance(claim.measured, Interval) else None
        figures = with_interval(value, 2) if value is not None else NOTHING
        rows.append((claim.claim, claim.against, figures, f"{claim.at_most:.3g}", claim.holds))
    return markdown_table(("limited", "against", "measured (95%)", "at most", "holds"), rows)


def _steps_table(measured: DecodingResults, context: int) -> str:
    timed = [(step, contender) for contender in measured.contenders if (step := contender.at(context)) is not None]
    timed.sort(key=lambda pair: pair[0].latency.median.value)
    decimals = places(step.latency.median.value for step, _ in timed)
    rows = [
        (
            f"**{contender.name}**" if contender.ours else contender.name,
            with_interval(step.latency.median, decimals),
            fixed(step.per_second.value, 1),
            with_interval(step.ratio, 2) if step.ratio is not None else NOTHING,
            percent(step.share.value if step.share is not None else None),
            error(contender.error),
        )
        for step, contender in timed
    ]
    limit = measured.limits.get(context)
    said = (
        ""
        if limit is None
        else f": {limit.latency.median.value:.3g} ms to copy {(limit.weights + limit.cache) / 1e6:,.0f} MB"
    )
    head = ("contender", "ms a token (95%)", "tokens a second", "ratio to ours (95%)", "share of the limit", "error")
    return f"Behind {context:,} tokens{said}\n\n{markdown_table(head, rows, 1)}"


def _first_tokens_table(measured: DecodingResults) -> str:
    decimals = places(first.latency.median.value for c in measured.contenders for first in c.first_tokens)
    rows = [
        (
            f"**{contender.name}**" if contender.ours else contender.name,
            *(with_interval(first.latency.median, decimals) for first in contender.first_tokens),
            fixed(None if contender.growth is None else contender.growth / 1024, 1),
        )
        for contender in measured.contenders
    ]
    head = (
        "ms to first token (95%)",
        *(f"prompt of {prompt:,}" for prompt in measured.prompts),
        "KiB that a step adds",
    )
    return markdown_table(head, rows, 1)


if __name__ == "__main__":
    typer.run(main)
