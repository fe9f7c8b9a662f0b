"""What a benchmark of decoding measured, as it is stored in its JSON document."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from attnforge.atomic import write_whole
from attnforge.bench.results import Environment, Interval, Latency, to_five_digits
from attnforge.errors import UsageError
from attnforge.records import Record

DECODING_RESULTS_VERSION = 2


class StepLimit(Record):
    """The least time of a step: that of a copy of as many bytes as it reads, read and written bytes both counted.

    Attributes:
        weights: bytes of weights that a step reads, in the bundle's own types.
        cache: bytes of filled cache that it reads.
        latency: milliseconds of the copy, which took turns with the contenders.
    """

    weights: int
    cache: int
    latency: Latency


class StepTime(Record):
    """Steps of one token behind a context.

    Attributes:
        context: tokens in the cache before the first timed step.
        latency: milliseconds a step, for all samples together.
        per_second: tokens a second, of all samples together.
        ratio: the median over that of the bundle's own fastest backend; above 1, the bundle is faster.
        share: the limit's median over its own.
    """

    context: int
    latency: Latency
    per_second: Interval
    ratio: Interval | None = None
    share: Interval | None = None


class FirstToken(Record):
    """Time to first token: a prompt into an empty cache, until the logits of its last token are there.

    Attributes:
        prompt: tokens of every sample.
        latency: milliseconds.
        ratio: as of :class:`StepTime`.
    """

    prompt: int
    latency: Latency
    ratio: Interval | None = None


class DecodingContender(Record):
    """One way to decode.

    Attributes:
        name: of the backend or peer.
        ours: whether it is a backend of the bundle.
        what: a line about it.
        error, budget: of the logits that are closest to their budget, relative.
        steps: by context.
        first_tokens: by prompt.
        growth: bytes that the process has more in memory after a step, the mean of many; None where the system does not
            tell.
        notes: what could not be measured, and why.
    """

    name: str
    ours: bool
    what: str
    error: float
    budget: float
    steps: list[StepTime] = []
    first_tokens: list[FirstToken] = []
    growth: float | None = None
    notes: list[str] = []

    def at(self, context: int) -> StepTime | None:
        """Its steps behind a context."""
        return next((step for step in self.steps if step.context == context), None)


class DecodingResults(Record):
    """All figures of one run of `bench --decode`.

    Attributes:
        command: that measures them again.
        seconds: that the run took.
        model: the bundle's name.
        source: name and options that make the model again.
        batch: samples that are decoded at once.
        places: tokens that the caches hold.
        steps: timed steps of a turn, behind one that is not timed.
        rounds: how often every contender had a turn at each context and prompt.
        openings: how often every contender was opened.
        held_to: what the logits were held to.
        limits: by context.
        wrong: contenders that missed the parity budget, which have no time, and by how much.
        skipped: contenders that could not run, and why.
    """

    schema_version: Annotated[int, Field(strict=True)] = DECODING_RESULTS_VERSION
    command: str
    created: str
    seconds: float
    environment: Environment
    model: str
    precision: str
    source: str
    batch: int
    places: int
    steps: int
    contexts: list[int]
    prompts: list[int]
    rounds: int
    openings: int
    held_to: Literal["float64", "eager"]
    limits: dict[int, StepLimit] = {}
    contenders: list[DecodingContender] = []
    wrong: dict[str, str] = {}
    skipped: dict[str, str] = {}

    @property
    def best(self) -> DecodingContender | None:
        """The bundle's own contender that is fastest behind the longest context; None where none was timed."""
        ours = [contender for contender in self.contenders if contender.ours and contender.steps]
        return min(ours, key=lambda contender: contender.steps[-1].latency.median.value, default=None)


def read(file: str | os.PathLike[str]) -> DecodingResults:
    """The results in a file.

    Raises:
        UsageError: there is none, or it is no results file of this schema.
    """
    try:
        return DecodingResults.model_validate(json.loads(Path(file).read_bytes()))
    except (OSError, ValueError, RecursionError, ValidationError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"{os.fspath(file)} holds no results of decoding ({reason}); write some with attnforge bench --decode --out"
        ) from None


def write(results: DecodingResults, file: str | os.PathLike[str]) -> None:
    """Write results, numbers to five digits, whole or not at all."""
    target = Path(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, f"{json.dumps(to_five_digits(results.model_dump(mode='json')), indent=1)}\n".encode())
