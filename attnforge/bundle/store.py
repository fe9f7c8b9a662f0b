"""A bundle on disk: a folder that holds a deployed model and its manifest.

A bundle is written to a temporary folder beside its place and renamed when it is whole. It is checked, schema first
and then the sha256 of every file, before anything in it is parsed: a TensorRT plan is executable content.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from attnforge.bundle.schema import CANONICAL, MANIFEST, PLAIN, SCHEMA_VERSION, WEIGHTS, Manifest
from attnforge.errors import BundleError, UsageError
from attnforge.files import is_full, sha256


class Bundle:
    """A bundle on disk whose manifest and files have been checked.

    Attributes:
        path: the folder.
        manifest: what it holds.
    """

    def __init__(self, path: str | os.PathLike[str], *, check_plans: bool = True, lazily: bool = False) -> None:
        """Open and check the bundle at `path`.

        Args:
            path: the folder.
            check_plans: whether TensorRT's plans are checked too; a caller that is about to rebuild them skips that.
            lazily: check a file when :meth:`file` is first asked for it, so only files that are used.

        Raises:
            BundleError: no bundle is there, its schema is another, or a file is missing or altered.
        """
        self.path = Path(path)
        self.manifest = _read_manifest(self.path)
        self._checked: set[str] = set()
        plans = {engine.file for target in self.manifest.targets.values() for engine in target.engines}
        for name in () if lazily else self.manifest.files:
            if check_plans or name not in plans:
                self.check(name)

    def file(self, name: str) -> Path:
        """Path of a file of the bundle, checked together with the files that its weights stand in.

        Args:
            name: as the manifest lists it.

        Raises:
            BundleError: the manifest does not list the file, or the file is missing or altered.
        """
        if name not in self.manifest.files:
            raise BundleError(f"{self.path} has no {name}; it was deployed for {', '.join(self.manifest.targets)}")
        beside = [WEIGHTS, f"{name}.data"] if name.endswith(".onnx") else []
        beside += [CANONICAL] if name == PLAIN else []
        for needed in (name, *(file for file in beside if file in self.manifest.files)):
            if needed not in self._checked:
                self.check(needed)
        return self.path / name

    def check(self, name: str) -> None:
        """Check that a file of the manifest is there and unaltered.

        Args:
            name: as the manifest lists it.

        Raises:
            BundleError: the file is missing, altered, or outside the bundle.
        """
        file = self.path / name
        if not file.resolve().is_relative_to(self.path.resolve()):
            raise BundleError(f"{self.path / MANIFEST} lists {name!r}, which is outside the bundle; do not use it")
        again = "build it again with load(…, rebuild=True)" if name.endswith(".plan") else "deploy the model again"
        if not file.is_file():
            raise BundleError(f"{file} is missing; copy the bundle again, or {again}")
        if sha256(file) != self.manifest.files[name]:
            raise BundleError(f"{file} was altered (its sha256 is not the manifest's); do not use it; {again}")
        self._checked.add(name)

    def __repr__(self) -> str:
        return f"Bundle({str(self.path)!r}, {self.manifest.name}, {self.manifest.precision})"


def _read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST
    if not file.is_file():
        raise BundleError(f"no bundle at {path}: it has no {MANIFEST}; make one with attnforge deploy")
    text = file.read_bytes()
    try:
        version = _Version.model_validate_json(text).schema_version
        if version != SCHEMA_VERSION:
            raise BundleError(
                f"{file} has schema version {version}, this attnforge reads {SCHEMA_VERSION}; deploy the model again, "
                "or use the attnforge that wrote it"
            )
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first: Any = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise BundleError(f"{file} is no valid manifest: {where}: {first['msg']}; deploy the model again") from error


class _Version(BaseModel):
    schema_version: Annotated[int, Field(strict=True)]


def _holds_bundle(folder: Path) -> bool:
    """Whether a folder is a bundle of any schema version, and not some other folder with a file `manifest.json`."""
    try:
        document = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and {"schema_version", "attention", "files"} <= set(document)


@contextmanager
def writing(out: str | os.PathLike[str], force: bool) -> Iterator[Path]:
    """A temporary folder that becomes `out` where the block ends, and is removed where it raises.

    Args:
        out: folder of the bundle.
        force: whether a bundle that stands there is replaced.

    Raises:
        UsageError: `out` exists and `force` is not given, or `out` is no bundle and would be lost.
        BundleError: the disk is full.
    """
    target = Path(out).resolve()  # through a link, what it points to is replaced, and the link stays
    if target.exists():
        if not force:
            raise UsageError(f"{target} exists; choose another folder, or overwrite it with --force (force=True)")
        if not _holds_bundle(target) and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(f"{target} exists and is no bundle, so it is not overwritten; choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        yield folder
        folder.chmod(0o755)
        if target.exists():
            old = folder.with_suffix(".old")
            target.rename(old)
            try:
                folder.rename(target)
            except BaseException:
                old.rename(target)
                raise
            shutil.rmtree(old)
        else:
            folder.rename(target)
    except Exception as error:
        if is_full(target.parent, error):
            raise BundleError(
                f"the disk of {target.parent} is full, or its quota is; nothing was written; make room, or choose "
                "another folder"
            ) from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_manifest(folder: Path, manifest: Manifest, *, only_new: bool = False) -> None:
    """Hash every file of a bundle into the manifest, and write the manifest last.

    Args:
        folder: of the bundle.
        manifest: receives `files`.
        only_new: whether files that the manifest lists already are not hashed again.
    """
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file != folder / MANIFEST)
    names = {file.relative_to(folder).as_posix(): file for file in files}
    known = manifest.files if only_new else {}
    manifest.files = {name: known.get(name) or sha256(file) for name, file in names.items()}
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
