"""Copy a role's output to its log file and to the manager; the role never waits for either.

The role writes into a pipe that one thread always empties; a second thread writes the file, a third sends the newest
lines to the manager. They are started together and ended in order.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from functools import partial

from ....core.launch import Launch
from ....core.log_lines import stamp_of
from ....core.run_dir import RunDir
from ....core.text import last_lines
from ....transport.control.endpoints import Address
from ....transport.control.log_messages import Backlog
from ....transport.keys import RunKeys
from .files import LineTimestamper, RateLimiter, RotatingLog
from .shipper import Shipper

MAX_QUEUED_BYTES = 4 * 2**20
"""lines kept for a file that cannot be written; then the oldest go"""
STUCK_AFTER_S = 2.0
"""s without a write that ends well, though there are lines: then the manager is asked to write them"""
RETRY_INTERVAL_S = 1.0
"""s between two tries at a disk that refused"""
_TAIL_BYTES = 4096
"""bytes; the last line is among them"""
_READ_BYTES = 64 * 2**10
_WRITE_BYTES = 256 * 2**10


class LogPump:
    """Empties the pipe ``fd`` into ``log`` and into ``tail``, in threads of its own; closes both. ``news``, which must
    neither wait nor raise, is called when there is something to be told."""

    def __init__(self, fd: int, log: RotatingLog, tail: Backlog, notify: Callable[[], None]) -> None:
        self._fd, self._log, self._tail, self._notify = fd, log, tail, notify
        self._queued = Backlog(MAX_QUEUED_BYTES)
        self._last_bytes = b""
        """the end of all"""
        self._wakeup = threading.Event()
        self._ended = False
        self._closing = threading.Event()
        self._busy_since: float | None = None
        self._saved = False
        self._reader = threading.Thread(target=self._read, name="log reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name="log writer", daemon=True)

    def start(self) -> None:
        self._reader.start()
        self._writer.start()

    @property
    def busy(self) -> bool:
        """There are lines that the file lacks."""
        return self._busy_since is not None or not self._queued.empty

    @property
    def stuck(self) -> bool:
        """The file cannot be written now."""
        since = self._busy_since
        return since is not None and time.monotonic() - since > STUCK_AFTER_S

    def last_line(self, within: float) -> str:
        """The last one that says something, once the pipe is empty; as far as it is read after so many s."""
        self._reader.join(within)
        lines = (
            line.removeprefix(stamp_of(line)).decode(errors="replace").strip() for line in self._last_bytes.splitlines()
        )
        return last_lines("\n".join(filter(None, lines)).rpartition("\n")[2])

    def finish(self, within: float) -> bool:
        """Wait up to so many s for the pipe's end and the file's last line; what comes later is not kept. True when the
        file has everything that was read, on its disk."""
        deadline = time.monotonic() + within
        self._reader.join(within)
        self._closing.set()
        self._wakeup.set()
        self._writer.join(max(0.0, deadline - time.monotonic()))
        return self._saved and not self.busy

    # ── threads ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _read(self) -> None:
        limiter, stamper = RateLimiter(), LineTimestamper()
        reported_drops = 0
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        try:
            while True:
                due = stamper.flush_due_in(time.monotonic())
                if due == 0.0 or not poller.poll(None if due is None else due * 1000 + 1):
                    self._enqueue(stamper.flush())
                    continue
                if not (data := os.read(self._fd, _READ_BYTES)):
                    break
                if allowed := limiter.admit(data):
                    if limiter.dropped > reported_drops:
                        count, reported_drops = limiter.dropped - reported_drops, limiter.dropped
                        self._enqueue(stamper.gap(count))
                    self._enqueue(stamper.feed(allowed, time.monotonic()))
            last = (
                stamper.gap(limiter.dropped - reported_drops) if limiter.dropped > reported_drops else stamper.flush()
            )
            self._enqueue(last)
        finally:
            os.close(self._fd)
            self._ended = True
            self._wakeup.set()

    def _enqueue(self, lines: bytes) -> None:
        if lines:
            self._last_bytes = (self._last_bytes + lines[-_TAIL_BYTES:])[-_TAIL_BYTES:]
            self._queued.put(lines)
            self._tail.put(lines)
            self._wakeup.set()
            self._notify()

    def _write(self) -> None:
        unwritten = b""
        while True:
            self._wakeup.clear()
            over = self._ended or self._closing.is_set()
            if self._busy_since is None and not self._queued.empty:  # before it is taken: busy without a gap
                self._busy_since = time.monotonic()
            unwritten = unwritten or self._queued.pop_oldest(_WRITE_BYTES)
            if unwritten:
                unwritten = unwritten[self._log.append(unwritten) :]
                if not unwritten:
                    self._busy_since = None
                elif self._closing.is_set():
                    return
                else:
                    self._closing.wait(RETRY_INTERVAL_S)
            elif over:
                self._saved = self._log.close()
                return
            else:
                self._wakeup.wait()


DRAIN_TIMEOUT_S = 1.0
"""s for the rest of the log to be written: storage may hang"""
LAST_LINE_TIMEOUT_S = 1.0
"""s for the pipe of a command that has ended to be emptied: somebody may have inherited it"""
REPORT_TIMEOUT_S = 1.0
"""s for the manager to take the end of a log whose file is complete"""
UNSAVED_TIMEOUT_S = 5.0
"""s for a manager to be there and take what the file lacks: nobody else has it"""


class RoleLog:
    """What comes out of the pipe ``fd``, until :meth:`finish`."""

    def __init__(self, run: RunDir, keys: RunKeys, launch: Launch, fd: int) -> None:
        self._shipper = Shipper(
            launch.incarnation,
            keys,
            partial(Address.read, run.log_collector),
            lambda: self._pump.busy,
            lambda: self._pump.stuck,
        )
        file = RotatingLog(run.log_file(launch.tag))
        self._pump = LogPump(fd, file, self._shipper.lines, self._shipper.wake_up)

    def start(self) -> None:
        self._pump.start()
        self._shipper.start()

    def last_line(self) -> str:
        """Of what the command wrote, which has ended (blocking: some s at most)."""
        return self._pump.last_line(LAST_LINE_TIMEOUT_S)

    def finish(self) -> None:
        """Write and tell the rest (blocking: some s where storage or the manager are away)."""
        saved = self._pump.finish(DRAIN_TIMEOUT_S)
        if not saved:
            self._shipper.finish(True, UNSAVED_TIMEOUT_S)
        elif self._shipper.connected:
            self._shipper.finish(False, REPORT_TIMEOUT_S)
