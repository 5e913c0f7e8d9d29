"""Read the runs again and again in a thread, and hand each result over to the screens in the thread of the UI."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from textual.dom import DOMNode
from textual.signal import Signal

from ....api.watching.manager_liveness import Liveness
from ....api.watching.runs_watcher import RunsWatcher, WatchedRun
from ....core.run_dir import RunDir
from ....core.types import OperationFailed
from ..status import RunFiles, waiting_text

POLL_INTERVAL_S = 1.0
"""Seconds between two readings of the runs. A shorter interval is not needed, because times are shown in whole
seconds."""


class OpenedRun(NamedTuple):
    """The run that the screens show in detail, with the data that its view needs in addition to its state."""

    watched: WatchedRun
    liveness: Liveness = Liveness()
    files: RunFiles = RunFiles()
    waiting: str = ""
    """What the run waits for, while it has no state; else empty."""

    @classmethod
    def read(cls, watched: WatchedRun) -> OpenedRun:
        """Return a run with the present content of its files. Blocks on the file system."""
        run, state = watched.run, watched.state
        if state is None:
            waiting = watched.trouble or waiting_text(run, watched.start_failure)
            return cls(watched, waiting=waiting)
        return cls(watched, watched.liveness, RunFiles.read(run, state))


class Snapshot(NamedTuple):
    """What one reading of all runs returned: the data that the screens show."""

    runs: tuple[WatchedRun, ...] = ()
    """All runs, newest first."""
    opened: OpenedRun | None = None
    """The run that is shown in detail; None if no run is shown in detail, or if the run is gone."""
    trouble: str = ""
    """Why the folder of runs cannot be read; empty if it can be read. If it cannot, ``runs`` are those of an earlier
    reading."""


class RunFeed:
    """The newest snapshot, and the loop that makes the next snapshots in a thread.

    Args:
        owner: The application.
        watcher: Reads the runs.
    """

    def __init__(self, owner: DOMNode, watcher: RunsWatcher) -> None:
        self.changed: Signal[Snapshot] = Signal(owner, "runs have been read")
        self.snapshot: Snapshot | None = None
        """The newest snapshot; None before the first reading."""
        self.now: Callable[[], float] = watcher.now
        self._watcher = watcher
        self._opened: Path | None = None
        self._wake = threading.Event()
        self._stopped = False

    def open(self, run: RunDir | None) -> None:
        """Read one run in detail from now on; with None, read no run in detail."""
        self._opened = None if run is None else run.path
        self._wake.set()

    def publish(self, snapshot: Snapshot) -> None:
        """Make a snapshot the newest one, and notify the screens."""
        self.snapshot = snapshot
        self.changed.publish(snapshot)

    def stop(self) -> None:
        """End :meth:`read_until_stopped`."""
        self._stopped = True
        self._wake.set()

    def read_until_stopped(self, hand_over: Callable[[Snapshot], object]) -> None:
        """Read, and hand over each snapshot, until :meth:`stop` is called."""
        runs: tuple[WatchedRun, ...] = ()
        while not self._stopped:
            self._wake.clear()
            trouble = ""
            try:
                runs = tuple(self._watcher.poll())
            except OperationFailed as error:
                trouble = str(error)
            watched = next((one for one in runs if one.run.path == self._opened), None)
            opened = None if watched is None else OpenedRun.read(watched)
            if not self._stopped:
                hand_over(Snapshot(runs, opened, trouble))
            self._wake.wait(POLL_INTERVAL_S)
