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
from attnforge.files import sha256


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
            check_plans: without, TensorRT's plans may be missing or altered, for who builds them anew.
            lazily: check each file when :meth:`file` is first asked for it, and so only those that are used.

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
        """Path of a file that the manifest lists.

        Raises:
            BundleError: it lists none; or that one, which was not checked before, is missing or altered.
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
        """That a file that the manifest lists is there and unaltered.

        Raises:
            BundleError: it is not.
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
    """Whether a folder is a bundle of any schema version, and not another's that also has a manifest."""
    try:
        document = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and {"schema_version", "attention", "files"} <= set(document)


@contextmanager
def writing(out: str | os.PathLike[str], force: bool) -> Iterator[Path]:
    """A temporary folder that becomes `out` when the block ends well, and is gone when it does not.

    Raises:
        UsageError: `out` exists and `force` is not given, or `out` is no bundle and would be lost.
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
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_manifest(folder: Path, manifest: Manifest, *, only_new: bool = False) -> None:
    """Hash every file in `folder` into the manifest, or only those that it does not list yet, and write it, last."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file != folder / MANIFEST)
    names = {file.relative_to(folder).as_posix(): file for file in files}
    known = manifest.files if only_new else {}
    manifest.files = {name: known.get(name) or sha256(file) for name, file in names.items()}
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
