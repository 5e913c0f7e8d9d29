"""Copy a role's output to its log file and to the manager without blocking the role.

The role writes into a pipe that one thread always empties. A second thread writes the file, and a third sends the
newest lines to the manager.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ....core.launch import Launch
from ....core.log_lines import STAMP_BYTES, stamp_of
from ....core.run_dir import RunDir
from ....core.text import last_lines
from ....transport.control.endpoints import Address
from ....transport.control.log_messages import Backlog
from ....transport.keys import RunKeys
from ..end_report import users_place
from .files import LineTimestamper, RateLimiter, RotatingLog
from .shipper import Shipper

MAX_QUEUED_BYTES = 4 * 2**20
"""Maximum number of bytes kept while the file cannot be written; above it, the oldest lines are dropped."""
STUCK_AFTER_S = 2.0
"""Seconds for which the launcher may fail to write waiting lines to the log file. After this time, the manager is asked
to write the lines to a file of its own."""
RETRY_INTERVAL_S = 1.0
"""Seconds between two tries to write after an error."""
_TAIL_BYTES = 4096
"""Number of bytes that are kept from the end of the output, to find its last line."""
_FRAME = re.compile(r'  File "(.+)", line (\d+)')
"""Pattern of a frame in a Python traceback."""
_READ_BYTES = 64 * 2**10
_WRITE_BYTES = 256 * 2**10


class LogPump:
    """Copies the pipe ``fd`` to ``log`` and to ``tail`` in two threads, and closes the pipe and the log.

    ``notify`` is called when ``tail`` has new lines; it must neither block nor raise.
    """

    def __init__(self, fd: int, log: RotatingLog, tail: Backlog, notify: Callable[[], None]) -> None:
        self._fd, self._log, self._tail, self._notify = fd, log, tail, notify
        self._queued = Backlog(MAX_QUEUED_BYTES)
        self._last_bytes = b""
        """The end of the output, at most :data:`_TAIL_BYTES`."""
        self._wakeup = threading.Event()
        self._ended = False
        self._closing = threading.Event()
        self._busy_since: float | None = None
        self._saved = False
        self._reader = threading.Thread(target=self._read, name="log reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name="log writer", daemon=True)

    def start(self) -> None:
        """Start both threads."""
        self._reader.start()
        self._writer.start()

    @property
    def busy(self) -> bool:
        """Whether lines are waiting to be written to the file."""
        return self._busy_since is not None or not self._queued.empty

    @property
    def stuck(self) -> bool:
        """Whether the file could not be written for :data:`STUCK_AFTER_S` seconds."""
        since = self._busy_since
        return since is not None and time.monotonic() - since > STUCK_AFTER_S

    def last_output(self, within: float) -> list[str]:
        """Return the last lines that are not blank, after waiting up to ``within`` seconds for the pipe's end."""
        self._reader.join(within)
        lines = (
            (line[STAMP_BYTES + 1 :] if stamp_of(line) else line).decode(errors="replace").rstrip()
            for line in self._last_bytes.splitlines()
        )
        return [line for line in lines if line]

    def finish(self, within: float) -> bool:
        """Wait up to ``within`` seconds until the pipe has ended and the file is written; later output is lost.

        Returns:
            Whether everything that was read is in the file and on the disk.
        """
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
            if self._busy_since is None and not self._queued.empty:  # before pop_oldest(), so that busy stays true
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
"""Timeout (s) for writing the rest of the log at the end, because the storage may hang."""
LAST_LINE_TIMEOUT_S = 1.0
"""Timeout (s) for emptying the pipe after the command has ended, because another process may have inherited the
pipe."""
REPORT_TIMEOUT_S = 1.0
"""Timeout (s) for the manager's acknowledgement of the end of a log whose file is complete."""
UNSAVED_TIMEOUT_S = 5.0
"""Timeout (s) for a manager to connect and receive the lines that the file lacks. It is longer than
:data:`REPORT_TIMEOUT_S`, because no other process has these lines."""


class RoleLog:
    """The log of one command: copies its output from the pipe ``fd`` until :meth:`finish`."""

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
        """Start the threads that read, write and send the output."""
        self._pump.start()
        self._shipper.start()

    def last_line(self, folder: Path | None = None) -> str:
        """Return the last line that the ended command wrote; block up to :data:`LAST_LINE_TIMEOUT_S`.

        If ``folder``, the job's folder, is given and the line ends a Python traceback, the place in the code is
        appended.
        """
        lines = self._pump.last_output(LAST_LINE_TIMEOUT_S)
        place = "" if folder is None else place_in_traceback(lines, folder)
        return last_lines(lines[-1] if lines else "") + (f" ({place})" if place else "")

    def finish(self) -> None:
        """Write and send the rest of the output; block some seconds if the storage or the manager is unreachable."""
        saved = self._pump.finish(DRAIN_TIMEOUT_S)
        if not saved:
            self._shipper.finish(True, UNSAVED_TIMEOUT_S)
        elif self._shipper.connected:
            self._shipper.finish(False, REPORT_TIMEOUT_S)


def place_in_traceback(lines: Sequence[str], folder: Path) -> str:
    """Return ``file:line`` in the user's code if ``lines`` end with a Python traceback, else an empty text.

    This serves a process that leaves no end report because it ended before it joined the run, for example by a syntax
    error. The result is only shown to people.
    """
    places: list[tuple[str, int]] = []
    for line in reversed(lines[:-1]):
        if not line.startswith(" "):  # the head of the traceback
            break
        if frame := _FRAME.match(line):
            places.insert(0, (frame[1], int(frame[2])))
    return users_place(places, folder) if places else ""
