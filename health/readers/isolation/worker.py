"""The process of one reader: it receives a byte as a request, reads, and replies with a frame.

The process ends when the supervisor (:mod:`rrl.health.readers.isolation.supervisor`) closes the connection. The
supervisor forks the process and opens no driver itself; the reader opens its driver here, after the fork.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, TypeVar

from ..base import NotInstalled, PermissionDenied, Reader, ReaderOptions
from ..samples import Reading
from . import framing
from .process import set_parent_death_signal

_log = logging.getLogger("rrl.readers")

T = TypeVar("T")
_DEFAULT_TIMES_S = (10.0, 10.0)
"""Interval and timeout (s) of a reader that cannot be imported."""


def run(
    name: str, class_path: str, options: ReaderOptions, connection: socket.socket, parent: int, alarm_after_s: float
) -> NoReturn:
    """Serve requests until the connection is closed.

    Args:
        name: Name of the reader.
        class_path: ``module:Class`` of the reader.
        options: Options of the reader.
        connection: Connection to the supervisor.
        parent: Pid of the supervisor.
        alarm_after_s: Seconds after which a kernel timer ends this process if a read hangs. No Python code can do this,
            since none runs during a hung call.
    """
    signal.signal(signal.SIGTERM, _on_sigterm)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # not SIGKILL, so that a reader with an open session of a driver's library has time to close it
    set_parent_death_signal(parent, signal.SIGTERM)
    source = _Source(name, class_path, options)
    code = 0
    try:
        try:
            _with_alarm(source.prepare, alarm_after_s)
            connection.sendall(framing.frame(framing.HELLO_FRAME, framing.encode(source.times)))
            while connection.recv(1):
                connection.sendall(framing.reading_frame(_with_alarm(source.read, alarm_after_s)))
        except (SystemExit, ConnectionError):  # SIGTERM arrived, or the supervisor has ended
            pass
        except BaseException as error:
            _log.error("reader %s failed: %r", name, error)
            code = 1
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except SystemExit:  # the death signal arrived just after the connection was closed
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, alarm_after_s)
        with contextlib.suppress(BaseException):
            source.close()
        os._exit(code)


class _Source:
    """A reader that is created at its first use. If the creation fails, the next use tries again."""

    def __init__(self, name: str, class_path: str, options: ReaderOptions) -> None:
        self._name, self._class_path, self._options = name, class_path, options
        self._reader: Reader | None = None
        self.times = _DEFAULT_TIMES_S

    def prepare(self) -> None:
        """Create the reader ahead of the first request.

        An error is ignored here, because the first request tries again and reports the error.
        """
        with contextlib.suppress(Exception):
            kind = _load(self._class_path)
            self.times = (kind.interval_s, kind.timeout_s)
            self._instance()

    def read(self) -> Reading:
        """Read once and return the result; errors become states of the result."""
        state, why, data = "read", "", None
        try:
            data = self._instance().read()
        except NotInstalled as error:
            state, why = "absent", str(error)
        except PermissionDenied as error:
            state, why = "denied", str(error)
        except Exception as error:
            state, why = "broken", f"{type(error).__name__}: {error}"
        return Reading(self._name, time.monotonic(), data, state, why)  # type: ignore[arg-type]

    def close(self) -> None:
        """Close the reader if it was created."""
        if self._reader is not None:
            self._reader.close()

    def _instance(self) -> Reader:
        if self._reader is None:
            self._reader = _load(self._class_path)(self._options)
            self.times = (self._reader.interval_s, self._reader.timeout_s)
        return self._reader


def _load(class_path: str) -> type[Reader]:
    module, _, name = class_path.partition(":")
    __import__(module)
    kind: type[Reader] = getattr(sys.modules[module], name)
    return kind


def _with_alarm(call: Callable[[], T], alarm_after_s: float) -> T:
    signal.setitimer(signal.ITIMER_REAL, alarm_after_s)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _on_sigterm(number: int, at: FrameType | None) -> None:
    """End the process; ignore further signals, which must not interrupt the closing of the reader."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit
