"""Bundles as a model repository that Triton serves.

    REPOSITORY/NAME/config.pbtxt        made of the manifest
    REPOSITORY/NAME/warmup/…            inputs of reference cases, which run before the model is ready
    REPOSITORY/NAME/1/model.py, bundle/           for the python backend
    REPOSITORY/NAME/1/model.onnx                  for onnxruntime; a folder where weights stand in a file of their own
    REPOSITORY/NAME/1/engine.SM89.plan …          for tensorrt

https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/user_guide/model_repository.html
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from attnforge.arrays import Array
from attnforge.atomic import new_folder, rename_new
from attnforge.bundle import OPENVINO, Bundle, DimSpec, Engine, Manifest, Trusted, place_of
from attnforge.bundle.output import copy, copy_whole
from attnforge.errors import AttnforgeError, UnavailableError, UsageError, first_line, shortened
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

MODEL = f'''"""Serves the bundle in the folder `{FOLDER}` beside this file; written by attnforge {__version__}."""

from attnforge.serving.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''

MOST_WARMUP = 2**24
"""Bytes of the inputs of all warm-up requests together, in the files and in memory once they are joined."""

MEASURED = 0.5
"""Seconds of a call from which no larger batch is measured."""


class Packaged(Record):
    """A model that was written to a repository.

    Attributes:
        name: as clients call it.
        version: as clients call it.
        backend: Triton's.
        folder: of the version.
        max_batch: samples that Triton may join; 0 where it joins none.
        apart: why Triton joins no requests; None where it does.
        preferred: numbers of samples that Triton prefers to join.
        measured: by number of samples in a call, samples a second on this machine; empty where none were measured.
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
) -> list[Packaged]:
    """Write bundles to a model repository, all of them or, where anything is wrong, none.

    Args:
        bundles: their folders; models are named after model and precision.
        out: the repository: a new folder; or one of models, which get `options.version` beside those that they have.
        options: how.
        name: of the model, where there is one bundle.
        trusted: files of public keys, one of which must have signed each bundle, as :func:`attnforge.load` takes them.
        progress: hears of every bundle.

    Raises:
        BundleError: no whole, unaltered bundle is there; or the disk is full.
        UsageError: the repository, or a version, is there already; two models have one name; another version of the
            model has other inputs or outputs; the repository cannot be written.
        UnavailableError: a bundle holds nothing that Triton's backend runs; says why.
    """
    options, say = options or Packaging(), progress or (lambda text: None)
    if name is not None and len(bundles) > 1:
        raise UsageError(f"{len(bundles)} bundles cannot all be named {name!r}; package one by one, or leave it out")
    models: dict[str, Bundle] = {}
    for folder in bundles:
        bundle = folder if isinstance(folder, Bundle) else Bundle(folder, trusted=trusted)
        model = name if name is not None else f"{bundle.manifest.name}-{bundle.manifest.precision}"
        model = named(model) if name is None else checked(model)
        if model in models:
            raise UsageError(f"{bundle.path} and {models[model].path} are both {model!r}; package one by one, by name")
        models[model] = bundle
    place = Place.of(Path(out), list(models), options.version)
    planned = []
    for model, bundle in models.items():
        say(f"package {model}")
        planned.append(_plan(model, bundle, place, options))
        place.check_alike(planned[-1])
    with place.writing() as folder:
        for plan in planned:
            _write(plan, folder / plan.model.name, options)
    return [plan.model for plan in planned]


def named(text: str) -> str:
    """A name that Triton takes and that stands in a URL as it is, made of any text."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:200] or "model"


def checked(name: str) -> str:
    """A name that a caller gave.

    Raises:
        UsageError: it would not stand in a URL, or not be a folder.
    """
    if name != named(name):
        raise UsageError(f"{shortened(name)!r} is no name of a model; give letters, digits, and _ . - between them")
    return name


# --- what is written --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A model that is about to be written.

    Attributes:
        model: as the caller hears of it.
        bundle: that it is made of.
        config: the configuration.
        files: of the version, by their names: the name of a file of the bundle.
        arrays: the inputs of warm-up requests, by their files.
    """

    model: Packaged
    bundle: Bundle
    config: Message
    files: Mapping[str, str]
    arrays: Mapping[str, Array]


def _plan(name: str, bundle: Bundle, place: Place, options: Packaging) -> Planned:
    files, engines = _files(bundle, options)
    batch, apart, preferred, measured = _batching(bundle, options)
    most = (batch.max or 0) if batch is not None else 0
    max_batch = most if options.max_batch is None else min(most, options.max_batch)
    warmups, arrays = _warmups(bundle, batch if max_batch else None, max_batch)
    model = Packaged(
        name=name,
        version=options.version,
        backend=options.backend,
        folder=str(place.target / name / str(options.version)),
        max_batch=max_batch,
        apart=apart,
        preferred=list(preferred),
        measured=measured,
        warmups=[warmup["name"] for warmup in warmups],
        kept=name in place.standing,
    )
    return Planned(model, bundle, _config(model, bundle.manifest, engines, warmups, options), files, arrays)


def _files(bundle: Bundle, options: Packaging) -> tuple[dict[str, str], list[Engine]]:
    """The files of the version and, for TensorRT, the plans among them.

    Raises:
        UnavailableError: the bundle has none for this backend of Triton.
    """
    manifest = bundle.manifest
    if manifest.doubt is not None:
        raise UnavailableError(f"{manifest.doubt}; deploy it again")
    if options.backend == "python":
        target = "onnxruntime" if options.session.startswith("onnxruntime") else options.session
        if target not in ("auto", OPENVINO, *manifest.targets):
            targets = ", ".join(name for name in manifest.targets if name != OPENVINO)
            raise UnavailableError(f"{bundle.path} was deployed for {targets}, and not for {target}")
        return {}, []
    if manifest.decoding is not None:
        raise UnavailableError(
            f"{bundle.path} is a decoder, whose caches Triton's {options.backend} backend does not keep; use --backend "
            "python, which answers for whole sequences"
        )
    tensors = [*manifest.inputs, *manifest.outputs]
    record = manifest.targets.get(options.backend)
    if scalars := [spec.name for spec in tensors if not spec.dims]:
        raise UnavailableError(f"{scalars[0]} has no dims, and Triton knows no such tensor; use --backend python")
    if options.backend == "onnxruntime":
        if any(spec.dtype == "bfloat16" for spec in tensors) or manifest.precision == "bf16":
            raise UnavailableError(
                f"{bundle.path} is bf16, which Triton's onnxruntime backend has no type for; use --backend python"
            )
        if record is None:
            raise UnavailableError(f"{bundle.path} holds no model for onnxruntime; deploy it with --target onnxruntime")
        own = record.cuda_model if options.kind == "gpu" and record.cuda_model is not None else record.model
        model, *weights = bundle.model_files(own)
        if not weights:
            return {"model.onnx": model}, []
        beside = {f"model.onnx/{PurePosixPath(file).name}": file for file in weights}
        return {"model.onnx/model.onnx": model, **beside}, []
    if record is None or not record.engines:
        reason = "it holds no plan of TensorRT"
        if "tensorrt_rtx" in manifest.targets:
            reason = "its plans are TensorRT-RTX's, which no backend of Triton loads"
        raise UnavailableError(
            f"{bundle.path} cannot be served by the tensorrt backend: {reason}; use --backend python"
        )
    if data := [spec.name for spec in manifest.outputs if is_open(spec, manifest.inputs)]:
        raise UnavailableError(
            f"the shape of {data[0]} is decided by the inputs' values, which Triton's tensorrt backend does not allow; "
            "use --backend python"
        )
    engines = _engines(bundle, record.engines, options.server_tensorrt)
    return {PurePosixPath(engine.file).name: engine.file for engine in engines}, engines


def _engines(bundle: Bundle, engines: Sequence[Engine], version: str | None) -> list[Engine]:
    """The plans that one server can load, of every compute capability one."""
    versions = sorted({engine.version for engine in engines})
    if version is not None:
        engines = [engine for engine in engines if f"{engine.version}.".startswith(f"{version}.")]
        if not engines:
            raise UnavailableError(f"the plans of {bundle.path} are TensorRT {', '.join(versions)}'s, not {version}'s")
    elif len(versions) > 1:
        raise UnavailableError(
            f"the plans of {bundle.path} are TensorRT {' and '.join(versions)}'s, and a server has one; say which "
            "(--server-tensorrt)"
        )
    by_capability = {capability: engine for engine in engines for capability in engine.compute_capabilities}
    if unknown := [name for name in by_capability if not re.fullmatch(r"SM\d{2,}", name)]:
        raise UnavailableError(f"a plan of {bundle.path} is for {unknown[0]}, which Triton cannot choose by")
    profiles = {len(engine.profiles) for engine in by_capability.values()}
    if len(profiles) > 1:
        raise UnavailableError(
            f"the plans of {bundle.path} have different numbers of profiles; package them one by one"
        )
    return list({engine.file: engine for engine in by_capability.values()}.values())


# --- batches ----------------------------------------------------------------------------------------------------------

Rates = dict[int, float]
"""Samples a second, by how many are in a call."""


def _batching(bundle: Bundle, options: Packaging) -> tuple[DimSpec | None, str | None, tuple[int, ...], Rates]:
    """The dim along which requests are joined or why they are not, which numbers of samples are preferred, and what was
    measured for that."""
    batch = batch_of(bundle.manifest)
    if options.max_batch == 0:
        batch = "max_batch is 0"
    if isinstance(batch, str):
        return None, batch, (), {}
    most = min(batch.max or 0, options.max_batch or batch.max or 0)
    try:
        with load(bundle, options.session, threads=options.threads) as session:
            if (reason := why_not_apart(session, batch)) is not None:
                return None, reason, (), {}
            if options.preferred is None and most > 1:
                rates = _rates(session, batch, most)
                return batch, None, (_best(rates),), rates
    except UnavailableError as error:
        return None, f"nothing here can run it and show that samples stay apart: {first_line(error)}", (), {}
    preferred = tuple(sorted(set(options.preferred or ())))
    if wrong := [number for number in preferred if not 1 <= number <= most]:
        raise UsageError(f"{wrong[0]} samples are preferred, and {bundle.path} takes 1 to {most}")
    return batch, None, preferred if most > 1 else (), {}


def _rates(session: Session, batch: DimSpec, most: int, seconds: float = 2.0) -> Rates:
    """Samples a second of batches of 1, 2, 4 … samples, the other sizes the example's, measured in turns."""
    specs, runs = session.inputs, {}
    for number in sorted({min(2**power, most) for power in range(most.bit_length() + 1)}):
        feeds = reference.make_inputs(reference.at(specs, {batch.symbol: number}), specs, {})
        runs[str(number)] = partial(session.run, feeds)
        if min(seconds_of(runs[str(number)]) for _ in range(2)) > MEASURED:
            break
    return {int(number): round(1e3 * int(number) / ms, 1) for number, ms in medians(runs, 8, seconds).items()}


NEAR = 1.05
"""Ratio to the best rate within which a number of samples in a call is as good as the best."""


def _best(rates: Rates) -> int:
    """The largest number of samples that is as good as the best: Triton joins no more than it prefers, and the more it
    joins, the less each request costs the server."""
    return max(number for number, rate in rates.items() if rate * NEAR >= max(rates.values()))


# --- warm-up ----------------------------------------------------------------------------------------------------------


def _warmups(bundle: Bundle, batch: DimSpec | None, most: int) -> tuple[list[Message], dict[str, Array]]:
    """The ordinary reference cases as warm-up requests, as far as :data:`MOST_WARMUP` holds them, and their files.
    Where requests are joined, a request has the case's first sample, as many times as the case has samples."""
    specs, stored = bundle.manifest.inputs, stored_inputs(bundle)
    warmups, files, left = list[Message](), dict[str, Array](), MOST_WARMUP
    for place, case in enumerate(case for case in bundle.manifest.cases if case.is_ordinary):
        with suppress(UnavailableError):  # more inputs than fit into memory
            feeds = reference.make_inputs(case, specs, stored)
            needed = sum(array.nbytes for array in feeds.values())
            if needed > left or any(array.size == 0 for array in feeds.values()):
                continue
            left -= needed
            inputs = []
            for number, spec in enumerate(specs):
                array = feeds[spec.name] if batch is None else feeds[spec.name][0]
                file = f"{place}.{named(case.name)}.{number}.{named(spec.name)}"
                inputs.append(configuration.sample(spec, array.shape, file))
                files[file] = array
            joined = 1 if batch is None else min(case.sizes[batch.symbol], most)
            warmups.append({"name": case.name, "batch_size": joined, "inputs": inputs})
    return warmups, files


# --- the configuration ------------------------------------------------------------------------------------------------


def _config(
    model: Packaged, manifest: Manifest, engines: Sequence[Engine], warmups: list[Message], options: Packaging
) -> Message:
    batched = model.max_batch > 0
    config: dict[str, Any] = {"name": model.name, **_of_backend(engines, options)}
    config["max_batch_size"] = model.max_batch
    config["input"] = [configuration.tensor(spec, batched=batched) for spec in manifest.inputs]
    config["output"] = [configuration.tensor(spec, batched=batched) for spec in manifest.outputs]
    config["version_policy"] = {"all": {}}  # a new version takes none away that is asked for by its number
    if model.max_batch > 1:
        preferred = {"preferred_batch_size": model.preferred} if model.preferred else {}
        config["dynamic_batching"] = {**preferred, "max_queue_delay_microseconds": options.max_delay}
    kind = "gpu" if options.backend == "tensorrt" else options.kind
    config["instance_group"] = [{"count": options.instances, "kind": Word(f"KIND_{kind.upper()}")}]
    if any(len(engine.profiles) > 1 for engine in engines):
        config["instance_group"][0]["profile"] = [str(number) for number in range(len(engines[0].profiles))]
    pinned = {"enable": kind != "cpu"}
    config["optimization"] = {"input_pinned_memory": pinned, "output_pinned_memory": pinned}
    parameters = _parameters(manifest, options).items()
    config["parameters"] = [{"key": key, "value": {"string_value": value}} for key, value in parameters]
    if warmups:
        config["model_warmup"] = warmups
    return config


def _of_backend(engines: Sequence[Engine], options: Packaging) -> Message:
    if options.backend == "python":
        return {"backend": "python", "default_model_filename": "model.py"}
    if options.backend == "onnxruntime":
        return {
            "platform": "onnxruntime_onnx", "backend": "onnxruntime", "default_model_filename": "model.onnx",
        }  # fmt: skip
    names = {engine.file: PurePosixPath(engine.file).name for engine in engines}
    capabilities = {capability: names[engine.file] for engine in engines for capability in engine.compute_capabilities}
    return {
        "platform": "tensorrt_plan", "backend": "tensorrt", "default_model_filename": names[engines[0].file],
        "cc_model_filenames": [
            {"key": f"{capability[2:-1]}.{capability[-1]}", "value": file} for capability, file in capabilities.items()
        ],
    }  # fmt: skip


def _parameters(manifest: Manifest, options: Packaging) -> dict[str, str]:
    about = {"attnforge": __version__, "model": manifest.name, "precision": manifest.precision}
    if options.backend == "python":
        about[SESSION] = options.session
        if options.threads is not None:
            about[THREADS] = str(options.threads)
    elif options.backend == "onnxruntime" and options.threads is not None:
        about["intra_op_thread_count"] = str(options.threads)
    elif options.backend == "tensorrt":
        record = manifest.targets["tensorrt"]
        about["tensorrt"] = record.engines[0].version
    return about


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
"""The fields of a configuration that all versions of a model share by their nature."""


@dataclass(frozen=True)
class Place:
    """Where models are put.

    Attributes:
        target: the repository.
        version: of the models.
        standing: the configurations of models that are there in other versions, by name.
    """

    target: Path
    version: int
    standing: Mapping[str, str]

    @classmethod
    def of(cls, out: Path, names: Sequence[str], version: int) -> Place:
        """The place of these models.

        Raises:
            UsageError: something else is there, or this version of a model.
        """
        try:
            target = place_of(out)
            if not os.path.lexists(target):
                return cls(target, version, {})
            if not target.is_dir():
                raise UsageError(f"{target} is no folder; choose another place")
            for model in target.iterdir():
                if not model.name.startswith(".") and not _is_model(model):
                    raise UsageError(f"{target} exists and is no model repository: it holds {shortened(model.name)!r}")
            standing = {}
            for name in names:
                if os.path.lexists(folder := target / name / str(version)):
                    raise UsageError(f"{folder} exists; give the next version (--version), or choose another folder")
                if os.path.lexists(file := target / name / CONFIG):
                    standing[name] = file.read_text(encoding="utf-8")
                elif os.path.lexists(target / name):
                    raise UsageError(f"{target / name} has no {CONFIG} to hold this one to; choose another --name")
        except (OSError, RuntimeError, ValueError) as error:
            if isinstance(error, AttnforgeError):
                raise
            raise UsageError(f"{shortened(str(out))} is no place for a repository: {first_line(error)}") from error
        return cls(target, version, standing)

    def check_alike(self, plan: Planned) -> None:
        """Check that a version fits the configuration that the model has: Triton has one for all versions.

        Raises:
            UsageError: it does not.
        """
        model = plan.model.name
        if model not in self.standing:
            return
        has, needed = fields(self.standing[model]), fields(configuration.text(plan.config))
        for name in COMPARED:
            if has.get(name) != needed.get(name):
                raise UsageError(
                    f"{model} has another {name} in {self.target / model / CONFIG}, which all versions share; "
                    "package it under another name (--name)"
                )

    def writing(self) -> AbstractContextManager[Path]:
        """A temporary folder of models that are put to their places where the block ends, or else removed.

        Raises:
            UsageError: it cannot be written, or something appeared there meanwhile.
            BundleError: the disk is full.
        """
        if not os.path.lexists(self.target):
            return new_folder(self.target)
        is_apart = os.stat(self.target.parent).st_dev != os.stat(self.target).st_dev  # a disk of its own
        return new_folder(self.target, self._put, parent=self.target if is_apart else None)

    def _put(self, folder: Path) -> None:
        """Rename every model, or its version, to its place; what was put is taken back where one cannot be."""
        put: list[tuple[Path, Path]] = []
        try:
            for model in sorted(folder.iterdir()):
                part = Path(model.name, str(self.version)) if model.name in self.standing else Path(model.name)
                rename_new(folder / part, self.target / part)
                put.append((self.target / part, folder / part))
        except BaseException:
            for there, back in put:
                there.rename(back)
            raise


def _is_model(folder: Path) -> bool:
    """Whether Triton might take a folder for a model: it has a configuration, or a version."""
    return (folder / CONFIG).is_file() or (folder.is_dir() and any(file.name.isdecimal() for file in folder.iterdir()))


def fields(text: str) -> dict[str, list[str]]:
    """The fields of a configuration as :func:`~.configuration.text` writes it, by name, each with its lines."""
    lines: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if line and not line[0].isspace() and line != "}":
            name = re.split(r"[\s:{]", line, maxsplit=1)[0]
        lines.setdefault(name, []).append(" ".join(line.split()))
    return lines
