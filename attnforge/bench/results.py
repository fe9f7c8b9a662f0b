"""The records of a results file. Numbers are in the units at the ends of their names.

A results file is a JSON document of :class:`Results` or :class:`DecodingResults`, each with its own schema version.
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
    """Milliseconds per call, with one caller, warm.

    Attributes:
        rounds: the calls of every round; contenders took turns within a round, so the rounds of two of them pair.
        openings: number of rounds of each load, in order; empty for a single load. The same for all contenders of a
            model.
        median, min, p90, p99: statistics over all calls; with fewer than a hundred calls p99 is near the slowest.
        samples: number of calls.
    """

    rounds: list[list[float]]
    openings: list[int] = []
    median: Interval
    min: float
    p90: float
    p99: float
    samples: int


class Throughput(Record):
    """Samples per second, with `batch` samples per call and `callers` concurrent callers, each in its own thread, on
    one loaded model."""

    batch: int
    callers: int
    per_second: Interval


class Cold(Record):
    """Seconds that a contender takes to start in its own process.

    Attributes:
        import_s: to import its libraries.
        load_s: from then until the model is ready; compilation counts here or in `first_s`. If it is long, the shorter
            of two loads.
        first_s: from then to the first output.
    """

    import_s: float
    load_s: float
    first_s: float


class MemoryUse(Record):
    """Memory of a contender in its own process, where the system reports it (Linux).

    Attributes:
        loaded_mib: after the model is loaded and, if it takes other sizes, has run at its least sizes; libraries
            included.
        peak_mib: peak from the start until it has run at these sizes: once, and our backends twice, because a session
            prepares for repeated sizes.
        extra_mib: peak that these runs add to `loaded_mib`.
    """

    loaded_mib: float
    peak_mib: float
    extra_mib: float


class Cases(Record):
    """The result of checking a contender in a bundle's reference cases.

    Attributes:
        held: number of cases that it ran, those at sizes that it was compiled for.
        of: number of cases in the bundle.
        wrong: the first case in which it misses the parity budget or fails, and how; None if there is none.
    """

    held: int
    of: int
    wrong: str | None = None


class Right(Record):
    """A way to run or to decode with the model that answers within the parity budget.

    Attributes:
        name: name of the backend or the peer.
        ours: whether it is a backend of the bundle, not a peer.
        what: one-line description.
        error, budget: error and budget of the answer that is closest to its budget, relative to float64, on the timed
            inputs.
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
        precision: precision that it computes at, and whose parity budget applies to it.
        picked: whether `load(backend="auto")` picks it at this precision.
        cases: result in the bundle's reference cases; ours, and peers that are as fast, are checked in them.
        ratio: its median over that of the picked backend at the same precision; above 1, the picked backend is faster.
        share: share of the machine's limit that it reaches, from 0 to 1 (:mod:`.limits`).
        size_mb: MB of the model's or plan's files.
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
        """Its name, unique among contenders of several precisions."""
        return f"{self.name} {self.precision}"

    @property
    def wrong_in(self) -> str | None:
        """The first reference case of the bundle in which it is wrong, and how; None if none is known."""
        return self.cases.wrong if self.cases is not None else None

    @property
    def partly(self) -> str | None:
        """A remark if it was checked in only some of the reference cases; None if in all, or if it was wrong."""
        if self.cases is None or self.cases.held == self.cases.of or self.cases.wrong is not None:
            return None
        return f"checked in {self.cases.held} of {self.cases.of} cases"

    @property
    def remarks(self) -> list[str]:
        """Its notes, and in which reference cases it was not checked or is wrong."""
        cases = f"it is wrong in {self.wrong_in}" if self.wrong_in is not None else self.partly
        return [*self.notes, *([cases] if cases is not None else [])]

    def rate_at(self, batch: int, callers: int) -> Throughput | None:
        """Return its throughput at a load, or None if that was not measured."""
        return next((rate for rate in self.throughput if (rate.batch, rate.callers) == (batch, callers)), None)


class Deployed(Record):
    """A bundle that was measured.

    Attributes:
        seconds: seconds of every stage of deploying it.
        size_mb: MB of the whole folder.
        source: name and options that rebuild the model.
    """

    precision: str
    bundle: str
    source: str
    seconds: dict[str, float]
    size_mb: float


class Model(Record):
    """One model at one set of sizes: all contenders took turns in one run.

    Attributes:
        work: operations and bytes, by precision.
        limit: least time that the machine allows for them, by precision.
        wrong: contenders that missed the parity budget and so have no time, and by how much.
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
        """How often every contender was loaded."""
        return max((len(contender.latency.openings) for contender in self.contenders), default=0) or 1

    @property
    def loads(self) -> list[tuple[int, int]]:
        """Samples per call and concurrent callers of every measured load."""
        return sorted({(rate.batch, rate.callers) for c in self.contenders for rate in c.throughput})

    @property
    def stages(self) -> list[str]:
        """The stages of deploying it."""
        return list(dict.fromkeys(stage for deployed in self.deployed for stage in deployed.seconds))

    @property
    def by_precision(self) -> dict[str, list[Contender]]:
        """The contenders by precision, fastest first."""
        fastest_first = sorted(self.contenders, key=lambda contender: contender.latency.median.value)
        return {
            name: [contender for contender in fastest_first if contender.precision == name]
            for name in precisions(contender.precision for contender in fastest_first)
        }


def precisions(names: Iterable[str]) -> list[str]:
    """Return each precision once, fp32 first, the others in the given order."""
    return sorted(dict.fromkeys(names), key=lambda name: name != "fp32")


class Fit(Record):
    """The exponent p of a law y ~ xᵖ, by least squares of the logarithms, and its 95% interval.

    Attributes:
        last: p between the two largest sizes only, where constant costs weigh least.
    """

    exponent: Interval
    last: float


class Series(Record):
    """One contender over sizes; None at sizes where it was not measured, with the reason in `notes`."""

    name: str
    precision: str
    ours: bool
    ms: list[float | None]
    extra_mib: list[float | None]
    time: Fit | None = None
    memory: Fit | None = None
    notes: list[str] = []


class Growth(Record):
    """Growth of time and memory with `along`: `tokens` or `layers`."""

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
        threads: number of threads of every CPU contender.
        governor: frequency governor of the first processor, or a remark that the system does not report it.
        load_before, load_after: processes that ran or waited over the minute before the run, and over its last minute.
    """

    machine: Machine
    versions: dict[str, str]
    threads: int
    governor: str
    load_before: float | None
    load_after: float | None = None


class Run(Record):
    """The fields of every run.

    Attributes:
        command: command that reproduces its figures.
        created: time at which it started.
        seconds: duration.
    """

    schema_version: Annotated[int, Field(strict=True)]
    command: str
    created: str
    seconds: float
    environment: Environment


def _reasons(measured: Model | DecodingResults) -> list[str]:
    """Why contenders have no time."""
    wrong = [f"{name} was not timed because its output is wrong: {reason}" for name, reason in measured.wrong.items()]
    return [*wrong, *(f"{name} did not run: {reason}" for name, reason in measured.skipped.items())]


class Results(Run):
    """All figures of one run of the benchmark.

    Attributes:
        left_out: parts that were not measured, each with the reason.
    """

    schema_version: Annotated[int, Field(strict=True)] = RESULTS_VERSION
    ceilings: Ceilings | None = None
    models: list[Model]
    growth: list[Growth] = []
    left_out: dict[str, str] = {}

    def summary(self) -> str:
        """Return the median of every contender, a line each, fastest first, and why others have none."""
        lines = []
        for model in self.models:
            for contender in sorted(model.contenders, key=lambda contender: contender.latency.median.value):
                picked = ", which auto loads" if contender.picked else ""
                lines.append(f"{model.name}, {contender.key}: {contender.latency.median.value:.3g} ms{picked}")
            lines += _reasons(model)
        return "\n".join(lines)


# --- decoding ---------------------------------------------------------------------------------------------------------


class StepLimit(Record):
    """The least time of a step: the time of a copy that moves (reads plus writes) as many bytes as the step reads.

    Attributes:
        weights: bytes of weights that a step reads, in the bundle's types.
        cache: bytes of filled cache that it reads.
        latency: milliseconds of the copy, which took turns with the contenders.
    """

    weights: int
    cache: int
    latency: Latency


class Timed(Record):
    """A timed operation of a decoder.

    Attributes:
        latency: its milliseconds, for all samples together.
        ratio: its median over that of the bundle's fastest backend; above 1, the bundle is faster.
    """

    latency: Latency
    ratio: Interval | None = None


class StepTime(Timed):
    """Steps of one token after a context.

    Attributes:
        context: tokens in the cache before the first timed step.
        per_second: tokens per second, of all samples together.
        share: the limit's median over the step's.
    """

    context: int
    per_second: Interval
    share: Interval | None = None


class FirstToken(Timed):
    """Time to first token: a prompt into an empty cache, until the logits of its last token are there.

    Attributes:
        prompt: tokens per sample.
    """

    prompt: int


class DecodingContender(Right):
    """One way to decode.

    Attributes:
        steps: times of steps, by context.
        first_tokens: times to first token, by prompt.
        growth: bytes by which the process's memory grows per step, the mean of many; None where the system does not
            report it.
    """

    steps: list[StepTime] = []
    first_tokens: list[FirstToken] = []
    growth: float | None = None

    def at(self, context: int) -> StepTime | None:
        """Return its steps after a context, or None."""
        return next((step for step in self.steps if step.context == context), None)


class DecodingResults(Run):
    """All figures of one run of `bench --decode`.

    Attributes:
        model: name of the bundle.
        source: name and options that rebuild the model.
        batch: samples that are decoded at once.
        places: capacity of the caches in tokens.
        steps: timed steps of a turn, after one that is not timed.
        rounds: timed rounds per contender at each context and prompt.
        openings: how often every contender was loaded.
        held_to: the reference that the logits were checked against.
        limits: least time of a step, by context.
        wrong: contenders that missed the parity budget and so have no time, and by how much.
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

    def summary(self) -> str:
        """Return the tokens per second of every contender after every context, a line each, and why others have
        none."""
        lines = [
            f"{self.model}, {contender.name}: {step.per_second.value:.3g} tokens per second after {step.context}"
            for contender in self.contenders
            for step in contender.steps
        ]
        return "\n".join([*lines, *_reasons(self)])

    @property
    def best(self) -> DecodingContender | None:
        """The bundle's backend that is fastest after the longest context; None if none was timed."""
        ours = [contender for contender in self.contenders if contender.ours and contender.steps]
        return min(ours, key=lambda contender: contender.steps[-1].latency.median.value, default=None)


# --- files ------------------------------------------------------------------------------------------------------------


def read(file: str | os.PathLike[str]) -> Results:
    """Read the results in a file.

    Raises:
        UsageError: the file does not exist, or is not a results file of this schema.
    """
    name = os.fspath(file)
    try:
        document = json.loads(Path(name).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not a results file ({error}); write one with attnforge bench --out") from None
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != RESULTS_VERSION:
        raise UsageError(f"{name} has schema version {version}, this attnforge reads {RESULTS_VERSION}; measure again")
    try:
        return Results.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{name} is not a valid results file: {where}: {first['msg']}; measure again") from None


def write(results: Run, file: str | os.PathLike[str]) -> None:
    """Write results atomically, with numbers to five digits."""
    target = Path(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, f"{json.dumps(to_five_digits(results.model_dump(mode='json')), indent=1)}\n".encode())


def to_five_digits(document: object) -> object:
    """Return a JSON document with its numbers to five digits."""
    return json.loads(json.dumps(document), parse_float=lambda text: float(f"{float(text):.5g}"))
