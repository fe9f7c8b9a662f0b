"""Every registered model and three of Hugging Face's, in fp32 and fp16, on one real Triton server.

`python -m benchmarks run triton-models` deploys and packages them, waits until the server is ready with
all of them, sends every reference case over HTTP and gRPC, checks the answers against the parity budget, and sends
invalid requests, each followed by a valid one. It writes `benchmarks/results/triton_models.json`, and exits with 1 if
anything is wrong. No figure depends on the machine's speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from tritonclient.utils import InferenceServerException

from attnforge.arrays import Array
from attnforge.atomic import temporary_folder
from attnforge.bundle import Bundle
from attnforge.errors import RunError
from attnforge.model.registry import MODELS, Example, build_model
from attnforge.runtime import cases as reference
from attnforge.runtime.parity.verify import Run, hold, stored_inputs
from attnforge.serving.triton.options import Packaging
from attnforge.serving.triton.repository import PackagedModel, package
from benchmarks.experiment import Claim, Columns, Experiment, named, say, table_of, where
from benchmarks.published import deployed
from benchmarks.servers.triton.client import PROTOCOLS, asking, client_of
from benchmarks.servers.triton.server import WHEEL, Server, unpack
from tests.support import huggingface

SMALLER: dict[str, dict[str, Any]] = {
    "patch-attention": {"image_size": 32, "max_image_size": 64},
    "patch-attention-digits": {"max_batch": 32},
}
"""Options of models whose largest case would take minutes in float64."""

HUGGING_FACE = (("bert", "sdpa"), ("vit", "eager"), ("gpt2", "sdpa"))

PRECISIONS = ("fp32", "fp16")


def measure(
    only: Annotated[list[str] | None, typer.Option(help="A model by name; repeatable.")] = None,
) -> dict[str, Any]:
    """Check every model."""
    unpack()
    made = {name: make for name, make in models().items() if not only or name in only}
    with temporary_folder() as folder:
        bundles = list(_bundles(made, folder))
        options = Packaging(preferred=(), threads=1, kind="cpu")
        packaged = package(bundles, folder / "repository", options, progress=say)
        say("start the server …")
        with Server(folder / "repository", folder / "log", timeout=600) as server:
            figures = {}
            for model, bundle in zip(packaged, bundles, strict=True):
                say(f"ask {model.name} …")
                figures[model.name] = asked(server, model, bundle)
            if "Traceback" in server.text():
                raise RunError(server.text())
    return {"server": WHEEL, "models": figures}


def models() -> dict[str, Callable[[], Example]]:
    """Return the models by name, each with a function that builds it."""
    made: dict[str, Callable[[], Example]] = {
        name: partial(build_model, name, **SMALLER.get(name, {})) for name in MODELS
    }
    return made | {f"hf-{name}-{form}": partial(huggingface.build, name, form) for name, form in HUGGING_FACE}


def _bundles(made: Mapping[str, Callable[[], Example]], folder: Path) -> Iterator[Bundle]:
    """Yield every model at every precision, deployed for ONNX Runtime."""
    for name, make in made.items():
        for precision in PRECISIONS:
            yield deployed(make(), folder / f"{name}-{precision}", name, precision=precision, tune=False, cache=False)


def asked(server: Server, model: PackagedModel, bundle: Bundle) -> dict[str, Any]:
    """Check a model; return, by protocol, the error and budget of the reference cases and how many invalid requests got
    an error and were followed by a right answer; and what went wrong."""
    figure: dict[str, Any] = {
        "max_batch": model.max_batch, "apart": model.apart, "warmups": len(model.warmups),
        "cases": len(bundle.manifest.cases), "wrong": [],
    }  # fmt: skip
    feeds = reference.make_inputs(bundle.manifest.cases[0], bundle.manifest.inputs, stored_inputs(bundle))
    for protocol in PROTOCOLS:
        with client_of(server, protocol) as client:
            run = asking(client, protocol, model.name)
            report = hold(bundle, "onnxruntime-cpu", run)
            figure[protocol] = {"error": report.error, "budget": report.budget, "passed": report.passed}
            if report.missed is not None:
                figure["wrong"].append(f"{protocol}: {report.missed}")
            before, refused = run(feeds), 0
            for mistake, request in wrong_requests(feeds, bundle, model.max_batch).items():
                reason = _refused(run, request) or _same(run(feeds), before)
                refused += reason is None
                if reason is not None:
                    figure["wrong"].append(f"{protocol}, {mistake}: {reason}")
            figure[protocol]["refused"] = refused
    return figure


def wrong_requests(feeds: Mapping[str, Array], bundle: Bundle, max_batch: int) -> dict[str, dict[str, Array]]:
    """Return invalid requests, by what is wrong with them."""
    name, array = next(iter(feeds.items()))
    rest = {key: value for key, value in feeds.items() if key != name}
    kind = np.float64 if array.dtype != np.float64 else np.float32
    requests = {
        "name": {"nobody": array, **rest},
        "type": {name: array.astype(kind), **rest},
        "rank": {name: array[..., None], **rest},
        "one more": {**feeds, "nobody": array},
        "none": {},
    }
    if fixed := [axis for axis, dim in enumerate(bundle.manifest.inputs[0].dims) if isinstance(dim, int)]:
        shape = [size + (axis == fixed[-1]) for axis, size in enumerate(array.shape)]
        requests["size"] = {name: np.zeros(shape, array.dtype), **rest}
    if max_batch:
        requests["an empty batch"] = {key: value[:0] for key, value in feeds.items()}
        requests["beyond the largest batch"] = {
            key: np.repeat(value[:1], max_batch + 1, axis=0) for key, value in feeds.items()
        }
    return requests


def _refused(run: Run, request: dict[str, Array]) -> str | None:
    try:
        run(request)
    except InferenceServerException:
        return None
    return "it was answered"


def _same(got: Mapping[str, Array], before: Mapping[str, Array]) -> str | None:
    same = all(np.array_equal(got[name], array, equal_nan=array.dtype.kind == "f") for name, array in before.items())
    return None if same and got.keys() == before.keys() else "the next valid request got a different answer"


COLUMNS: Columns = {
    "model": "{name}".format_map,
    "requests": lambda of: f"up to {of['max_batch']} samples joined" if of["max_batch"] else "one a call",
    "warm-up": "{warmups}".format_map,
    "cases": "{cases}".format_map,
    "HTTP, error of budget": "{http[error]:.1e} of {http[budget]:.1e}".format_map,
    "gRPC": "{grpc[error]:.1e} of {grpc[budget]:.1e}".format_map,
    "wrong requests refused": "{http[refused]} and {grpc[refused]}".format_map,
}


def table(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    models = named(figures["models"])
    failed = sum(bool(of["wrong"]) for of in models)
    return (
        f"{table_of(COLUMNS, models, None)}\n\n{len(models)} models, {failed} with anything wrong; the server of "
        f"{figures['server']}; {where(figures)}"
    )


def claims(figures: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims: nothing is wrong."""
    for name, of in figures["models"].items():
        yield Claim(f"{name}, requests that went wrong", len(of["wrong"]), 0, "; ".join(of["wrong"]))


EXPERIMENT = Experiment("triton_models.json", measure, {"triton-models": table}, claims, threads=lambda: 1)
