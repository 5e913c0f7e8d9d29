"""Paths whose file systems may hang: each is looked at by a short-lived process of its own. One that does not come back
is left where it is, and its path counts as not answering until it does.

One process that waits proves little: its request may be lost, and the next one answered. So a path that does not answer
is looked at by :data:`~rrl.health.readers.samples.MOUNT_ATTEMPTS` processes within one look, started one after another.
The path answers if any of them comes back.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Sequence
from typing import NoReturn

import msgspec

from .isolation import process
from .samples import MOUNT_ATTEMPTS, Mount

_LEFT_WITHIN = 0.5
"""s for left processes to end on SIGKILL when this ends"""
_MOST = 1 << 16


class _Seen(msgspec.Struct, frozen=True, array_like=True):
    """The answer of the process that looked at a mount: why it failed, in the system's words, or its figures."""

    why: str = ""
    device: int = 0
    used: float | None = None
    inodes_used: float | None = None


class _Look(msgspec.Struct):
    """One process at work."""

    pid: int
    answer: int
    """descriptor"""
    path: str
    began: float
    """monotonic, s"""
    needed: bool = True
    """False: another process had the path's answer; this one was killed and is awaited for its end only"""


class Mounts:
    def __init__(self, paths: Sequence[str], within: float) -> None:
        self._paths = tuple(dict.fromkeys(paths))
        self._within = within
        self._looks: dict[int, _Look] = {}
        """by descriptor, those that have not come back"""
        self._types: dict[int, str] = {}

    def look(self) -> tuple[Mount, ...]:
        """Blocks for ``within`` s at most, and not for those that did not answer before."""
        self._gather((), 0.0)  # those that came back meanwhile: their answer is old, they are asked again
        hanging = {look.path for look in self._looks.values() if look.needed}
        waiting = [path for path in self._paths if path not in hanging]
        found: dict[str, _Seen] = {}
        for _ in range(MOUNT_ATTEMPTS):
            for path in waiting:
                self._start(path)
            found |= self._gather(waiting, self._within / MOUNT_ATTEMPTS)
            waiting = [path for path in waiting if path not in found]
        now = time.monotonic()
        return tuple(self._mount(path, found.get(path), now) for path in self._paths)

    def close(self) -> None:
        for look in self._looks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(look.pid, signal.SIGKILL)  # ours until it is waited for, so it is still the same process
            look.needed = True
        deadline = time.monotonic() + _LEFT_WITHIN
        while self._looks and (left := deadline - time.monotonic()) > 0:
            self._gather(self._paths, left)

    def _start(self, path: str) -> None:
        look = _start(path)
        self._looks[look.answer] = look

    def _gather(self, waited: Collection[str], within: float) -> dict[str, _Seen]:
        """Return answers by path: those that are there, and those of ``waited`` that come in time."""
        found: dict[str, _Seen] = {}
        deadline = time.monotonic() + within
        poll = select.poll()
        for fd in self._looks:
            poll.register(fd, select.POLLIN)
        while True:
            asked = {look.path for look in self._looks.values() if look.needed}
            waiting = any(path in asked and path not in found for path in waited)
            for fd, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000 if waiting else 0):
                poll.unregister(fd)
                look = self._looks.pop(fd)
                seen = _end(look)
                if look.needed:
                    found[look.path] = seen
            if not waiting or time.monotonic() >= deadline:
                break
        for look in self._looks.values():
            if look.needed and look.path in found:
                look.needed = False
                with contextlib.suppress(ProcessLookupError):
                    os.kill(look.pid, signal.SIGKILL)
        return found

    def _mount(self, path: str, seen: _Seen | None, now: float) -> Mount:
        if seen is None:
            begins = [look.began for look in self._looks.values() if look.needed and look.path == path]
            return Mount(path=path, answers=False, why=f"did not answer within {self._within:g} s",
                         attempts=len(begins), hung_for=now - min(begins, default=now))  # fmt: skip
        if seen.why:
            return Mount(path=path, answers=False, why=seen.why)
        if seen.device not in self._types:
            self._types = _types()
        kind = self._types.setdefault(seen.device, "")
        return Mount(path=path, answers=True, filesystem=kind, used=seen.used, inodes_used=seen.inodes_used)


def _start(path: str) -> _Look:
    answer, say = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _see(path, say, parent)
    os.close(say)
    return _Look(pid, answer, path, time.monotonic())


def _end(look: _Look) -> _Seen:
    """Its answer is there, or it ended without one; so it is about to end."""
    data = os.read(look.answer, _MOST)
    os.close(look.answer)
    os.waitpid(look.pid, 0)
    return msgspec.msgpack.decode(data, type=_Seen) if data else _Seen("its process was ended")


def _see(path: str, say: int, parent: int) -> NoReturn:
    """In the process of its own."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        process.dies_with(parent, signal.SIGKILL)  # it holds nothing that would need closing
        process.let_go([say])
        os.write(say, msgspec.msgpack.encode(_figures(path)))
    finally:
        os._exit(0)


def _figures(path: str) -> _Seen:
    try:
        device = os.stat(path).st_dev
        figures = os.statvfs(path)
        with contextlib.suppress(PermissionError, NotADirectoryError), os.scandir(path) as entries:
            next(entries, None)  # from the file system's servers, not from what the kernel remembers of its root
    except OSError as error:
        return _Seen(os.strerror(error.errno or 0))
    used = figures.f_blocks - figures.f_bfree
    room = used + figures.f_bavail
    inodes = (figures.f_files - figures.f_ffree) / figures.f_files if figures.f_files else None
    return _Seen("", device, used / room if room else None, inodes)


def _types() -> dict[int, str]:
    """Kind of file system by device. Empty for one that gives its files other numbers than its mount (btrfs)."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            major, _, minor = before.split()[2].partition(":")
            found[os.makedev(int(major), int(minor))] = after.split()[0]
    return found
