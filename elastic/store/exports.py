"""Files and folders that are written for other programs: there whole or not at all.

What is in them is workers/checkpoint/export.py's. Local paths only.
"""

import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from elastic.protocol.errors import WrongInput
from elastic.store.files import sync_directory

MARKS = (".metadata", "model.safetensors", "model.safetensors.index.json")
"""A folder with one of these is an export, which --overwrite may replace."""


@contextmanager
def publishing(place: str, *, is_folder: bool, overwrite: bool) -> Generator[Path]:
    """A temporary path to write to, which becomes `place` at the end and is removed on an error.

    Raises WrongInput if there is something at `place`, unless `overwrite`; OSError.
    """
    path = local_path(place)
    check_free(path, is_folder=is_folder, overwrite=overwrite)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_folder:
            temporary.mkdir()
        yield temporary
        replace_with(temporary, path)
    finally:
        remove(temporary)


def local_path(place: str) -> Path:
    if "://" in place:
        raise WrongInput(f"{place!r} is no local path; export to a folder, then copy it")
    return Path(place).expanduser().absolute()


def check_free(path: Path, *, is_folder: bool, overwrite: bool) -> None:
    """WrongInput for what is in the way, and for a folder that no export of ours made."""
    if path.is_dir():
        names = os.listdir(path)
        if not is_folder:
            raise WrongInput(f"{path} is a folder; give the name of a file in it")
        if names and not overwrite:
            raise WrongInput(f"{path} is not empty; give another path, or --overwrite")
        if names and not set(MARKS) & set(names):
            raise WrongInput(f"{path} holds other files than an export; --overwrite spares it")
    elif path.exists():
        if is_folder:
            raise WrongInput(f"{path} is a file; give a folder, which may not exist yet")
        if not overwrite:
            raise WrongInput(f"{path} exists; give another path, or --overwrite")


def replace_with(temporary: Path, path: Path) -> None:
    """Atomic where `path` is new, empty or a file; a full folder goes away first."""
    old = path.with_name(f"{temporary.name}.old")
    if path.is_dir() and os.listdir(path):
        path.rename(old)
    temporary.rename(path)
    sync_directory(path.parent)
    remove(old)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
