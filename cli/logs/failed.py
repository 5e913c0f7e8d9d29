"""``rrl logs --failed``: for each failure the findings, the last lines of the incarnation, and the recovery."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from msgspec import Struct

from ...api.logs.files import Log, all_logs
from ...api.logs.merge import Line, LineFilter, LogTail
from ...core.log_lines import seconds_of, stamp
from ...core.run_dir import RunDir
from ...core.text import escaped
from ...core.types import AGENT
from ...manager.reporting.failure_records import Failure
from ...manager.storage.journal import replay
from ..common.output import json_line
from .failures import FailureReport, concerns, failures
from .printer import LogRecord, Printer

CLOCK_SLACK_S = 1.0
"""Assumed difference (s) of nodes' clocks. Lines that are at most this much later than a failure count as lines before
the failure."""


class FailureRecord(Struct, frozen=True):
    """One failure: a line of the output of ``rrl logs --failed --json``."""

    time: str
    """When the failure was recorded (ISO 8601, UTC)."""
    incarnation: str | None
    """The failed incarnation; None if only a node failed."""
    node: str | None
    found: tuple[str, ...]
    """Findings, the end of the step, and stacks, as text."""
    injected: bool
    """True if an injected fault can have caused the failure."""
    rung: str | None
    """The repair that was chosen."""
    successor: str | None
    """The incarnation that took over; None if it has not worked yet."""
    recovered_s: float | None
    """Seconds from the failure until the successor worked; None if it has not worked yet."""
    lines: list[LogRecord]
    """The last lines of the incarnation, or of its launcher if the incarnation wrote none."""


def show_failures(run: RunDir, selector: str | None, wanted: LineFilter, newest: int, printer: Printer) -> int:
    """Print the run's failures, each with at most ``newest`` lines from before it. Returns exit code 0.

    ``wanted.since`` is the earliest time of failures to print; ``wanted.match`` selects their lines.
    """
    found = failures(replay(run))
    since = seconds_of(wanted.since) if wanted.since else 0.0
    found = [report for report in found if concerns(selector, report.failure) and report.failure.recorded_at >= since]
    if not found and not printer.json:
        print(f"nothing{f' of {selector}' if selector else ''} has failed{' since then' if since else ''}")
    logs = all_logs(run)
    for report in found:
        lines = list(_last_lines(report.failure, logs, LineFilter(newest, b"", wanted.match)))
        sys.stdout.write(_json(report, lines, printer) if printer.json else _text(report, lines, printer))
    sys.stdout.flush()
    return 0


def _last_lines(failure: Failure, logs: list[Log], wanted: LineFilter) -> Iterator[tuple[Log, Line]]:
    """Yield the newest lines of the failed incarnation; if it wrote no line, the newest lines of its launcher.

    If the incarnation continued after the failure, only lines from before the failure are selected.
    """
    if failure.incarnation is None:
        return
    own_logs = [log for log in logs if log.owner == str(failure.incarnation) and log.kind != "manager"]
    if not failure.ended:
        wanted = wanted._replace(until=stamp(int((failure.recorded_at + CLOCK_SLACK_S) * 1e6)))
    for kind in ("role", "launcher"):
        lines = [(log, line) for log in own_logs if log.kind == kind for line in _lines(log, wanted)]
        if lines:
            yield from lines
            return


def _lines(log: Log, wanted: LineFilter) -> Iterator[Line]:
    tail = LogTail(log, wanted)
    yield from tail.new_lines()
    yield from tail.close()


def _text(report: FailureReport, lines: list[tuple[Log, Line]], printer: Printer) -> str:
    failure, evidence = report
    subject = (
        f"{failure.incarnation} on {failure.node}"
        if failure.incarnation and failure.node
        else f"{failure.incarnation or failure.node}"
    )
    at = printer.local_time(stamp(int(failure.recorded_at * 1e6)))
    out = [f"{at} {subject} failed{' (injected)' if failure.injected else ''}"]
    out += [f"    {escaped(line)}" for line in evidence]
    if lines and lines[0][0].kind == "launcher" and lines[0][0].role != AGENT:  # an agent logs only there
        out.append("    it wrote no log lines; the last lines of its launcher:")
    for log, line in lines:
        time_of_day = f"{printer.local_time(line.stamp)} " if line.stamp else ""
        label = f"{log.label} | " if log.kind == "launcher" else "| "
        text = line.text.decode("utf-8", "replace")
        out.append(f"  {label}{time_of_day}{text if printer.raw else escaped(text)}")
    if failure.incarnation is not None and not lines:
        out.append("    it wrote no log lines")
    if failure.rung:
        out.append(f"    then: {failure.rung.value}{_recovery_text(failure)}")
    elif not failure.ended and failure.incarnation is not None:
        out.append("    it kept running")
    return "\n".join(out) + "\n\n"


def _recovery_text(failure: Failure) -> str:
    """Return which incarnation took over, and how many seconds after the failure; empty while none has joined."""
    if failure.recovered_at is not None:
        return f"; {failure.successor} was working {failure.recovered_at - failure.recorded_at:.1f} s later"
    if failure.joined_at is not None:
        after = failure.joined_at - failure.recorded_at
        return f"; {failure.successor} joined {after:.1f} s later and has done no work yet"
    return ""


def _json(report: FailureReport, lines: list[tuple[Log, Line]], printer: Printer) -> str:
    failure, evidence = report
    recovered_at = failure.recovered_at
    return json_line(
        FailureRecord(
            time=stamp(int(failure.recorded_at * 1e6)).decode(),
            incarnation=None if failure.incarnation is None else str(failure.incarnation),
            node=failure.node or None,
            found=evidence,
            injected=failure.injected,
            rung=None if failure.rung is None else failure.rung.value,
            successor=None if recovered_at is None else str(failure.successor),
            recovered_s=None if recovered_at is None else round(recovered_at - failure.recorded_at, 3),
            lines=[printer.record(log, line) for log, line in lines],
        )
    )
