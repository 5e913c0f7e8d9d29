"""The lines of a life's log, as its first process writes them and as they are read again.

``2026-11-20T09:00:00.123456Z text``: RFC 3339, UTC, by the clock of the node (they differ: for order and display, never
for a decision). Within one life no time occurs twice and none goes back, so that a time names its line: that is how two
copies of one log become one.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime

STAMP = 27
"""bytes of a time; a blank follows"""
_MICROS = 1_000_000
_NOTICE = b"[rrl: "
_STAMPED = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z ")


def second_text(second: int) -> bytes:
    """A time down to the point before its microseconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%S.", time.gmtime(second)).encode()


def stamp(micros: int) -> bytes:
    """``micros``: µs since the epoch."""
    second, rest = divmod(micros, _MICROS)
    return b"%s%06dZ" % (second_text(second), rest)


def stamp_of(line: bytes) -> bytes:
    """The time of a line (times compare as bytes), or b"" where it has none."""
    return line[:STAMP] if _STAMPED.match(line) else b""


def first_stamp(lines: bytes) -> bytes:
    return stamp_of(lines[: STAMP + 1])


def last_stamp(lines: bytes) -> bytes:
    """Of the last of some whole lines."""
    start = lines.rfind(b"\n", 0, -1) + 1
    return stamp_of(lines[start : start + STAMP + 1])


def seconds_of(stamped: bytes) -> float:
    """s since the epoch. Raises ValueError when a digit group is out of range."""
    return datetime.strptime(stamped.decode(), "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC).timestamp()


def missing(count: int) -> bytes:
    """What stands where lines are missing. Where it takes the place of lines, it bears the time of the last of them: a
    copy that has that line says so."""
    return b"%s%d bytes of this log are missing here]" % (_NOTICE, count)


def is_notice(text: bytes) -> bool:
    """Whether a line's text, its time cut off, is such a word."""
    return text.startswith(_NOTICE)
