"""``rrl logs``: print the logs of a run's processes, merged by time.

The command prints the ends of the logs, follows the logs over rotations and into new incarnations, or prints the lines
before each failure.
"""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ...core.log_lines import stamp
from ...core.processes import raise_nofile
from ...core.run_dir import RunDir
from ..common.output import parse_time
from ..common.runs import StateReader, UsageError, find_run
from .files import Log, all_logs
from .merge import Line, LineFilter, LogTail
from .printer import Printer

POLL_INTERVAL_S = 0.4
"""Interval (s) between two checks for new lines of the followed logs."""
DEFAULT_LINES = 20
"""Default number of lines that are printed of each log."""


def logs(
    name: str | None, selector: str | None, *, follow: bool, lines: int | None, since: str | None, grep: str | None,
    failed: bool, json: bool, raw: bool,
) -> int:  # fmt: skip
    """Print the logs of a run (by default of the newest one), merged by time.

    With ``follow``, new lines are printed too, until the run ends. With ``failed``, only the last lines before each
    failure are printed. With ``raw``, control characters that the terminal would obey are printed as they are. Returns
    the exit code, 130 after Ctrl-C.
    """
    wanted = _line_filter(lines, since, grep)
    if failed and follow:
        raise UsageError("--failed shows past failures, --follow shows new lines: use only one of them")
    if raw and json:
        raise UsageError("--raw cannot be combined with --json, which prints exactly what was written, escaped as JSON")
    run = _find_run(name, selector)
    raise_nofile()  # a merge holds all its files open
    printer = Printer(json, raw)
    if failed:
        from .failed import show_failures

        return show_failures(run, selector, wanted, lines if lines is not None else DEFAULT_LINES, printer)
    chosen = _selected_logs(run, selector)
    if not chosen and (not follow or (selector is not None and not _may_log_later(run, selector))):
        raise UsageError(_no_logs_message(run, selector))
    printer.labelled = follow or len(chosen) > 1
    tails = {log.path: LogTail(log, wanted) for log in chosen}
    printer.print(_merged({tail: tail.first_lines() for tail in tails.values()}))
    if follow:
        try:
            _follow(run, selector, tails, wanted, printer)
        except KeyboardInterrupt:
            return 130
    printer.print(_merged({tail: tail.close() for tail in tails.values()}))
    return 0


def _find_run(name: str | None, selector: str | None) -> RunDir:
    """Return the run with this name. Raises UsageError, also if the only argument is a selector instead of a run."""
    try:
        return find_run(name)
    except UsageError:
        if selector is None and name is not None:
            newest = find_run(None)
            if _selected_logs(newest, name) or _may_log_later(newest, name):
                raise UsageError(f'"{name}" is not a run; write: rrl logs {newest.id} {name}') from None
        raise


def _follow(
    run: RunDir, selector: str | None, tails: dict[Path, LogTail], wanted: LineFilter, printer: Printer
) -> None:
    """Print new lines until the run has ended.

    All lines that were written before the run's last journal record are printed.
    """
    reader = StateReader(run)
    while True:
        state = reader.state()
        more: dict[LogTail, Iterator[Line]] = {}
        for log in _selected_logs(run, selector):
            if log.path not in tails:  # of a new incarnation: read from its beginning
                tails[log.path] = LogTail(log, LineFilter(None, b"", wanted.match))
            tails[log.path].log = log  # a promotion of a standby process changes the names
            more[tails[log.path]] = tails[log.path].new_lines(log.copies)
        printer.print(_merged(more))
        if state is not None and state.outcome is not None:
            return
        time.sleep(POLL_INTERVAL_S)


# ── selected logs ──────────────────────────────────────────────────────────────────────────────────────────────────
def _line_filter(lines: int | None, since: str | None, grep: str | None) -> LineFilter:
    if lines is None and since is None and grep is None:
        lines = DEFAULT_LINES
    return LineFilter(lines, b"" if since is None else stamp(int(parse_time(since) * 1e6)), _matcher(grep))


def _matcher(grep: str | None) -> Callable[[bytes], object] | None:
    if grep is None:
        return None
    try:
        return re.compile(grep.encode()).search
    except re.error as error:
        raise UsageError(f'--grep "{grep}" is not a valid regular expression: {error}') from None


def _selected_logs(run: RunDir, selector: str | None) -> list[Log]:
    return [log for log in all_logs(run) if selector is None or log.belongs_to(selector)]


def _may_log_later(run: RunDir, selector: str) -> bool:
    """Return whether the job has this role or replica, so that it may still write a log."""
    state = StateReader(run).state()
    return state is not None and any(selector in (replica.id, replica.role) for replica in state.replicas.values())


def _no_logs_message(run: RunDir, selector: str | None) -> str:
    replicas = sorted({log.replica for log in all_logs(run)})
    if not replicas:
        return f"{run.id} has no logs yet"
    if selector is not None and _may_log_later(run, selector):
        return f'"{selector}" of {run.id} has written no log yet; there are logs of: {", ".join(replicas)}'
    return f'{run.id} has no logs of "{selector}"; there are logs of: {", ".join(replicas)}'


# ── merged lines ───────────────────────────────────────────────────────────────────────────────────────────────────
def _merged(tails: dict[LogTail, Iterator[Line]]) -> Iterator[tuple[Log, Line]]:
    """Yield the lines of all logs with the log of each, ordered by time."""

    def with_log(log: Log, lines: Iterator[Line]) -> Iterator[tuple[Log, Line]]:
        return ((log, line) for line in lines)

    return heapq.merge(*(with_log(tail.log, lines) for tail, lines in tails.items()), key=lambda one: one[1].order)
