"""Claims that the suite's results are held to: ratios of times within one run, memory, and how memory grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attnforge.bench.interval import ratio_of
from attnforge.bench.results import Growth, Model, Results
from benchmarks.experiment import Claim

MIB_AT_MOST, TOKENS = 64, 12544
EXPONENT_AT_MOST = 1.1


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

    def measured_on(self, model: Model | None) -> Claim:
        """What `model` says of the claim; None where the results lack the model."""
        name, _, precision = self.peer.partition(" ")
        claim = f"{self.model}: {self.ours} to {name if precision else f'any {name} contender'}"
        contenders = model.contenders if model is not None else []
        ours = next((c for c in contenders if c.key == self.ours or (c.picked and c.precision == self.ours)), None)
        if ours is None:
            return Claim(claim, None, self.at_most)
        others = [c for c in contenders if c is not ours and self.peer in (c.key, c.precision)]
        others.sort(key=lambda c: c.latency.median.value)
        first = next((i for i, c in enumerate(others) if precision or not c.wrong_in), len(others))
        ratios = [ratio_of(ours.latency.rounds, c.latency.rounds, ours.latency.openings) for c in others[: first + 1]]
        over = tuple(f"{c.key} ({ratio.value:.2f})" for c, ratio in zip(others[:first], ratios, strict=False))
        if first == len(others):
            return Claim(claim, None, self.at_most, "", over, ours.wrong_in)
        partly = f", {others[first].partly}" if others[first].partly is not None else ""
        against = "" if precision else f"{ours.key} to {others[first].key}{partly}"
        return Claim(claim, ratios[first], self.at_most, against, over, ours.wrong_in)


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


def measured_claims(results: Results) -> list[Claim]:
    """Every claim, with what was measured."""
    models = {model.name: model for model in results.models}
    ratios = [claim.measured_on(models.get(claim.model)) for claim in RATIOS]
    return [*ratios, *_of_memory(results.growth)]


def _of_memory(growth: Sequence[Growth]) -> Iterator[Claim]:
    over = next((one for one in growth if one.along == "tokens"), None)
    series = next((s for s in over.series if s.name == "onnxruntime-cpu"), None) if over is not None else None
    mib = dict(zip(over.sizes, series.extra_mib, strict=True)).get(TOKENS) if over and series else None
    yield Claim(f"patch-attention: MiB that {TOKENS} tokens add on onnxruntime-cpu", mib, MIB_AT_MOST)
    exponent = series.memory.exponent if series is not None and series.memory is not None else None
    yield Claim("patch-attention: p of memory ~ tokensᵖ on onnxruntime-cpu", exponent, EXPONENT_AT_MOST)
