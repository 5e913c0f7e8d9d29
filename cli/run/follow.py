"""Follows a run until it ends: on a terminal as a view that is drawn twice a second, else as plain lines."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import RenderableType
from rich.text import Text

from ...core.run_dir import RunDir
from ...manager.model.state import State
from ...manager.storage.lease import LeaseHolder, holder
from ..common.output import console, print_line
from ..common.runs import OperationFailed, StateReader, find_run, job_of
from ..views.replicas import MAX_LISTED
from ..views.status import one_line
from .live_display import Line, LiveDisplay
from .manager_liveness import (
    INTERRUPTED,
    SQUEUE_EVERY_S,
    STALE_LEASES,
    Liveness,
    SlurmJobs,
    ask_slurm,
    judge,
    manager_gone,
    owner_of,
)
from .start_check import NeverBegan, StartCheck
from .status import picture, waiting_text

POLL_INTERVAL_S = 0.5
"""Interval (s) of polling, and between two drawings."""
_REDRAW_KEY = "\x0c"
"""Ctrl-L, which draws everything again after other programs have written to the terminal."""
LINE_INTERVAL_S = 10.0
"""Interval (s) of plain lines when nothing but the step or the time has changed."""
SUMMARY_TIMEOUT_S = 10.0
"""Time (s) to wait for the summary of an ended run, from the last renewal of the manager's lease."""


def show_live(name: str | None) -> int:
    """``rrl status --live``: draw the run until it has ended or ``q`` was pressed; returns exit code 0."""
    follow(find_run(name))
    return 0


def follow(
    run: RunDir,
    *,
    stop: threading.Event | None = None,
    require_manager: bool = False,
    summary_follows: bool = False,
    manages: bool = False,
) -> State | None:
    """Follow a run until it has ended, ``q`` was pressed, or ``stop`` was set.

    With ``summary_follows``, the view of the ended run is removed, since the caller prints its summary. With
    ``manages``, this process is the run's manager: ``q`` has no effect, and Ctrl-C cancels the run.

    Returns the last state read; its ``outcome`` is None when following stopped before the end. Raises KeyboardInterrupt
    after Ctrl-C, and, with ``require_manager``, NeverBegan or OperationFailed if no manager is left to begin or end the
    run.
    """
    watcher = _Watcher(run, require_manager)
    stop = stop or threading.Event()
    if sys.stdout.isatty() and not console().is_dumb_terminal:
        _draw(watcher, stop, summary_follows, manages)
    else:
        _print_progress(watcher, stop)
    return watcher.state


class _Watcher:
    """Holds the newest state that was read, and how long the manager's lease was not renewed (local clock)."""

    def __init__(self, run: RunDir, require_manager: bool) -> None:
        self.run = run
        self.state: State | None = None
        self._require_manager = require_manager
        self._reader = StateReader(run)
        self._start_check = StartCheck(run)
        self.start_failure = ""
        """Why no manager will ever begin the run; empty if a manager may."""
        self._holder: LeaseHolder | None = None
        self._renewed_at = time.monotonic()
        self._slurm: SlurmJobs | None = None
        """Slurm's last answer since the lease was last renewed."""
        self._slurm_polled_at = 0.0

    def poll(self) -> bool:
        """Read the state and the lease; return whether the run has ended and its summary exists.

        If the summary is missing, returns True after ``SUMMARY_TIMEOUT_S`` all the same. With ``require_manager``,
        raises NeverBegan or OperationFailed if no manager is left to begin or end the run.
        """
        self.state = self._reader.state()
        try:
            current = holder(self.run)
        except OSError:
            current = None
        self.start_failure = self._start_check.failure(self.state)
        if self._require_manager and self.start_failure:
            raise NeverBegan(f"{self.run.id} is rejected: {self.start_failure}")
        if current != self._holder:
            self._holder, self._renewed_at, self._slurm = current, time.monotonic(), None
        if self.state is not None and self.state.outcome is not None:
            return self.run.summary.exists() or time.monotonic() - self._renewed_at > SUMMARY_TIMEOUT_S
        if (
            self._require_manager
            and self.silence_s
            and (gone := manager_gone(self.run))
            and not _runs_on_slurm(self.run)
        ):
            raise OperationFailed(f"the manager of {self.run.id} is gone (its output: {self.run.submit}): {gone}")
        if self._require_manager and (liveness := self.liveness).standing == INTERRUPTED:
            raise OperationFailed(f"{self.run.id} is interrupted: {liveness}")
        return False

    @property
    def silence_s(self) -> float:
        """Return the seconds since the manager's lease was last renewed; 0 if it was renewed recently enough."""
        silent = time.monotonic() - self._renewed_at
        patience = STALE_LEASES * self.state.job.limits.lease if self.state is not None else 60.0
        return silent if silent > patience else 0.0

    @property
    def liveness(self) -> Liveness:
        """Return what is known of the manager if its lease is not renewed, else an empty result.

        Slurm is queried once in ``SQUEUE_EVERY_S`` at most.
        """
        if not self.silence_s or self.state is None or self.state.outcome is not None:
            return Liveness()
        if self.state.job.cluster == "slurm":
            now = time.monotonic()
            if self._slurm is None or now - self._slurm_polled_at >= SQUEUE_EVERY_S:
                self._slurm, self._slurm_polled_at = ask_slurm(owner_of(self.run)), now
        return judge(self.state, f"silent for {self.silence_s:.0f} s", self._slurm)


def _draw(watcher: _Watcher, stop: threading.Event, summary_follows: bool, manages: bool) -> None:
    display, final = LiveDisplay(console()), None
    hint = "Ctrl-C cancels the run" if manages else "q stops watching; the run goes on"
    over = False
    try:
        with _key_reader(display.clear) as pressed:
            while True:
                over = watcher.poll()
                if over:
                    final = _view(watcher, display, MAX_LISTED)
                    return
                display.draw(_fitting_lines(watcher, display, hint))
                if stop.is_set() or _leaves(pressed, display, manages):
                    return
    finally:
        display.finish(None if summary_follows else final, erase=over)


def _view(watcher: _Watcher, display: LiveDisplay, max_listed: int) -> RenderableType:
    if watcher.state is None:
        return Text(f"{watcher.run.id}: {waiting_text(watcher.run, watcher.start_failure)}")
    return picture(watcher.run, watcher.state, display.width, watcher.liveness, max_listed)


def _fitting_lines(watcher: _Watcher, display: LiveDisplay, hint: str) -> list[Line]:
    """Return the lines of the run and of the hint.

    If they do not fit the terminal, replicas that work are only counted; then the last lines are left out.
    """
    free = display.height - 2
    lines = display.lines(_view(watcher, display, MAX_LISTED))
    if len(lines) > free and watcher.state is not None:
        lines = display.lines(_view(watcher, display, 0))
    if (hidden := len(lines) - free) > 0:
        hint = f"{hidden} more lines do not fit; {hint}"
    return [*lines[: max(0, free)], (), *display.lines(Text(hint, "bright_black"))]


def _leaves(pressed: Callable[[float], str], display: LiveDisplay, manages: bool) -> bool:
    """Return whether the user leaves within ``POLL_INTERVAL_S``, the interval between two drawings."""
    until = time.monotonic() + POLL_INTERVAL_S
    while (left := until - time.monotonic()) > 0:
        keys = pressed(left)
        if "q" in keys and not manages:
            return True
        if _REDRAW_KEY in keys:
            display.clear()
            break
    return False


def _print_progress(watcher: _Watcher, stop: threading.Event) -> None:
    """Print the run's status in one line whenever the status of a replica or of the manager changes.

    If only other parts of the line change, such as the training step, print it at most once per ``LINE_INTERVAL_S``.
    """
    printed, printed_at, printed_about = "", 0.0, ""
    while True:
        over = watcher.poll()
        if watcher.state is None:
            line, about = f"{watcher.run.id}: {waiting_text(watcher.run, watcher.start_failure)}", ""
        else:
            liveness = watcher.liveness
            line = one_line(watcher.state, time.time(), bool(liveness.note), liveness.standing)
            about = f"{_incarnations_text(watcher.state)} {bool(liveness.note)} {liveness.standing}"
        due = time.monotonic() - printed_at >= LINE_INTERVAL_S
        if line != printed and (over or due or about != printed_about):
            print_line(line)
            printed, printed_at, printed_about = line, time.monotonic(), about
        if over or stop.wait(POLL_INTERVAL_S):
            return


def _incarnations_text(state: State) -> str:
    return " ".join(
        f"{replica.id}#{replica.incarnation_number}:{replica.status}" for replica in state.replicas.values()
    )


def _runs_on_slurm(run: RunDir) -> bool:
    """Return whether the run is on Slurm, which restarts a lost manager by itself."""
    job = job_of(run)
    return job is not None and job.cluster == "slurm"


@contextmanager
def _key_reader(on_return: Callable[[], None]) -> Iterator[Callable[[float], str]]:
    """Yield a function that waits the given seconds for key presses, and returns the keys or ``""``.

    Return need not be pressed, and keys do not appear in the view. The terminal is restored on every exit. Nothing is
    read or changed while another job of the shell uses the terminal: the kernel would stop this process. ``on_return``
    is called when this process uses the terminal again after another job.
    """
    if not sys.stdin.isatty():
        yield _no_keys
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def keys(seconds: float) -> str:
        if not _in_foreground(fd):
            return _no_keys(seconds)
        if termios.tcgetattr(fd)[3] & termios.ECHO:  # another job has used the terminal: its keys are discarded
            tty.setcbreak(fd, termios.TCSAFLUSH)
            on_return()
        if not select.select([fd], [], [], seconds)[0]:
            return ""
        return os.read(fd, 1024).decode("latin-1") or _no_keys(seconds)  # nothing is read from a terminal that is gone

    try:
        if _in_foreground(fd):
            tty.setcbreak(fd, termios.TCSANOW)  # keys that were pressed already are kept
        yield keys
    finally:
        if _in_foreground(fd):
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _in_foreground(terminal: int) -> bool:
    """Return whether this process may use the terminal; True if the terminal belongs to no shell with job control."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return True


def _no_keys(seconds: float) -> str:
    time.sleep(seconds)
    return ""
