"""The file with the progress of a tracker's process, and the lock that gives each tracker only one process.

The file is beside the tracker's own files, for people and for the supervisor. Which steps were sent is read from the
tracker itself (:mod:`.base`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from ...core.processes import kill_and_wait, pids, read_process
from ...core.run_dir import RunDir, write_atomically

TRACKER_ENV = "RRL_TRACKER"
"""Environment variable of the process of a tracker, and of the processes that it starts. Its value is ``<run
directory>/<tracker>``. Processes that outlived their parent are found by this variable."""
LOCK_POLL_S = 1.0
"""Seconds between two attempts to get the lock of a tracker that another process holds."""
KILL_TIMEOUT_S = 5.0
"""Seconds to wait for the end of killed processes."""


class Progress(Struct, frozen=True):
    """The progress that the process of a tracker has recorded."""

    step: int = 0
    """Newest step that was sent; 0 if no step was sent."""
    job: str = ""
    """Digest of the job spec that was sent; empty if none was sent."""
    place: str = ""
    """Where a person finds the run in the tracker; empty if this is not known yet."""
    finished: bool = False
    """True if the end of the run was sent, too."""
    error: str = ""
    """Why the newest process failed, in one line; empty if it did not fail."""


class Locked(Exception):
    """Another process sends the steps of this run to this tracker."""


def mark_of(run: RunDir, tracker: str) -> str:
    """Return the value of :data:`TRACKER_ENV` by which the processes of a run's tracker are found."""
    return f"{run.path}/{tracker}"


def read_progress(run: RunDir, tracker: str) -> Progress:
    """Return the recorded progress of a tracker; if there is none, or it cannot be read, return the defaults."""
    try:
        return msgspec.json.decode(_file(run, tracker, "json").read_bytes(), type=Progress)
    except (OSError, msgspec.MsgspecError):
        return Progress()


def write_progress(run: RunDir, tracker: str, progress: Progress) -> None:
    """Record the progress of a tracker. Raises OSError."""
    write_atomically(_file(run, tracker, "json"), msgspec.json.encode(progress))


def log_file(run: RunDir, tracker: str) -> Path:
    """Return the path of the output of the tracker's processes."""
    return _file(run, tracker, "log")


@contextlib.contextmanager
def locked(run: RunDir, tracker: str, *, wait: bool) -> Iterator[None]:
    """Hold the lock of a tracker, so that only one process on all hosts sends the steps of a run to it.

    The kernel, or the file server, releases the lock when the process ends. On storage without locks no lock is held.
    In this case only processes on the same host are excluded, because a new process ends them (:func:`end_leftovers`).

    Raises:
        Locked: another process holds the lock, and ``wait`` is False.
        OSError: the lock file cannot be opened.
    """
    fd = os.open(_file(run, tracker, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not wait:
                    raise Locked from None
                time.sleep(LOCK_POLL_S)
            except OSError:  # the storage has no locks
                break
        yield
    finally:
        os.close(fd)


def end_leftovers(run: RunDir, tracker: str) -> None:
    """Kill the processes that an earlier process of the tracker left behind on this host, and wait for their end.

    Only processes of the current user are considered. A tracker's own service process may write for some time after its
    parent was killed. The tracker's files show which steps were written only once the service process has ended.
    """
    mark = f"{TRACKER_ENV}={mark_of(run, tracker)}".encode()
    left = []
    for pid in pids():
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                left.append(pid)
    kill_and_wait([process for pid in left if (process := read_process(pid)) is not None], KILL_TIMEOUT_S)


def _file(run: RunDir, tracker: str, kind: str) -> Path:
    return run.trackers / f"{tracker}.{kind}"
