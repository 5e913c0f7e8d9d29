"""``rrl logs``: print the logs of a run's processes, merged by time.

The command prints the ends of the logs, follows the logs over rotations and into new incarnations, or prints the lines
before each failure.
"""

from __future__ import annotations

from ...api.logs.log_reader import DEFAULT_LINES, LogReader, line_filter, matcher, may_log_later, selected_logs
from ...api.runs import find_run
from ...core.processes import raise_nofile
from ...core.run_dir import RunDir
from ...core.types import UsageError
from ..common.output import parse_time
from .printer import Printer


def logs(
    name: str | None,
    selector: str | None,
    *,
    follow: bool,
    lines: int | None,
    since: str | None,
    grep: str | None,
    failed: bool,
    json: bool,
    raw: bool,
) -> int:
    """Print the logs of a run (by default of the newest run), merged by time.

    With ``follow``, new lines are printed too, until the run ends. With ``failed``, only the last lines before each
    failure are printed. With ``raw``, control characters are printed as they are, so the terminal interprets them.
    Returns the exit code, 130 after Ctrl-C.
    """
    earliest = None if since is None else parse_time(since)
    wanted = line_filter(lines, earliest, None if grep is None else matcher(grep, "--grep"))
    if failed and follow:
        raise UsageError("--failed shows past failures, --follow shows new lines: use only one of them")
    if raw and json:
        raise UsageError("--raw cannot be combined with --json, which prints exactly what was written, escaped as JSON")
    run = _find_run(name, selector)
    printer = Printer(json, raw)
    if failed:
        from .failed import show_failures

        raise_nofile()  # merging keeps every file open, so the limit must be high
        return show_failures(run, selector, wanted, lines if lines is not None else DEFAULT_LINES, printer)
    reader = LogReader(run, selector, wanted, follow=follow)
    printer.labelled = follow or len(reader.logs) > 1
    try:
        for batch in reader.batches():
            printer.print(batch)
    except KeyboardInterrupt:
        return 130
    return 0


def _find_run(name: str | None, selector: str | None) -> RunDir:
    """Return the run with this name. Raises UsageError if there is none, for example if ``name`` is a selector."""
    try:
        return find_run(name)
    except UsageError:
        if selector is None and name is not None:
            newest = find_run(None)
            if selected_logs(newest, name) or may_log_later(newest, name):
                raise UsageError(f'"{name}" is not a run; write: rrl logs {newest.id} {name}') from None
        raise
