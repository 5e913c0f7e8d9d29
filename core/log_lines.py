"""Write and parse the log lines of replicas and of rrl's own processes.

A line is ``2026-11-20T09:00:00.123456Z text``: RFC 3339, UTC, from the clock of the node. Clocks of nodes differ, so
times are used only for order and display. Within one incarnation the times strictly increase.

The processes of rrl log through ``logging.getLogger("rrl.<process>")``, in lines of the same form with level and logger
before the text. Each process calls :func:`start_logging` first in its ``main``.
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

from .text import escaped_lines
from .types import DEFAULT_LOG_LEVEL, LogLevel

LOG_LEVEL_ENV = "RRL_LOG_LEVEL"
"""Environment variable with the :data:`LogLevel` of a process and of the processes that it starts. ``rrl --verbose``
sets it, and it takes precedence over ``[manager] log_level``; the manager passes it on in the launch files."""
STAMP_BYTES = 27
"""Length of a time stamp in bytes, without the space after it."""
_MICROS = 1_000_000
_STAMPED = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z ")


def second_text(second: int) -> bytes:
    """Return a time stamp without its microseconds: ``2026-11-20T09:00:00.``; ``second`` is in seconds since 1970."""
    return time.strftime("%Y-%m-%dT%H:%M:%S.", time.gmtime(second)).encode()


def stamp(micros: int) -> bytes:
    """Return the time stamp of a log line of the time ``micros``, which is given in µs since 1970."""
    second, rest = divmod(micros, _MICROS)
    return b"%s%06dZ" % (second_text(second), rest)


def stamp_of(line: bytes) -> bytes:
    """Return the time stamp of a line (stamps compare as bytes), or b"" if the line has none."""
    return line[:STAMP_BYTES] if _STAMPED.match(line) else b""


def seconds_of(stamp_text: bytes) -> float:
    """Return a time stamp as seconds since the epoch.

    Raises:
        ValueError: A group of digits is out of range.
    """
    return datetime.strptime(stamp_text.decode(), "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC).timestamp()


def missing_notice(count: int) -> bytes:
    """Return the text of the line that replaces ``count`` missing bytes.

    The caller stamps the notice with the time of the last missing line.
    """
    return b"[rrl: %d bytes of this log are missing here]" % count


def start_logging(level: str = DEFAULT_LOG_LEVEL, *, stamped: bool = True) -> None:
    """Write the messages of all loggers below ``rrl`` to stderr. A further call only sets the level.

    Args:
        level: The lowest :data:`LogLevel` that is written, unless :data:`LOG_LEVEL_ENV` names another level.
        stamped: Begin each line with the time. False in a role's process, whose launcher stamps every line.
    """
    logger = logging.getLogger("rrl")
    chosen = os.environ.get(LOG_LEVEL_ENV) or level
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler(stamped))
    known = chosen in get_args(LogLevel)
    logger.setLevel((chosen if known else level).upper())
    if not known:
        logger.error("%s=%s is not a log level; use one of %s", LOG_LEVEL_ENV, chosen, ", ".join(get_args(LogLevel)))


class _StderrHandler(logging.Handler):
    """Writes to the current ``sys.stderr``, which rich replaces while ``rrl submit --foreground`` draws its view.

    It writes nothing while the root logger has handlers. A program that configures logging itself, for example a user's
    role, then gets each message once, in its own format.
    """

    def __init__(self, stamped: bool) -> None:
        super().__init__()
        self.setFormatter(_Formatter(f"{'%(stamp)s ' if stamped else ''}%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        try:
            line = self.format(record)
        except Exception:  # the arguments do not fit the message: logging reports that, and the caller continues
            self.handleError(record)
            return
        with contextlib.suppress(OSError, ValueError):  # stderr is closed, or is on a full disk
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


class _Formatter(logging.Formatter):
    """Stamps messages like the lines of roles' logs, and escapes control characters.

    Messages quote text of roles, nodes and users. Without the escapes, control characters in this text could control
    the terminal that shows stderr.
    """

    def format(self, record: logging.LogRecord) -> str:
        record.__dict__["stamp"] = stamp(int(record.created * _MICROS)).decode()
        return escaped_lines(super().format(record))
