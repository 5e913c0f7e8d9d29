"""Which files of a history folder are read: regular files of the user whose folder they lie in, within bounds.

Nothing is read before kind, owner, size and holes of the opened file were checked, so that no file of a user can hold
up or fill the report of an administrator. Whatever is left out is told with its reason.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from .records import MAX_FILE_BYTES, MAX_FILE_RECORDS, MAX_LINE_BYTES, parse_file_name

MAX_USER_ENTRIES = 50_000
"""names of a user's folder that are looked at: each costs a stat, 1 ms over NFS"""
MAX_USER_FILES = 3000
"""files of a user that are read: a hundred runs a day for a month"""
MAX_USER_BYTES = 512 * 2**20
"""bytes of all files of a user: what a report reads in some 10 s"""
MAX_USER_RECORDS = 500_000
"""records of a user that are kept: a hundred runs at once, each with a sign of life every half hour, for three months;
in a report they take about 300 MB of memory"""
MAX_USER_REASONS = 5
"""files of a user that are named with the reason why they are not read; of more, only the number is told"""


_UID_DIGITS = 10
"""of 2^32"""


class RejectedFile(Exception):
    """This file is not read; the text says why."""


class UserFolder(Struct, frozen=True):
    path: Path
    user: str
    """the user's name, or number where there is no name: one who has a folder by name and one by number is one user"""
    uid: int


class Allowance:
    """What may still be read of one user, in all history folders together."""

    def __init__(self) -> None:
        self.files = MAX_USER_FILES
        self.bytes = MAX_USER_BYTES
        self.records = MAX_USER_RECORDS

    def admit(self, size: int) -> None:
        """Count a file of ``size`` bytes. Raises RejectedFile where its user already has too many, or too large
        ones."""
        if self.files <= 0:
            raise RejectedFile(f"its user has more than {MAX_USER_FILES} files: only the newest are read")
        if size > self.bytes:
            raise RejectedFile(f"its user has more than {MAX_USER_BYTES // 2**20} MiB: only the newest files are read")
        self.files -= 1
        self.bytes -= size


class Rejections:
    """Files that were not read, and why; bounded for each user."""

    def __init__(self) -> None:
        self._reasons: dict[str, list[str]] = {}
        self._more: dict[str, int] = {}

    def add(self, user: str, path: str | Path, reason: str) -> None:
        reasons = self._reasons.setdefault(user, [])
        if len(reasons) < MAX_USER_REASONS:
            reasons.append(f"{path}: {reason}")
        else:
            self._more[user] = self._more.get(user, 0) + 1

    def lines(self) -> tuple[str, ...]:
        named = [line for reasons in self._reasons.values() for line in reasons]
        more = [f"{count} more files of {user}" for user, count in self._more.items()]
        return tuple(sorted(named)) + tuple(sorted(more))


def user_folders(folder: Path, rejections: Rejections) -> Iterator[UserFolder]:
    """Folders that are named after the user who owns them, or that root made for that user. Raises OSError where
    ``folder`` cannot be read."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith(".") or not entry.name.isprintable() or not entry.is_dir(follow_symlinks=False):
            continue
        owner = entry.stat(follow_symlinks=False).st_uid
        uid = _uid(entry.name) if owner == 0 else owner
        if uid is not None and entry.name in (names := _names(uid)):
            yield UserFolder(Path(entry.path), names[0], uid)
        else:
            whose = _names(owner)[0]
            rejections.add(whose, entry.path, f"it belongs to {whose}, not to {entry.name}")


def newest_files(folder: UserFolder, rejections: Rejections) -> Iterator[tuple[Path, str]]:
    """Paths of histories and the run that each is named after, those written last first. Raises OSError."""
    with os.scandir(folder.path) as entries:
        found = list(islice(entries, MAX_USER_ENTRIES + 1))
    if len(found) > MAX_USER_ENTRIES:
        rejections.add(folder.user, folder.path, f"only {MAX_USER_ENTRIES} of its names are looked at")
    dated = []
    for entry in found[:MAX_USER_ENTRIES]:
        if (named := parse_file_name(entry.name)) is None:
            continue
        try:
            written = entry.stat(follow_symlinks=False).st_mtime
        except OSError as error:
            rejections.add(folder.user, entry.path, error.strerror or str(error))
            continue
        dated.append((written, entry.path, named[0]))
    for _, path, run in sorted(dated, reverse=True):
        yield Path(path), run


def open_checked(path: Path, folder: UserFolder, allowance: Allowance) -> tuple[BinaryIO, os.stat_result]:
    """Open a history for reading, at its beginning. Raises RejectedFile or OSError, and then has read nothing."""
    _check_regular(os.lstat(path))  # a device is not even opened
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        about = os.fstat(fd)
        _check_regular(about)
        if about.st_uid != folder.uid:
            raise RejectedFile(f"it belongs to {_names(about.st_uid)[0]}, not to {folder.user}")
        if about.st_size > MAX_FILE_BYTES:
            raise RejectedFile(f"{about.st_size} bytes are more than any run writes ({MAX_FILE_BYTES})")
        if _has_hole(fd, about.st_size):
            raise RejectedFile("it is a sparse file, which no run writes")
        allowance.admit(about.st_size)
    except BaseException:
        os.close(fd)
        raise
    return open(fd, "rb"), about


def whole_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Length and text of each whole line; the text of one that is too long is empty. One that is torn, or still being
    written, is left for the next time."""
    for _ in range(MAX_FILE_RECORDS):
        text = file.readline(MAX_LINE_BYTES + 1)
        length = len(text)
        while not text.endswith(b"\n") and len(text) > MAX_LINE_BYTES:
            rest = file.readline(MAX_LINE_BYTES + 1)
            length += len(rest)
            text = rest if rest.endswith(b"\n") or len(rest) > MAX_LINE_BYTES else b""
        if not text.endswith(b"\n"):
            return
        yield length, text if length <= MAX_LINE_BYTES else b""


def _check_regular(about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise RejectedFile("it is a link, FIFO or device, not a regular file")


def _has_hole(fd: int, size: int) -> bool:
    """Return whether a part of the file was never written; False where the file system cannot tell."""
    try:
        return bool(size) and os.lseek(fd, 0, os.SEEK_HOLE) < size
    except OSError:
        return False
    finally:
        os.lseek(fd, 0, os.SEEK_SET)


def _uid(name: str) -> int | None:
    """Return the uid of the user that a folder is named after, or None where there is no such user."""
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return int(name) if name.isascii() and name.isdigit() and len(name) <= _UID_DIGITS else None


def _names(uid: int) -> tuple[str, ...]:
    """Return the names that a user's folder may have. The first is the user's name in reports."""
    try:
        return (pwd.getpwuid(uid).pw_name, str(uid))
    except KeyError:
        return (str(uid),)
