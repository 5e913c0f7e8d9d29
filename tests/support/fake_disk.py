"""A disk that a test can inspect, crash and fill.

It intercepts the calls of this process on the files of one folder, and records the folder before and after each call
that changes it. :meth:`Moment.images` gives the contents that a crash at that moment may leave, for a killed process
and for a power cut that loses writes without fsync. Any call can also be made to fail. The files are real; only files
directly in the folder are on this disk.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

_CALLS = {
    "open": True,
    "write": True,
    "fsync": False,
    "fdatasync": False,
    "replace": False,
    "unlink": False,
    "ftruncate": False,
}
"""Names of the recorded calls, each with whether it needs free space."""
Image = dict[str, bytes]
"""Content of the folder by file name."""


class Moment(Struct, frozen=True):
    """The folder before or after one call."""

    call: str
    """The call, for example ``write log.1``."""
    number: int
    """Number of the call, counted from 0."""
    now: Image
    written: Image
    """Content of the present files as of their last fsync."""
    synced: Image
    """Content that a power cut would leave: the synced content of the files whose names were synced."""
    note: int
    """Value of :attr:`FakeDisk.note`, a number that the test sets, at the time of the call."""

    def images(self, cuts: Callable[[int, int], Iterable[int]]) -> Iterator[Image]:
        """Yield every content that a crash may leave.

        A file with unsynced bytes may be torn. ``cuts(start, end)`` returns the offsets at which it is torn.
        """
        yield from (self.now, self.synced, self.written)
        for name, data in self.now.items():
            safe = self.written[name]
            if len(data) == len(safe) or not data.startswith(safe):
                continue
            tail = len(data) - len(safe)
            torn = [data[:cut] for cut in cuts(len(safe), len(data))]
            torn += [safe + bytes(tail), safe + bytes(tail // 2) + data[len(safe) + tail // 2 :]]  # grown, not filled
            for one in torn:
                yield self.now | {name: one}
                if name in self.synced and safe == self.synced[name]:
                    yield self.synced | {name: one}


class Died(BaseException):
    """Raised instead of a call, as if the process were killed by SIGKILL before this call."""


class FakeDisk:
    """The files of ``folder``.

    ``fail_at`` is the number of the call that fails with ``error``; a failing write first writes half of its bytes.
    While ``full`` is true, each call that needs space fails. ``die_before`` is a call as in ``Moment.call``; instead of
    its next occurrence, Died is raised.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.moments: list[Moment] = []
        self.calls: list[str] = []
        self.note = 0
        self.fail_at = -1
        self.error = errno.ENOSPC
        self.full = False
        self.die_before = ""
        self.recording = True
        """Whether moments are recorded."""
        self._synced: dict[int, bytes] = {}
        """Synced content by inode."""
        self._named: dict[str, int] = {}
        """Inodes by name, as of the last sync of the folder."""
        for name, needs_space in _CALLS.items():
            patch.setattr(os, name, self._replacement(name, getattr(os, name), needs_space))

    def crash_folders(
        self, parent: Path, cuts: Callable[[int, int], Iterable[int]]
    ) -> Iterator[tuple[Moment, Image, Path]]:
        """Write each different content that a crash at any moment may leave into a folder of its own in ``parent``.

        Two contents count as equal only if :attr:`note` is also equal. :meth:`Moment.images` describes ``cuts``.
        """
        observed: set[bytes] = set()
        for moment in self.moments:
            for image in moment.images(cuts):
                mark = hashlib.sha256(repr((sorted(image.items()), moment.note)).encode()).digest()
                if mark in observed:
                    continue
                observed.add(mark)
                folder = parent / str(len(observed))
                folder.mkdir()
                for name, data in image.items():
                    (folder / name).write_bytes(data)
                yield moment, image, folder

    def _replacement(self, name: str, real: Callable[..., Any], needs_space: bool) -> Callable[..., Any]:
        def call(what: Any, *args: Any, **more: Any) -> Any:
            where = self._path_of(what)
            creates = name != "open" or bool(args and args[0] & (os.O_CREAT | os.O_TRUNC))
            if where is None or not creates:
                return real(what, *args, **more)
            number = len(self.calls)
            reported = f"{name} {where.name if where != self.folder else 'the folder'}"
            self.calls.append(reported)
            self._record_moment(reported, number)
            if reported == self.die_before:
                self.die_before = ""
                raise Died
            if number == self.fail_at or (self.full and needs_space):
                if name == "write":
                    real(what, args[0][: len(args[0]) // 2])
                self._record_moment(reported, number)
                raise OSError(self.error, os.strerror(self.error), str(where))
            done = real(what, *args, **more)
            if name in ("fsync", "fdatasync"):
                self._sync(what, where)
            elif name == "open":
                self._synced.pop(os.fstat(done).st_ino, None)  # a new file may have the inode number of a removed one
            self._record_moment(reported, number)
            return done

        return call

    def _path_of(self, what: Any) -> Path | None:
        """Return the path of a file, given by path or descriptor; None if the file is not on this disk."""
        path = Path(os.readlink(f"/proc/self/fd/{what}")) if isinstance(what, int) else Path(os.fspath(what))
        return path if self.folder in (path, path.parent) else None

    def _sync(self, fd: int, where: Path) -> None:
        if where == self.folder:
            self._named = {entry.name: entry.inode() for entry in os.scandir(self.folder)}
        else:
            self._synced[os.fstat(fd).st_ino] = where.read_bytes()

    def _record_moment(self, call_text: str, number: int) -> None:
        if not self.recording:
            return
        held = {entry.name: (entry.inode(), Path(entry.path).read_bytes()) for entry in os.scandir(self.folder)}
        now = {name: data for name, (_, data) in held.items()}
        written = {name: self._synced.get(inode, b"") for name, (inode, _) in held.items()}
        synced = {name: self._synced.get(inode, b"") for name, inode in self._named.items()}
        self.moments.append(Moment(call_text, number, now, written, synced, self.note))
