"""Decoding of a model with about 100 million parameters, compared with all peers and checked against limits.

`python -m benchmarks run decoding` deploys a Llama with random weights and a cache of 2,048 tokens, and times steps
after 128 and 1,024 tokens of context, and prompts of up to 2,048. It writes `benchmarks/results/decoding.json`, and
exits with 1 if a limit is exceeded or the bundle's answer is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

import attnforge
from attnforge.atomic import temporary_folder
from attnforge.bench.interval import ratio_of
from attnforge.bench.results import DecodingContender, DecodingResults, Timed
from attnforge.bundle import Bundle
from attnforge.report.render import NOTHING, error, fixed, markdown_table, percent, places, with_interval
from benchmarks.experiment import Claim, Experiment, claims_table, not_held, say, where
from benchmarks.published import Published

SIZES: Mapping[str, Any] = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
    "intermediate_size": 2048, "vocab_size": 16000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
"""Configuration of a Llama with 100.1 million parameters."""

CACHE_TOKENS, MAX_TOKENS = 2048, 256

CONTEXTS = (128, 1024)
PROMPTS = (16, 128, 512, CACHE_TOKENS)

EAGER = "eager-static"
EAGER_AT_MOST, PEER_AT_MOST, LEAST_SHARE = 0.9, 1.0, 0.6


def measure(
    rounds: Annotated[int, typer.Option(help="Timed rounds per contender.")] = 24,
    openings: Annotated[
        int, typer.Option(help="Times each contender is reloaded; rounds are split between loads.")
    ] = 4,
) -> DecodingResults:
    """Measure the times of steps and of first tokens."""
    with temporary_folder() as folder:
        measured = attnforge.benchmark(
            deployed(folder), against=["all"], decode=True, contexts=CONTEXTS, prompts=PROMPTS, rounds=rounds,
            openings=openings, trust_source=True, command="", progress=say,
        )  # fmt: skip
    measured.source = f"LlamaForCausalLM {' '.join(f'{name}={size}' for name, size in SIZES.items())}"
    return measured


def deployed(
    folder: Path, sizes: Mapping[str, Any] = SIZES, cache_tokens: int = CACHE_TOKENS, max_tokens: int = MAX_TOKENS
) -> Bundle:
    """Deploy the Llama for 1 or 2 samples.

    Args:
        folder: folder for the bundle, with the configuration next to it.
        sizes: configuration of the Llama.
        cache_tokens: capacity of its caches in tokens.
        max_tokens: maximum tokens of one call of the model.
    """
    options = {"inputs": "input_ids", "batch": 2, "max_batch": 2, "tokens": max_tokens // 2, "max_tokens": max_tokens}
    llama = Published("llama-100m", "decoder", "LlamaForCausalLM", sizes, options)
    return llama.deployed(folder, tune=False, cache_tokens=cache_tokens)


# --- results ----------------------------------------------------------------------------------------------------------


def claims(figures: dict[str, Any]) -> Iterator[Claim]:
    """Yield a claim for every figure with a limit, at every context. Wrong peers have no time to compare with."""
    measured = DecodingResults.model_validate(figures)
    for context in measured.contexts:
        best, after = measured.best, f"after {context:,} tokens"
        ours = best.at(context) if best is not None else None
        peers = [(peer, step) for peer in measured.contenders if not peer.ours and (step := peer.at(context))]
        eager = next((pair for pair in peers if pair[0].name == EAGER), None)
        others = [pair for pair in peers if pair[0].name != EAGER]
        fastest = min(others, key=lambda pair: pair[1].latency.median.value, default=None)
        yield _against(f"ms a token, of {EAGER}'s, {after}", EAGER_AT_MOST, ours, eager)
        yield _against(f"ms a token, of the best other peer's, {after}", PEER_AT_MOST, ours, fastest)
        limit = measured.limits.get(context)
        over = None
        if ours is not None and limit is not None:
            over = ratio_of(ours.latency.rounds, limit.latency.rounds, ours.latency.openings)
        text = f"ms a token, of the limit by bandwidth, {after} ({percent(LEAST_SHARE)} of the limit at least)"
        yield Claim(text, over, round(1 / LEAST_SHARE, 4))
    for i, prompt in enumerate(measured.prompts):
        firsts = {each.name: (each, each.first_tokens[i]) for each in measured.contenders if each.first_tokens}
        ours_first = firsts[measured.best.name][1] if measured.best is not None else None
        text = f"ms to the first token, of {EAGER}'s, prompt of {prompt:,} tokens"
        yield _against(text, EAGER_AT_MOST, ours_first, firsts.get(EAGER))


def _against(text: str, at_most: float, ours: Timed | None, theirs: tuple[DecodingContender, Timed] | None) -> Claim:
    if ours is None or theirs is None:
        return Claim(text, None, at_most)
    peer, step = theirs
    return Claim(text, ratio_of(ours.latency.rounds, step.latency.rounds, step.latency.openings), at_most, peer.name)


def broken(figures: dict[str, Any]) -> list[str]:
    """Return the claims that do not hold, and a line if no backend of the bundle was timed."""
    lines = not_held(claims(figures))
    is_timed = DecodingResults.model_validate(figures).best is not None
    return lines if is_timed else [*lines, "no backend of the bundle was timed"]


def table(figures: dict[str, Any]) -> str:
    """Return the claims, the time of a step by context, and the time to first token, as Markdown."""
    measured = DecodingResults.model_validate(figures)
    load = measured.environment.load_before
    before = [] if load is None else [f"load {load:.2g} before"]
    parts = [claims_table(claims(figures)), *(_steps_table(measured, context) for context in measured.contexts)]
    if measured.prompts:
        parts.append(_first_tokens_table(measured))
    parts += [f"Not timed, because its logits are wrong: {name}: {why}." for name, why in measured.wrong.items()]
    if measured.skipped:
        parts.append("Not run: " + "; ".join(f"{name}: {why}" for name, why in measured.skipped.items()) + ".")
    return "\n\n".join([*parts, "; ".join([where(figures), *before])])


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
    title = f"After {context:,} tokens"
    if (limit := measured.limits.get(context)) is not None:
        title += f": {limit.latency.median.value:.3g} ms to copy {(limit.weights + limit.cache) / 1e6:,.0f} MB"
    head = ("contender", "ms a token (95%)", "tokens a second", "ratio to ours (95%)", "share of the limit", "error")
    return f"{title}\n\n{markdown_table(head, rows, 1)}"


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
    head = ("ms to first token (95%)", *(f"prompt of {prompt:,}" for prompt in measured.prompts), "KiB added per step")
    return markdown_table(head, rows, 1)


EXPERIMENT = Experiment("decoding.json", measure, {"decoding": table}, claims, broken)
