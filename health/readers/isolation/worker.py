"""A reader's own process: it is asked by a byte, reads, and answers by a frame. It ends when nobody can ask any more.

Forked by :mod:`rrl.health.readers.isolation.supervisor`, so that nothing of a driver is opened before the fork.
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
"""every and within (s) of a reader that cannot be imported"""


def run(
    name: str, class_path: str, options: ReaderOptions, connection: socket.socket, parent: int, alarm_after_s: float
) -> NoReturn:
    """``where``: ``module:Class``. ``alarm``: s after which a read that hangs ends this process, should no keeper be
    there to do so. That is the kernel's doing: no Python runs within a call that hangs."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    set_parent_death_signal(
        parent, signal.SIGTERM
    )  # not SIGKILL: who holds a session of a driver's library gets time to close it
    source = _Source(name, class_path, options)
    code = 0
    try:
        try:
            _with_alarm(source.prepare, alarm_after_s)
            connection.sendall(framing.frame(framing.HELLO_FRAME, framing.encode(source.times)))
            while connection.recv(1):
                connection.sendall(framing.reading_frame(_with_alarm(source.read, alarm_after_s)))
        except (SystemExit, ConnectionError):  # asked to end, or nobody is there any more
            pass
        except BaseException as error:
            _log.error("reader %s failed: %r", name, error)
            code = 1
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except SystemExit:  # the signal of a keeper's death came just after the end of its line
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, alarm_after_s)
        with contextlib.suppress(BaseException):
            source.close()
        os._exit(code)


class _Source:
    """A reader, made when it is first needed, and again as long as it cannot be made."""

    def __init__(self, name: str, class_path: str, options: ReaderOptions) -> None:
        self._name, self._class_path, self._options = name, class_path, options
        self._reader: Reader | None = None
        self.times = _DEFAULT_TIMES_S

    def prepare(self) -> None:
        """Whatever goes wrong here goes wrong again at the first look, which tells it."""
        with contextlib.suppress(Exception):
            kind = _load(self._class_path)
            self.times = (kind.interval_s, kind.timeout_s)
            self._instance()

    def read(self) -> Reading:
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
    """End the process, once: a second signal must not interrupt the closing of the reader."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit
