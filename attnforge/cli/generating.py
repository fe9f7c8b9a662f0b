"""`attnforge generate`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated

import typer

import attnforge
from attnforge.cli.answers import Answer
from attnforge.cli.options import BundleArgument, Json, TrustedKeys, whole_numbers
from attnforge.cli.terminal import out, say
from attnforge.errors import UsageError, plain

MOST = 64
"""Tokens that are generated where nobody says how many."""


def generate(
    bundle: BundleArgument,
    text: Annotated[str | None, typer.Argument(help="What to go on from, as the bundle's tokenizer reads it.")] = None,
    ids: Annotated[str | None, typer.Option(help="Token ids instead of a text, as 1,2,3.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="How many tokens at most; by default 64, or what the cache has room for.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token; 1 draws from the model's own.")
    ] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many of the likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this probability.")] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    stop: Annotated[str | None, typer.Option(help="Ids behind which the text ends, as 2,3; the bundle's own.")] = None,
    backend: Annotated[str, typer.Option("--backend", "-b", help="auto, or a backend by name.")] = "auto",
    trusted: TrustedKeys = None,
    as_json: Json = False,
) -> Answer:
    """Let a decoder go on with a text, and print its tokens as they come.

    The bundle was deployed with --cache-tokens. Without a tokenizer, tokens are given and printed as ids.

    Example: `attnforge generate digits.bundle 7`

    Example: `attnforge generate llama-fp16 "Once upon a time" --max-new-tokens 100 --temperature 0.8 --top-p 0.95`

    Example: `attnforge generate llama-fp16 --ids 1,450,3118 --json`
    """
    import numpy as np

    from attnforge.runtime.decoding.generation import Sampler
    from attnforge.text import Tokenizer

    if (text is None) == (ids is None):
        raise UsageError("a text, or token ids with --ids, are what to go on from; give one of them")
    sampler = Sampler(temperature, top_k, top_p, seed)
    with attnforge.load(bundle, backend, trusted=trusted) as session:
        tokenizer = Tokenizer(session.bundle) if text is not None else None
        prompt = whole_numbers(ids or "", "--ids") if tokenizer is None else tokenizer.ids(text or "")
        if not prompt:
            raise UsageError("the prompt has no token; give a longer text")
        ends = None if stop is None else whole_numbers(stop, "--stop")
        if max_new_tokens is None:
            decoding = session.bundle.manifest.decoding
            room = decoding.places - len(prompt) + 1 if decoding is not None else MOST
            max_new_tokens = max(1, min(MOST, room))
        start = time.perf_counter()
        tokens = session.generate([np.array(prompt)], max_new_tokens, stop=ends, sampler=sampler)
        chosen: list[int] = []
        first = 0.0

        def following() -> Iterator[int]:
            nonlocal first
            for token in tokens:
                first = first or time.perf_counter() - start
                chosen.append(int(token[0]))
                yield chosen[-1]

        if as_json:
            for _ in following():
                pass
        elif tokenizer is None:
            for token in following():
                out.print(token, end=" ", markup=False)
            out.print()
        else:
            out.print(plain_text(tokenizer.text(prompt)), end="", markup=False, soft_wrap=True)
            for piece in tokenizer.stream(prompt, following()):
                out.print(plain_text(piece), end="", markup=False, soft_wrap=True)
            out.print()
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
    told = f"{len(chosen)} tokens on {session.backend}; the first after {1e3 * first:.0f} ms{speed}"
    return Answer(document, lambda: say(told, "dim"))


def plain_text(text: str) -> str:
    """A text of a model as a terminal may show it: lines end, and nothing steers."""
    return "\n".join(plain(line) for line in text.split("\n"))
