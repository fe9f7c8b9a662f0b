"""Bundles as a Triton model repository.

    REPOSITORY/NAME/config.pbtxt        generated from the manifest
    REPOSITORY/NAME/warmup/…            inputs of reference cases, which run before the model is ready
    REPOSITORY/NAME/1/model.py, bundle/           for the python backend
    REPOSITORY/NAME/1/model.onnx                  for onnxruntime; a folder if weights are in separate files
    REPOSITORY/NAME/1/engine.SM89.plan …          for tensorrt

https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/user_guide/model_repository.html
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath

from attnforge.arrays import Array
from attnforge.atomic import new_folder, rename_new
from attnforge.bundle import OPENVINO, Bundle, DimSpec, Engine, Trusted, place_of
from attnforge.bundle.output import copy, copy_whole
from attnforge.errors import UnavailableError, UsageError, first_line, raised_as, shortened
from attnforge.records import Record
from attnforge.runtime import cases as reference
from attnforge.runtime.parity.verify import stored_inputs
from attnforge.runtime.race import medians, seconds_of
from attnforge.runtime.session import Session, load
from attnforge.serving.batching import batch_of, is_open, why_not_apart
from attnforge.serving.triton import configuration
from attnforge.serving.triton.configuration import Message, Word
from attnforge.serving.triton.model import FOLDER, SESSION, THREADS
from attnforge.serving.triton.options import Packaging
from attnforge.version import __version__

CONFIG, WARMUP = "config.pbtxt", "warmup"

MODEL = f'''"""Serves the bundle in the folder `{FOLDER}` next to this file; written by attnforge {__version__}."""

from attnforge.serving.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''

MOST_WARMUP = 2**24
"""Maximum total bytes of the inputs of all warm-up requests, in the files and in memory after they are joined."""

MEASURED = 0.5
"""Seconds of a call above which no larger batch is measured."""


class PackagedModel(Record):
    """A model that was written to a repository.

    Attributes:
        name: name of the model for clients.
        version: version of the model for clients.
        backend: Triton backend.
        folder: folder of the version.
        max_batch: maximum samples that Triton may join; 0 if it joins none.
        apart: why Triton joins no requests; None if it does.
        preferred: numbers of samples that Triton prefers to join.
        measured: samples per second on this machine, by samples per call; empty if not measured.
        warmups: names of the reference cases that run before the model is ready.
        kept: whether the configuration of an earlier version was kept.
    """

    name: str
    version: int
    backend: str
    folder: str
    max_batch: int
    apart: str | None
    preferred: list[int]
    measured: dict[int, float]
    warmups: list[str]
    kept: bool = False


def package(
    bundles: Sequence[str | os.PathLike[str] | Bundle],
    out: str | os.PathLike[str],
    options: Packaging | None = None,
    *,
    name: str | None = None,
    trusted: Trusted = None,
    progress: Callable[[str], object] | None = None,
) -> list[PackagedModel]:
    """Write bundles to a model repository: all of them, or none if anything is wrong.

    Args:
        bundles: bundles or their folders; models are named after model and precision.
        out: the repository: a new folder, or an existing repository, whose models get the additional version
            `options.version`.
        options: packaging options.
        name: name of the model, if there is one bundle.
        trusted: files of public keys, one of which must have signed each bundle, as in :func:`attnforge.load`.
        progress: called with a message for every bundle.

    Raises:
        BundleError: a bundle is missing, incomplete or altered; or the disk is full.
        UsageError: `name` is not valid in a URL or as a folder; the version, or something other than a repository,
            exists at `out`; two models have one name;
            another version of the model has different inputs or outputs; or the repository cannot be written.
        UnavailableError: a bundle contains nothing that Triton's backend can run.
    """
    options, say = options or Packaging(), progress or (lambda text: None)
    if name is not None and len(bundles) > 1:
        raise UsageError(f"{len(bundles)} bundles cannot all be named {name!r}; package one by one, or omit the name")
    models: dict[str, Bundle] = {}
    for folder in bundles:
        bundle = folder if isinstance(folder, Bundle) else Bundle(folder, trusted=trusted)
        model = named(f"{bundle.manifest.name}-{bundle.manifest.precision}" if name is None else name)
        if name is not None and model != name:
            raise UsageError(f"{shortened(name)!r} is not a model name; give letters, digits, and _ . - between them")
        if model in models:
            raise UsageError(f"{bundle.path} and {models[model].path} are both {model!r}; package one by one, by name")
        models[model] = bundle
    repository = Repository.of(Path(out), list(models), options.version)
    planned = []
    for model, bundle in models.items():
        say(f"package {model}")
        planned.append(_plan(model, bundle, repository, options))
        repository.check_alike(planned[-1])
    with repository.writing() as folder:
        for plan in planned:
            _write(plan, folder / plan.model.name, options)
    return [plan.model for plan in planned]


def named(text: str) -> str:
    """Return a model name made from any text, valid for Triton and unescaped in URLs."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:200] or "model"


# --- plans ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A model to be written.

    Attributes:
        model: the record that is returned to the caller.
        bundle: its bundle.
        config: its configuration.
        files: see :class:`Served`.
        arrays: the inputs of warm-up requests, by their files.
    """

    model: PackagedModel
    bundle: Bundle
    config: Message
    files: Mapping[str, str]
    arrays: Mapping[str, Array]


def _plan(name: str, bundle: Bundle, repository: Repository, options: Packaging) -> Planned:
    """Return the model that is to be written, and the configuration of all its versions."""
    served = _served(bundle, options)
    batch, most, preferred, measured = _batching(bundle, options)
    warmups, arrays = _warmups(bundle, batch if isinstance(batch, DimSpec) and most else None, most)
    model = PackagedModel(
        name=name, version=options.version, backend=options.backend,
        folder=str(repository.target / name / str(options.version)), max_batch=most,
        apart=batch if isinstance(batch, str) else None, preferred=preferred, measured=measured,
        warmups=[warmup["name"] for warmup in warmups], kept=name in repository.existing,
    )  # fmt: skip
    manifest, batched = bundle.manifest, most > 0
    joining = {"preferred_batch_size": preferred, "max_queue_delay_microseconds": options.max_delay}
    kind = "gpu" if options.backend == "tensorrt" else options.kind
    profiles = [str(number) for number in range(served.profiles)] if served.profiles > 1 else []
    instances = {"count": options.instances, "kind": Word(f"KIND_{kind.upper()}"), "profile": profiles}
    pinned = {"enable": kind != "cpu"}
    about = {"attnforge": __version__, "model": manifest.name, "precision": manifest.precision, **served.parameters}
    config = {
        "name": name,
        **served.fields,
        "max_batch_size": most,
        "input": [configuration.tensor(spec, batched=batched) for spec in manifest.inputs],
        "output": [configuration.tensor(spec, batched=batched) for spec in manifest.outputs],
        "version_policy": {"all": {}},  # a new version does not remove others, which clients may request by number
        "dynamic_batching": joining if most > 1 else [],
        "instance_group": [instances],
        "optimization": {"input_pinned_memory": pinned, "output_pinned_memory": pinned},
        "parameters": [{"key": key, "value": {"string_value": value}} for key, value in about.items()],
        "model_warmup": warmups,
    }
    return Planned(model, bundle, config, served.files, arrays)


@dataclass(frozen=True)
class Served:
    """What a Triton backend runs.

    Attributes:
        fields: the configuration's fields that say so.
        parameters: the configuration's parameters for this backend.
        files: the bundle's files by their names in the version's folder.
        profiles: number of optimization profiles of each plan.
    """

    fields: Message
    parameters: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    profiles: int = 1


def _served(bundle: Bundle, options: Packaging) -> Served:
    """Return what the Triton backend runs.

    Raises:
        UnavailableError: the bundle has nothing for it.
    """
    manifest = bundle.manifest
    if manifest.doubt is not None:
        raise UnavailableError(f"{manifest.doubt}; deploy it again")
    if options.backend == "python":
        return _in_python(bundle, options)
    if manifest.decoding is not None:
        raise UnavailableError(
            f"{bundle.path} is a decoder, whose caches Triton's {options.backend} backend does not keep; use --backend "
            "python, which runs whole sequences"
        )
    if scalars := [spec.name for spec in (*manifest.inputs, *manifest.outputs) if not spec.dims]:
        raise UnavailableError(f"{scalars[0]} has no dims, which Triton does not support; use --backend python")
    return (_in_onnxruntime if options.backend == "onnxruntime" else _in_tensorrt)(bundle, options)


def _in_python(bundle: Bundle, options: Packaging) -> Served:
    target = "onnxruntime" if options.session.startswith("onnxruntime") else options.session
    if target not in ("auto", OPENVINO, *bundle.manifest.targets):
        targets = ", ".join(name for name in bundle.manifest.targets if name != OPENVINO)
        raise UnavailableError(f"{bundle.path} was deployed for {targets}, not for {target}")
    threads = {} if options.threads is None else {THREADS: str(options.threads)}
    return Served({"backend": "python", "default_model_filename": "model.py"}, {SESSION: options.session, **threads})


def _in_onnxruntime(bundle: Bundle, options: Packaging) -> Served:
    manifest = bundle.manifest
    record = manifest.targets.get("onnxruntime")
    if manifest.precision == "bf16" or any(s.dtype == "bfloat16" for s in (*manifest.inputs, *manifest.outputs)):
        raise UnavailableError(
            f"{bundle.path} is bf16, which Triton's onnxruntime backend has no type for; use --backend python"
        )
    if record is None:
        raise UnavailableError(f"{bundle.path} has no model for onnxruntime; deploy it with --target onnxruntime")
    graph = record.cuda_model if options.kind == "gpu" and record.cuda_model is not None else record.model
    model, *weights = bundle.model_files(graph)
    files = {f"model.onnx/{PurePosixPath(file).name}": file for file in weights}
    files["model.onnx/model.onnx" if weights else "model.onnx"] = model
    fields = {"platform": "onnxruntime_onnx", "backend": "onnxruntime", "default_model_filename": "model.onnx"}
    threads = {} if options.threads is None else {"intra_op_thread_count": str(options.threads)}
    return Served(fields, threads, files)


def _in_tensorrt(bundle: Bundle, options: Packaging) -> Served:
    manifest = bundle.manifest
    record = manifest.targets.get("tensorrt")
    if record is None or not record.engines:
        reason = "it has no TensorRT plan"
        if "tensorrt_rtx" in manifest.targets:
            reason = "its plans are for TensorRT-RTX, which no Triton backend loads"
        raise UnavailableError(
            f"{bundle.path} cannot be served by the tensorrt backend: {reason}; use --backend python"
        )
    if data := [spec.name for spec in manifest.outputs if is_open(spec, manifest.inputs)]:
        raise UnavailableError(
            f"the shape of {data[0]} depends on the inputs' values, which Triton's tensorrt backend does not allow; "
            "use --backend python"
        )
    engines = _engines(bundle, record.engines, options.server_tensorrt)
    files = {PurePosixPath(engine.file).name: engine.file for engine in engines.values()}
    fields = {
        "platform": "tensorrt_plan", "backend": "tensorrt", "default_model_filename": next(iter(files)),
        "cc_model_filenames": [
            {"key": f"{name[2:-1]}.{name[-1]}", "value": PurePosixPath(engine.file).name}
            for name, engine in engines.items()
        ],
    }  # fmt: skip
    chosen = next(iter(engines.values()))  # all are for one version, with as many profiles
    return Served(fields, {"tensorrt": chosen.version}, files, len(chosen.profiles))


def _engines(bundle: Bundle, engines: Sequence[Engine], version: str | None) -> dict[str, Engine]:
    """Return the plans that one server can load, by compute capability."""
    versions = sorted({engine.version for engine in engines})
    if version is not None:
        engines = [engine for engine in engines if f"{engine.version}.".startswith(f"{version}.")]
        if not engines:
            raise UnavailableError(f"the plans of {bundle.path} are for TensorRT {', '.join(versions)}, not {version}")
    elif len(versions) > 1:
        raise UnavailableError(
            f"the plans of {bundle.path} are for TensorRT {' and '.join(versions)}, and a server has one; choose it "
            "with --server-tensorrt"
        )
    by_capability = {capability: engine for engine in engines for capability in engine.compute_capabilities}
    if unknown := [name for name in by_capability if not re.fullmatch(r"SM\d{2,}", name)]:
        raise UnavailableError(f"a plan of {bundle.path} is for {unknown[0]}, which Triton cannot select plans by")
    if len({len(engine.profiles) for engine in by_capability.values()}) > 1:
        raise UnavailableError(
            f"the plans of {bundle.path} have different numbers of profiles; package them one by one"
        )
    return by_capability


# --- batches ----------------------------------------------------------------------------------------------------------

Rates = dict[int, float]
"""Samples per second, by samples per call."""


def _batching(bundle: Bundle, options: Packaging) -> tuple[DimSpec | str, int, list[int], Rates]:
    """Return the dim along which requests are joined, or why they are not; the maximum number of samples; the preferred
    numbers; and the measurements for these."""
    batch = "max_batch is 0" if options.max_batch == 0 else batch_of(bundle.manifest)
    if isinstance(batch, str):
        return batch, 0, [], {}
    most = min(batch.max or 0, options.max_batch or batch.max or 0)
    try:
        with load(bundle, options.session, threads=options.threads) as session:
            if (reason := why_not_apart(session, batch)) is not None:
                return reason, 0, [], {}
            if options.preferred is None and most > 1:
                rates = _rates(session, batch, most)
                return batch, most, [_best(rates)], rates
    except UnavailableError as error:
        return f"nothing here can run it to check that samples are independent: {first_line(error)}", 0, [], {}
    preferred = sorted(set(options.preferred or ()))
    if wrong := [number for number in preferred if not 1 <= number <= most]:
        raise UsageError(f"{wrong[0]} samples are preferred, but {bundle.path} takes 1 to {most}")
    return batch, most, preferred if most > 1 else [], {}


def _rates(session: Session, batch: DimSpec, most: int, seconds: float = 2.0) -> Rates:
    """Measure the samples per second of batches of 1, 2, 4 … samples in turns, with the example's other sizes."""
    specs, runs = session.inputs, {}
    for number in sorted({min(2**power, most) for power in range(most.bit_length() + 1)}):
        feeds = reference.make_inputs(reference.at(specs, {batch.symbol: number}), specs, {})
        runs[str(number)] = partial(session.run, feeds)
        if min(seconds_of(runs[str(number)]) for _ in range(2)) > MEASURED:
            break
    return {int(number): round(1e3 * int(number) / ms, 1) for number, ms in medians(runs, 8, seconds).items()}


NEAR = 1.05
"""Ratio to the best rate within which a batch size counts as equally good."""


def _best(rates: Rates) -> int:
    """Return the largest number of samples that is as good as the best: Triton joins no more than it prefers, and the
    more it joins, the less each request costs the server."""
    return max(number for number, rate in rates.items() if rate * NEAR >= max(rates.values()))


# --- warm-up ----------------------------------------------------------------------------------------------------------


def _warmups(bundle: Bundle, batch: DimSpec | None, most: int) -> tuple[list[Message], dict[str, Array]]:
    """Return the ordinary reference cases as warm-up requests, within :data:`MOST_WARMUP`, and their files. If requests
    are joined, a request has the case's first sample, as many times as the case has samples."""
    specs, stored = bundle.manifest.inputs, stored_inputs(bundle)
    warmups, files, left = list[Message](), dict[str, Array](), MOST_WARMUP
    for index, case in enumerate(case for case in bundle.manifest.cases if case.is_ordinary):
        with suppress(UnavailableError):  # inputs that do not fit into memory
            feeds = reference.make_inputs(case, specs, stored)
            needed = sum(array.nbytes for array in feeds.values())
            if needed > left or any(array.size == 0 for array in feeds.values()):
                continue
            left -= needed
            inputs = []
            for number, spec in enumerate(specs):
                array = feeds[spec.name] if batch is None else feeds[spec.name][0]
                file = f"{index}.{named(case.name)}.{number}.{named(spec.name)}"
                inputs.append(configuration.sample(spec, array.shape, file))
                files[file] = array
            joined = 1 if batch is None else min(case.sizes[batch.symbol], most)
            warmups.append({"name": case.name, "batch_size": joined, "inputs": inputs})
    return warmups, files


# --- the folders ------------------------------------------------------------------------------------------------------


def _write(plan: Planned, folder: Path, options: Packaging) -> None:
    version, warmup = folder / str(options.version), folder / WARMUP
    version.mkdir(parents=True)
    (folder / CONFIG).write_text(configuration.text(plan.config), encoding="utf-8")
    with plan.bundle.steady():
        if options.backend == "python":
            (version / "model.py").write_text(MODEL, encoding="utf-8")
            copy_whole(plan.bundle, version / FOLDER)
        for name, file in plan.files.items():
            copy(plan.bundle, file, version / name)
    if plan.arrays:
        warmup.mkdir()
    for name, array in plan.arrays.items():
        (warmup / name).write_bytes(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())


COMPARED = ("backend", "max_batch_size", "input", "output", "default_model_filename", "cc_model_filenames")
"""The fields of a configuration that all versions of a model necessarily share."""


@dataclass(frozen=True)
class Repository:
    """A model repository to write to.

    Attributes:
        target: folder of the repository.
        version: version of the models.
        existing: configurations of models that exist in other versions, by name.
    """

    target: Path
    version: int
    existing: Mapping[str, str]

    @classmethod
    def of(cls, out: Path, names: Sequence[str], version: int) -> Repository:
        """Return the repository for these models.

        Raises:
            UsageError: `out` is not a repository, or has this version of a model.
        """
        with raised_as(UsageError, f"{shortened(str(out))} cannot be a repository"):
            target = place_of(out)
            if not os.path.lexists(target):
                return cls(target, version, {})
            if not target.is_dir():
                raise UsageError(f"{target} is not a folder; choose another path")
            for model in target.iterdir():
                if not model.name.startswith(".") and not _is_model(model):
                    raise UsageError(f"{target} exists and is not a model repository: it has {shortened(model.name)!r}")
            existing = {}
            for name in names:
                if os.path.lexists(folder := target / name / str(version)):
                    raise UsageError(f"{folder} exists; give the next version (--version), or choose another folder")
                if os.path.lexists(file := target / name / CONFIG):
                    existing[name] = file.read_text(encoding="utf-8")
                elif os.path.lexists(target / name):
                    raise UsageError(f"{target / name} has no {CONFIG} to compare with; choose another --name")
        return cls(target, version, existing)

    def check_alike(self, plan: Planned) -> None:
        """Check that a version fits the model's configuration, which Triton has once for all versions.

        Raises:
            UsageError: it does not fit.
        """
        model = plan.model.name
        if model not in self.existing:
            return
        has, needed = fields(self.existing[model]), fields(configuration.text(plan.config))
        for name in COMPARED:
            if has.get(name) != needed.get(name):
                raise UsageError(
                    f"{model} has a different {name} in {self.target / model / CONFIG}, which all versions share; "
                    "package it under another name (--name)"
                )

    def writing(self) -> AbstractContextManager[Path]:
        """Return a context with a temporary folder, whose models are moved to the repository at the end of the block,
        or removed on an error.

        Raises:
            UsageError: the repository cannot be written, or something appeared there meanwhile.
            BundleError: the disk is full.
        """
        if not os.path.lexists(self.target):
            return new_folder(self.target)
        is_apart = os.stat(self.target.parent).st_dev != os.stat(self.target).st_dev  # a separate disk
        return new_folder(self.target, self._put, parent=self.target if is_apart else None)

    def _put(self, folder: Path) -> None:
        """Move every model, or its version, to the repository; if one cannot be moved, undo the others."""
        with ExitStack() as undo:
            for model in sorted(folder.iterdir()):
                part = Path(model.name, str(self.version)) if model.name in self.existing else Path(model.name)
                rename_new(folder / part, self.target / part)
                undo.callback((self.target / part).rename, folder / part)
            undo.pop_all()


def _is_model(folder: Path) -> bool:
    """Return whether Triton might treat a folder as a model: it has a configuration, or a version."""
    return (folder / CONFIG).is_file() or (folder.is_dir() and any(file.name.isdecimal() for file in folder.iterdir()))


def fields(text: str) -> dict[str, list[str]]:
    """Return the fields of a configuration written by :func:`~.configuration.text`, by name, each with its words."""
    words: dict[str, list[str]] = {}
    for part in re.split(r"^(?=\w)", text, flags=re.MULTILINE):
        words.setdefault(re.split(r"[\s:{]", part, maxsplit=1)[0], []).extend(part.split())
    return words
