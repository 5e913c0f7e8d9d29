"""The supervisor process: forks a process per reader, requests samples when due and forwards them to the client.

:mod:`rrl.health.readers.isolation.client` starts ``python -m rrl.health.readers.isolation.supervisor``. The supervisor
enforces the deadline of each read, and makes no call that could hang. While the client has not received the pending
results, the supervisor requests no samples; the kernel and the drivers keep new data until then. The supervisor ends
when the client disconnects, or when the client's process ends.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import sys
import time
from types import FrameType
from typing import Literal, NoReturn

import msgspec

from ....core.log_lines import start_logging
from ..base import START_TIMEOUT_S
from ..samples import Reading
from . import framing, worker
from .process import close_inherited_fds, describe_blocked_call, describe_exit, set_parent_death_signal

_log = logging.getLogger("rrl.readers")

RETRY_INTERVAL_S = 10.0
"""Minimum time (s) before a source that was absent, not permitted or broken is read again."""
CLOSE_TIMEOUT_S = 3.0
"""Seconds within which a reader that is not hung must end by itself."""
TERM_TIMEOUT_S = 2.0
"""Seconds from SIGTERM to SIGKILL."""
KILL_TIMEOUT_S = 1.0
"""Seconds after SIGKILL at which a process that still runs counts as hung in the kernel. It is then left running."""
BACKOFF_S = (1.0, 60.0)
"""First and longest delay (s) before a reader that died is restarted. The delay doubles with each restart."""
_STABLE_AFTER_S = 60.0
"""Seconds after which a reader process counts as stable. If it dies later, the delay before its restart is the first
value of ``BACKOFF_S`` again."""
_ALARM_AFTER_S = START_TIMEOUT_S + TERM_TIMEOUT_S
"""Seconds after the hung timeout at which a kernel timer ends a process that still hangs. The supervisor ends such a
process earlier; the timer is needed only if the supervisor fails."""
_CHUNK_BYTES = 1 << 16
_NEVER = float("inf")


class _Child:
    """One reader and its process. Times are of the monotonic clock, in seconds."""

    def __init__(self, name: str, class_path: str) -> None:
        self.name, self.class_path = name, class_path
        self.pid = self.pidfd = 0
        """Pid and pidfd of the process; both are 0 without a process."""
        self.connection: socket.socket | None = None
        self.inbox = framing.Inbox()
        self.interval_s, self.timeout_s = 0.0, START_TIMEOUT_S
        self.hello_received = False
        self.request_sent_at: float | None = None
        """Time of the unanswered request to the process; None if there is none."""
        self.hung = False
        """Whether the unanswered request was reported as hung."""
        self.due_at = 0.0
        """Time of the next request, or of the restart."""
        self.signalled = 0
        """Last signal that the supervisor sent to the process; 0 if it sent none."""
        self.escalate_at: float | None = None
        """Time of the next stronger signal to a process that must end; None if it need not end."""
        self.started_at = 0.0
        self.deaths = 0

    def wakes_at(self, free: bool, hung_timeout_s: float) -> float:
        """Return the time (s) at which the supervisor must act on this reader even if no event arrives.

        Args:
            free: Whether a request may be sent now.
            hung_timeout_s: Seconds after the request at which a process with a hung read is ended.
        """
        if self.escalate_at is not None:
            return self.escalate_at
        if self.request_sent_at is not None:
            return self.request_sent_at + (max(hung_timeout_s, self.timeout_s) if self.hung else self.timeout_s)
        return self.due_at if free else _NEVER


class _Supervisor:
    """The loop that serves the client and all reader processes."""

    def __init__(self, config: framing.ReaderConfig, client: socket.socket) -> None:
        self._config, self._client = config, client
        self._children = [_Child(name, class_path) for name, class_path in config.readers.items()]
        self._out = bytearray()
        self._poll = select.poll()
        self._by_connection: dict[int, _Child] = {}
        """Readers by the descriptor of their connection."""
        self._by_pidfd: dict[int, _Child] = {}
        """Readers by the pidfd of their process."""
        self._closing = False
        self._sigterm_received = False
        client.setblocking(False)

    def run(self) -> None:
        """Run until the client ends or SIGTERM arrives, and all processes have ended."""
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        set_parent_death_signal(self._config.parent, signal.SIGTERM)
        self._poll.register(woken, select.POLLIN)
        while True:
            if self._sigterm_received:
                self._close()
            now = time.monotonic()
            for child in self._children:
                self._service(child, now)
            if self._closing and not self._by_pidfd:
                return
            due = min((self._wakes_at(child) for child in self._children), default=_NEVER)
            if not self._closing:
                self._poll.register(self._client, select.POLLIN | (select.POLLOUT if self._out else 0))
            for fd, _ in self._poll.poll(None if due == _NEVER else max(0.0, due - time.monotonic()) * 1000 + 1):
                if fd == woken:
                    os.read(woken, _CHUNK_BYTES)
                elif fd == self._client.fileno():
                    self._service_client()
                elif (readable_child := self._by_connection.get(fd)) is not None:
                    self._receive(readable_child)
                elif (ended_child := self._by_pidfd.get(fd)) is not None:
                    self._reap(ended_child)

    def _on_sigterm(self, number: int, at: FrameType | None) -> None:
        """Record that the signal arrived, so that the loop in `run` closes the readers.

        The wakeup descriptor wakes this loop. The handler does not close the readers itself, because it could miss a
        reader whose process is just being started. That process would never end, and neither would the supervisor.
        """
        self._sigterm_received = True

    def _wakes_at(self, child: _Child) -> float:
        return child.wakes_at(not self._out, self._config.hung_timeout_s)

    def _service(self, child: _Child, now: float) -> None:
        if now < self._wakes_at(child):
            return
        if child.escalate_at is not None or child.hung:
            self._escalate_signal(child, now)
        elif child.request_sent_at is not None:
            child.hung = True
            verb = "answer" if child.hello_received else "start"
            self._report(
                child, "hung", f"did not {verb} within {child.timeout_s:g} s{describe_blocked_call(child.pid)}"
            )
        elif child.pid == 0:
            self._start(child, now)
        else:
            child.request_sent_at = now
            with contextlib.suppress(OSError):  # the process died, and its pidfd reports the death
                assert child.connection is not None
                child.connection.send(b"?")

    # ── reader processes ──────────────────────────────────────────────────────────────────────────────────────────────
    def _start(self, child: _Child, now: float) -> None:
        supervisor_pid = os.getpid()
        try:
            parent_end, child_end = socket.socketpair()
            with child_end:
                pid = os.fork()
                if pid == 0:
                    self._exec_child(child, child_end, supervisor_pid)
            child.pidfd = _pidfd(pid)
        except OSError as error:  # too many processes or descriptors: possibly temporary
            child.due_at = now + RETRY_INTERVAL_S
            self._report(child, "broken", f"its process cannot be started: {error.strerror}")
            return
        parent_end.setblocking(False)
        child.pid, child.connection = pid, parent_end
        child.inbox, child.hello_received, child.hung, child.escalate_at, child.signalled = (
            framing.Inbox(),
            False,
            False,
            None,
            0,
        )
        child.started_at = child.request_sent_at = now
        child.timeout_s = self._config.read_timeout_s or START_TIMEOUT_S
        self._by_connection[parent_end.fileno()] = self._by_pidfd[child.pidfd] = child
        self._poll.register(parent_end, select.POLLIN)
        self._poll.register(child.pidfd, select.POLLIN)

    def _exec_child(self, child: _Child, connection: socket.socket, supervisor_pid: int) -> NoReturn:
        """Run the reader in the child process.

        The child first closes the connections to all other readers, which it inherits from the supervisor. If it kept
        them open, those readers could not notice that the supervisor closes them.
        """
        signal.set_wakeup_fd(-1)
        close_inherited_fds([connection.fileno()])
        worker.run(
            child.name,
            child.class_path,
            self._config.options,
            connection,
            supervisor_pid,
            self._config.hung_timeout_s + _ALARM_AFTER_S,
        )

    def _receive(self, child: _Child) -> None:
        """Handle all bytes that have arrived from the process of a reader.

        If the process has closed its connection, the connection is closed here too, because the process is about to
        end.
        """
        while child.connection is not None:
            try:
                data = child.connection.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self._disconnect(child)
                return
            child.inbox.feed(data)
            try:
                for kind, body in child.inbox.frames():
                    self._on_frame(child, kind, body, time.monotonic())
            except (ValueError, msgspec.DecodeError):  # the process's memory may be damaged; others are unaffected
                self._report(child, "broken", "its process sent an invalid frame")
                self._disconnect(child)
                return

    def _on_frame(self, child: _Child, kind: bytes, body: bytes, now: float) -> None:
        request_sent_at = child.request_sent_at if child.request_sent_at is not None else now
        child.request_sent_at, child.hung = None, False
        if kind == framing.HELLO_FRAME:
            interval_s, timeout_s = msgspec.msgpack.decode(body, type=tuple[float, float])
            child.interval_s, child.timeout_s, child.hello_received, child.due_at = (
                interval_s,
                self._config.read_timeout_s or timeout_s,
                True,
                now,
            )
            return
        child.due_at = max(
            now,
            request_sent_at
            + (child.interval_s if kind == framing.READ_FRAME else max(child.interval_s, RETRY_INTERVAL_S)),
        )
        self._send(framing.frame(kind, body))
        self._after_report(child)

    def _disconnect(self, child: _Child) -> None:
        if child.connection is not None:
            self._poll.unregister(child.connection)
            del self._by_connection[child.connection.fileno()]
            child.connection.close()
            child.connection = None
        if child.escalate_at is None:
            child.escalate_at = time.monotonic() + CLOSE_TIMEOUT_S

    def _reap(self, child: _Child) -> None:
        self._receive(child)
        self._disconnect(child)
        _, status = os.waitpid(child.pid, 0)
        self._release(child)
        now = time.monotonic()
        child.deaths = child.deaths + 1 if now - child.started_at < _STABLE_AFTER_S else 1
        child.request_sent_at, child.hung, child.escalate_at = None, False, None
        backoff_s = min(BACKOFF_S[0] * 2.0 ** min(child.deaths - 1, 10), BACKOFF_S[1])
        child.due_at = _NEVER if self._closing else now + backoff_s
        if not self._closing and not child.signalled:
            self._report(child, "broken", f"its process ended {describe_exit(status)}")

    def _release(self, child: _Child) -> None:
        self._poll.unregister(child.pidfd)
        del self._by_pidfd[child.pidfd]
        os.close(child.pidfd)
        child.pid = child.pidfd = 0

    def _escalate_signal(self, child: _Child, now: float) -> None:
        """Send the next stronger signal to a process that must end; after SIGKILL, send nothing more."""
        if child.signalled == 0:
            child.signalled, child.escalate_at = signal.SIGTERM, now + TERM_TIMEOUT_S
        elif child.signalled == signal.SIGTERM:
            child.signalled, child.escalate_at = signal.SIGKILL, now + KILL_TIMEOUT_S
        elif self._closing:
            at = describe_blocked_call(child.pid)
            _log.error("reader %s: process %d does not end on SIGKILL; it still runs%s", child.name, child.pid, at)
            self._release(child)
            child.escalate_at = _NEVER
            return
        else:  # no second process is started while this one exists
            child.escalate_at = _NEVER
            self._report(child, "hung", f"does not end on SIGKILL{describe_blocked_call(child.pid)}")
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child.pidfd, child.signalled)

    # ── the client ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _service_client(self) -> None:
        """Send pending results to the client. The client sends nothing; its disconnection ends the supervisor."""
        try:
            if self._out:
                del self._out[: self._client.send(self._out)]
            if not self._client.recv(_CHUNK_BYTES):
                self._close()
        except BlockingIOError:
            pass
        except ConnectionError:
            self._close()

    def _report(self, child: _Child, state: Literal["hung", "broken"], why: str) -> None:
        self._send(framing.reading_frame(Reading(child.name, time.monotonic(), None, state, why)))
        self._after_report(child)

    def _send(self, frame: bytes) -> None:
        self._out += frame
        with contextlib.suppress(BlockingIOError, ConnectionError):  # `run` notices a disconnected client
            del self._out[: self._client.send(self._out)]

    def _after_report(self, child: _Child) -> None:
        if self._config.once:
            child.due_at = _NEVER

    def _close(self) -> None:
        """Make all readers end: close their connections now, and set the time of the first signal to each.

        A reader notices between two reads that its connection was closed.
        """
        if self._closing:
            return
        self._closing = True
        now = time.monotonic()
        with contextlib.suppress(KeyError):
            self._poll.unregister(self._client)
        for child in self._children:
            child.due_at = _NEVER
            if child.pid:
                child.escalate_at = (
                    now + (0.0 if child.hung else CLOSE_TIMEOUT_S) if child.signalled == 0 else child.escalate_at
                )
                with contextlib.suppress(OSError):
                    if child.connection is not None:
                        child.connection.shutdown(socket.SHUT_WR)


def _pidfd(pid: int) -> int:
    """Return the pidfd of a child. On failure, kill and reap the child and raise OSError."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)  # the child has not opened anything yet
        os.waitpid(pid, 0)
        raise


def main() -> int:
    """Run the supervisor with its configuration as the only argument and its connection to the client as stdin."""
    start_logging()
    config = msgspec.json.decode(sys.argv[1], type=framing.ReaderConfig)
    client = socket.socket(fileno=os.dup(0))
    for class_path in config.readers.values():  # all readers share the memory of a module that is imported here
        with contextlib.suppress(Exception):  # the reader's own process reports the error
            __import__(class_path.partition(":")[0])
    gc.collect()
    gc.freeze()  # keeps garbage collectors of the readers from copying shared memory
    _Supervisor(config, client).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
