"""Print lines of logs to stdout: with local times and labels for people, or as JSON for programs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

from msgspec import Struct

from ...api.logs.files import Log
from ...api.logs.merge import Line
from ...core.log_lines import STAMP_BYTES, seconds_of
from ...core.text import escaped
from ..common.output import json_line

_COLOURS = (36, 33, 32, 35, 34, 31)
"""ANSI codes of the colours of labels, in the order in which logs get them."""


class LogRecord(Struct, frozen=True):
    """One line of a log: a line of the output of ``rrl logs --json``."""

    time: str | None
    """When the line was written (ISO 8601, UTC); None if it is not known."""
    incarnation: str
    """Incarnation that wrote the line; ``manager`` for the manager."""
    log: str
    """Kind of the log."""
    text: str


class Printer:
    """Writes log lines to standard output, as text with times and labels, or as JSON with one object a line.

    Lines are labelled if they may come from several logs. With ``raw``, control characters are not escaped.
    """

    def __init__(self, json: bool, raw: bool) -> None:
        self.json = json
        self.raw = raw
        self.labelled = False
        self._coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._colours: dict[str, int] = {}
        self._second = b""
        self._local_second = ""

    def print(self, lines: Iterator[tuple[Log, Line]]) -> None:
        """Print the lines in their order."""
        for log, line in lines:
            sys.stdout.write(self.format_line(log, line) + "\n")
        sys.stdout.flush()

    def format_line(self, log: Log, line: Line) -> str:
        """Return one line as it is printed."""
        text = line.text.decode("utf-8", "replace")
        if self.json:
            return json_line(self.record(log, line)).rstrip("\n")
        text = text if self.raw else escaped(text)
        time_of_day = f"{self.local_time(line.stamp)} " if line.stamp else ""
        return f"{time_of_day}{self._paint(log.label)} | {text}" if self.labelled else f"{time_of_day}{text}"

    def record(self, log: Log, line: Line) -> LogRecord:
        """Return one line as its fields in JSON."""
        return LogRecord(line.stamp.decode() or None, log.owner, log.kind, line.text.decode("utf-8", "replace"))

    def local_time(self, stamped: bytes) -> str:
        """Return a line's time in the local time zone: ``11-20 09:00:00.123``."""
        second = stamped[: STAMP_BYTES - 8]
        if second != self._second:
            try:
                moment = time.localtime(seconds_of(stamped))
            except ValueError:  # a time in another format, which rrl did not write
                return second.decode()
            self._second, self._local_second = second, time.strftime("%m-%d %H:%M:%S", moment)
        return f"{self._local_second}.{stamped[STAMP_BYTES - 7 : STAMP_BYTES - 4].decode()}"

    def _paint(self, label: str) -> str:
        if not self._coloured:
            return label
        colour = self._colours.setdefault(label, _COLOURS[len(self._colours) % len(_COLOURS)])
        return f"\x1b[{colour}m{label}\x1b[0m"
