"""The process of one reader: it receives a byte as a request, reads, and replies.

:mod:`rrl.health.readers.isolation.client` starts ``python -m rrl.health.readers.isolation.worker`` with a
:class:`WorkerConfig` as the only argument and the connection as stdin. The process ends when the client closes the
connection. Each message to the client is an :class:`Answer` in msgpack, after its length in bytes.
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
from typing import NoReturn, TypeVar

import msgspec
from msgspec import Struct

from ....core.log_lines import start_logging
from ..base import NotInstalled, PermissionDenied, Reader, ReaderOptions
from ..samples import Reading
from .process import end_soon_after, set_parent_death_signal

_log = logging.getLogger("rrl.readers")

T = TypeVar("T")
_DEFAULT_TIMES_S = (10.0, 10.0)
"""Interval and timeout (s) of a reader that cannot be imported."""


HEAD_BYTES = 4
"""Size of the length before an answer, as little-endian bytes."""


class WorkerConfig(Struct, frozen=True):
    """The only argument of the process, as JSON."""

    name: str
    """Name of the reader."""
    class_path: str
    """``module:Class`` of the reader."""
    options: ReaderOptions
    parent: int
    """Pid of the process with the client."""
    alarm_after_s: float
    """Seconds after which a kernel timer ends this process if a read hangs. No Python code can do this, since none runs
    during a hung call."""


class Answer(Struct, frozen=True):
    """What the process sends after its start and after each request."""

    reading: Reading | None
    """The result of the request; None after the start."""
    interval_s: float
    """Seconds between the starts of two reads."""
    timeout_s: float
    """Seconds that a read may take before it counts as hung."""


def main() -> NoReturn:
    """Serve requests until the connection is closed."""
    start_logging()
    config = msgspec.json.decode(sys.argv[1], type=WorkerConfig)
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a connection is closed once every process has closed it
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # Not SIGKILL: a reader with an open session of a driver's library closes it when the connection is closed.
    end_soon_after(signal.SIGQUIT, signal.SIGTERM)
    set_parent_death_signal(config.parent, signal.SIGQUIT)
    source = _Source(config.name, config.class_path, config.options)
    code = 0
    try:
        _with_alarm(source.prepare, config.alarm_after_s)
        _send(connection, Answer(None, *source.times))
        while connection.recv(1):
            reading = _with_alarm(source.read, config.alarm_after_s)
            _send(connection, Answer(reading, *source.times))
    except ConnectionError:  # the client has ended
        pass
    except BaseException as error:
        _log.error("reader %s failed: %r", config.name, error)
        code = 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, config.alarm_after_s)
        with contextlib.suppress(BaseException):
            source.close()
        os._exit(code)


def _send(connection: socket.socket, answer: Answer) -> None:
    body = msgspec.msgpack.encode(answer)
    connection.sendall(len(body).to_bytes(HEAD_BYTES, "little") + body)


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


if __name__ == "__main__":
    main()
