"""A checkpoint as a tree of files in a folder, and its manifest, which names each file and its digest.

The record of a commit contains the manifest. The files may have any format. Only files that a manifest names are read.
The name of a file is its path relative to the checkpoint's folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ...core.run_dir import Attempt, RunDir, attempt_of, sync
from ...core.shares import checked_share, owners

FILE_THREADS = 16
"""Maximum number of files that are synced or read at the same time. A thread that syncs mostly waits for the disk.
Measured for 2,000 files of 4 KiB on ext4 with two busy cores: 0.27 ms a file with one thread, 0.15 to 0.18 ms with 8 to
16, 0.24 ms with 64."""
LINKS = ".committed"
"""Folder in a checkpoint's folder with hard links to exactly the committed files (:func:`exact_folder`)."""

Digest = dict[str, Any]
"""The digest of one file in a manifest: ``{"sha256": hex, "bytes": n}``."""


class _FileDigest(Struct):
    sha256: str
    bytes: int


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
        TypeError: ``files`` is a single file, or no list, or one is not a path.
    """
    if isinstance(files, str | bytes | Path) or not isinstance(files, Iterable):
        raise TypeError(f"me.commit(step, files): files must be a list of paths, not {files!r}")
    given = [*files]
    for file in given:
        if not isinstance(file, str | os.PathLike) or "\0" in str(file):
            raise TypeError(f"me.commit(step, files): {file!r} is not a path")
    return [Path(file) for file in given]


def describe(run_dir: Path, paths: Iterable[Path], known: Mapping[str, Digest] = {}) -> dict[str, Any]:
    """Make the files of a checkpoint durable, and return its manifest.

    Args:
        run_dir: the run directory.
        paths: files and folders below one folder that :func:`fresh_folder` made, at any depth, or this folder itself.
            All files below a folder are taken.
        known: known digests by name; these files are already durable and are not read again.

    Returns:
        ``{"folder": relative to the run directory, "files": {name: {"sha256": hex, "bytes": n}}}``.

    Raises:
        TypeError: ``known`` is not a mapping of names to digests.
        ValueError: there are no files; one is not a regular file, has a name that is not printable, changes meanwhile,
            or is given twice; they are not in one folder; or ``known`` has others.
        OSError: a file could not be read or synced.
    """
    try:
        msgspec.convert(known, dict[str, _FileDigest])
    except msgspec.ValidationError as error:
        raise TypeError(f"me.commit(step, files, digests=...): {error}; expected one dict of me.digests") from None
    checkpoints, folders, names = RunDir(run_dir).checkpoints, set[Path](), list[str]()
    for path in paths:
        inside = path.relative_to(checkpoints).parts if path.is_relative_to(checkpoints) else ()
        if not inside or attempt_of(inside[0]) is None or ".." in inside:
            raise ValueError(f"{path} is not in a folder that me.checkpoint_dir(step) returned: write it there")
        folders.add(folder := checkpoints / inside[0])
        name = "/".join(inside[1:])
        names += (name,) if name in known else _regular_files(folder, name)
    if len(folders) != 1 or not names:
        raise ValueError(
            "the files of a checkpoint must be in one folder that me.checkpoint_dir(step) returned, but"
            f" {len(names)} files in {len(folders)} folders were given"
        )
    names.sort()
    if twice := next((name for name, following in itertools.pairwise(names) if name == following), None):
        raise ValueError(f"{folder / twice} is given twice: name each file once, itself or by a folder above it")
    if others := sorted(known.keys() - names):
        raise ValueError(
            f"digests has {others[0]!r}, which is not among the files of the commit: name it or its folder"
        )
    digests = make_durable(folder, [name for name in names if name not in known])
    return {
        "folder": folder.relative_to(run_dir).as_posix(),
        "files": {name: known.get(name) or digests[name] for name in names},
    }


def _regular_files(folder: Path, name: str) -> Iterator[str]:
    """Yield the names of all files at or below ``name``. Raises ValueError if one is not a regular file."""
    if os.path.realpath(folder / name) != os.path.join(os.path.realpath(folder), name).rstrip("/"):
        raise ValueError(f"{folder / name} is a link, or is behind one: a checkpoint has regular files only")
    for path, mode in _files_below(folder / name):
        if not stat.S_ISREG(mode):
            kind = "a link" if stat.S_ISLNK(mode) else "not a regular file"
            raise ValueError(f"{path} is {kind}: a checkpoint has regular files only")
        if not (found := path.relative_to(folder).as_posix()).isprintable():
            raise ValueError(f"{folder}: {found!r} is not a printable name of a file: rename it")
        yield found


def _files_below(path: Path) -> Iterator[tuple[Path, int]]:
    """Yield path and mode of everything at or below ``path`` that is not a folder. Links are not followed."""
    if stat.S_ISDIR(mode := path.lstat().st_mode):
        for child in path.iterdir():
            yield from _files_below(child)
    else:
        yield path, mode


def make_durable(folder: Path, names: Collection[str]) -> dict[str, Digest]:
    """Fsync files of a checkpoint's folder, so that a commit record may name them; return their digests by name.

    All folders from the files up to the parent of ``folder`` are synced after the files. Raises OSError.
    """
    folders = {folder, folder.parent} if names else set()
    for name in names:
        folders |= {folder / parent for parent in Path(name).parents}
    with ThreadPoolExecutor(FILE_THREADS) as pool:
        digests = [*pool.map(lambda name: digest_of(folder / name, durable=True), names)]
        for _ in pool.map(sync, folders):
            pass
    return dict(zip(names, digests, strict=True))


def share_of(files: Mapping[str, Digest], share: tuple[int, int]) -> set[str]:
    """Return the names of the files that one of several ranks reads, as ``(rank, world)``: about equally many bytes.

    Each file is in the share of exactly one rank. Raises ValueError if there is no such share.
    """
    rank, world = checked_share(share)
    sizes = {name: digest["bytes"] for name, digest in files.items()}
    return {name for name, owner in owners(sizes, world).items() if owner == rank}


def verified(run_dir: Path, manifest: dict[str, Any], only: Collection[str] | None = None) -> dict[str, Path]:
    """Return the paths of a manifest's files by name, after reading them and comparing their digests.

    Args:
        run_dir: the run directory.
        manifest: the result of :func:`describe`.
        only: names of the files to compare; None for all.

    Raises:
        DamagedCheckpoint: a compared file is missing or differs.
    """
    folder, files = run_dir / manifest["folder"], manifest["files"]
    with ThreadPoolExecutor(FILE_THREADS) as pool:
        for _ in pool.map(
            lambda name: _compare(folder / name, files[name]), [name for name in files if only is None or name in only]
        ):
            pass
    return {name: folder / name for name in files}


def _compare(path: Path, expected: Digest) -> None:
    try:
        digest = digest_of(path)
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: {error.strerror}") from error
    if digest != expected:
        raise DamagedCheckpoint(f"{path} has the digest {digest}, but {expected} was committed")


def digest_of(path: Path, *, durable: bool = False) -> Digest:
    """Return the digest of a file, which is read completely, and synced first if ``durable``.

    Raises:
        OSError: the file could not be read or synced.
        ValueError: the file is to be durable, but has changed meanwhile.
    """
    with path.open("rb") as file:
        if durable:
            os.fsync(file.fileno())
        before = os.fstat(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        read, after = file.tell(), os.fstat(file.fileno())
        if durable and (before.st_mtime_ns, read) != (after.st_mtime_ns, after.st_size):
            raise ValueError(f"{path} has changed while it was read: commit it after its last write")
        return {"sha256": digest, "bytes": read}


def exact_folder(run_dir: Path, manifest: dict[str, Any]) -> Path:
    """Return a folder with exactly the files of a manifest, under their names.

    It is the checkpoint's folder, or a folder of hard links in it, which is deleted with it. On a file system without
    hard links the files are copied. Any number of processes may call this at the same time, and be killed.

    Raises:
        DamagedCheckpoint: a file is missing.
        OSError: the links could not be made.
    """
    folder: Path = run_dir / manifest["folder"]
    files, links = manifest["files"], folder / LINKS
    for exact in (folder, links):
        if _has_exactly(exact, files):
            return exact
    try:
        made = folder / os.path.basename(tempfile.mkdtemp(prefix=f"{LINKS}.", dir=folder))
        place_files(folder, files, made, _link_or_copy)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{error.filename}: {error.strerror}") from error
    with contextlib.suppress(OSError):  # another process was faster, or something has changed its folder
        made.rename(links)
    if not _has_exactly(links, files):
        return made
    shutil.rmtree(made, ignore_errors=True)
    return links


def _has_exactly(folder: Path, files: Mapping[str, Digest]) -> bool:
    try:
        found = {path.relative_to(folder).as_posix(): stat.S_ISREG(mode) for path, mode in _files_below(folder)}
    except FileNotFoundError:  # not there, or another process is just making or renaming a folder in it
        return False
    return found == dict.fromkeys(files, True)


def place_files(folder: Path, names: Iterable[str], into: Path, place: Callable[[Path, Path], object]) -> None:
    """Call ``place`` for each file of a checkpoint with its path in ``folder`` and its path in ``into``.

    The folders in ``into`` are created. Raises OSError.
    """
    for name in names:
        (into / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place(folder / name, into / name)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
