"""Readers that misbehave, each in one way, for tests of the readers' client.

``options.proc`` is a folder for notes, which are empty files. A reader reports by notes ``what.pid``, and a test
controls the readers by other notes. :func:`place` gives the name by which a reader is started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

from rrl.health.readers.base import NotInstalled, PermissionDenied, ReaderOptions
from rrl.health.readers.samples import HostData

_POLL_INTERVAL_S = 0.01
"""Seconds between two checks for a note."""


def place(kind: type[Good]) -> str:
    return f"{kind.name}={__name__}:{kind.__name__}"


class Good:
    name, interval_s, timeout_s = "good", 0.02, 20.0

    def __init__(self, options: ReaderOptions) -> None:
        self._notes = Path(options.proc)
        self._note("made")
        self._count = 0

    def _note(self, what: str) -> None:
        (self._notes / f"{self.name}-{what}.{os.getpid()}").touch()

    def read(self) -> HostData:
        """Return a sample whose ``zombies`` is the number of reads in this process."""
        self._count += 1
        return HostData(zombies=self._count)

    def close(self) -> None:
        self._note("closed")


class Hangs(Good):
    """A reader that hangs while the note (file) ``hang`` exists."""

    name, timeout_s = "hangs", 0.3

    def read(self) -> HostData:
        while (self._notes / "hang").exists():
            time.sleep(_POLL_INTERVAL_S)
        return super().read()


class HangsInC(Good):
    """A reader that hangs in a C call that holds the GIL, as in a driver's library, so that no signal handler runs."""

    name, timeout_s = "stuck", 0.3

    def read(self) -> HostData:
        self._note("stuck")
        lock = ctypes.create_string_buffer(64)  # larger than a pthread_mutex_t; a mutex of zeros is unlocked
        calls = ctypes.PyDLL(None)
        calls.pthread_mutex_lock(lock)
        calls.pthread_mutex_lock(lock)
        return super().read()


class HangsAtStart(Good):
    name = "slow"

    def __init__(self, options: ReaderOptions) -> None:
        super().__init__(options)
        time.sleep(600)


class Dies(Good):
    name = "dies"

    def read(self) -> HostData:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().read()


class Garbles(Good):
    """A reader that writes bytes that are not a frame to its connection, as a faulty library might."""

    name = "garbles"

    def read(self) -> HostData:
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                    os.write(int(entry), b"\xff" * 64)
        return super().read()


class IsAbsent(Good):
    name = "absent"

    def read(self) -> HostData:
        raise NotInstalled("no such device here")


class IsDenied(Good):
    """A reader without the permission to read, whose constructor therefore raises PermissionDenied."""

    name = "denied"

    def __init__(self, options: ReaderOptions) -> None:
        raise PermissionDenied("not for you")


class Raises(Good):
    name = "raises"

    def read(self) -> HostData:
        raise ValueError("no sense in this")


class Floods(Good):
    """A reader whose samples are larger than the buffer of a socket."""

    name, interval_s = "floods", 0.0

    def read(self) -> HostData:
        self._count += 1
        return HostData(zombies=self._count, clock_source="x" * 500_000)
