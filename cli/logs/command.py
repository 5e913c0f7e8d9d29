"""``rrl logs``: what a run's processes wrote, merged by time: the ends of their logs, or as it comes, or what came
before each failure. Following goes on over rotations and into new incarnations."""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ...core.log_lines import stamp
from ...core.processes import raise_nofile
from ...core.run_dir import RunDir
from ..common.output import moment
from ..common.runs import BadInput, Reader, find_run
from .files import Log, all_logs
from .merge import LifeTail, Line, Wanted
from .printer import Printer

PAUSE = 0.4
"""s between two looks"""
NEWEST = 20
"""lines of each log, where nothing else says how many"""


def logs(
    name: str, whose: str | None, *, follow: bool, lines: int | None, since: str | None, grep: str | None,
    failed: bool, json: bool, raw: bool,
) -> int:  # fmt: skip
    """``raw``: what would command the terminal is printed as it is."""
    wanted = _wanted(lines, since, grep)
    if failed and follow:
        raise BadInput("--failed tells what has happened, --follow what comes: ask for one of them")
    if raw and json:
        raise BadInput("--raw is for people; --json says exactly what was written, and escapes it as JSON does")
    run = find_run(name)
    raise_nofile()  # a merge holds all its files open
    printer = Printer(json, raw)
    if failed:
        from .failed import show_failures

        return show_failures(run, whose, wanted, lines if lines is not None else NEWEST, printer)
    chosen = _chosen(run, whose)
    if not chosen and (not follow or (whose is not None and not _may_come(run, whose))):
        raise BadInput(_nothing(run, whose))
    printer.labelled = follow or len(chosen) > 1
    tails = {log.path: LifeTail(log, wanted) for log in chosen}
    printer.print(_merged({tail: tail.begin() for tail in tails.values()}))
    if follow:
        try:
            _follow(run, whose, tails, wanted, printer)
        except KeyboardInterrupt:
            return 130
    printer.print(_merged({tail: tail.close() for tail in tails.values()}))
    return 0


def _follow(run: RunDir, whose: str | None, tails: dict[Path, LifeTail], wanted: Wanted, printer: Printer) -> None:
    """Until the run has ended; whatever was written before its last record is printed."""
    reader = Reader(run)
    while True:
        state = reader.state()
        more: dict[LifeTail, Iterator[Line]] = {}
        for log in _chosen(run, whose):
            if log.path not in tails:  # a new life: from its beginning
                tails[log.path] = LifeTail(log, Wanted(None, b"", wanted.match))
            tails[log.path].log = log  # a shadow may have become something
            more[tails[log.path]] = tails[log.path].more(log.copies)
        printer.print(_merged(more))
        if state is not None and state.outcome is not None:
            return
        time.sleep(PAUSE)


# ── what is asked for ──────────────────────────────────────────────────────────────────────────────────────────────
def _wanted(lines: int | None, since: str | None, grep: str | None) -> Wanted:
    if lines is None and since is None and grep is None:
        lines = NEWEST
    return Wanted(lines, b"" if since is None else stamp(int(moment(since) * 1e6)), _matcher(grep))


def _matcher(grep: str | None) -> Callable[[bytes], object] | None:
    if grep is None:
        return None
    try:
        return re.compile(grep.encode()).search
    except re.error as error:
        raise BadInput(f'--grep "{grep}" is no regular expression: {error}') from None


def _chosen(run: RunDir, whose: str | None) -> list[Log]:
    return [log for log in all_logs(run) if whose is None or log.of(whose)]


def _may_come(run: RunDir, whose: str) -> bool:
    """The job has this role or replica, and it only has not written anything yet."""
    state = Reader(run).state()
    return state is not None and any(whose in (replica.id, replica.role) for replica in state.replicas.values())


def _nothing(run: RunDir, whose: str | None) -> str:
    there = sorted({log.replica for log in all_logs(run)})
    if not there:
        return f"{run.id} has no logs yet"
    if whose is not None and _may_come(run, whose):
        return f'"{whose}" of {run.id} has written nothing; there are logs of: {", ".join(there)}'
    return f'{run.id} has no logs of "{whose}"; there are: {", ".join(there)}'


# ── what is shown ──────────────────────────────────────────────────────────────────────────────────────────────────
def _merged(tails: dict[LifeTail, Iterator[Line]]) -> Iterator[tuple[Log, Line]]:
    """By time. Of many logs those that have come since are few: the rest cost one look each."""

    def of(log: Log, lines: Iterator[Line]) -> Iterator[tuple[Log, Line]]:
        return ((log, line) for line in lines)

    return heapq.merge(*(of(tail.log, lines) for tail, lines in tails.items()), key=lambda one: one[1].order)
