"""Probe paths whose file systems may hang, each in a short-lived process of its own.

If the first process for a path does not return, further processes are started one after another, up to
:data:`~rrl.health.readers.samples.MOUNT_ATTEMPTS` processes within one read. A single waiting process proves little,
because its request may have been lost and the next request may be answered. The path answers if any of these processes
returns.

Processes that do not return are left running. Until one of them returns, their path counts as unanswered, and no new
process is started for it.
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

_KILL_TIMEOUT_S = 0.5
"""Seconds for hung probe processes to end on SIGKILL when the reader closes."""
_MAX_ANSWER_BYTES = 1 << 16


class _MountAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Result of one probe: the system's error text, or the figures of the file system."""

    why: str = ""
    device: int = 0
    used: float | None = None
    inodes_used: float | None = None


class _MountProbe(msgspec.Struct):
    """A running probe process."""

    pid: int
    answer_fd: int
    """Descriptor of the pipe on which the answer arrives."""
    path: str
    began: float
    """Start time of the process (s, monotonic)."""
    needed: bool = True
    """Whether the answer is still needed. It is not needed if another process has answered for the path. In this case
    the process of this probe was killed and only has to be reaped."""


class Mounts:
    """The probes of the paths that a node needs."""

    def __init__(self, paths: Sequence[str], timeout_s: float) -> None:
        self._paths = tuple(dict.fromkeys(paths))
        self._timeout_s = timeout_s
        self._probes: dict[int, _MountProbe] = {}
        """Probes without an answer, by descriptor."""
        self._types: dict[int, str] = {}

    def read(self) -> tuple[Mount, ...]:
        """Probe all paths and return the results.

        Blocks for at most ``timeout_s`` seconds, and not at all for paths that have not answered an earlier read.
        """
        self._gather((), 0.0)  # drop answers since the last read, because the paths are probed again
        hanging = {look.path for look in self._probes.values() if look.needed}
        waiting = [path for path in self._paths if path not in hanging]
        found: dict[str, _MountAnswer] = {}
        for _ in range(MOUNT_ATTEMPTS):
            for path in waiting:
                self._start(path)
            found |= self._gather(waiting, self._timeout_s / MOUNT_ATTEMPTS)
            waiting = [path for path in waiting if path not in found]
        now = time.monotonic()
        return tuple(self._mount(path, found.get(path), now) for path in self._paths)

    def close(self) -> None:
        """Kill the probes that are still running."""
        for look in self._probes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(look.pid, signal.SIGKILL)  # not reaped yet, so the pid is not reused
            look.needed = True
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while self._probes and (left := deadline - time.monotonic()) > 0:
            self._gather(self._paths, left)

    def _start(self, path: str) -> None:
        look = _start_probe(path)
        self._probes[look.answer_fd] = look

    def _gather(self, waited: Collection[str], timeout_s: float) -> dict[str, _MountAnswer]:
        """Wait up to ``timeout_s`` s until all paths in ``waited`` have answered, and return the new answers by path.

        Answers of other paths are returned too. Once a path has answered, the other probes of this path are killed.
        """
        found: dict[str, _MountAnswer] = {}
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        for fd in self._probes:
            poll.register(fd, select.POLLIN)
        while True:
            probed = {look.path for look in self._probes.values() if look.needed}
            waiting = any(path in probed and path not in found for path in waited)
            for fd, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000 if waiting else 0):
                poll.unregister(fd)
                look = self._probes.pop(fd)
                answer = _finish_probe(look)
                if look.needed:
                    found[look.path] = answer
            if not waiting or time.monotonic() >= deadline:
                break
        for look in self._probes.values():
            if look.needed and look.path in found:
                look.needed = False
                with contextlib.suppress(ProcessLookupError):
                    os.kill(look.pid, signal.SIGKILL)
        return found

    def _mount(self, path: str, answer: _MountAnswer | None, now: float) -> Mount:
        if answer is None:
            begins = [look.began for look in self._probes.values() if look.needed and look.path == path]
            return Mount(
                path=path,
                answers=False,
                why=f"did not answer within {self._timeout_s:g} s",
                attempts=len(begins),
                hung_for=now - min(begins, default=now),
            )
        if answer.why:
            return Mount(path=path, answers=False, why=answer.why)
        if answer.device not in self._types:
            self._types = _types()
        kind = self._types.setdefault(answer.device, "")
        return Mount(path=path, answers=True, filesystem=kind, used=answer.used, inodes_used=answer.inodes_used)


def _start_probe(path: str) -> _MountProbe:
    read_fd, write_fd = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _run_probe(path, write_fd, parent)
    os.close(write_fd)
    return _MountProbe(pid, read_fd, path, time.monotonic())


def _finish_probe(look: _MountProbe) -> _MountAnswer:
    """Reap a probe process that has written its answer, or has ended without one, and return the answer."""
    data = os.read(look.answer_fd, _MAX_ANSWER_BYTES)
    os.close(look.answer_fd)
    os.waitpid(look.pid, 0)
    return msgspec.msgpack.decode(data, type=_MountAnswer) if data else _MountAnswer("its probe gave no answer")


def _run_probe(path: str, write_fd: int, parent: int) -> NoReturn:
    """Probe the path in the child process and write the answer; does not return."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        process.set_parent_death_signal(parent, signal.SIGKILL)  # the probe has nothing open that needs closing
        process.close_inherited_fds([write_fd])
        os.write(write_fd, msgspec.msgpack.encode(_figures(path)))
    finally:
        os._exit(0)


def _figures(path: str) -> _MountAnswer:
    try:
        device = os.stat(path).st_dev
        figures = os.statvfs(path)
        with contextlib.suppress(PermissionError, NotADirectoryError), os.scandir(path) as entries:
            next(entries, None)  # asks the servers: the kernel may have cached the file system's root
    except OSError as error:
        return _MountAnswer(os.strerror(error.errno or 0))
    used = figures.f_blocks - figures.f_bfree
    capacity = used + figures.f_bavail
    inodes = (figures.f_files - figures.f_ffree) / figures.f_files if figures.f_files else None
    return _MountAnswer("", device, used / capacity if capacity else None, inodes)


def _types() -> dict[int, str]:
    """Return the file system types by device.

    A file system whose files have another device number than its mount (btrfs) is missing.
    """
    found: dict[int, str] = {}
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            major, _, minor = before.split()[2].partition(":")
            found[os.makedev(int(major), int(minor))] = after.split()[0]
    return found
