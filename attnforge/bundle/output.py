"""Atomic writing of bundles, and copies of them.

A bundle is written to a temporary folder next to its destination and renamed when it is complete.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
from contextlib import AbstractContextManager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from attnforge.atomic import exchange, new_folder, remove, rename_new, write_whole
from attnforge.bundle.reading import UNLISTED, Bundle, manifest_data, unlisted_text
from attnforge.bundle.schema import MANIFEST, SIGNATURE, Manifest
from attnforge.bundle.trust import signatures
from attnforge.errors import BundleError, UsageError, first_line, shortened
from attnforge.files import names_in, open_inside, sha256

_OF_THE_SYSTEM = (".DS_Store", "Thumbs.db", "desktop.ini")
"""Files that file managers leave in folders, which may be deleted."""


def _document(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a bundle of any schema version; None if the folder is not a bundle."""
    with suppress(BundleError, ValueError, RecursionError):
        document = json.loads(manifest_data(folder))
        if isinstance(document, dict) and {"schema_version", "attention", "files"} <= set(document):
            return document
    return None


def place_of(out: Path) -> Path:
    """Return the absolute path of a folder to be made, with links resolved.

    Raises:
        UsageError: no folder can have that path, it is not UTF-8, or it is inside a bundle, whose signature and
            `--force` allow no further files.
    """
    try:
        target = out.resolve()
        str(target).encode()  # ONNX Runtime cannot write to other paths
    except (OSError, RuntimeError, ValueError) as error:  # a cycle of links, or an invalid file name
        why = "its path is not UTF-8" if isinstance(error, UnicodeEncodeError) else first_line(error)
        raise UsageError(f"{shortened(str(out))} cannot be a folder: {why}; choose another") from error
    if (bundle := next((parent for parent in target.parents if _document(parent) is not None), None)) is not None:
        raise UsageError(f"{target} is inside the bundle {bundle}; choose a folder outside it")
    return target


def _why_not_replaced(folder: Path) -> str | None:
    """Return why a folder may not be replaced by a bundle, or None: it is not a bundle of any schema version, contains
    files that are not the bundle's, or cannot be written to."""
    if (document := _document(folder)) is None:
        return None if folder.is_dir() and not any(folder.iterdir()) else "exists and is not a bundle"
    listed = {*(document["files"] if isinstance(document["files"], dict) else ()), *UNLISTED}
    for name in names_in(folder):
        if name not in listed and PurePosixPath(name).name not in _OF_THE_SYSTEM:
            return f"contains {name!r}, which is not part of the bundle"
    can_write = all(os.access(parent, os.W_OK | os.X_OK) for parent, _, _ in os.walk(folder))
    return None if can_write else "is a read-only bundle"


def writing(out: str | os.PathLike[str], force: bool) -> AbstractContextManager[Path]:
    """Return a context with a temporary folder that becomes `out` at the end of the block, or is removed if the block
    raises.

    If a bundle is replaced, old and new are exchanged atomically, if the system supports that. Leftovers of killed
    processes are removed.

    Args:
        out: folder of the bundle.
        force: whether an existing bundle is replaced. Nothing else ever is.

    Raises:
        UsageError: `out` exists and `force` is False; or it would be replaced but is not a bundle, is read-only, or
            contains other files; or it is inside another bundle, or cannot be written.
        BundleError: the disk is full.
    """
    target = place_of(Path(out))  # a link stays, and its target is replaced
    _bring_back(target)
    _check(target, force)
    return new_folder(target, lambda folder: _put(folder, target, force))


def _check(target: Path, force: bool) -> None:
    if not os.path.lexists(target):
        return
    if not force:
        raise UsageError(f"{target} exists; choose another folder, or overwrite it with --force (force=True)")
    if (why := _why_not_replaced(target)) is not None:
        raise UsageError(f"{target} {why}, so it is not overwritten; choose another folder")


def _put(folder: Path, target: Path, force: bool) -> None:
    """Rename a complete bundle to its destination, which is checked again because it may have changed meanwhile."""
    _check(target, force)
    if not os.path.lexists(target):
        rename_new(folder, target)
    elif not exchange(folder, target):
        old = folder.with_suffix(".old")
        target.rename(old)
        try:
            folder.rename(target)
        except BaseException:
            old.rename(target)
            raise
        remove(old)


def _bring_back(target: Path) -> None:
    """Recover from a process that was killed between the two renames of a system that cannot exchange folders."""
    with suppress(OSError):
        for old in sorted(target.parent.glob(f".{glob.escape(target.name)}.*.old")):
            if not os.path.lexists(target):
                old.rename(target)
            elif os.lstat(old).st_uid == os.getuid():
                remove(old)


def write_manifest(folder: Path, manifest: Manifest, *, only_new: bool = False) -> None:
    """Hash every file of a bundle into the manifest, and write the manifest last.

    Args:
        folder: folder of the bundle.
        manifest: receives `files`.
        only_new: whether to skip files that the manifest already lists.
    """
    files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
    known = manifest.files if only_new else {}
    manifest.files = {n: known.get(n) or sha256(file) for n, file in files.items() if n not in UNLISTED}
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def sign(bundle: str | os.PathLike[str], key: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Sign a bundle: write `model.sig` into its folder. The bundle may be moved and renamed afterwards.

    Args:
        bundle: folder of the bundle.
        key: a .pem file with a private key of an elliptic curve (P-256, P-384 or P-521).
        force: whether to overwrite an existing signature.

    Returns:
        path of the signature.

    Raises:
        BundleError: the bundle is missing, incomplete or altered, or contains files that its manifest does not list.
        UsageError: the key is not a private key, the bundle is already signed, or the folder cannot be written to.
        UnavailableError: `attnforge[signing]` is not installed.
    """
    made = Bundle(bundle, trusted=False)
    file = made.path / SIGNATURE
    if os.path.lexists(file) and not force:
        raise UsageError(f"{made.path} is already signed; overwrite {SIGNATURE} with --force (force=True)")
    if others := made.unlisted():
        raise BundleError(f"{unlisted_text(made.path, others)}; remove them, then sign it")
    with made.steady():
        data = signatures().signature_of(made._root, manifest_data(made._root, made.path), Path(key))
    try:
        write_whole(made._root / SIGNATURE, data)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}; sign a copy of the bundle") from error
    return file


# --- copies of bundles ------------------------------------------------------------------------------------------------


def copy(bundle: Bundle, name: str, to: Path) -> None:
    """Copy a file of a bundle.

    Args:
        bundle: bundle whose manifest lists the file.
        name: name of the file.
        to: destination; missing parent folders are made.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    with open_inside(bundle.path.resolve(), name) as source, to.open("wb") as copy:
        shutil.copyfileobj(source, copy, 2**20)


def copy_whole(bundle: Bundle, to: Path) -> None:
    """Copy the files that the manifest lists, and the signature if there is one.

    Raises:
        BundleError: a signed bundle contains other files; or it was altered meanwhile.
    """
    if (others := bundle.unlisted()) and (bundle.path / SIGNATURE).exists():
        raise BundleError(f"{unlisted_text(bundle.path, others)}, and its signature does not cover them; remove them")
    for name in [*bundle.manifest.files, MANIFEST, *([SIGNATURE] if (bundle.path / SIGNATURE).exists() else [])]:
        copy(bundle, name, to / name)
    Bundle(to, trusted=bundle.trusted or False)  # checks that the copy is complete and has the same signature
