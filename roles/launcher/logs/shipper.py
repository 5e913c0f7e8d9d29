"""The newest lines of a life, told to the manager as they come: what a node takes with it when it dies is there.

A thread and a socket of its own, so that neither a flood nor a run directory that hangs delays anything else. It costs
``RATE`` at most; of a flood the newest lines are told. A new manager is told the newest lines again.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence

from ....core.types import Incarnation
from ....transport.control.endpoints import Address, Dialer
from ....transport.control.log_messages import LOG_BOUNDS, MAX_TEXT_BYTES, TAIL_BYTES, Backlog, LogLines, LogLinesAck
from ....transport.keys import RunKeys

RATE_BYTES_PER_S = 32 * 2**10
"""bytes/s told on average: 2,000 lives that all flood come to 64 MiB/s at the manager"""
BURST_BYTES = 64 * 2**10
"""bytes that may be told at once: a whole tail"""
MESSAGE_OVERHEAD_BYTES = 4 * 2**10
"""bytes that a message counts beside its text: one line at a time is told eight times a second for long, more often
for a moment"""
MIN_MESSAGE_BYTES = 8 * 2**10
"""bytes of a flood that are told at once: a hundred lines every 0.4 s are newer than a thousand every 2 s"""
STUCK_CHECK_INTERVAL_S = 1.0
"""s between two looks whether the file still cannot be written"""
ANSWER_TIMEOUT_S = 10.0
"""s for an answer; then the same is said again"""


class Shipper:
    """Tells what is put into ``lines``. ``busy`` and ``stuck``: the file lacks lines; it cannot be written now."""

    def __init__(
        self, incarnation: Incarnation, keys: RunKeys, find: Callable[[], Address | None], busy: Callable[[], bool],
        stuck: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.lines = Backlog(TAIL_BYTES)
        self._incarnation, self._keys, self._find, self._busy, self._stuck = incarnation, keys, find, busy, stuck
        self._sent = Backlog(TAIL_BYTES)
        self._sent_stuck = False
        self._unsaved_at_end: bool | None = None
        """the log has ended; whether its file lacks something"""
        self._rate_limited_until = 0.0
        self._loop = asyncio.new_event_loop()
        self._wakeup, self._ending = asyncio.Event(), asyncio.Event()
        self._dialer: Dialer | None = None
        self._thread = threading.Thread(target=self._run, name="log shipper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake_up(self) -> None:
        """From any thread: look at ``lines``."""
        if not self._wakeup.is_set():
            self._call_soon(self._wakeup.set)

    @property
    def connected(self) -> bool:
        return self._dialer is not None and self._dialer.connected

    def finish(self, unsaved: bool, within: float) -> bool:
        """Tell the rest and that the log ends here. False when nobody took it within so many s."""
        self._unsaved_at_end = unsaved
        self._call_soon(self._ending.set)
        self._call_soon(self._wakeup.set)
        self._thread.join(within)
        return not self._thread.is_alive()

    def _call_soon(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(callback)

    def _run(self) -> None:
        self._loop.run_until_complete(self._send_loop())
        self._loop.close()

    async def _send_loop(self) -> None:
        self._dialer = dialer = Dialer(self._keys, LogLinesAck, self._find, self._on_connect, LOG_BOUNDS)
        running = asyncio.create_task(dialer.run())
        over = False
        while not over:
            self._wakeup.clear()
            over, stuck = self._unsaved_at_end is not None, self._unsaved_at_end or self._stuck()
            text = self.lines.pop_oldest(MAX_TEXT_BYTES if over else self._allowance())
            over = over and self.lines.empty
            if text or over or stuck != self._sent_stuck:
                await self._send_until_taken(dialer, LogLines(self._incarnation, text, stuck, over))
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STUCK_CHECK_INTERVAL_S if self._busy() else None):
                    await self._wakeup.wait()
        running.cancel()
        await asyncio.wait([running])
        await dialer.close()

    def _allowance(self) -> int:
        """Bytes that the rate has room for."""
        spent = max(0.0, self._rate_limited_until - self._loop.time()) * RATE_BYTES_PER_S
        return max(MIN_MESSAGE_BYTES, min(MAX_TEXT_BYTES, int(BURST_BYTES - spent)))

    async def _send_until_taken(self, dialer: Dialer, lines: LogLines) -> None:
        """Until it is taken. What comes meanwhile waits, or falls out."""
        while True:
            with contextlib.suppress(TimeoutError):
                await dialer.request(lines, ANSWER_TIMEOUT_S)
                break
        self._sent_stuck = lines.unsaved
        self._sent.put(lines.text)
        self._rate_limited_until = (
            max(self._loop.time(), self._rate_limited_until)
            + (len(lines.text) + MESSAGE_OVERHEAD_BYTES) / RATE_BYTES_PER_S
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._rate_limited_until - BURST_BYTES / RATE_BYTES_PER_S):
                await self._ending.wait()

    def _on_connect(self) -> Sequence[LogLines]:
        """What every new manager is told first."""
        sent = self._sent.all()
        return [LogLines(self._incarnation, sent, self._sent_stuck)] if sent else []
