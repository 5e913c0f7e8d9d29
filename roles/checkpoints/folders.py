"""A checkpoint as files in a folder, and its manifest, which names each file and its digest.

The record of a commit contains the manifest. The files may have any format. Only files that a manifest names are read.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from ...core.run_dir import Attempt, sync

Digest = dict[str, Any]
"""The digest of one file in a manifest: ``{"sha256": hex, "bytes": n}``."""


class StoredFiles(Struct, frozen=True):
    """The result of :func:`describe` for files that belong to no commit, such as the reference model."""

    folder: str
    files: dict[str, Digest]


class DamagedCheckpoint(Exception):
    """A committed file is missing, or its content differs from the committed digest."""


def fresh_folder(checkpoints: Path, number: int, incarnation: int) -> Path:
    """Create the empty folder ``step-<number>.<incarnation>.<attempt>`` of one attempt at step ``number``.

    No folder is used twice, because a checkpoint that overwrites another one may mix old and new values without an
    error (measured).
    """
    for attempt in itertools.count():
        folder = checkpoints / Attempt(number, incarnation, attempt).folder
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return folder
    raise AssertionError


def as_paths(files: object) -> list[Path]:
    """Return the paths of a checkpoint's files, which a user may have given as strings.

    Raises:
        TypeError: ``files`` is a single file, or not a list of paths.
    """
    if isinstance(files, str | Path) or not isinstance(files, Iterable):
        raise TypeError(f"me.commit(step, files): files must be a list of paths, not {files!r}")
    return [Path(file) for file in files]


def describe(run_dir: Path, files: Iterable[Path], known: Mapping[str, Digest] = {}) -> dict[str, Any]:
    """Return the manifest of ``files``.

    Args:
        run_dir: the run directory.
        files: files of one folder inside the run directory.
        known: known digests by file name; these files are not read again.

    Returns:
        ``{"folder": relative to the run directory, "files": {name: {"sha256": hex, "bytes": n}}}``.

    Raises:
        ValueError: there are no files, or they are in more than one folder or outside the run directory.
    """
    paths = sorted(files)
    folders = {path.parent for path in paths}
    if len(folders) != 1:
        raise ValueError(
            f"the files of a checkpoint must be in one folder, but {len(paths)} files in {len(folders)} folders were"
            " given"
        )
    if not (folder := folders.pop()).is_relative_to(run_dir):
        raise ValueError(
            f"the files of a checkpoint must be in the run directory, and these are in {folder}: write them into the"
            " folder that me.checkpoint_dir(step) returns"
        )
    folder = folder.relative_to(run_dir)
    digests = {path.name: known.get(path.name) or digest_of(path) for path in paths}
    return {"folder": folder.as_posix(), "files": digests}


def make_durable(files: Iterable[Path]) -> None:
    """Fsync the files, their folder and its parent, so that a commit record may name them. Raises OSError."""
    paths = list(files)
    folders = {path.parent for path in paths}
    for path in (*paths, *folders, *{folder.parent for folder in folders}):
        sync(path)


def verified(run_dir: Path, manifest: dict[str, Any], only: Collection[str] | None = None) -> dict[str, Path]:
    """Return the paths of a manifest's files by name, after reading them and comparing their digests.

    Args:
        run_dir: the run directory.
        manifest: the result of :func:`describe`.
        only: names of the files to compare; None for all.

    Raises:
        DamagedCheckpoint: a compared file is missing or differs.
    """
    folder = run_dir / manifest["folder"]
    files = {name: folder / name for name in manifest["files"]}
    for name, path in files.items():
        if only is not None and name not in only:
            continue
        expected = manifest["files"][name]
        try:
            digest = digest_of(path)
        except OSError as error:
            raise DamagedCheckpoint(f"{path}: {error.strerror}") from error
        if digest != expected:
            raise DamagedCheckpoint(f"{path} has the digest {digest}, but {expected} was committed")
    return files


def digest_of(path: Path) -> Digest:
    """Return the digest of a file, which is read completely. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"sha256": digest, "bytes": file.tell()}
