"""``rrl logs --failed``: for each failure what was found, the last lines of that life, and how it was got over."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import msgspec

from ...core.log_lines import seconds_of, stamp
from ...core.run_dir import RunDir
from ...core.text import escaped, escaped_json
from ...core.types import AGENT
from ...manager.storage.journal import JournalError, replay
from ..common.runs import BadInput
from .failures import Failure, failures, of
from .files import Log, all_logs
from .merge import LifeTail, Line, Wanted
from .printer import Printer

SLACK = 1.0
"""s that clocks of nodes may differ: lines so much later still count as before the finding about a life that went on"""


def show_failures(run: RunDir, whose: str | None, wanted: Wanted, newest: int, printer: Printer) -> int:
    """``wanted.since`` chooses failures, ``wanted.match`` lines."""
    try:
        found = failures(replay(run))
    except JournalError as error:
        raise BadInput(str(error)) from None
    since = seconds_of(wanted.since) if wanted.since else 0.0
    found = [failure for failure in found if of(whose, failure) and failure.at >= since]
    if not found and not printer.json:
        print(f"nothing{f' of {whose}' if whose else ''} has failed{' since then' if since else ''}")
    logs = all_logs(run)
    for failure in found:
        lines = list(_last_words(failure, logs, Wanted(newest, b"", wanted.match)))
        sys.stdout.write(_json(failure, lines, printer) if printer.json else _text(failure, lines, printer))
    sys.stdout.flush()
    return 0


def _last_words(failure: Failure, logs: list[Log], wanted: Wanted) -> Iterator[tuple[Log, Line]]:
    """The newest lines of the life; if it never spoke, those of its launcher."""
    if failure.life is None:
        return
    theirs = [log for log in logs if log.life == str(failure.life) and log.kind != "manager"]
    if not failure.over:
        wanted = wanted._replace(until=stamp(int((failure.at + SLACK) * 1e6)))
    for kind in ("role", "launcher"):
        said = [(log, line) for log in theirs if log.kind == kind for line in _lines(log, wanted)]
        if said:
            yield from said
            return


def _lines(log: Log, wanted: Wanted) -> Iterator[Line]:
    tail = LifeTail(log, wanted)
    yield from tail.begin()
    yield from tail.close()


def _text(failure: Failure, lines: list[tuple[Log, Line]], printer: Printer) -> str:
    who = f"{failure.life} on {failure.node}" if failure.life and failure.node else f"{failure.life or failure.node}"
    at = printer.local(stamp(int(failure.at * 1e6)))
    out = [f"{at} {who} failed{' (injected)' if failure.injected else ''}"]
    out += [f"    {escaped(told)}" for told in failure.told]
    if lines and lines[0][0].kind == "launcher" and lines[0][0].role != AGENT:  # an agent has no other log
        out.append("    it never spoke; its launcher said:")
    for log, line in lines:
        time_of_day = f"{printer.local(line.stamp)} " if line.stamp else ""
        label = f"{log.label} | " if log.kind == "launcher" else "| "
        text = line.text.decode("utf-8", "replace")
        out.append(f"  {label}{time_of_day}{text if printer.raw else escaped(text)}")
    if failure.life is not None and not lines:
        out.append("    it left no line")
    if failure.rung:
        out.append(f"    then: {failure.rung}{_back(failure)}")
    elif not failure.over and failure.life is not None:
        out.append("    it went on")
    return "\n".join(out) + "\n\n"


def _back(failure: Failure) -> str:
    if failure.back is None or failure.back_at is None:
        return ""
    return f"; {failure.back} was at work {failure.back_at - failure.at:.1f} s later"


def _json(failure: Failure, lines: list[tuple[Log, Line]], printer: Printer) -> str:
    document = {
        "time": stamp(int(failure.at * 1e6)).decode(),
        "life": None if failure.life is None else str(failure.life),
        "node": failure.node,
        "found": failure.told,
        "injected": failure.injected,
        "rung": failure.rung or None,
        "back": None if failure.back is None else str(failure.back),
        "back_s": None if failure.back_at is None else round(failure.back_at - failure.at, 3),
        "lines": [msgspec.Raw(printer.text(log, line).encode()) for log, line in lines],
    }
    return escaped_json(msgspec.json.encode(document).decode()) + "\n"
