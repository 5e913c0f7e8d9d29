"""``python -m rrl.health.readers.isolation.supervisor``: the keeper's process. It forks a process per reader, asks each
in its time, keeps the deadline of each read, and passes on what they say.

It does nothing itself that could hang, and asks nobody while its own reader does not take what there is: the kernel and
the drivers keep what is new until then. Started by :class:`rrl.health.readers.isolation.client.Keeper`; ends with it.
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
from typing import Literal, NoReturn

import msgspec

from ....core.log_lines import start_logging
from ..base import START_TIMEOUT_S
from ..samples import Reading
from . import framing, worker
from .process import close_inherited_fds, describe_blocked_call, describe_exit, set_parent_death_signal

_log = logging.getLogger("rrl.readers")

RETRY_INTERVAL_S = 10.0
"""s until what was absent, not permitted or broken is looked at again, where the reader's own time is shorter"""
CLOSE_TIMEOUT_S = 3.0
"""s for a reader that is not hung to come to its end by itself"""
TERM_TIMEOUT_S = 2.0
"""s from SIGTERM to SIGKILL"""
KILL_TIMEOUT_S = 1.0
"""s from SIGKILL until a process is left behind: it hangs in the kernel"""
BACKOFF_S = (1.0, 60.0)
"""s until a reader that died is started again: first, and at most (doubled each time)"""
_STABLE_AFTER_S = 60.0
"""s after which a death is no longer counted with those before"""
_ALARM_AFTER_S = START_TIMEOUT_S + TERM_TIMEOUT_S
"""s after which a read that should have been ended ends its own process"""
_CHUNK_BYTES = 1 << 16
_NEVER = float("inf")


class _Child:
    """One reader and its process, as the keeper sees it. Times are of the monotonic clock, s."""

    def __init__(self, name: str, class_path: str) -> None:
        self.name, self.class_path = name, class_path
        self.pid = self.pidfd = 0
        """0: there is no process"""
        self.connection: socket.socket | None = None
        self.inbox = framing.Inbox()
        self.interval_s, self.timeout_s = 0.0, START_TIMEOUT_S
        self.hello_received = False
        self.request_sent_at: float | None = None
        """since when it owes an answer"""
        self.hung = False
        """and that was told"""
        self.due_at = 0.0
        """when it is asked, or started, again"""
        self.signalled = 0
        """the signal it was sent last, by us"""
        self.escalate_at: float | None = None
        """when the next harder signal is due to a process that is to end"""
        self.started_at = 0.0
        self.deaths = 0

    def wakes_at(self, free: bool, hung_timeout_s: float) -> float:
        """When something is to be done about it without its doing; ``free``: it may be asked."""
        if self.escalate_at is not None:
            return self.escalate_at
        if self.request_sent_at is not None:
            return self.request_sent_at + (max(hung_timeout_s, self.timeout_s) if self.hung else self.timeout_s)
        return self.due_at if free else _NEVER


class _Supervisor:
    def __init__(self, config: framing.ReaderConfig, client: socket.socket) -> None:
        self._config, self._client = config, client
        self._children = [_Child(name, where) for name, where in config.readers.items()]
        self._out = bytearray()
        self._poll = select.poll()
        self._by_connection: dict[int, _Child] = {}
        """by the descriptor of its line"""
        self._by_pidfd: dict[int, _Child] = {}
        """by its pidfd"""
        self._closing = False
        client.setblocking(False)

    def run(self) -> None:
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGTERM, lambda number, at: self._close())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        set_parent_death_signal(self._config.parent, signal.SIGTERM)
        self._poll.register(woken, select.POLLIN)
        while True:
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
            with contextlib.suppress(OSError):  # it died: its pidfd says so
                assert child.connection is not None
                child.connection.send(b"?")

    # ── a reader's life ───────────────────────────────────────────────────────────────────────────────────────────────
    def _start(self, child: _Child, now: float) -> None:
        supervisor_pid = os.getpid()
        try:
            parent_end, child_end = socket.socketpair()
            with child_end:
                pid = os.fork()
                if pid == 0:
                    self._exec_child(child, child_end, supervisor_pid)
            child.pidfd = _pidfd(pid)
        except OSError as error:  # too many processes or descriptors here: that may pass
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
        """In the new process: let go of everything but the line, or the others would not see us end."""
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
        """Take what its line holds. A line that ends says that its process is about to."""
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
            except (ValueError, msgspec.DecodeError):  # its memory is damaged: that is no other reader's concern
                self._report(child, "broken", "its process said what is no reading")
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
        """The next step to make a process end. The last one: it hangs in the kernel, and is left."""
        if child.signalled == 0:
            child.signalled, child.escalate_at = signal.SIGTERM, now + TERM_TIMEOUT_S
        elif child.signalled == signal.SIGTERM:
            child.signalled, child.escalate_at = signal.SIGKILL, now + KILL_TIMEOUT_S
        elif self._closing:
            at = describe_blocked_call(child.pid)
            _log.error("reader %s: process %d does not end on SIGKILL, it is left%s", child.name, child.pid, at)
            self._release(child)
            child.escalate_at = _NEVER
            return
        else:  # no other one is started as long as it is there
            child.escalate_at = _NEVER
            self._report(child, "hung", f"does not end on SIGKILL{describe_blocked_call(child.pid)}")
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child.pidfd, child.signalled)

    # ── the one who started us ────────────────────────────────────────────────────────────────────────────────────────
    def _service_client(self) -> None:
        """It says nothing; its end is ours."""
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
        with contextlib.suppress(BlockingIOError, ConnectionError):  # its end is heard in _talk
            del self._out[: self._client.send(self._out)]

    def _after_report(self, child: _Child) -> None:
        if self._config.once:
            child.due_at = _NEVER

    def _close(self) -> None:
        """Ask all to end: first by hanging up, which they see between two reads."""
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
    """Its pidfd. Raises OSError, and nobody is left."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)  # it has opened nothing yet
        os.waitpid(pid, 0)
        raise


def main() -> int:
    start_logging()
    config = msgspec.json.decode(sys.argv[1], type=framing.ReaderConfig)
    client = socket.socket(fileno=os.dup(0))
    for class_path in config.readers.values():  # once here instead of once in each: what is shared costs once
        with contextlib.suppress(Exception):  # its own process says what is wrong with it
            __import__(class_path.partition(":")[0])
    gc.collect()
    gc.freeze()  # what is there now is shared with the readers: their collectors shall not write to it
    _Supervisor(config, client).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
