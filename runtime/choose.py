"""The choices that are measured on the machine that deploys a bundle: which backend is fastest within the parity
budget, and which settings of ONNX Runtime's CPU session are fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any

import onnxruntime as ort

from attnforge.arrays import Array
from attnforge.bundle import WEIGHTS, Bundle, Case, Choice, SessionSettings
from attnforge.errors import first_line
from attnforge.machine import this_machine, versions
from attnforge.progress import Progress, Steps
from attnforge.runtime import cases as reference
from attnforge.runtime.backends.onnxruntime import OnnxRuntime, session_options
from attnforge.runtime.backends.registry import BACKENDS, fastest_first, libraries_of, why_unavailable
from attnforge.runtime.backends.whole_sequences import as_model
from attnforge.runtime.parity.verify import hold, stored_inputs
from attnforge.runtime.race import ALIKE, FEWEST_ROUNDS, LONG, medians, seconds_of
from attnforge.runtime.session import Session, load

ROUNDS = 16
"""Number of times that every backend, and every setting, is timed."""

FEWEST_CALLS = 4 * FEWEST_ROUNDS
"""Approximate minimum number of calls in a race of two."""


def choose_backend(
    bundle: Bundle,
    seconds: float = 10.0,
    progress: Progress | None = None,
    crashed: Mapping[str, str] = MappingProxyType({}),
) -> Choice | None:
    """Check every backend that can run here against the budget, and time those that meet it, in shuffled turns.

    Every backend is checked once, alone in memory. Those that meet the budget are opened together and timed, and again
    in reverse order if there is time, because the one that is opened first may stay slower because of that.

    Args:
        bundle: the bundle; backends are checked on its reference cases, and timed on its example.
        seconds: time for opening and timing; the backends are opened once, and timed in a few rounds, however long that
            takes. Checking the budget is not a measurement, and does not count.
        progress: receives each backend as it is opened.
        crashed: backends that are not tried again, with reasons.

    Returns:
        the choice; None if fewer than two backends can run, so that there is nothing to choose.
    """
    start = time.perf_counter()
    able = [name for name in BACKENDS if why_unavailable(bundle, name) is None]
    if len(able) < 2:
        return None
    dropped = {**crashed, **why_dropped(bundle, [name for name in able if name not in crashed], progress)}
    names, timings = [name for name in able if name not in dropped], []
    end = time.perf_counter() + seconds
    for order, share in ((names, 1 / 2), (names[::-1], 1)):
        load_start = time.perf_counter()
        with ExitStack() as stack:
            opened = {name: _opened_work(stack, bundle, name, dropped) for name in order}
            runs = {name: run for name, run in opened.items() if run is not None}
            load_seconds = time.perf_counter() - load_start
            timings.append(medians(runs, ROUNDS // 2, share * (end - time.perf_counter())))
        names = [name for name in names if name in runs]
        if len(names) < 2 or time.perf_counter() + load_seconds > end:
            break
    milliseconds = {name: round(mean(times[name] for times in timings), 4) for name in able if name not in dropped}
    return Choice(
        machine=this_machine(), versions=versions(libraries_of(able)),
        sizes=next(case.sizes for case in bundle.manifest.cases if case.kind == "example"),
        picked=next(iter(fastest_first(milliseconds, bundle.manifest)), None), milliseconds=milliseconds,
        dropped=dropped, seconds=round(time.perf_counter() - start, 3),
    )  # fmt: skip


def why_dropped(
    bundle: Bundle, names: Sequence[str], progress: Progress | None = None, cases: Sequence[Case] | None = None
) -> dict[str, str]:
    """The reasons why backends fail or miss the budget, by backend. Each is alone in memory, because the largest
    case takes the most.

    Args:
        bundle: the bundle.
        names: names of the backends.
        progress: receives each backend.
        cases: the cases to check; by default the bundle's.
    """
    steps, dropped = Steps(progress, len(names)), dict[str, str]()
    for name in names:
        steps.begin(name)
        try:
            with load(bundle, name, cache=False) as session:  # the bundle is not yet in its final folder
                missed = hold(bundle, name, session.run, cases, schedules=session.schedules).missed
        except Exception as error:  # from any library: a backend that fails is not chosen
            dropped[name] = first_line(error)
        else:
            dropped |= {} if missed is None else {name: f"it missed the parity budget: {missed}"}
    return dropped


def _opened_work(stack: ExitStack, bundle: Bundle, name: str, dropped: dict[str, str]) -> Callable[[], Any] | None:
    """The work of a backend that is timed, on the example.

    Args:
        stack: closes the backend.
        bundle: the bundle.
        name: name of the backend.
        dropped: receives the reason if the backend fails; then there is no run.
    """
    try:
        session = stack.enter_context(load(bundle, name, cache=False))
        session.warm_up()
    except Exception as error:
        dropped[name] = first_line(error)
        return None
    return _work(session, _example(bundle))


def _work(session: Session, feeds: Mapping[str, Array]) -> Callable[[], Any]:
    """The work of a session that is timed: a run of these inputs; for a decoder, a prompt of them and as many steps as
    it has tokens or as the caches have free slots."""
    decoding = session.bundle.manifest.decoding
    if decoding is None:
        return partial(session.run, feeds)
    tokens = feeds[decoding.tokens]
    decoder = session.decoder(len(tokens))
    steps = min(tokens.shape[1], decoder.places - tokens.shape[1])

    def run() -> None:
        decoder.reset()
        decoder.prefill(tokens)
        for position in range(steps):
            decoder.step(tokens[:, position])

    return run


def tune_session(bundle: Bundle, seconds: float = 3.0) -> SessionSettings:
    """The settings with which ONNX Runtime's CPU session runs the bundle's model fastest on this machine: its threads,
    whether they spin, and whether it keeps memory between runs.

    Settings matter to runs that are shorter than :data:`~attnforge.runtime.race.LONG`; longer ones keep the defaults.
    A setting other than ONNX Runtime's default has to win twice, the second time by
    :data:`~attnforge.runtime.race.ALIKE`, and must not lose by as much at the largest sizes, for which there has to be
    time.

    A small model is also written as ONNX Runtime's optimizer leaves it, so that no load has to optimise it again.
    Large models keep the defaults: loading one is nearly all reading of weights, its runs are long, and every setting
    that is tried would load another copy of the weights.

    Args:
        bundle: the bundle; its example is timed, and the optimized model is written to its folder.
        seconds: total time for timing.

    Raises:
        Exception: from ONNX Runtime, if it cannot run the model; then no optimized model is left.
    """
    model = bundle.file(bundle.manifest.targets["onnxruntime"].model)
    settings = SessionSettings(machine=this_machine(gpus=False), version=ort.__version__)
    if bundle.path.joinpath(WEIGHTS).exists():
        return settings
    optimized = model.with_name("optimized.onnx")
    try:
        options = session_options()
        options.optimized_model_filepath = str(optimized)  # opening the session writes it
        ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        settings.optimized = optimized.relative_to(bundle.path).as_posix()
        return _fastest_settings(bundle, model, settings, seconds)
    except BaseException:
        optimized.unlink(missing_ok=True)
        raise


def _fastest_settings(bundle: Bundle, model: Path, settings: SessionSettings, seconds: float) -> SessionSettings:
    """`settings`, which are ONNX Runtime's defaults, or those that ran the model faster twice."""
    start, example = time.perf_counter(), _example(bundle)
    default = _work(_session_with(bundle, model, settings), example)
    default()
    if seconds_of(default) > LONG:
        return settings
    changes: dict[str, dict[str, Any]] = {"no spinning": {"spinning": False}, "no arena": {"arena": False}}
    if this_machine().processors > 1:
        changes["one thread"] = {"threads": 1}
    tried = {"default": settings, **{name: settings.model_copy(update=change) for name, change in changes.items()}}
    sessions = {name: _session_with(bundle, model, candidate) for name, candidate in tried.items()}
    runs = {name: _work(session, example) for name, session in sessions.items()}
    settings.measured = medians(runs, ROUNDS, seconds / 2)
    best = min(settings.measured, key=lambda name: settings.measured[name])
    if best == "default":
        return settings
    for feeds, factor in ((example, ALIKE), (_largest(bundle), 1 / ALIKE)):
        left = start + seconds - time.perf_counter()
        pair = {name: _work(sessions[name], feeds) for name in ("default", best)}
        if FEWEST_CALLS * seconds_of(pair["default"]) > left:  # too little time to know whether it wins
            return settings
        again = medians(pair, ROUNDS, left / 2)
        if again[best] * factor >= again["default"]:
            return settings
    return tried[best].model_copy(update={"measured": settings.measured})


def _session_with(bundle: Bundle, model: Path, settings: SessionSettings) -> Session:
    """A session with these settings."""
    manifest = bundle.manifest
    file = bundle.path / settings.optimized if settings.optimized is not None else model
    backend = OnnxRuntime("onnxruntime-cpu", file, manifest.graph_inputs, manifest.graph_outputs, None, settings)
    return Session(bundle, as_model(backend, manifest))


def _example(bundle: Bundle) -> dict[str, Array]:
    """The example's inputs by name."""
    case = next(case for case in bundle.manifest.cases if case.kind == "example")
    return reference.make_inputs(case, bundle.manifest.inputs, stored_inputs(bundle))


def _largest(bundle: Bundle) -> dict[str, Array]:
    """Normal inputs of the largest sizes by name."""
    normal = (case for case in bundle.manifest.cases if case.kind == "normal")
    case = max(normal, key=lambda case: prod(case.sizes.values()))
    return reference.make_inputs(case, bundle.manifest.inputs, {})
