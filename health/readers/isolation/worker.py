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

from ..base import Absent, Denied, Reader, ReaderOptions
from ..samples import Reading
from . import framing
from .process import dies_with

_log = logging.getLogger("rrl.readers")

T = TypeVar("T")
_UNKNOWN_TIMES = (10.0, 10.0)
"""every and within (s) of a reader that cannot be imported"""


def run(name: str, where: str, options: ReaderOptions, line: socket.socket, parent: int, alarm: float) -> NoReturn:
    """``where``: ``module:Class``. ``alarm``: s after which a read that hangs ends this process, should no keeper be
    there to do so. That is the kernel's doing: no Python runs within a call that hangs."""
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    dies_with(parent, signal.SIGTERM)  # not SIGKILL: who holds a session of a driver's library gets time to close it
    source = _Source(name, where, options)
    code = 0
    try:
        try:
            _armed(source.prepare, alarm)
            line.sendall(framing.frame(framing.HELLO, framing.encode(source.times)))
            while line.recv(1):
                line.sendall(framing.reading(_armed(source.look, alarm)))
        except (SystemExit, ConnectionError):  # asked to end, or nobody is there any more
            pass
        except BaseException as error:
            _log.error("reader %s failed: %r", name, error)
            code = 1
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except SystemExit:  # the signal of a keeper's death came just after the end of its line
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, alarm)
        with contextlib.suppress(BaseException):
            source.close()
        os._exit(code)


class _Source:
    """A reader, made when it is first needed, and again as long as it cannot be made."""

    def __init__(self, name: str, where: str, options: ReaderOptions) -> None:
        self._name, self._where, self._options = name, where, options
        self._reader: Reader | None = None
        self.times = _UNKNOWN_TIMES

    def prepare(self) -> None:
        """Whatever goes wrong here goes wrong again at the first look, which tells it."""
        with contextlib.suppress(Exception):
            kind = _load(self._where)
            self.times = (kind.every, kind.within)
            self._made()

    def look(self) -> Reading:
        state, why, data = "read", "", None
        try:
            data = self._made().read()
        except Absent as error:
            state, why = "absent", str(error)
        except Denied as error:
            state, why = "denied", str(error)
        except Exception as error:
            state, why = "broken", f"{type(error).__name__}: {error}"
        return Reading(self._name, time.monotonic(), data, state, why)  # type: ignore[arg-type]

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _made(self) -> Reader:
        if self._reader is None:
            self._reader = _load(self._where)(self._options)
            self.times = (self._reader.every, self._reader.within)
        return self._reader


def _load(where: str) -> type[Reader]:
    module, _, name = where.partition(":")
    __import__(module)
    kind: type[Reader] = getattr(sys.modules[module], name)
    return kind


def _armed(call: Callable[[], T], alarm: float) -> T:
    signal.setitimer(signal.ITIMER_REAL, alarm)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _leave(number: int, at: FrameType | None) -> None:
    """End the process, once: a second signal must not interrupt the closing of the reader."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit
