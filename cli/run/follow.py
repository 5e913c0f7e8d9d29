"""Keep looking at a run until it ends: a picture redrawn twice a second, or plain lines where there is no terminal."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.live import Live

from ...core.run_dir import RunDir
from ...manager.model.state import State
from ...manager.storage.lease import Holder, holder
from ..common.output import Escaped, console, print_line
from ..common.runs import Failed, Reader, find_run, job_of
from ..views.status import one_line
from .manager_liveness import INTERRUPTED, SQUEUE_EVERY_S, Liveness, SlurmJobs, ask_slurm, judge, manager_gone, owner_of
from .start_check import NeverBegan, StartCheck
from .status import picture, waiting

PAUSE = 0.5
"""s between two looks"""
LINE_EVERY = 10.0
"""s between two plain lines when nothing but time has passed"""
SILENT = 3.0
"""a manager whose lease has not moved for so many times its length is said to be silent"""
SUMMARY_WITHIN = 10.0
"""s that the summary may come after the last record"""


def show_live(name: str | None) -> int:
    """``rrl status --live``: draw the run until it has ended or ``q`` was pressed; returns exit code 0."""
    follow(find_run(name), keys=True)
    return 0


def follow(run: RunDir, *, keys: bool, stop: threading.Event | None = None, insist: bool = False) -> State | None:
    """Look until the run has ended, ``q`` was pressed (``keys``), or ``stop`` was set. Ctrl-C passes through.

    Returns the last state seen; its ``outcome`` is None when somebody stopped looking before the end. ``insist``
    raises Failed when nothing on this machine manages the run any more, and so nothing would ever end it."""
    watcher = _Watcher(run, insist)
    stop = stop or threading.Event()
    if sys.stdout.isatty():
        _draw(watcher, stop, keys)
    else:
        _tell(watcher, stop)
    return watcher.state


class _Watcher:
    """The state as of the last look, and whether the manager's lease still moves (by our own clock)."""

    def __init__(self, run: RunDir, insist: bool) -> None:
        self.run = run
        self.state: State | None = None
        self._insist = insist
        self._reader = Reader(run)
        self._start = StartCheck(run)
        self.start_failure = ""
        """why no manager will ever begin the run"""
        self._held: Holder | None = None
        self._moved = time.monotonic()
        self._slurm: SlurmJobs | None = None
        """the last answer of Slurm, since the lease stands still"""
        self._asked_at = 0.0

    def look(self) -> bool:
        """True once the run has ended and its summary is there."""
        self.state = self._reader.state()
        try:
            held = holder(self.run)
        except OSError:
            held = None
        self.start_failure = self._start.failure(self.state)
        if self._insist and self.start_failure:
            raise NeverBegan(f"{self.run.id} is rejected: {self.start_failure}")
        if held != self._held:
            self._held, self._moved, self._slurm = held, time.monotonic(), None
        if self.state is not None and self.state.outcome is not None:
            return self.run.summary.exists() or time.monotonic() - self._moved > SUMMARY_WITHIN
        if self._insist and self.silent_for and (gone := manager_gone(self.run)) and not _in_slurm(self.run):
            raise Failed(f"the manager of {self.run.id} is gone (its output: {self.run.submit}): {gone}")
        if self._insist and (found := self.found).standing == INTERRUPTED:
            raise Failed(f"{self.run.id} is interrupted: {found}")
        return False

    @property
    def silent_for(self) -> float:
        """s since the manager's lease last moved; 0 while that is nothing unusual."""
        silent = time.monotonic() - self._moved
        patience = SILENT * self.state.job.limits.lease if self.state is not None else 60.0
        return silent if silent > patience else 0.0

    @property
    def found(self) -> Liveness:
        """What is to be said of a manager whose lease stands still. Slurm is asked now and then only."""
        if not self.silent_for or self.state is None or self.state.outcome is not None:
            return Liveness()
        if self.state.job.cluster == "slurm":
            now = time.monotonic()
            if self._slurm is None or now - self._asked_at >= SQUEUE_EVERY_S:
                self._slurm, self._asked_at = ask_slurm(owner_of(self.run)), now
        return judge(self.state, f"silent for {self.silent_for:.0f} s", self._slurm)


def _draw(watcher: _Watcher, stop: threading.Event, keys: bool) -> None:
    screen = console()
    with _key_reader(keys) as pressed, Live(console=screen, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            over = watcher.look()
            if watcher.state is None:
                live.update(f"{watcher.run.id}: {waiting(watcher.run, watcher.start_failure)}", refresh=True)
            else:
                live.update(Escaped(picture(watcher.run, watcher.state, screen.width, watcher.found)), refresh=True)
            if over or stop.is_set() or pressed(PAUSE) == "q":
                return


def _tell(watcher: _Watcher, stop: threading.Event) -> None:
    """A line whenever something but the step has changed, and now and then the step."""
    told, told_at, told_about = "", 0.0, ""
    while True:
        over = watcher.look()
        if watcher.state is None:
            line, about = f"{watcher.run.id}: {waiting(watcher.run, watcher.start_failure)}", ""
        else:
            found = watcher.found
            line = one_line(watcher.state, bool(found.note), found.standing)
            about = f"{_lives(watcher.state)} {bool(found.note)} {found.standing}"
        due = time.monotonic() - told_at >= LINE_EVERY
        if line != told and (over or due or about != told_about):
            print_line(line)
            told, told_at, told_about = line, time.monotonic(), about
        if over or stop.wait(PAUSE):
            return


def _lives(state: State) -> str:
    return " ".join(f"{replica.id}#{replica.incarnation}:{replica.status}" for replica in state.replicas.values())


def _in_slurm(run: RunDir) -> bool:
    """There Slurm starts a lost manager again by itself."""
    job = job_of(run)
    return job is not None and job.cluster == "slurm"


@contextmanager
def _key_reader(wanted: bool) -> Iterator[Callable[[float], str]]:
    """Gives a function that waits so many s for a key, without Return; the terminal is set back however this ends."""
    if not wanted or not sys.stdin.isatty():
        yield _no_key
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield lambda seconds: os.read(fd, 1).decode("latin-1") if select.select([fd], [], [], seconds)[0] else ""
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""
