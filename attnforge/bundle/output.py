"""Bundles, and what is made of them, written whole or not at all.

A bundle is written to a temporary folder beside its place and renamed when it is whole.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from attnforge.atomic import exchange, new_folder, remove, rename_new, write_whole
from attnforge.bundle.reading import UNLISTED, Bundle, manifest_data, unlisted_text
from attnforge.bundle.schema import MANIFEST, SIGNATURE, Manifest
from attnforge.bundle.trust import signatures
from attnforge.errors import BundleError, UsageError, first_line, shortened
from attnforge.files import names_in, open_inside, sha256

_OF_THE_SYSTEM = (".DS_Store", "Thumbs.db", "desktop.ini")
"""Files that file managers leave in folders, which nobody misses."""


def _document(folder: Path) -> dict[str, Any] | None:
    """The manifest of a bundle of any schema version; None where a folder is no bundle."""
    try:
        document = json.loads(manifest_data(folder))
    except (BundleError, ValueError, RecursionError):
        return None
    is_bundle = isinstance(document, dict) and {"schema_version", "attention", "files"} <= set(document)
    return document if is_bundle else None


def place_of(out: Path) -> Path:
    """The whole path of a folder that is to be made, with links resolved.

    Raises:
        UsageError: no folder can be there, its path is not UTF-8, or it is inside a bundle, whose signature and
            `--force` allow no further files.
    """
    try:
        target = out.resolve()
        str(target).encode()  # ONNX Runtime writes to no other path
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, or a name that no file can have
        why = "its path is not UTF-8" if isinstance(error, UnicodeEncodeError) else first_line(error)
        raise UsageError(f"{shortened(str(out))} is no place for a folder: {why}; choose another") from error
    if (bundle := next((parent for parent in target.parents if _document(parent) is not None), None)) is not None:
        raise UsageError(f"{target} is inside the bundle {bundle}; choose a folder outside it")
    return target


def _why_not_replaced(folder: Path) -> str | None:
    """Why a folder may not be replaced by a bundle, or None: it is no bundle of any schema version, holds files that
    are not the bundle's, or cannot be written to."""
    if (document := _document(folder)) is None:
        is_empty = folder.is_dir() and not any(folder.iterdir())
        return None if is_empty else "exists and is no bundle"
    listed = {*(document["files"] if isinstance(document["files"], dict) else ()), *UNLISTED}
    for name in names_in(folder):
        if name not in listed and PurePosixPath(name).name not in _OF_THE_SYSTEM:
            return f"holds {name!r}, which is not the bundle's"
    can_write = all(os.access(place, os.W_OK | os.X_OK) for place, _, _ in os.walk(folder))
    return None if can_write else "is a bundle that is read-only"


@contextmanager
def writing(out: str | os.PathLike[str], force: bool) -> Iterator[Path]:
    """A temporary folder that becomes `out` where the block ends, and is removed where it raises.

    Where a bundle is replaced, the two exchange their places at one instant, if the system can do that. What a process
    that was killed left behind here is removed.

    Args:
        out: folder of the bundle.
        force: whether a bundle that stands there is replaced. Nothing else ever is.

    Raises:
        UsageError: `out` exists and `force` is not given, or `out` is no bundle, is read-only, or holds other files
            and would be lost; or it is inside another bundle, or cannot be written.
        BundleError: the disk is full.
    """
    target = check_place(out, force)
    with new_folder(target, lambda folder: _put(folder, target, force)) as folder:
        yield folder


def check_place(out: str | os.PathLike[str], force: bool) -> Path:
    """The folder that a bundle would be put to; through a link, what it points to is replaced, and the link stays.

    Args:
        out: folder of the bundle.
        force: whether a bundle that stands there may be replaced.

    Raises:
        UsageError: as of :func:`writing`.
    """
    target = place_of(Path(out))
    _bring_back(target)
    _check(target, force)
    return target


def _check(target: Path, force: bool) -> None:
    if not os.path.lexists(target):
        return
    if not force:
        raise UsageError(f"{target} exists; choose another folder, or overwrite it with --force (force=True)")
    if (why := _why_not_replaced(target)) is not None:
        raise UsageError(f"{target} {why}, so it is not overwritten; choose another folder")


def _put(folder: Path, target: Path, force: bool) -> None:
    """Rename a whole bundle to its place. What stands there now is looked at once more: it may have come meanwhile."""
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
    """Undo what a process left that was killed between the two renames of a system that cannot exchange folders."""
    with suppress(OSError):
        for old in sorted(target.parent.glob(f".{glob.escape(target.name)}.*.old")):
            if not os.path.lexists(target):
                old.rename(target)
            elif os.lstat(old).st_uid == os.getuid():
                remove(old)


def write_manifest(folder: Path, manifest: Manifest, *, only_new: bool = False) -> None:
    """Hash every file of a bundle into the manifest, and write the manifest last.

    Args:
        folder: of the bundle.
        manifest: receives `files`.
        only_new: whether files that the manifest lists already are not hashed again.
    """
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    names = {file.relative_to(folder).as_posix(): file for file in files}
    names = {name: file for name, file in names.items() if name not in UNLISTED}
    known = manifest.files if only_new else {}
    manifest.files = {name: known.get(name) or sha256(file) for name, file in names.items()}
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def sign(bundle: str | os.PathLike[str], key: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Sign a bundle: write `model.sig` into its folder. The bundle may be moved and renamed after that.

    Args:
        bundle: its folder.
        key: a .pem file with a private key of an elliptic curve (P-256, P-384 or P-521).
        force: overwrite a signature that is there.

    Returns:
        the signature's file.

    Raises:
        BundleError: no whole, unaltered bundle is there, or it holds files that its manifest does not list.
        UsageError: the key is none, the bundle is signed already, or the folder cannot be written to.
        UnavailableError: `attnforge[signing]` is not installed.
    """
    made = Bundle(bundle, trusted=False)
    file = made.path / SIGNATURE
    if os.path.lexists(file) and not force:
        raise UsageError(f"{made.path} is signed already; overwrite {SIGNATURE} with --force (force=True)")
    if others := made.unlisted():
        raise BundleError(f"{unlisted_text(made.path, others)}; remove them, then sign it")
    with made.steady():
        data = signatures().signature_of(made._root, manifest_data(made._root, made.path), Path(key))
    try:
        write_whole(made._root / SIGNATURE, data)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}; sign a copy of the bundle") from error
    return file


# --- what is made of bundles ------------------------------------------------------------------------------------------


def copy(bundle: Bundle, name: str, to: Path) -> None:
    """Copy a file of a bundle.

    Args:
        bundle: that the manifest lists the file of.
        name: of the file.
        to: where to; folders on the way are made.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    with open_inside(bundle.path.resolve(), name) as source, to.open("wb") as copy:
        shutil.copyfileobj(source, copy, 2**20)


def copy_whole(bundle: Bundle, to: Path) -> None:
    """Copy what the manifest lists, with the signature where there is one.

    Raises:
        BundleError: a signed bundle holds other files; or it was altered meanwhile.
    """
    if (others := bundle.unlisted()) and (bundle.path / SIGNATURE).exists():
        raise BundleError(f"{unlisted_text(bundle.path, others)}, and its signature is of other files; remove them")
    names = [*bundle.manifest.files, MANIFEST, *([SIGNATURE] if (bundle.path / SIGNATURE).exists() else [])]
    for name in names:
        copy(bundle, name, to / name)
    Bundle(to, trusted=bundle.trusted or False)  # whole, and signed as it was
