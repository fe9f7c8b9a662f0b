"""A bundle on disk: a folder with a deployed model and its manifest.

It is checked, the schema first and then the sha256 of every file, before anything in it is parsed: a TensorRT plan is
executable content. Files are opened without following links, and what was checked is what is used: the same bytes, or
a path that is checked again after its use (:meth:`Bundle.steady`).
"""

from __future__ import annotations

import errno
import hashlib
import logging
import mmap
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from attnforge.bundle import schema
from attnforge.bundle.consistency import inconsistencies
from attnforge.bundle.trust import Trusted, keys_of, signatures
from attnforge.errors import AttnforgeError, BundleError, ReplacedError, first_line, plain, raised_as, shortened
from attnforge.files import Identity, identity, names_in, open_inside, open_regular

if TYPE_CHECKING:
    from attnforge.arrays import Array

log = logging.getLogger("attnforge")


MOST_MANIFEST = 2**26
"""Maximum size of a manifest, in bytes."""

MOST_VALUES = 200_000
"""Maximum number of commas, and so about of values, in a manifest: reporting an invalid value takes a kilobyte."""

READ_WHOLE = 2**26
"""Largest model, in bytes, that is read into memory, so that exactly the checked bytes are run."""

_COMPILED = "EPContext"
"""ONNX Runtime's operator whose attribute is a compiled model, such as a TensorRT plan, or the name of its file."""

_NAMING = (b"location", _COMPILED.encode())
"""Bytes that occur in every ONNX model that names files: the key of external data, and :data:`_COMPILED`."""


class Bundle:
    """A bundle on disk whose manifest and files have been checked.

    Attributes:
        path: the folder.
        manifest: its manifest.
        trusted: public keys, one of which has signed it; empty if no signature was required.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, check_plans: bool = True, lazily: bool = False, trusted: Trusted = None
    ) -> None:
        """Open and check the bundle at `path`.

        Args:
            path: the folder.
            check_plans: whether TensorRT plans are checked too; a caller that is about to rebuild them skips that.
            lazily: whether to check a file only when it is first used.
            trusted: files of public keys, one of which must have signed the whole folder; by default those named by
                `ATTNFORGE_TRUSTED`. False requires no signature, whatever the variable says.

        Raises:
            BundleError: there is no bundle, it has another schema version, or a file is missing or altered.
            SignatureError: a BundleError: a signature is required, and the bundle has none, one by another key, or was
                altered.
            UsageError: a trusted key is not a public key.
            UnavailableError: a signature is required, and `attnforge[signing]` is not installed.
        """
        self.trusted = keys_of(trusted)
        self.path = Path(path)
        with raised_as(BundleError, f"no bundle at {shortened(str(path))!r}"):  # a cycle of links, an invalid file name
            self._root = self.path.resolve()  # so that changing a link later does not affect this bundle
        self._folder = self._identity(".")
        data = manifest_data(self._root, self.path)
        if self.trusted:
            signatures().check_signed(self.path, self._root, data, self.trusted)
        self.manifest = _parsed_manifest(self.path / schema.MANIFEST, data)
        self._sum = hashlib.sha256(data).digest()
        self._checked: dict[str, Identity] = {}
        plans = {engine.file for target in self.manifest.targets.values() for engine in target.engines}
        for name in () if lazily else self.manifest.files:
            if check_plans or name not in plans:
                self.check(name)
        if not lazily and (others := self.unlisted()):
            log.warning("%s", unlisted_text(self.path, others))

    @property
    def signature(self) -> Literal["none", "not checked", "of a trusted key"]:
        """Whether the bundle is signed, and whether that was checked, which needs trusted keys."""
        if self.trusted:
            return "of a trusted key"
        return "not checked" if os.path.lexists(self.path / schema.SIGNATURE) else "none"

    def summary(self) -> str:
        """Return what the model takes and returns, how its attention was lowered, and why it is not fused where it is
        not, a line each."""
        return self.manifest.summary()

    def unlisted(self) -> list[str]:
        """Return the files in the folder that the manifest does not list; attnforge never reads or runs them."""
        return [name for name in names_in(self.path) if name not in self.manifest.files and name not in UNLISTED]

    def file(self, name: str) -> Path:
        """Return the path of a file of the bundle, checked together with the files of its external weights. Open it
        inside :meth:`steady`; :meth:`read` and :meth:`model` do not need that.

        Args:
            name: name in the manifest.

        Raises:
            BundleError: the manifest does not list the file, or the file is missing or altered.
        """
        return self.path / self.model_files(name)[0]

    def read(self, name: str) -> bytes:
        """Return the content of a file of the bundle, read once and checked.

        Args:
            name: name in the manifest.

        Raises:
            BundleError: the manifest does not list the file, or the file is missing or altered.
        """
        with self._open_member(name) as stream:
            data = stream.read()
        if hashlib.sha256(data).hexdigest() != self.manifest.files[name]:
            raise self._altered(name)
        return data

    def model(self, name: str) -> bytes | Path:
        """Return an ONNX model of the bundle: its content, or its path if it is large or has external weights. Open the
        path inside :meth:`steady`.

        Args:
            name: name in the manifest.

        Raises:
            BundleError: the manifest does not list the file, or a file is missing, altered or outside the bundle.
        """
        with self._open_member(name) as stream:
            is_small = os.fstat(stream.fileno()).st_size <= READ_WHOLE
        if is_small and not self._shared(name) and not self._named(name, data := self.read(name)):
            return data
        self.file(name)
        return self._root / name

    def model_files(self, name: str) -> list[str]:
        """Check a file of the bundle and return its name, followed for an ONNX model by the files of its external
        weights, which must be in the same folder.

        Args:
            name: name in the manifest.

        Raises:
            BundleError: the manifest does not list the file, or a file is missing, altered or outside the bundle.
        """
        self._check_again(name, *self._shared(name))
        external = self._external(name) if name.endswith(".onnx") else []  # libraries open any path named there
        self._check_again(*external)
        return [name, *external]

    def tensors(self, name: str) -> dict[str, Array]:
        """Return the arrays of a safetensors file by name, read once and checked.

        Raises:
            BundleError: the manifest does not list the file, or the file is missing, altered or not safetensors.
        """
        from safetensors.numpy import load

        data, not_read = self.read(name), f"{self.path / name} is not a safetensors file that NumPy reads"
        with raised_as(BundleError, not_read, "; deploy the model again"):
            return load(data)

    @contextmanager
    def steady(self, *, whole: bool = True) -> Iterator[None]:
        """A block in which files of the bundle are opened by their paths.

        Args:
            whole: whether the folder and its manifest must stay unchanged too, not only the checked files.

        A folder that is exchanged for another and back was moved, which its identity shows.

        Raises:
            ReplacedError: the bundle, or a file that was checked, was replaced, moved or altered meanwhile.
        """
        before = {name: self._identity(name) for name in ((".", schema.MANIFEST) if whole else ())}
        yield
        if any(self._identity(name) != was for name, was in {**before, **self._checked}.items()):
            raise self._replaced()

    def check(self, name: str) -> None:
        """Check that a file of the manifest exists and is unaltered.

        Args:
            name: name in the manifest.

        Raises:
            BundleError: the file is missing, altered, or outside the bundle.
        """
        with self._open_member(name) as stream:
            before = identity(os.fstat(stream.fileno()))
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            after = identity(os.fstat(stream.fileno()))
        if digest != self.manifest.files[name] or before != after:
            raise self._altered(name)
        self._checked[name] = before

    def __repr__(self) -> str:
        return f"Bundle({str(self.path)!r}, {self.manifest.name}, {self.manifest.precision})"

    # ---

    def _shared(self, name: str) -> list[str]:
        """Return the listed files that may contain a model's weights."""
        files = [schema.WEIGHTS, f"{name}.data"] if name.endswith(".onnx") else []
        files += [schema.CANONICAL] if name == schema.PLAIN else []
        return [file for file in files if file in self.manifest.files]

    def _check_again(self, *names: str) -> None:
        """Check files of the manifest that are not checked yet, or have changed since."""
        for name in names:
            if name not in self._checked or self._checked[name] != self._identity(name):
                self.check(name)

    def _external(self, name: str) -> list[str]:
        """Return the files, as listed in the manifest, in which a library would look for a model's weights: those that
        the model names, and the .bin file that OpenVINO reads, which accepts its own format under any model's name."""
        model = PurePosixPath(name)
        binary = model.with_suffix(".bin").name
        files = {binary} if os.path.lexists(self._root / model.parent / binary) else set()
        with self._open_member(name) as stream:
            if os.fstat(stream.fileno()).st_size:
                with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    files |= self._named(name, data)
        for file in files:
            if PurePosixPath(file).name != file or (model.parent / file).as_posix() not in self.manifest.files:
                raise BundleError(
                    f"{self.path / name} has weights in {file!r}, which the manifest does not list in the same folder; "
                    "do not use it"
                )
        return [(model.parent / file).as_posix() for file in sorted(files)]

    def _named(self, name: str, data: bytes | mmap.mmap) -> set[str]:
        """Return the files that the content of a model names."""
        if all(data.find(text) < 0 for text in _NAMING):
            return set()
        from onnx import NodeProto, load_model_from_string

        from attnforge.bundle.external import locations, messages

        with raised_as(BundleError, f"{self.path / name} is not an ONNX model"):
            parts = list(messages(load_model_from_string(data[:])))
        if any(isinstance(part, NodeProto) and part.op_type == _COMPILED for part in parts):
            raise BundleError(
                f"{self.path / name} contains a compiled model ({_COMPILED}), which is code; do not use it"
            )
        return {file for part in parts for file in locations(part)}

    def _open_member(self, name: str) -> BufferedReader:
        if name not in self.manifest.files:
            targets = ", ".join(target for target in self.manifest.targets if target != schema.OPENVINO)
            raise BundleError(f"{self.path} has no {name}; it was deployed for {targets}")
        try:
            return open_inside(self._root, name)
        except OSError as error:
            file = self.path / name
            if self._was_replaced():
                raise self._replaced() from error
            if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENOTDIR) or file.is_symlink():
                raise BundleError(
                    f"{file} is a link, or in a linked folder, and may lead outside the bundle; do not use it, or "
                    "copy the bundle with its links resolved (cp -rL)"
                ) from error
            if error.errno == errno.ENOENT:
                raise BundleError(f"{file} is missing; copy the bundle again, or {_again(name)}") from error
            raise BundleError(f"{file} cannot be read: {first_line(error)}") from error

    def _identity(self, name: str) -> Identity | None:
        with suppress(OSError):
            return identity(os.lstat(self._root / name))
        return None

    def _altered(self, name: str) -> BundleError:
        if self._was_replaced():
            return self._replaced()
        return BundleError(
            f"{self.path / name} was altered (its sha256 is not the manifest's); do not use it; {_again(name)}"
        )

    def _was_replaced(self) -> bool:
        """Whether the folder was moved or its manifest was replaced."""
        with suppress(BundleError):
            is_other = hashlib.sha256(manifest_data(self.path)).digest() != self._sum
            return is_other or self._identity(".") != self._folder
        return False

    def _replaced(self) -> ReplacedError:
        return ReplacedError(f"{self.path} was replaced while it was read; read it again when it no longer changes")


UNLISTED = (schema.MANIFEST, schema.SIGNATURE)
"""Files of a bundle that are never listed in its manifest."""


def open_bundle(bundle: str | os.PathLike[str] | Bundle, *, lazily: bool = False, trusted: Trusted = None) -> Bundle:
    """Open a bundle by its folder. An open bundle is returned as it is, unless keys are given; then it is opened again.
    Arguments and errors are those of :class:`Bundle`."""
    if isinstance(bundle, Bundle) and trusted is None:
        return bundle
    return Bundle(bundle.path if isinstance(bundle, Bundle) else bundle, lazily=lazily, trusted=trusted)


@contextmanager
def used(path: Path, how: str) -> Iterator[None]:
    """A block that computes with the content of a bundle, whose checksums and schema are correct. It may still not
    contain a valid model, for which libraries raise errors of many types.

    Args:
        path: path of the bundle.
        how: how it is used, such as "verified".

    Raises:
        BundleError: instead of any error that is not attnforge's own.
    """
    try:
        yield
    except (AttnforgeError, OSError, MemoryError):
        raise
    except Exception as error:
        raise BundleError(
            f"{path} cannot be {how} ({type(error).__name__}: {shortened(first_line(error))}); its content is not what "
            "attnforge writes, or this is a bug in attnforge: deploy the model again, and report it if that fails"
        ) from error


def unlisted_text(path: Path, names: Sequence[str]) -> str:
    """Return a message about files that a manifest does not list."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{path} contains files not listed in its manifest: {', '.join(map(plain, names[:3]))}{more}"


def _again(name: str) -> str:
    return "build it again with load(…, rebuild=True)" if name.endswith(".plan") else "deploy the model again"


def manifest_data(folder: Path, shown: Path | None = None) -> bytes:
    """Return the content of a bundle's manifest.

    Args:
        folder: folder of the bundle.
        shown: path for messages; by default the folder.
    """
    path, file = shown or folder, folder / schema.MANIFEST
    try:
        with open_regular(file, follow=False) as stream:
            data = stream.read(MOST_MANIFEST + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BundleError(f"no bundle at {path}: {_how_to_make_one(path)}") from error
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        raise BundleError(f"no bundle at {path}: its {schema.MANIFEST} cannot be read: {first_line(error)}") from error
    if len(data) > MOST_MANIFEST:
        raise BundleError(f"{file} is not a valid manifest: it has more than {MOST_MANIFEST:,} bytes")
    if data.count(b",") > MOST_VALUES:
        raise BundleError(f"{file} is not a valid manifest: it has more than {MOST_VALUES:,} values")
    return data


def _how_to_make_one(path: Path) -> str:
    """What to write for a bundle of a model that was given instead."""
    if path.suffix in (".onnx", ".pt2") and path.is_file():
        ranges = [part for name in _dims_of(path) for part in ("--dim", f"{name}=1:4:16")]
        flags = ["--trust-source"] if path.suffix == ".pt2" else ranges
        model, name = str(path), path.stem
    elif (path / "config.json").is_file() or str(path).startswith("hf:"):
        folder = str(path).removeprefix("hf:")
        model, flags, name = f"hf:{folder}", [], Path(folder).name
    else:
        return f"it has no {schema.MANIFEST}; make one with attnforge deploy"
    command = shlex.join(["attnforge", "deploy", model, *flags, "--out", f"{name}.bundle"])
    return f"it is a model; make one with {command}"


def _dims_of(file: Path) -> list[str]:
    """The dynamic dims of an ONNX model's inputs, as `attnforge deploy` calls them; none if it cannot be read."""
    import onnx

    try:
        graph = onnx.load(file, load_external_data=False).graph
    except Exception:  # protobuf's; deploy says what is wrong with the file
        return []
    weights = {weight.name for weight in graph.initializer}
    dims = {
        schema.dim_name(dim.dim_param, value.name, i): None
        for value in graph.input
        if value.name not in weights
        for i, dim in enumerate(value.type.tensor_type.shape.dim)
        if dim.dim_value <= 0
    }
    return list(dims)


def _parsed_manifest(file: Path, data: bytes) -> schema.Manifest:
    try:
        version = _Version.model_validate_json(data).schema_version
        if version != schema.SCHEMA_VERSION:
            raise BundleError(
                f"{file} has schema version {version}, this attnforge reads {schema.SCHEMA_VERSION}; deploy the model "
                "again, or use the attnforge that wrote it"
            )
        manifest = schema.Manifest.model_validate_json(data)
    except ValidationError as error:
        first: Any = error.errors(include_url=False, include_input=False)[0]
        where = shortened(".".join(str(part) for part in first["loc"])) or "the document"
        why = shortened(first["msg"].removeprefix("Value error, "))
        raise BundleError(f"{file} is not a valid manifest: {where}: {why}; deploy the model again") from error
    if (inconsistency := next(inconsistencies(manifest), None)) is not None:
        raise BundleError(f"{file} is not a valid manifest: {shortened(inconsistency)}; deploy the model again")
    return manifest


class _Version(BaseModel):
    schema_version: Annotated[int, Field(strict=True)]
