"""The lines of logs: of a replica's log, as its first process writes them and as they are read again, and of rrl's own
messages.

``2026-11-20T09:00:00.123456Z text``: RFC 3339, UTC, by the clock of the node (they differ: for order and display, never
for a decision). Within one life no time occurs twice and none goes back, so that a time names its line: that is how two
copies of one log become one.

rrl's own processes log through ``logging.getLogger("rrl.<process>")``, in lines of the same form with level and logger
before the text: :func:`start_logging`, which each process calls first in its ``main``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from datetime import UTC, datetime
from typing import get_args

from .run_spec import DEFAULT_LOG_LEVEL, LogLevel
from .text import escaped_lines

LOG_LEVEL_ENV = "RRL_LOG_LEVEL"
"""The :data:`LogLevel` of a process and of those that it starts, as an environment variable. ``rrl --verbose`` sets it,
and it takes precedence over ``[manager] log_level``; the manager hands it on in the launch files."""
STAMP_BYTES = 27
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
    return line[:STAMP_BYTES] if _STAMPED.match(line) else b""


def first_stamp(lines: bytes) -> bytes:
    return stamp_of(lines[: STAMP_BYTES + 1])


def last_stamp(lines: bytes) -> bytes:
    """Of the last of some whole lines."""
    start = lines.rfind(b"\n", 0, -1) + 1
    return stamp_of(lines[start : start + STAMP_BYTES + 1])


def seconds_of(stamp_text: bytes) -> float:
    """s since the epoch. Raises ValueError when a digit group is out of range."""
    return datetime.strptime(stamp_text.decode(), "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC).timestamp()


def missing_notice(count: int) -> bytes:
    """What stands where lines are missing. Where it takes the place of lines, it bears the time of the last of them: a
    copy that has that line says so."""
    return b"%s%d bytes of this log are missing here]" % (_NOTICE, count)


def is_notice(text: bytes) -> bool:
    """Whether a line's text, its time cut off, is such a word."""
    return text.startswith(_NOTICE)


def start_logging(level: str = DEFAULT_LOG_LEVEL, *, stamped: bool = True) -> None:
    """Write the messages of all loggers below ``rrl`` to stderr. A further call only sets the level.

    Args:
        level: The lowest :data:`LogLevel` that is written, unless :data:`LOG_LEVEL_ENV` names another.
        stamped: Begin each line with the time. A role's process leaves that to its launcher, which stamps every line.
    """
    logger, chosen = logging.getLogger("rrl"), os.environ.get(LOG_LEVEL_ENV) or level
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler(stamped))
    known = chosen in get_args(LogLevel)
    logger.setLevel((chosen if known else level).upper())
    if not known:
        logger.error("%s=%s is not a level; use one of %s", LOG_LEVEL_ENV, chosen, ", ".join(get_args(LogLevel)))


class _StderrHandler(logging.Handler):
    """Writes to the current ``sys.stderr``, which rich replaces while ``rrl submit --foreground`` draws its view.

    It writes nothing while the root logger has handlers: a program that configures logging itself, for example a user's
    role, gets each message once, in its own format."""

    def __init__(self, stamped: bool) -> None:
        super().__init__()
        self.setFormatter(_Formatter(f"{'%(asctime)s ' if stamped else ''}%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        try:
            line = self.format(record)
        except Exception:  # the arguments do not fit the message: logging reports that, and the caller continues
            self.handleError(record)
            return
        with contextlib.suppress(OSError, ValueError):  # a full disk below stderr; a closed stderr
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


class _Formatter(logging.Formatter):
    """Stamps messages as roles' logs are stamped, and escapes control characters, since messages quote text of roles,
    nodes and users, and stderr may be a terminal."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return stamp(int(record.created * _MICROS)).decode()

    def format(self, record: logging.LogRecord) -> str:
        return escaped_lines(super().format(record))
