"""`attnforge generate`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Annotated

import typer

import attnforge
from attnforge.cli.options import Backend, BundleArgument, Json, TrustedKeys, whole_numbers
from attnforge.cli.terminal import Answer, out, say
from attnforge.errors import UsageError, plain

_Sampling = partial(typer.Option, rich_help_panel="Sampling")


def generate(
    bundle: BundleArgument,
    text: Annotated[str | None, typer.Argument()] = None,
    ids: str | None = None,
    max_new_tokens: int | None = None,
    backend: Backend = "auto",
    trusted: TrustedKeys = None,
    as_json: Json = False,
    temperature: Annotated[float, _Sampling()] = 0.0,
    top_k: Annotated[int | None, _Sampling()] = None,
    top_p: Annotated[float | None, _Sampling()] = None,
    seed: Annotated[int, _Sampling()] = 0,
    stop: Annotated[str | None, _Sampling()] = None,
) -> Answer:
    """Generate text from a decoder bundle and stream it.

    The bundle must have been deployed with --cache-tokens. Without a tokenizer, give the prompt with --ids; new tokens
    are then printed as ids.

    Example: `attnforge generate llama-fp16 "Once upon a time" --max-new-tokens 100 --temperature 0.8 --top-p 0.95`

    Example: `attnforge generate llama-fp16 --ids 1,450,3118 --json`

    Args:
        text: Prompt, encoded by the bundle's tokenizer.
        ids: Prompt as token ids, comma-separated.
        max_new_tokens: Maximum number of new tokens (default: 64, or what the cache has room for).
        temperature: Sampling temperature; 0 selects the most likely token.
        top_k: Sample from this many most likely tokens.
        top_p: Sample from the most likely tokens up to this total probability.
        seed: Random seed for sampling.
        stop: Stop token ids, comma-separated (default: the bundle's).
    """
    if (text is None) == (ids is None):
        raise UsageError("give either a prompt text or token ids with --ids")
    with attnforge.load(bundle, backend, trusted=trusted) as session:
        tokenizer = session.tokenizer if text is not None else None
        prompt = whole_numbers(ids or "", "--ids") if tokenizer is None else tokenizer.ids(text or "")
        if not prompt:
            raise UsageError("the prompt has no tokens; give a longer text")
        ends = None if stop is None else whole_numbers(stop, "--stop")
        start = time.perf_counter()
        tokens = session.generate(
            [prompt], max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=ends
        )
        chosen: list[int] = []
        first = 0.0

        def following() -> Iterator[int]:
            nonlocal first
            for token in tokens:
                first = first or time.perf_counter() - start
                chosen.append(int(token[0]))
                yield chosen[-1]

        if tokenizer is None:
            pieces: Iterator[str] = (f"{token} " for token in following())
        else:
            pieces = chain([tokenizer.text(prompt)], tokenizer.stream(prompt, following()))
        for piece in chain(pieces, "\n"):
            if not as_json:
                shown = "\n".join(map(plain, piece.split("\n")))  # without other control characters
                out.print(shown, end="", markup=False, soft_wrap=True)
        seconds = time.perf_counter() - start
    rate = (len(chosen) - 1) / (seconds - first) if seconds > first and len(chosen) > 1 else None
    document = {
        "backend": session.backend,
        "prompt": prompt,
        "tokens": chosen,
        "text": tokenizer.text([*prompt, *chosen]) if tokenizer is not None else None,
        "seconds_to_first_token": first,
        "tokens_per_second": rate,
    }
    speed = f", then {rate:.1f} tokens a second" if rate is not None else ""
    timing = f"{len(chosen)} tokens on {session.backend}; the first after {1e3 * first:.0f} ms{speed}"
    return Answer(document, lambda: say(timing, "dim"))
