"""A checkpoint as files: its folder, and the manifest by which a commit record names it file by file.

No torch here: any trainer's files, in any format. Only what a manifest names is ever read; never a directory listing.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

Digest = dict[str, Any]
"""Of one file, as a manifest names it: ``{"sha256": hex, "bytes": n}``."""


class StoredFiles(Struct, frozen=True):
    """What :func:`describe` gives, of files that no commit names."""

    folder: str
    files: dict[str, Digest]


class DamagedCheckpoint(Exception):
    """The files are not those that were committed: one is missing, or its bytes are others."""


def fresh_folder(checkpoints: Path, number: int, incarnation: int) -> Path:
    """Make the folder of one attempt at step ``number``: ``step-<number>.<incarnation>.<attempt>``, empty.

    Never an existing one: a checkpoint written over another one mixes old and new values without an error (measured).
    """
    for attempt in itertools.count():
        folder = checkpoints / f"step-{number}.{incarnation}.{attempt}"
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return folder
    raise AssertionError


def incarnation_of(folder: str) -> int | None:
    """Which life made a folder of this name; None for a name that is not :func:`fresh_folder`'s."""
    match = re.fullmatch(r"step-\d+\.(\d+)\.\d+", folder)
    return int(match[1]) if match else None


def describe(run_dir: Path, files: Iterable[Path], known: Mapping[str, Digest] = {}) -> dict[str, Any]:
    """``{"folder": relative to the run directory, "files": {name: {"sha256": hex, "bytes": n}}}``. Files whose digest
    is ``known``, by name, are not read.

    All files of one folder. Raises ValueError when there are none, in more than one folder, or outside the run.
    """
    paths = sorted(files)
    folders = {path.parent for path in paths}
    if len(folders) != 1:
        raise ValueError(f"a checkpoint is the files of one folder, not of {len(folders)}")
    folder = folders.pop().relative_to(run_dir)
    digests = {path.name: known.get(path.name) or digest_of(path) for path in paths}
    return {"folder": folder.as_posix(), "files": digests}


def make_durable(files: Iterable[Path]) -> None:
    """On the disk when it returns, names included, the folder's too: a commit record counts on it. Raises OSError."""
    paths = list(files)
    folders = {path.parent for path in paths}
    for path in (*paths, *folders, *{folder.parent for folder in folders}):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def verified(run_dir: Path, manifest: dict[str, Any], only: Collection[str] | None = None) -> dict[str, Path]:
    """The files that the manifest names, by name, each (or ``only`` these) read and compared. Raises
    DamagedCheckpoint."""
    folder = run_dir / manifest["folder"]
    files = {name: folder / name for name in manifest["files"]}
    for name, path in files.items():
        if only is not None and name not in only:
            continue
        expected = manifest["files"][name]
        try:
            found = digest_of(path)
        except OSError as error:
            raise DamagedCheckpoint(f"{path}: {error.strerror}") from error
        if found != expected:
            raise DamagedCheckpoint(f"{path}: has {found}, committed was {expected}")
    return files


def digest_of(path: Path) -> Digest:
    """Reads the whole file. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"sha256": digest, "bytes": file.tell()}
