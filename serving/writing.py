"""What is made of a bundle, written whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from attnforge.bundle import MANIFEST, SIGNATURE, Bundle, place_of, unlisted_text
from attnforge.errors import BundleError, UsageError
from attnforge.files import new_folder, open_inside, rename_new


def new_place(out: Path) -> Path:
    """The whole path of a folder that is to be made.

    Raises:
        UsageError: something is there, or nothing can be, or it is inside a bundle.
    """
    if os.path.lexists(target := place_of(out)):
        raise UsageError(f"{target} exists; choose another folder")
    return target


@contextmanager
def written(target: Path, put: Callable[[Path], object] | None = None) -> Iterator[Path]:
    """A temporary folder that is moved to its place where the block ends, or else removed.

    Args:
        target: the place.
        put: moves what is in the temporary folder into `target`, which is there; without, `target` is new.

    Raises:
        UsageError: it cannot be written, or something appeared there meanwhile.
        BundleError: the disk is full.
    """
    is_apart = put is not None and os.stat(target.parent).st_dev != os.stat(target).st_dev
    put = put or (lambda folder: rename_new(folder, target))
    try:
        with new_folder(target, put, parent=target if is_apart else None) as folder:
            yield folder
    except FileExistsError as error:
        raise UsageError(f"{error.filename2 or error.filename} appeared meanwhile, and is left as it is") from error


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
