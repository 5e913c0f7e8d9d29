"""Select the files of a history folder that are read: regular files of the folder's user, within limits.

Kind, owner, size and holes of an opened file are checked before it is read, so that no user's file can block or fill an
administrator's report. Every file that is left out is reported with the reason.
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
"""Maximum number of entries of a user's folder that are examined. Each entry costs a stat, 1 ms over NFS."""
MAX_USER_FILES = 3000
"""Maximum number of files of a user that are read: a hundred runs a day for a month."""
MAX_USER_BYTES = 512 * 2**20
"""Maximum number of bytes in all files of a user, which a report reads in about 10 s."""
MAX_USER_RECORDS = 500_000
"""Maximum number of stored records of a user: a hundred concurrent runs, each with a checkpoint every half hour, for
three months. In a report they take about 300 MB of memory."""
MAX_USER_REASONS = 5
"""Maximum number of rejected files of a user that are named with the reason; further rejected files are counted."""
_UID_DIGITS = 10
"""Maximum number of decimal digits of a uid, which is below 2^32."""


class RejectedFile(Exception):
    """A file of a user's history is not read; the text gives the reason."""


class UserFolder(Struct, frozen=True):
    """The folder of one user in a history folder."""

    path: Path
    user: str
    """Name of the user, or the uid if the uid has no name. A folder named after the uid belongs to the same user as the
    folder named after the name."""
    uid: int


class Allowance:
    """Number of files, bytes and records of one user that may still be read, in all history folders together."""

    def __init__(self) -> None:
        self.files = MAX_USER_FILES
        self.bytes = MAX_USER_BYTES
        self.records = MAX_USER_RECORDS

    def admit(self, size: int) -> None:
        """Count a file of ``size`` bytes. Raises RejectedFile if the user has too many files or bytes."""
        if self.files <= 0:
            raise RejectedFile(f"the user who owns it has more than {MAX_USER_FILES} files: only the newest are read")
        if size > self.bytes:
            raise RejectedFile(
                f"the files of the user who owns it exceed {MAX_USER_BYTES // 2**20} MiB: only the newest are read"
            )
        self.files -= 1
        self.bytes -= size


class Rejections:
    """Files that were not read, with the reasons; the number of reasons per user is limited."""

    def __init__(self) -> None:
        self._reasons: dict[str, list[str]] = {}
        self._more: dict[str, int] = {}

    def add(self, user: str, path: str | Path, reason: str) -> None:
        """Add a file of this user."""
        reasons = self._reasons.setdefault(user, [])
        if len(reasons) < MAX_USER_REASONS:
            reasons.append(f"{path}: {reason}")
        else:
            self._more[user] = self._more.get(user, 0) + 1

    def lines(self) -> tuple[str, ...]:
        """Return one line with the reason for each of the first ``MAX_USER_REASONS`` files of each user.

        If more files of a user were not read, a further line gives their number.
        """
        named = [line for reasons in self._reasons.values() for line in reasons]
        more = [f"{count} more files of {user}" for user, count in self._more.items()]
        return tuple(sorted(named)) + tuple(sorted(more))


def user_folders(folder: Path, rejections: Rejections) -> Iterator[UserFolder]:
    """Yield the folders that belong to the user after whom they are named, or to root.

    Raises OSError if ``folder`` cannot be read.
    """
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith(".") or not entry.name.isprintable() or not entry.is_dir(follow_symlinks=False):
            continue
        owner = entry.stat(follow_symlinks=False).st_uid
        uid = _uid(entry.name) if owner == 0 else owner
        if uid is not None and entry.name in (names := _names(uid)):
            yield UserFolder(Path(entry.path), names[0], uid)
        else:
            owner_name = _names(owner)[0]
            rejections.add(owner_name, entry.path, f"it belongs to {owner_name}, not to {entry.name}")


def newest_files(folder: UserFolder, rejections: Rejections) -> Iterator[tuple[Path, str]]:
    """Yield each history file and the run in its name, newest file first. Raises OSError if that fails."""
    with os.scandir(folder.path) as entries:
        found = list(islice(entries, MAX_USER_ENTRIES + 1))
    if len(found) > MAX_USER_ENTRIES:
        rejections.add(folder.user, folder.path, f"more than {MAX_USER_ENTRIES} files: the others are not examined")
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
    """Open a history file for reading, at its beginning. Raises RejectedFile or OSError before anything is read."""
    _check_regular(os.lstat(path))  # a device is not even opened
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        about = os.fstat(fd)
        _check_regular(about)
        if about.st_uid != folder.uid:
            raise RejectedFile(f"it belongs to {_names(about.st_uid)[0]}, not to {folder.user}")
        if about.st_size > MAX_FILE_BYTES:
            raise RejectedFile(f"{about.st_size} bytes are more than any run writes (at most {MAX_FILE_BYTES} bytes)")
        if _has_hole(fd, about.st_size):
            raise RejectedFile("it is a sparse file, which no run writes")
        allowance.admit(about.st_size)
    except BaseException:
        os.close(fd)
        raise
    return open(fd, "rb"), about


def whole_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield length and text of each whole line; the text of a line that is too long is empty.

    An incomplete last line, which may still be being written, is left for the next call.
    """
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
    """Return whether a part of the file was never written; False if the file system cannot report this."""
    try:
        return bool(size) and os.lseek(fd, 0, os.SEEK_HOLE) < size
    except OSError:
        return False
    finally:
        os.lseek(fd, 0, os.SEEK_SET)


def _uid(name: str) -> int | None:
    """Return the uid of the user that a folder is named after, or None if there is no such user."""
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
