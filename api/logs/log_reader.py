"""Read the logs of a run's processes, merged by time, and follow them over rotations and into new incarnations."""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from msgspec import Struct

from ...core.log_lines import seconds_of, stamp
from ...core.processes import raise_nofile
from ...core.run_dir import RunDir
from ...core.types import UsageError
from ..runs import StateReader, job_of
from .files import Log, all_logs
from .merge import Line, LineFilter, LogTail

POLL_INTERVAL_S = 0.4
"""Interval (s) between two checks for new lines of the followed logs."""
DEFAULT_LINES = 20
"""Default number of lines of each log."""


def line_filter(lines: int | None, since: float | None, match: Callable[[bytes], object] | None) -> LineFilter:
    """Return the filter that selects lines of each log.

    Args:
        lines: Number of the newest lines; by default all if another argument is given, else ``DEFAULT_LINES``.
        since: Time (s since 1970) before which lines are left out.
        match: Function that is true for the text of a wanted line (:func:`matcher`).
    """
    if lines is None and since is None and match is None:
        lines = DEFAULT_LINES
    return LineFilter(lines, b"" if since is None else stamp(int(since * 1e6)), match)


def matcher(pattern: str, option: str) -> Callable[[bytes], object]:
    """Return a function that searches a line for a regular expression.

    Raises UsageError, which names ``option``, if the expression is not valid.
    """
    try:
        return re.compile(pattern.encode()).search
    except re.error as error:
        raise UsageError(f'{option} "{pattern}" is not a valid regular expression: {error}') from None


class LogLine(Struct, frozen=True):
    """One line of a log."""

    time: datetime | None
    """When the line was written; None if the log does not contain a time for it."""
    incarnation: str
    """The incarnation that wrote the line, such as ``rollout/0#1``; ``manager`` for the manager."""
    log: str
    """Kind of the log: ``role``, ``launcher`` or ``manager``."""
    text: str

    @classmethod
    def read(cls, log: Log, line: Line) -> Self:
        """Return a line of a log with its values decoded."""
        at = datetime.fromtimestamp(seconds_of(line.stamp), UTC) if line.stamp else None
        return cls(at, log.owner, log.kind, line.text.decode("utf-8", "replace"))


class LogReader:
    """Reads the selected logs of a run.

    Args:
        run: The run.
        selector: A role, a replica or an incarnation, such as ``rollout/0``; None for all logs.
        wanted: Selects lines of each log.
        follow: Whether new lines are read too, until the run ends.

    Raises:
        UsageError: There is no such log.
    """

    def __init__(self, run: RunDir, selector: str | None, wanted: LineFilter, *, follow: bool) -> None:
        self._run, self._selector, self._wanted, self._follow = run, selector, wanted, follow
        self.logs = selected_logs(run, selector)
        """The logs that exist so far."""
        if not self.logs and (not follow or (selector is not None and not may_log_later(run, selector))):
            raise UsageError(_no_logs_message(run, selector))

    def batches(self) -> Iterator[Iterator[tuple[Log, Line]]]:
        """Yield the existing lines, then with ``follow`` the new lines of each check. Each line comes with its log.

        All lines that were written before the run's last journal record are yielded.
        """
        raise_nofile()  # merging keeps every file open, so the limit must be high
        tails = {log.path: LogTail(log, self._wanted) for log in self.logs}
        yield _merged({tail: tail.new_lines() for tail in tails.values()})
        if self._follow:
            yield from self._new_lines(tails)
        yield _merged({tail: tail.close() for tail in tails.values()})

    def _new_lines(self, tails: dict[Path, LogTail]) -> Iterator[Iterator[tuple[Log, Line]]]:
        reader = StateReader(self._run)
        while True:
            state = reader.state()
            more: dict[LogTail, Iterator[Line]] = {}
            for log in selected_logs(self._run, self._selector):
                if log.path not in tails:  # the log of a new incarnation: read from its beginning
                    tails[log.path] = LogTail(log, LineFilter(None, b"", self._wanted.match))
                tails[log.path].log = log  # a promotion of a standby process changes the log's names
                more[tails[log.path]] = tails[log.path].new_lines()
            yield _merged(more)
            if state is not None and state.outcome is not None:
                return
            time.sleep(POLL_INTERVAL_S)


def selected_logs(run: RunDir, selector: str | None) -> list[Log]:
    """Return the logs of a run that ``selector`` selects."""
    return [log for log in all_logs(run) if selector is None or log.belongs_to(selector)]


def may_log_later(run: RunDir, selector: str) -> bool:
    """Return whether the job has this role or replica, so that it may still write a log."""
    if (state := StateReader(run).state()) is not None:
        return any(selector in (replica.id, replica.role) for replica in state.replicas.values())
    job = job_of(run)  # the run has not begun: its replicas are not known yet
    return job is not None and any(selector.partition("/")[0] == role.name for role in job.roles)


def _no_logs_message(run: RunDir, selector: str | None) -> str:
    replicas = sorted({log.replica for log in all_logs(run)})
    if not replicas:
        return f"{run.id} has no logs yet"
    if selector is not None and may_log_later(run, selector):
        return f'"{selector}" of {run.id} has written no log yet; there are logs of: {", ".join(replicas)}'
    return f'{run.id} has no logs of "{selector}"; there are logs of: {", ".join(replicas)}'


def _merged(tails: dict[LogTail, Iterator[Line]]) -> Iterator[tuple[Log, Line]]:
    """Yield each line of all logs with its log, ordered by time."""

    def with_log(log: Log, lines: Iterator[Line]) -> Iterator[tuple[Log, Line]]:
        return ((log, line) for line in lines)

    return heapq.merge(*(with_log(tail.log, lines) for tail, lines in tails.items()), key=lambda one: one[1].order)
