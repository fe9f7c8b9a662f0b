"""The records of a results file. Numbers are in the units that their names end in.

A results file is a JSON document of :class:`Results` or :class:`DecodingResults`, with a schema version of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from attnforge.atomic import write_whole
from attnforge.bench.limits import Ceilings, Limit, Work
from attnforge.errors import UsageError
from attnforge.machine import Machine
from attnforge.records import Interval as Interval
from attnforge.records import Record

RESULTS_VERSION, DECODING_RESULTS_VERSION = 1, 2


class Latency(Record):
    """Milliseconds a call, one caller, warm.

    Attributes:
        rounds: of every round, each call; contenders took turns within a round, so the rounds of two of them pair.
        openings: how many of the rounds, in order, were of each opening; empty for a single one. All contenders of a
            model have the same.
        median, min, p90, p99: of all calls; with fewer than a hundred calls p99 is near the slowest.
        samples: how many calls that is.
    """

    rounds: list[list[float]]
    openings: list[int] = []
    median: Interval
    min: float
    p90: float
    p99: float
    samples: int


class Throughput(Record):
    """Samples a second, with `batch` samples a call and `callers` at once, each in a thread of its own, on one loaded
    model."""

    batch: int
    callers: int
    per_second: Interval


class Cold(Record):
    """Seconds that a contender's start takes in a process of its own.

    Attributes:
        import_s: to import its libraries.
        load_s: from then until the model is ready; a compiler's work is here or in `first_s`. Where it is long, the
            lesser of two.
        first_s: from then to the first output.
    """

    import_s: float
    load_s: float
    first_s: float


class MemoryUse(Record):
    """Memory of a contender in a process of its own, where the system tells (Linux).

    Attributes:
        loaded_mib: once the model is loaded and, if it can, has run at its least sizes; libraries included.
        peak_mib: the most from its start until it has run at these sizes: once, and one of our backends twice, because
            a session prepares for sizes that come again.
        extra_mib: the most that these runs add to `loaded_mib`.
    """

    loaded_mib: float
    peak_mib: float
    extra_mib: float


class Cases(Record):
    """How a contender did in a bundle's reference cases.

    Attributes:
        held: how many cases it ran, those at sizes that it was made for.
        of: how many cases the bundle has.
        wrong: the first case in which it misses the parity budget or fails, and how; None where there is none.
    """

    held: int
    of: int
    wrong: str | None = None


class Right(Record):
    """A way to run or to decode with the model that answers within the parity budget.

    Attributes:
        name: of the backend or the peer.
        ours: whether it is a backend of the bundle, and no peer.
        what: a line about it.
        error, budget: of the answer that is closest to its budget, relative to float64, on the inputs that were timed.
        notes: what could not be measured, and why.
    """

    name: str
    ours: bool
    what: str
    error: float
    budget: float
    notes: list[str] = []


class Contender(Right):
    """One way to run the model, and its measurements; None for those that could not be made.

    Attributes:
        precision: that it computes at, and whose parity budget it was held to.
        picked: whether `load(backend="auto")` picks it at this precision.
        cases: how it did in the bundle's reference cases; ours, and peers that are as fast, are held to them.
        ratio: its median over that of the picked backend at the same precision; above 1, the picked backend is faster.
        share: of the machine's limit, from 0 to 1 (:mod:`.limits`).
        size_mb: of the model's or plan's files.
    """

    precision: str
    picked: bool = False
    cases: Cases | None = None
    latency: Latency
    ratio: Interval | None = None
    share: float | None = None
    throughput: list[Throughput] = []
    cold: Cold | None = None
    memory: MemoryUse | None = None
    size_mb: float | None = None

    @property
    def key(self) -> str:
        """Its name where contenders of several precisions stand side by side."""
        return f"{self.name} {self.precision}"

    @property
    def wrong_in(self) -> str | None:
        """The first of the bundle's reference cases in which it is wrong, and how; None where none is known."""
        return self.cases.wrong if self.cases is not None else None

    @property
    def partly(self) -> str | None:
        """A remark where it was held to some of the reference cases only; None where to all, or where it was wrong."""
        if self.cases is None or self.cases.held == self.cases.of or self.cases.wrong is not None:
            return None
        return f"held to {self.cases.held} of {self.cases.of} cases"

    @property
    def remarks(self) -> list[str]:
        """Its notes, and which reference cases it was not held to, or is wrong in."""
        cases = f"it is wrong in {self.wrong_in}" if self.wrong_in is not None else self.partly
        return [*self.notes, *([cases] if cases is not None else [])]

    def rate_at(self, batch: int, callers: int) -> Throughput | None:
        """Its throughput at a load, if that was measured."""
        return next((rate for rate in self.throughput if (rate.batch, rate.callers) == (batch, callers)), None)


class Deployed(Record):
    """A bundle that was measured.

    Attributes:
        seconds: of every stage of deploying it.
        size_mb: of the whole folder.
        source: name and options that make the model again.
    """

    precision: str
    bundle: str
    source: str
    seconds: dict[str, float]
    size_mb: float


class Model(Record):
    """One model at one set of sizes: every contender took turns with every other in one run.

    Attributes:
        work: operations and bytes, by precision.
        limit: the least time that the machine allows for them, by precision.
        wrong: contenders that missed the parity budget, which have no time, and by how much.
        skipped: contenders that could not run, and why.
    """

    name: str
    sizes: dict[str, int]
    inputs: dict[str, str]
    rounds: int
    deployed: list[Deployed]
    work: dict[str, Work] = {}
    limit: dict[str, Limit] = {}
    contenders: list[Contender]
    wrong: dict[str, str] = {}
    skipped: dict[str, str] = {}

    @property
    def openings(self) -> int:
        """How often every contender was opened."""
        return max((len(contender.latency.openings) for contender in self.contenders), default=0) or 1

    @property
    def loads(self) -> list[tuple[int, int]]:
        """Samples a call and callers at once, of every load that was measured."""
        return sorted({(rate.batch, rate.callers) for c in self.contenders for rate in c.throughput})

    @property
    def stages(self) -> list[str]:
        """The stages of deploying it."""
        return list(dict.fromkeys(stage for deployed in self.deployed for stage in deployed.seconds))

    @property
    def by_precision(self) -> dict[str, list[Contender]]:
        """The contenders by precision, the fastest first."""
        fastest_first = sorted(self.contenders, key=lambda contender: contender.latency.median.value)
        return {
            name: [contender for contender in fastest_first if contender.precision == name]
            for name in precisions(contender.precision for contender in fastest_first)
        }


def precisions(names: Iterable[str]) -> list[str]:
    """Each precision once, fp32 first, then in the order of the names."""
    return sorted(dict.fromkeys(names), key=lambda name: name != "fp32")


class Fit(Record):
    """The p of a law y ~ xᵖ, by least squares of the logarithms, and its 95% interval.

    Attributes:
        last: p between the two largest sizes alone, where constant costs weigh least.
    """

    exponent: Interval
    last: float


class Series(Record):
    """One contender over sizes; None where it was not measured, and `notes` says why."""

    name: str
    precision: str
    ours: bool
    ms: list[float | None]
    extra_mib: list[float | None]
    time: Fit | None = None
    memory: Fit | None = None
    notes: list[str] = []


class Growth(Record):
    """How time and memory grow with `along`: `tokens` or `layers`."""

    model: str
    along: str
    sizes: list[int]
    series: list[Series]
    deploy_seconds: list[dict[str, float]] = []

    @property
    def stages(self) -> list[str]:
        """The stages of deploying it."""
        return list(dict.fromkeys(stage for seconds in self.deploy_seconds for stage in seconds))


class Environment(Record):
    """The machine, and how busy it was.

    Attributes:
        threads: of every CPU contender.
        governor: of the first processor's clock; or a remark that the system does not tell.
        load_before, load_after: processes that ran or waited over the minute before the run, and over its last.
    """

    machine: Machine
    versions: dict[str, str]
    threads: int
    governor: str
    load_before: float | None
    load_after: float | None = None


class Run(Record):
    """What is said of every run.

    Attributes:
        command: that measures its figures again.
        created: when it began.
        seconds: that it took.
    """

    schema_version: Annotated[int, Field(strict=True)]
    command: str
    created: str
    seconds: float
    environment: Environment


class Results(Run):
    """All figures of one run of the benchmark.

    Attributes:
        left_out: parts that were not measured, and why.
    """

    schema_version: Annotated[int, Field(strict=True)] = RESULTS_VERSION
    ceilings: Ceilings | None = None
    models: list[Model]
    growth: list[Growth] = []
    left_out: dict[str, str] = {}


# --- decoding ---------------------------------------------------------------------------------------------------------


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


class Timed(Record):
    """Something that decoders do.

    Attributes:
        latency: milliseconds of it, for all samples together.
        ratio: the median over that of the bundle's own fastest backend; above 1, the bundle is faster.
    """

    latency: Latency
    ratio: Interval | None = None


class StepTime(Timed):
    """Steps of one token behind a context.

    Attributes:
        context: tokens in the cache before the first timed step.
        per_second: tokens a second, of all samples together.
        share: the limit's median over its own.
    """

    context: int
    per_second: Interval
    share: Interval | None = None


class FirstToken(Timed):
    """Time to first token: a prompt into an empty cache, until the logits of its last token are there.

    Attributes:
        prompt: tokens of every sample.
    """

    prompt: int


class DecodingContender(Right):
    """One way to decode.

    Attributes:
        steps: by context.
        first_tokens: by prompt.
        growth: bytes that the process has more in memory after a step, the mean of many; None where the system does not
            tell.
    """

    steps: list[StepTime] = []
    first_tokens: list[FirstToken] = []
    growth: float | None = None

    def at(self, context: int) -> StepTime | None:
        """Its steps behind a context."""
        return next((step for step in self.steps if step.context == context), None)


class DecodingResults(Run):
    """All figures of one run of `bench --decode`.

    Attributes:
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


# --- files ------------------------------------------------------------------------------------------------------------


def read(file: str | os.PathLike[str]) -> Results:
    """The results in a file.

    Raises:
        UsageError: there is none, or it is no results file of this schema.
    """
    try:
        document = json.loads(Path(file).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{os.fspath(file)} is no results file ({error}); write one with attnforge bench --out"
        ) from None
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != RESULTS_VERSION:
        raise UsageError(
            f"{os.fspath(file)} has results of schema {version}, this attnforge reads {RESULTS_VERSION}; measure again"
        )
    try:
        return Results.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(
            f"{os.fspath(file)} is no whole results file: {where}: {first['msg']}; measure again"
        ) from None


def write(results: Run, file: str | os.PathLike[str]) -> None:
    """Write results, numbers to five digits, whole or not at all."""
    target = Path(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, f"{json.dumps(to_five_digits(results.model_dump(mode='json')), indent=1)}\n".encode())


def to_five_digits(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: to_five_digits(item) for key, item in value.items()}
    return [to_five_digits(item) for item in value] if isinstance(value, list) else value
