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
from ..base import STARTS_WITHIN
from ..samples import Reading
from . import framing, worker
from .process import dies_with, how, let_go, where

_log = logging.getLogger("rrl.readers")

AGAIN = 10.0
"""s until what was absent, not permitted or broken is looked at again, where the reader's own time is shorter"""
CLOSE_WITHIN = 3.0
"""s for a reader that is not hung to come to its end by itself"""
TERM_WITHIN = 2.0
"""s from SIGTERM to SIGKILL"""
KILL_WITHIN = 1.0
"""s from SIGKILL until a process is left behind: it hangs in the kernel"""
BACK_OFF = (1.0, 60.0)
"""s until a reader that died is started again: first, and at most (doubled each time)"""
_LIVED = 60.0
"""s after which a death is no longer counted with those before"""
_ALARM_AFTER = STARTS_WITHIN + TERM_WITHIN
"""s after which a read that should have been ended ends its own process"""
_CHUNK = 1 << 16
_NEVER = float("inf")


class _Child:
    """One reader and its process, as the keeper sees it. Times are of the monotonic clock, s."""

    def __init__(self, name: str, where: str) -> None:
        self.name, self.where = name, where
        self.pid = self.pidfd = 0
        """0: there is no process"""
        self.line: socket.socket | None = None
        self.inbox = framing.Inbox()
        self.every, self.within = 0.0, STARTS_WITHIN
        self.greeted = False
        self.asked: float | None = None
        """since when it owes an answer"""
        self.hung = False
        """and that was told"""
        self.due = 0.0
        """when it is asked, or started, again"""
        self.signalled = 0
        """the signal it was sent last, by us"""
        self.ends: float | None = None
        """when the next harder signal is due to a process that is to end"""
        self.born = 0.0
        self.deaths = 0

    def wakes(self, free: bool, hung_ends: float) -> float:
        """When something is to be done about it without its doing; ``free``: it may be asked."""
        if self.ends is not None:
            return self.ends
        if self.asked is not None:
            return self.asked + (max(hung_ends, self.within) if self.hung else self.within)
        return self.due if free else _NEVER


class _Keeping:
    def __init__(self, order: framing.Order, line: socket.socket) -> None:
        self._order, self._line = order, line
        self._children = [_Child(name, where) for name, where in order.readers.items()]
        self._out = bytearray()
        self._poll = select.poll()
        self._heard: dict[int, _Child] = {}
        """by the descriptor of its line"""
        self._watched: dict[int, _Child] = {}
        """by its pidfd"""
        self._closing = False
        line.setblocking(False)

    def run(self) -> None:
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGTERM, lambda number, at: self._close())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        dies_with(self._order.parent, signal.SIGTERM)
        self._poll.register(woken, select.POLLIN)
        while True:
            now = time.monotonic()
            for one in self._children:
                self._attend(one, now)
            if self._closing and not self._watched:
                return
            due = min((self._wakes(one) for one in self._children), default=_NEVER)
            if not self._closing:
                self._poll.register(self._line, select.POLLIN | (select.POLLOUT if self._out else 0))
            for fd, _ in self._poll.poll(None if due == _NEVER else max(0.0, due - time.monotonic()) * 1000 + 1):
                if fd == woken:
                    os.read(woken, _CHUNK)
                elif fd == self._line.fileno():
                    self._talk()
                elif (one_heard := self._heard.get(fd)) is not None:
                    self._hear(one_heard)
                elif (one_ended := self._watched.get(fd)) is not None:
                    self._bury(one_ended)

    def _wakes(self, one: _Child) -> float:
        return one.wakes(not self._out, self._order.hung_ends)

    def _attend(self, one: _Child, now: float) -> None:
        if now < self._wakes(one):
            return
        if one.ends is not None or one.hung:
            self._harder(one, now)
        elif one.asked is not None:
            one.hung = True
            verb = "answer" if one.greeted else "start"
            self._tell(one, "hung", f"did not {verb} within {one.within:g} s{where(one.pid)}")
        elif one.pid == 0:
            self._start(one, now)
        else:
            one.asked = now
            with contextlib.suppress(OSError):  # it died: its pidfd says so
                assert one.line is not None
                one.line.send(b"?")

    # ── a reader's life ────────────────────────────────────────────────────────────────────────────────────────────
    def _start(self, one: _Child, now: float) -> None:
        keeper = os.getpid()
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                pid = os.fork()
                if pid == 0:
                    self._become(one, theirs, keeper)
            one.pidfd = _pidfd(pid)
        except OSError as error:  # too many processes or descriptors here: that may pass
            one.due = now + AGAIN
            self._tell(one, "broken", f"its process cannot be started: {error.strerror}")
            return
        ours.setblocking(False)
        one.pid, one.line = pid, ours
        one.inbox, one.greeted, one.hung, one.ends, one.signalled = framing.Inbox(), False, False, None, 0
        one.born = one.asked = now
        one.within = self._order.within or STARTS_WITHIN
        self._heard[ours.fileno()] = self._watched[one.pidfd] = one
        self._poll.register(ours, select.POLLIN)
        self._poll.register(one.pidfd, select.POLLIN)

    def _become(self, one: _Child, line: socket.socket, keeper: int) -> NoReturn:
        """In the new process: let go of everything but the line, or the others would not see us end."""
        signal.set_wakeup_fd(-1)
        let_go([line.fileno()])
        worker.run(one.name, one.where, self._order.options, line, keeper, self._order.hung_ends + _ALARM_AFTER)

    def _hear(self, one: _Child) -> None:
        """Take what its line holds. A line that ends says that its process is about to."""
        while one.line is not None:
            try:
                data = one.line.recv(_CHUNK)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self._hang_up(one)
                return
            one.inbox.feed(data)
            try:
                for kind, body in one.inbox.frames():
                    self._take(one, kind, body, time.monotonic())
            except (ValueError, msgspec.DecodeError):  # its memory is damaged: that is no other reader's concern
                self._tell(one, "broken", "its process said what is no reading")
                self._hang_up(one)
                return

    def _take(self, one: _Child, kind: bytes, body: bytes, now: float) -> None:
        asked = one.asked if one.asked is not None else now
        one.asked, one.hung = None, False
        if kind == framing.HELLO:
            every, within = msgspec.msgpack.decode(body, type=tuple[float, float])
            one.every, one.within, one.greeted, one.due = every, self._order.within or within, True, now
            return
        one.due = max(now, asked + (one.every if kind == framing.READ else max(one.every, AGAIN)))
        self._say(framing.frame(kind, body))
        self._told(one)

    def _hang_up(self, one: _Child) -> None:
        if one.line is not None:
            self._poll.unregister(one.line)
            del self._heard[one.line.fileno()]
            one.line.close()
            one.line = None
        if one.ends is None:
            one.ends = time.monotonic() + CLOSE_WITHIN

    def _bury(self, one: _Child) -> None:
        self._hear(one)
        self._hang_up(one)
        _, status = os.waitpid(one.pid, 0)
        self._forget(one)
        now = time.monotonic()
        one.deaths = one.deaths + 1 if now - one.born < _LIVED else 1
        one.asked, one.hung, one.ends = None, False, None
        again = min(BACK_OFF[0] * 2.0 ** min(one.deaths - 1, 10), BACK_OFF[1])
        one.due = _NEVER if self._closing else now + again
        if not self._closing and not one.signalled:
            self._tell(one, "broken", f"its process ended {how(status)}")

    def _forget(self, one: _Child) -> None:
        self._poll.unregister(one.pidfd)
        del self._watched[one.pidfd]
        os.close(one.pidfd)
        one.pid = one.pidfd = 0

    def _harder(self, one: _Child, now: float) -> None:
        """The next step to make a process end. The last one: it hangs in the kernel, and is left."""
        if one.signalled == 0:
            one.signalled, one.ends = signal.SIGTERM, now + TERM_WITHIN
        elif one.signalled == signal.SIGTERM:
            one.signalled, one.ends = signal.SIGKILL, now + KILL_WITHIN
        elif self._closing:
            at = where(one.pid)
            _log.error("reader %s: process %d does not end on SIGKILL, it is left%s", one.name, one.pid, at)
            self._forget(one)
            one.ends = _NEVER
            return
        else:  # no other one is started as long as it is there
            one.ends = _NEVER
            self._tell(one, "hung", f"does not end on SIGKILL{where(one.pid)}")
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(one.pidfd, one.signalled)

    # ── the one who started us ─────────────────────────────────────────────────────────────────────────────────────
    def _talk(self) -> None:
        """It says nothing; its end is ours."""
        try:
            if self._out:
                del self._out[: self._line.send(self._out)]
            if not self._line.recv(_CHUNK):
                self._close()
        except BlockingIOError:
            pass
        except ConnectionError:
            self._close()

    def _tell(self, one: _Child, state: Literal["hung", "broken"], why: str) -> None:
        self._say(framing.reading(Reading(one.name, time.monotonic(), None, state, why)))
        self._told(one)

    def _say(self, frame: bytes) -> None:
        self._out += frame
        with contextlib.suppress(BlockingIOError, ConnectionError):  # its end is heard in _talk
            del self._out[: self._line.send(self._out)]

    def _told(self, one: _Child) -> None:
        if self._order.once:
            one.due = _NEVER

    def _close(self) -> None:
        """Ask all to end: first by hanging up, which they see between two reads."""
        if self._closing:
            return
        self._closing = True
        now = time.monotonic()
        with contextlib.suppress(KeyError):
            self._poll.unregister(self._line)
        for one in self._children:
            one.due = _NEVER
            if one.pid:
                one.ends = now + (0.0 if one.hung else CLOSE_WITHIN) if one.signalled == 0 else one.ends
                with contextlib.suppress(OSError):
                    if one.line is not None:
                        one.line.shutdown(socket.SHUT_WR)


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
    order = msgspec.json.decode(sys.argv[1], type=framing.Order)
    line = socket.socket(fileno=os.dup(0))
    for place in order.readers.values():  # once here instead of once in each: what is shared costs once
        with contextlib.suppress(Exception):  # its own process says what is wrong with it
            __import__(place.partition(":")[0])
    gc.collect()
    gc.freeze()  # what is there now is shared with the readers: their collectors shall not write to it
    _Keeping(order, line).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
