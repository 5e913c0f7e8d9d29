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

from ...api.runs import find_run
from ...api.watching.run_watcher import POLL_INTERVAL_S, RunWatcher
from ...core.run_dir import RunDir
from ...manager.model.state import State
from ..common.output import console, print_line
from ..views.replicas import MAX_LISTED
from ..views.status import one_line
from .live_display import Line, LiveDisplay
from .status import picture, waiting_text

_REDRAW_KEY = "\x0c"
"""Ctrl-L, which draws everything again after other programs have written to the terminal."""
LINE_INTERVAL_S = 10.0
"""Interval (s) of plain lines when nothing but the step or the time has changed."""


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
    watcher = RunWatcher(run, require_manager)
    stop = stop or threading.Event()
    if sys.stdout.isatty() and not console().is_dumb_terminal:
        _draw(watcher, stop, summary_follows, manages)
    else:
        _print_progress(watcher, stop)
    return watcher.state


def _draw(watcher: RunWatcher, stop: threading.Event, summary_follows: bool, manages: bool) -> None:
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


def _view(watcher: RunWatcher, display: LiveDisplay, max_listed: int) -> RenderableType:
    if watcher.state is None:
        return Text(f"{watcher.run.id}: {waiting_text(watcher.run, watcher.start_failure)}")
    return picture(watcher.run, watcher.state, display.width, watcher.liveness, max_listed)


def _fitting_lines(watcher: RunWatcher, display: LiveDisplay, hint: str) -> list[Line]:
    """Return the lines of the view: the lines of the run, and the hint below them.

    If they do not fit the terminal, the view counts the replicas that work instead of listing them. If they still do
    not fit, the last lines of the run are left out, and the hint says how many.
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


def _print_progress(watcher: RunWatcher, stop: threading.Event) -> None:
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
            line = one_line(watcher.state, time.time(), liveness.note, liveness.standing)
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


@contextmanager
def _key_reader(on_return: Callable[[], None]) -> Iterator[Callable[[float], str]]:
    """Yield a function that waits the given seconds for key presses, and returns the keys or ``""``.

    The user need not press Enter, and keys do not appear in the view. The terminal is restored on every exit. While
    another job of the shell uses the terminal, nothing is read or changed, because the kernel would stop this process.
    ``on_return`` is called when this process uses the terminal again after another job.
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
        return os.read(fd, 1024).decode("latin-1") or _no_keys(seconds)  # the read is empty once the terminal is closed

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
