"""What a bundle runs fastest with on this machine: which backend, of those within the parity budget, and which settings
of ONNX Runtime's session."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from pathlib import Path
from statistics import mean
from typing import Any

import onnxruntime as ort

from attnforge.arrays import Array
from attnforge.bundle import WEIGHTS, Bundle, Choice, SessionSettings
from attnforge.machine import this_machine, versions
from attnforge.progress import Progress, Steps
from attnforge.runtime import cases as reference
from attnforge.runtime.backends.onnxruntime import OnnxRuntime, session_options
from attnforge.runtime.backends.registry import BACKENDS, libraries_of, why_unavailable
from attnforge.runtime.parity.verify import compare, stored_inputs
from attnforge.runtime.preference import fastest_first
from attnforge.runtime.session import Session, load
from attnforge.runtime.turns import ALIKE, LONG, medians, seconds_of

ROUNDS = 16
"""How often every backend, and every setting, is timed."""


def choose_backend(bundle: Bundle, seconds: float = 10.0, progress: Progress | None = None) -> Choice | None:
    """Hold every backend that can run here to the budget, and time those that are within it, in turns; once more where
    they were opened in the reverse order, for who is opened first may stay slower for that.

    Args:
        bundle: whose reference cases are held to, and whose example is timed.
        seconds: for timing.
        progress: hears of every backend as it is opened, twice.

    Returns:
        what was found; None where fewer than two backends can run, so that there is nothing to choose.
    """
    start = time.perf_counter()
    able = [name for name in BACKENDS if why_unavailable(bundle, name) is None]
    if len(able) < 2:
        return None
    dropped: dict[str, str] = {}
    steps = Steps(progress, 2 * len(able))
    openings = [
        _timed(bundle, able, dropped, seconds / 2, steps, hold=True),
        _timed(bundle, able[::-1], dropped, seconds / 2, steps),
    ]
    found = {name: round(mean(one[name] for one in openings), 4) for name in able if name not in dropped}
    return Choice(
        machine=this_machine(),
        versions=versions(libraries_of(able)),
        sizes=next(case.sizes for case in bundle.manifest.cases if case.kind == "example"),
        picked=next(iter(fastest_first(found)), None),
        milliseconds=found,
        dropped=dropped,
        seconds=round(time.perf_counter() - start, 3),
    )


def _timed(
    bundle: Bundle, names: Sequence[str], dropped: dict[str, str], seconds: float, steps: Steps, *, hold: bool = False
) -> dict[str, float]:
    """The median milliseconds of the backends, opened in this order, but for those that are dropped. One that fails is
    dropped here, and so is one that misses the budget, if they are to be held to it."""
    feeds = _example(bundle)
    with ExitStack() as stack:
        sessions: dict[str, Session] = {}
        for name in (name for name in names if name not in dropped):
            steps.begin(name)
            try:
                session = stack.enter_context(load(bundle, name, cache=False))  # the folder is not the bundle's last
                missed = compare(session).missed if hold else None
                missed = f"it missed the parity budget: {missed}" if missed is not None else None
                session.warm_up()
            except Exception as error:  # of any library: a backend that fails is one that is not chosen
                missed = (str(error).strip() or type(error).__name__).splitlines()[0]
            if missed is None:
                sessions[name] = session
            else:
                dropped[name] = missed
        return medians({name: partial(session.run, feeds) for name, session in sessions.items()}, ROUNDS // 2, seconds)


def tune_session(bundle: Bundle, seconds: float = 3.0) -> SessionSettings:
    """How ONNX Runtime's CPU session runs the bundle's model fastest on this machine: on how many threads, spinning or
    not, keeping its memory or not. That matters to runs of less than :data:`LONG`. What is not ONNX Runtime's default
    has to win again by :data:`ALIKE`, and not lose by as much at the largest sizes.

    A small model is also written as ONNX Runtime's optimizer leaves it, which it then need not do at every load; of a
    large one, nearly all of loading is reading weights.

    Args:
        bundle: whose example is timed, and whose folder the optimized model is written to.
        seconds: for timing, at most twice.
    """
    model = bundle.file(bundle.manifest.targets["onnxruntime"].model)
    settings = SessionSettings(machine=this_machine(gpus=False), version=ort.__version__)
    if not bundle.path.joinpath(WEIGHTS).exists():
        settings.optimized = f"{model.parent.relative_to(bundle.path).as_posix()}/optimized.onnx"
        _save_optimized(model, bundle.path / settings.optimized)
    example, largest = _example(bundle), _largest(bundle)
    usual = partial(_as_set(bundle, model, settings), example)
    usual()
    if seconds_of(usual) > LONG:
        return settings
    others: dict[str, dict[str, Any]] = {"no spinning": {"spinning": False}, "no arena": {"arena": False}}
    if this_machine().processors > 1:
        others["one thread"] = {"threads": 1}
    tried = {"default": settings, **{name: settings.model_copy(update=change) for name, change in others.items()}}
    runs = {name: _as_set(bundle, model, one) for name, one in tried.items()}
    settings.measured = medians({name: partial(run, example) for name, run in runs.items()}, ROUNDS, seconds)
    best = min(settings.measured, key=lambda name: settings.measured[name])
    for feeds, most, factor in ((example, seconds, ALIKE), (largest, 0.0, 1 / ALIKE)):
        again = medians({name: partial(runs[name], feeds) for name in {"default": 0, best: 0}}, ROUNDS, most)
        if again[best] * factor >= again["default"]:
            return settings
    return tried[best].model_copy(update={"measured": settings.measured})


def _save_optimized(model: Path, to: Path) -> None:
    options = session_options()
    options.optimized_model_filepath = str(to)
    ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


def _as_set(bundle: Bundle, model: Path, settings: SessionSettings) -> Callable[[Mapping[str, Array]], Any]:
    manifest = bundle.manifest
    file = bundle.path / settings.optimized if settings.optimized is not None else model
    session = Session(bundle, OnnxRuntime("onnxruntime-cpu", file, manifest.inputs, manifest.outputs, None, settings))
    return session.run


def _example(bundle: Bundle) -> dict[str, Array]:
    case = next(case for case in bundle.manifest.cases if case.kind == "example")
    return reference.make_inputs(case, bundle.manifest.inputs, stored_inputs(bundle))


def _largest(bundle: Bundle) -> dict[str, Array]:
    case = max(
        (case for case in bundle.manifest.cases if case.kind == "normal"), key=lambda case: prod(case.sizes.values())
    )
    return reference.make_inputs(case, bundle.manifest.inputs, {})
