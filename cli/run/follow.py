"""Follows a run until it ends: on a terminal as a view that is drawn twice a second, else as plain lines."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import SegmentLines
from rich.text import Text

from ...api.runs import find_run
from ...api.watching.run_watcher import POLL_INTERVAL_S, RunWatcher
from ...core.run_dir import RunDir
from ...manager.model.state import State
from ..common.output import Escaped, console, print_line
from ..views.replicas import MAX_LISTED
from ..views.status import one_line
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
    screen = console()
    size = screen.size
    hint = "Ctrl-C cancels the run" if manages else "q stops watching; the run goes on"
    live = Live(console=screen, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    with _key_reader() as pressed, live:
        while True:
            if watcher.poll():
                live.transient = summary_follows
                if not summary_follows:  # the end of the view draws all its lines, also those beyond the screen
                    live.update(Escaped(_view(watcher, screen, MAX_LISTED)))
                return
            live.update(_fitting_view(watcher, screen, hint), refresh=True)
            keys = pressed(POLL_INTERVAL_S)
            if stop.is_set() or ("q" in keys and not manages):
                return
            if screen.size != size or _REDRAW_KEY in keys:  # after a change of size, the old lines may be anywhere
                size = screen.size
                screen.clear()


def _view(watcher: RunWatcher, screen: Console, max_listed: int) -> RenderableType:
    if watcher.state is None:
        return Text(f"{watcher.run.id}: {waiting_text(watcher.run, watcher.start_failure)}")
    return picture(watcher.run, watcher.state, screen.width, watcher.liveness, max_listed)


def _fitting_view(watcher: RunWatcher, screen: Console, hint: str) -> RenderableType:
    """Return the lines of the run, and the hint below them.

    If they do not fit the terminal, the view counts the replicas that work instead of listing them. If they still do
    not fit, the last lines of the run are left out, and the hint says how many.
    """
    free = max(0, screen.height - 2)
    lines = screen.render_lines(Escaped(_view(watcher, screen, MAX_LISTED)), pad=False)
    if len(lines) > free:
        lines = screen.render_lines(Escaped(_view(watcher, screen, 0)), pad=False)
    if (hidden := len(lines) - free) > 0:
        hint = f"{hidden} more lines do not fit; {hint}"
    return Group(
        SegmentLines(lines[:free], new_lines=True), "", Text(hint, "bright_black", overflow="crop", no_wrap=True)
    )


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
def _key_reader() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits the given seconds for key presses, and returns the keys or ``""``.

    The user need not press Enter, and keys do not appear in the view. The terminal is restored on every exit. While
    another job of the shell uses the terminal, nothing is read or changed, because the kernel would stop this process.
    When this process uses the terminal again after another job, the function returns the key that redraws the view.
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
            return _REDRAW_KEY
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
