"""What the suite's results are held to: ratios within the run, memory, and how it grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from attnforge.benchmarks.measure.results import Contender, Growth, Interval, Model, Results
from attnforge.benchmarks.measure.statistics import ratio_of

MIB_AT_MOST, TOKENS = 64, 12544
EXPONENT_AT_MOST = 1.1


@dataclass(frozen=True)
class Outcome:
    """A claim, and what was measured of it; None where nothing was.

    Attributes:
        against: what was compared with what.
        passed_over: of others that are faster than that, and wrong in a reference case, what ours is to them.
        wrong: the reference case in which ours is.
    """

    claim: str
    at_most: float
    measured: Interval | None
    against: str = ""
    passed_over: tuple[str, ...] = ()
    wrong: str | None = None

    @property
    def holds(self) -> str:
        """Whether it holds, in a word or two: what is within its interval may be chance, either way."""
        if self.wrong is not None:
            return f"**no**, it is wrong in {self.wrong}"
        if self.measured is None:
            return "not measured"
        if self.measured.value <= self.at_most:
            return "yes"
        return "**no**" if self.measured.low > self.at_most else "no, within noise"


@dataclass(frozen=True)
class Ratio:
    """That one contender takes at most so many times as long as another; of several others, as the fastest.

    Attributes:
        ours: key of a contender, or a precision, for what `auto` picks at it.
        others: which contenders it is held to, by their key.
        right: of the others only those that are not known to be wrong in a reference case of the bundle.
    """

    model: str
    ours: str
    others: Callable[[Contender], bool]
    named: str
    at_most: float
    right: bool = False

    def outcome(self, model: Model | None) -> Outcome:
        claim = f"{self.model}: {self.ours} to {self.named}"
        contenders = model.contenders if model is not None else []
        ours = next((c for c in contenders if c.key == self.ours or (c.picked and c.precision == self.ours)), None)
        others = sorted(
            (c for c in contenders if c is not ours and self.others(c)), key=lambda c: c.latency.median.value
        )
        if ours is None:
            return Outcome(claim, self.at_most, None)
        first = next((i for i, c in enumerate(others) if not (self.right and c.wrong_in)), len(others))
        ratios = [ratio_of(ours.latency.rounds, c.latency.rounds, ours.latency.openings) for c in others[: first + 1]]
        over = tuple(f"{c.key} ({ratio.value:.2f})" for c, ratio in zip(others[:first], ratios, strict=False))
        if first == len(others):
            return Outcome(claim, self.at_most, None, "", over, ours.wrong_in)
        partly = f", {others[first].partly}" if others[first].partly is not None else ""
        against = f"{ours.key} to {others[first].key}{partly}"
        return Outcome(claim, self.at_most, ratios[first], against, over, ours.wrong_in)


def _named(key: str) -> Callable[[Contender], bool]:
    return lambda one: one.key == key


def _at(precision: str) -> Callable[[Contender], bool]:
    return lambda one: one.precision == precision


RATIOS = [
    *(
        Ratio("patch-attention", "onnxruntime-cpu fp32", _named(f"{peer} fp32"), peer, at_most)
        for peer, at_most in (
            ("onnxruntime-plain", 0.75),
            ("ort-fusions", 0.70),
            ("eager-sdpa", 0.95),
            ("openvino-plain", 1.05),
        )
    ),
    Ratio("patch-attention", "bf16", _at("fp32"), "any fp32 contender", 0.40, right=True),
    *(
        Ratio(model, precision, _at(precision), f"any {precision} contender", 1.05, right=True)
        for model, precision in (
            ("patch-attention", "fp32"),
            ("patch-attention", "bf16"),
            ("vit-b-16", "fp32"),
            ("bert-base", "fp32"),
            ("bert-base", "bf16"),
        )
    ),
]


def outcomes(results: Results) -> list[Outcome]:
    """Every claim, with what was measured."""
    models = {model.name: model for model in results.models}
    found = [claim.outcome(models.get(claim.model)) for claim in RATIOS]
    return [*found, *_of_memory(results.growth)]


def _of_memory(growth: Sequence[Growth]) -> Iterator[Outcome]:
    over = next((one for one in growth if one.along == "tokens"), None)
    series = next((s for s in over.series if s.name == "onnxruntime-cpu"), None) if over is not None else None
    mib = dict(zip(over.sizes, series.extra_mib, strict=True)).get(TOKENS) if over and series else None
    held = None if mib is None else Interval(value=mib, low=mib, high=mib)
    yield Outcome(f"patch-attention: MiB that {TOKENS} tokens add on onnxruntime-cpu", MIB_AT_MOST, held)
    fit = series.memory if series is not None else None
    exponent = None if fit is None else fit.exponent
    yield Outcome("patch-attention: p of memory ~ tokensᵖ on onnxruntime-cpu", EXPONENT_AT_MOST, exponent)


def table(results: Results) -> str:
    """The claims as Markdown."""
    lines = ["| | at most | measured | 95% | holds |", "|---|---|---|---|---|"]
    for one in outcomes(results):
        of = f"{one.claim} ({one.against})" if one.against and "any" in one.claim else one.claim
        if one.passed_over:
            of += f"; passed over, for they are wrong in another case: {', '.join(one.passed_over)}"
        if one.measured is None:
            lines.append(f"| {of} | {one.at_most:g} | – | – | {one.holds} |")
            continue
        at = one.measured
        lines.append(f"| {of} | {one.at_most:g} | {at.value:.3g} | {at.low:.3g}–{at.high:.3g} | {one.holds} |")
    return "\n".join(lines)
