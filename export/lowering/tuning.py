"""The fastest form of a site on this machine: its forms are run and compared at the sizes they will see.

A site is cut from its model with all that is computed for it alone (:mod:`.cut`): rotation, casts, and what a form
leaves of the mask. Each form is written into that cut as it is deployed, and compared with the plain one; a form that
differs is not timed. Sites with equal cuts share one measurement.

One graph of a decoder step serves one token after many and a whole prompt, so it has one form: the fastest for a prompt
and as many single tokens after it. Its caches are input and output in one buffer, as a decoder's are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from attnforge.arrays import Array
from attnforge.bundle import NEXT
from attnforge.errors import first_line
from attnforge.export.attention.canonicalize import Site
from attnforge.export.graphs.build import dims_of
from attnforge.export.graphs.execute import open_session
from attnforge.export.graphs.sizes import Unmeasurable, evaluated, sizes_of
from attnforge.export.lowering.attention import Attention, Candidate, FormChoice, Lowered, attentions, write
from attnforge.export.lowering.cut import cut_of, work_of
from attnforge.numbers import scientific
from attnforge.progress import Steps
from attnforge.runtime.parity.budget import relative_error
from attnforge.runtime.race import ALIKE, APART, LONG, medians, seconds_of

ROUNDS = 9
"""Number of times that every candidate is timed."""

LARGEST_SCORES = 2**26
"""Bytes of scores above which no form that materialises them is tried: the forms of a site, which are in memory at
once, take about thirteen times as much."""

CALLS = 5
"""The fewest calls that :func:`~attnforge.runtime.race.medians` makes of a form. Forms whose calls are long are timed
only if there is time for these."""


@dataclass(frozen=True)
class Library:
    """The library that runs the forms that are measured.

    Attributes:
        name: name of the library.
        open: takes a model and its inputs by name; returns a function that runs it and returns the library's own output
            object. Caches are written in place.
        read: converts that output to an array.
    """

    name: str
    open: Callable[[ir.Model, Mapping[str, Array]], Callable[[], Any]]
    read: Callable[[Any], Array]


def _open_on_onnxruntime(model: ir.Model, feeds: Mapping[str, Array]) -> Callable[[], Any]:
    """A function that runs `model` on `feeds` and returns the binding of ONNX Runtime's own output values."""
    session = open_session(model, optimised=True)
    binding = session.io_binding()
    values = {each.name: ort.OrtValue.ortvalue_from_numpy(feeds[each.name]) for each in session.get_inputs()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in (each.name for each in session.get_outputs()):
        if name.endswith(NEXT):
            binding.bind_ortvalue_output(name, values[name.removesuffix(NEXT)])
        else:
            binding.bind_output(name, "cpu")

    def run() -> Any:
        session.run_with_iobinding(binding)
        return binding

    return run


ONNX_RUNTIME = Library("ONNX Runtime", _open_on_onnxruntime, lambda binding: binding.get_outputs()[0].numpy())


@dataclass
class Tuner:
    """Chooses the form of each site by measuring.

    Attributes:
        sizes: the usual size of each symbolic dim.
        seconds: time for measuring all sites together. Once it is spent, the remaining sites are left to the rules.
        steps: counts every site.
        measured: earlier measurements, by site.
        library: runs the forms.
        spent: seconds of measuring so far.
        chosen: the form of every site so far.
    """

    sizes: Mapping[str, int]
    seconds: float = 20.0
    steps: Steps = field(default_factory=lambda: Steps(None))
    measured: Mapping[str, FormChoice] = field(default_factory=dict)
    library: Library = ONNX_RUNTIME
    spent: float = field(default=0.0, init=False)
    chosen: dict[str, FormChoice] = field(default_factory=dict, init=False)
    _known: dict[Hashable, FormChoice] = field(default_factory=dict, init=False)

    def choose(self, model: ir.Model, a: Attention, candidates: Sequence[Candidate], ruled: FormChoice) -> FormChoice:
        """The fastest of `candidates`, or `ruled` if they cannot be measured.

        Args:
            model: the model of the site; not modified.
            a: the site.
            candidates: its forms, the plain one first.
            ruled: the form that the rules choose.
        """
        site = str(a.node.name)
        self.steps.begin(site.removesuffix("/Attention"))
        self.chosen[site] = self.measured.get(site) or self._choose(model, a, candidates, ruled)
        return self.chosen[site]

    def _choose(self, model: ir.Model, a: Attention, candidates: Sequence[Candidate], ruled: FormChoice) -> FormChoice:
        if len(candidates) == 1:
            return ruled
        try:
            candidates = self._in_memory(a, candidates, ruled)
            projects = any(candidate.projects for candidate in candidates)
            key = (work_of(a, self.sizes, projects), tuple(candidate.form for candidate in candidates))
            if key not in self._known:
                if self.spent >= self.seconds:
                    raise Unmeasurable("the time for measuring was spent on other sites")
                start = time.perf_counter()
                try:
                    self._known[key] = self._measured(model, a, candidates, ruled, projects)
                finally:
                    self.spent += time.perf_counter() - start
        except Unmeasurable as reason:
            return replace(ruled, why=f"{ruled.why}; not measured: {reason}")
        return self._known[key]

    def _in_memory(self, a: Attention, candidates: Sequence[Candidate], ruled: FormChoice) -> Sequence[Candidate]:
        """The forms that may be in memory together.

        Raises:
            Unmeasurable: they would not be compared with the form that the rules choose.
        """
        scores = 4 * prod(evaluated(a.size(name), self.sizes) for name in ("B", "H", "n_q", "n_k"))
        if scores <= LARGEST_SCORES:
            return candidates
        without = [candidate for candidate in candidates if not candidate.materialises_scores]
        if len(without) < 2 or ruled.form not in [candidate.form for candidate in without]:
            raise Unmeasurable(f"its scores are {scores / 2**20:,.0f} MiB, and most forms would materialise them")
        return without

    def _measured(
        self, model: ir.Model, a: Attention, candidates: Sequence[Candidate], ruled: FormChoice, projects: bool
    ) -> FormChoice:
        end = time.perf_counter() + (self.seconds - self.spent) / 2
        cut, works = cut_of(model, a, projects), workloads(a, self.sizes)
        models = {candidate.form: cut.lowered(candidate) for candidate in candidates}
        times: list[dict[str, float]] = []
        dropped: dict[str, str] = {}
        for left, work in zip(range(len(works), 0, -1), works, strict=True):
            feeds = cut.feeds(work.sizes, work.past)
            runs, seconds, refused = agreeing(candidates, models, feeds, self.library, end)
            warm = {form: seconds_of(run) if seconds[form] > LONG else seconds[form] for form, run in runs.items()}
            slow = _too_slow(warm, end - time.perf_counter(), ruled.form)
            dropped |= refused | slow
            runs = {form: run for form, run in runs.items() if form not in slow}
            times.append(medians(runs, ROUNDS, (end - time.perf_counter()) / left))
        forms = [form for form in times[0] if all(form in others for others in times)]
        if not forms:
            raise Unmeasurable("; ".join(dropped.values()))
        together = {form: sum(work.count * ms[form] for work, ms in zip(works, times, strict=True)) for form in forms}
        chosen = _fastest(together, [c.form for c in candidates if not c.materialises_scores], ruled.form)
        timings = [_timing(work, ms, chosen, forms) for work, ms in zip(works, times, strict=True)]
        why = f"measured: {'; '.join(timings)}" + "".join(f"; not {form}: {why}" for form, why in dropped.items())
        return FormChoice(chosen, why, {form: times[0][form] for form in forms}, dropped)


def _too_slow(seconds: Mapping[str, float], left: float, ruled: str) -> dict[str, str]:
    """The forms for whose calls there is no time, and why; they take several times as long as those that are compared.

    Args:
        seconds: of a call of each form.
        left: seconds for all calls.
        ruled: the form that the rules choose.

    Raises:
        Unmeasurable: forms that are about as fast as the fastest, or the one that the rules choose, are among them.
    """
    slow: dict[str, str] = {}
    for form in sorted(seconds, key=lambda form: -seconds[form]):
        compared = sum(seconds.values()) - sum(seconds[each] for each in slow)
        if seconds[form] <= LONG or CALLS * compared <= left:
            break
        if seconds[form] < APART * min(seconds.values()) or form == ruled:
            raise Unmeasurable(_too_long(seconds[form]))
        slow[form] = f"a call takes {seconds[form]:.1f} seconds"
    return slow


def _too_long(seconds: float) -> str:
    return f"a call takes {seconds:.1f} seconds, so there is no time to compare its forms"


@dataclass(frozen=True)
class Workload:
    """What a site does in one call.

    Attributes:
        sizes: the size of each symbolic dim.
        past: the number of tokens in a cache.
        count: how many such calls there are for one call of the last work.
        text: the work in words, ending the sentence of a time.
    """

    sizes: Mapping[str, int]
    past: int = 0
    count: int = 1
    text: str = ""


def workloads(a: Attention, sizes: Mapping[str, int]) -> list[Workload]:
    """The calls that are timed: one at the usual sizes, or for a site with a cache a token and a prompt of one
    sample."""
    if a.cached is None:
        return [Workload(sizes)]
    batch, tokens = (str(dim) for dim in dims_of(a.cached.tokens)[:2])
    capacity = evaluated(sizes_of(a.cached.caches[0].before)[2], sizes)
    count = min(max(evaluated(a.size("n_q"), sizes), 2), capacity)
    token, prompt = ({**sizes, batch: 1, tokens: number} for number in (1, count))
    past = capacity // 2
    return [
        Workload(token, past, count, f" for a token after {past:,}"),
        Workload(prompt, text=f" for a prompt of {count:,}"),
    ]


def _timing(work: Workload, times: Mapping[str, float], chosen: str, forms: Sequence[str]) -> str:
    others = ", ".join(f"{form} {times[form]:.3f}" for form in forms if form != chosen)
    return f"{times[chosen]:.3f} ms{work.text}" + (f" against {others}" if others else "")


def agreeing(
    candidates: Sequence[Candidate],
    models: Mapping[str, ir.Model],
    feeds: Mapping[str, Array],
    library: Library,
    end: float,
) -> tuple[dict[str, Callable[[], Any]], dict[str, float], dict[str, str]]:
    """By form: a run of every form that agrees with the first candidate; the seconds of the first call; and why the
    other forms are dropped.

    Args:
        candidates: the forms.
        models: the site in each form, by form.
        feeds: inputs of the models.
        library: runs them.
        end: time by which all calls have to be done.

    Raises:
        Unmeasurable: the first form does not run, or there is no time for the calls of a form.
    """
    runs: dict[str, Callable[[], Any]] = {}
    seconds: dict[str, float] = {}
    dropped: dict[str, str] = {}
    expected: Array | None = None
    for form, tolerance in ((candidate.form, candidate.tolerance) for candidate in candidates):
        try:
            run = library.open(models[form], feeds)
            start = time.perf_counter()
            output = library.read(run())
        except Exception as error:  # a kernel that refuses this shape is a result
            if expected is None:
                raise Unmeasurable(f"{library.name} refuses the form that the others are checked against") from error
            dropped[form] = f"{library.name} refuses it: {first_line(error)}"
            continue
        seconds[form] = time.perf_counter() - start
        if seconds[form] > LONG and CALLS * seconds[form] > end - start:
            raise Unmeasurable(_too_long(seconds[form]))
        expected = output if expected is None else expected
        if reason := disagreement(output, expected, tolerance, candidates[0].form):
            dropped[form] = reason
        else:
            runs[form] = run
    return runs, seconds, dropped


def _fastest(measured: Mapping[str, float], without_scores: Sequence[str], ruled: str) -> str:
    """The fastest form; among equally fast ones, one that does not materialise the scores, preferably the rules'."""
    best = min(measured.values())
    alike = [form for form, ms in measured.items() if ms <= ALIKE * best]
    preferred = [form for form in alike if form in without_scores] or alike
    return ruled if ruled in preferred else min(preferred, key=lambda form: measured[form])


def disagreement(output: Array, expected: Array, tolerance: float, plain: str) -> str | None:
    """The difference between an output and that of the plain form, as text; None if rounding explains it."""
    lost, without = (np.where(np.isfinite(array), 0, array) for array in (output, expected))
    if not np.array_equal(lost, without, equal_nan=True):
        return f"it differs from {plain} in fully masked rows"
    finite = np.isfinite(expected)
    error = relative_error(output[finite].astype(np.float64), expected[finite].astype(np.float64))
    return f"it differs from {plain} by {scientific(error)}" if error > tolerance else None


def by_rules(candidates: Sequence[Candidate]) -> FormChoice:
    """The first form that pays, the plain one last."""
    plain, *others = candidates
    chosen = next((candidate for candidate in others if candidate.pays), plain)
    return FormChoice(chosen.form, chosen.why)


def lower_sites(
    model: ir.Model,
    sites: Sequence[Site],
    candidates_for: Callable[[str, Attention], Sequence[Candidate]],
    tuner: Tuner | None = None,
    kept: str | None = None,
) -> list[Lowered]:
    """Write every canonical site of `model`, in place, in the form that is chosen for it.

    Args:
        model: a graph with canonical Attention nodes, which stay, without users.
        sites: what :func:`~attnforge.export.attention.canonicalize.canonicalize` found in it.
        candidates_for: takes the name of a site and its attention; returns its forms.
        tuner: chooses by measuring; None to choose by rules.
        kept: the form of the canonical node itself. A site that has no other is not listed in the result.
    """
    lowered = []
    for site, a in attentions(model, sites):
        candidates = candidates_for(site.name, a)
        choice = by_rules(candidates)
        if [candidate.form for candidate in candidates] == [kept]:
            continue
        if tuner is not None and a.dtype == ir.DataType.FLOAT:
            choice = tuner.choose(model, a, candidates, choice)
        candidate = next(candidate for candidate in candidates if candidate.form == choice.form)
        if candidate.form != kept:
            write(model.graph, a, candidate)
        unfused = None if candidate.fused else choice.why
        lowered.append(Lowered(site=site.name, node=candidate.node, unfused=unfused, **vars(choice)))
    return lowered
