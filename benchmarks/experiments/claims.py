"""Claims that the suite's results are held to: ratios of times within one run, memory, and how memory grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from attnforge.bench.interval import ratio_of
from attnforge.bench.results import Growth, Interval, Model, Results
from attnforge.report.render import markdown_table

MIB_AT_MOST, TOKENS = 64, 12544
EXPONENT_AT_MOST = 1.1


Verdict = Literal["yes", "no", "within noise", "not measured"]


def verdict(measured: Interval | float, at_most: float) -> Verdict:
    """Whether a measurement is at most a limit: `yes`, `no`, or `within noise`.

    The whole 95% interval has to lie on one side of the limit; the limit itself is allowed. A single reading has no
    interval and stands for itself.
    """
    low, high = (measured.low, measured.high) if isinstance(measured, Interval) else (measured, measured)
    return "yes" if high <= at_most else "no" if low > at_most else "within noise"


@dataclass(frozen=True)
class MeasuredClaim:
    """A claim and what was measured of it.

    Attributes:
        claim: what is to be at most `at_most`.
        measured: an estimate with its interval, or a single reading; None where nothing was measured.
        against: which contender was compared with which.
        passed_over: contenders that are faster than the compared one and wrong in a reference case, each with the ratio
            of ours to it.
        wrong: the reference case in which ours is wrong.
    """

    claim: str
    at_most: float
    measured: Interval | float | None
    against: str = ""
    passed_over: tuple[str, ...] = ()
    wrong: str | None = None

    @property
    def holds(self) -> str:
        """Whether the claim holds, in a word or two, as Markdown."""
        if self.wrong is not None:
            return f"**no**, it is wrong in {self.wrong}"
        if self.measured is None:
            return "not measured"
        word = verdict(self.measured, self.at_most)
        return "**no**" if word == "no" else word


@dataclass(frozen=True)
class Ratio:
    """The claim that one contender takes at most `at_most` times as long as another.

    Attributes:
        model: name of the model in the results.
        ours: key of a contender; or a precision, for the backend that `auto` picks at it.
        peer: key of the other; or a precision, for the fastest of all others at it that is not known to be wrong in a
            reference case of the bundle.
    """

    model: str
    ours: str
    peer: str
    at_most: float

    def measured_on(self, model: Model | None) -> MeasuredClaim:
        """What `model` says of the claim; None where the results lack the model."""
        name, _, precision = self.peer.partition(" ")
        claim = f"{self.model}: {self.ours} to {name if precision else f'any {name} contender'}"
        contenders = model.contenders if model is not None else []
        ours = next((c for c in contenders if c.key == self.ours or (c.picked and c.precision == self.ours)), None)
        if ours is None:
            return MeasuredClaim(claim, self.at_most, None)
        others = [c for c in contenders if c is not ours and self.peer in (c.key, c.precision)]
        others.sort(key=lambda c: c.latency.median.value)
        first = next((i for i, c in enumerate(others) if precision or not c.wrong_in), len(others))
        ratios = [ratio_of(ours.latency.rounds, c.latency.rounds, ours.latency.openings) for c in others[: first + 1]]
        over = tuple(f"{c.key} ({ratio.value:.2f})" for c, ratio in zip(others[:first], ratios, strict=False))
        if first == len(others):
            return MeasuredClaim(claim, self.at_most, None, "", over, ours.wrong_in)
        partly = f", {others[first].partly}" if others[first].partly is not None else ""
        against = f"{ours.key} to {others[first].key}{partly}"
        return MeasuredClaim(claim, self.at_most, ratios[first], against, over, ours.wrong_in)


RATIOS = (
    Ratio("patch-attention", "onnxruntime-cpu fp32", "onnxruntime-plain fp32", 0.75),
    Ratio("patch-attention", "onnxruntime-cpu fp32", "ort-fusions fp32", 0.70),
    Ratio("patch-attention", "onnxruntime-cpu fp32", "eager-sdpa fp32", 0.95),
    Ratio("patch-attention", "onnxruntime-cpu fp32", "openvino-plain fp32", 1.05),
    Ratio("patch-attention", "bf16", "fp32", 0.40),
    Ratio("patch-attention", "fp32", "fp32", 1.05),
    Ratio("patch-attention", "bf16", "bf16", 1.05),
    Ratio("vit-b-16", "fp32", "fp32", 1.05),
    Ratio("bert-base", "fp32", "fp32", 1.05),
    Ratio("bert-base", "bf16", "bf16", 1.05),
)


def measured_claims(results: Results) -> list[MeasuredClaim]:
    """Every claim, with what was measured."""
    models = {model.name: model for model in results.models}
    ratios = [claim.measured_on(models.get(claim.model)) for claim in RATIOS]
    return [*ratios, *_of_memory(results.growth)]


def _of_memory(growth: Sequence[Growth]) -> Iterator[MeasuredClaim]:
    over = next((one for one in growth if one.along == "tokens"), None)
    series = next((s for s in over.series if s.name == "onnxruntime-cpu"), None) if over is not None else None
    mib = dict(zip(over.sizes, series.extra_mib, strict=True)).get(TOKENS) if over and series else None
    yield MeasuredClaim(f"patch-attention: MiB that {TOKENS} tokens add on onnxruntime-cpu", MIB_AT_MOST, mib)
    exponent = series.memory.exponent if series is not None and series.memory is not None else None
    yield MeasuredClaim("patch-attention: p of memory ~ tokensᵖ on onnxruntime-cpu", EXPONENT_AT_MOST, exponent)


def table(results: Results) -> str:
    """The claims as Markdown."""
    return markdown_table(("", "at most", "measured", "95%", "holds"), [_row(one) for one in measured_claims(results)])


def _row(outcome: MeasuredClaim) -> tuple[str, ...]:
    claim = outcome.claim
    if outcome.against and "any" in claim:
        claim += f" ({outcome.against})"
    if outcome.passed_over:
        claim += f"; passed over, for they are wrong in another case: {', '.join(outcome.passed_over)}"
    measured, interval = "–", "–"
    if isinstance(outcome.measured, Interval):
        measured = f"{outcome.measured.value:.3g}"
        interval = f"{outcome.measured.low:.3g}–{outcome.measured.high:.3g}"
    elif outcome.measured is not None:
        measured, interval = f"{outcome.measured:.3g}", "one reading"
    return claim, f"{outcome.at_most:g}", measured, interval, outcome.holds
