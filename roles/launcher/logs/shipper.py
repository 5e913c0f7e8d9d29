"""Send the newest lines of a role's output to the manager, so that they survive the loss of the node.

The lines are sent by a separate thread on a separate socket, so that neither a flood of lines nor a hung run directory
delays other messages. On average at most ``RATE_BYTES_PER_S`` bytes are sent per second; during a flood, only the
newest lines are sent. A new manager receives the newest lines again.
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
"""Maximum average number of bytes sent per second. 2,000 replicas at this rate send 64 MiB/s to the manager."""
BURST_BYTES = 64 * 2**10
"""Number of bytes that may be sent in one burst: all lines that are kept (:data:`TAIL_BYTES`)."""
MESSAGE_OVERHEAD_BYTES = 4 * 2**10
"""Number of bytes that the rate limit counts for each message in addition to the message's text. So on average at most
eight messages are sent per second."""
MIN_MESSAGE_BYTES = 8 * 2**10
"""Number of bytes of text that a message may always contain, even if the rate limit is used up. In a long flood,
every message has this size, and 100 lines arrive at the manager every 0.4 s. With messages of the maximum size, 1,000
lines would arrive every 2 s."""
STUCK_CHECK_INTERVAL_S = 1.0
"""Seconds between two checks whether the log file cannot be written, while lines wait to be written to it."""
ANSWER_TIMEOUT_S = 10.0
"""Timeout (s) of the manager's acknowledgement, after which the same lines are sent again."""


class Shipper:
    """Sends the lines that are put into ``lines`` to the manager.

    ``find`` returns the address of the manager's log collector. ``busy`` returns whether the log file lacks lines, and
    ``stuck`` whether the file cannot be written.
    """

    def __init__(
        self, incarnation: Incarnation, keys: RunKeys, find: Callable[[], Address | None], busy: Callable[[], bool],
        stuck: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.lines = Backlog(TAIL_BYTES)
        self._incarnation, self._keys, self._find, self._busy, self._stuck = incarnation, keys, find, busy, stuck
        self._sent = Backlog(TAIL_BYTES)
        self._sent_stuck = False
        self._unsaved_at_end: bool | None = None
        """Whether the log file lacks lines at the end of the log; None before the end."""
        self._rate_limited_until = 0.0
        self._loop = asyncio.new_event_loop()
        self._wakeup, self._ending = asyncio.Event(), asyncio.Event()
        self._dialer: Dialer | None = None
        self._thread = threading.Thread(target=self._run, name="log shipper", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake_up(self) -> None:
        """Make the thread send new ``lines``. May be called from any thread."""
        if not self._wakeup.is_set():
            self._call_soon(self._wakeup.set)

    @property
    def connected(self) -> bool:
        """Whether the manager's log collector is connected."""
        return self._dialer is not None and self._dialer.connected

    def finish(self, unsaved: bool, within: float) -> bool:
        """Send the remaining lines and the message that the log has ended.

        Args:
            unsaved: whether the log file lacks lines.
            within: seconds to wait for the acknowledgement.

        Returns:
            Whether a manager acknowledged everything in time.
        """
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
        """Return the bytes that the next message may contain under the rate limit."""
        spent = max(0.0, self._rate_limited_until - self._loop.time()) * RATE_BYTES_PER_S
        return max(MIN_MESSAGE_BYTES, min(MAX_TEXT_BYTES, int(BURST_BYTES - spent)))

    async def _send_until_taken(self, dialer: Dialer, lines: LogLines) -> None:
        """Send the lines until the manager acknowledges them, then wait as the rate limit demands.

        Lines that arrive in the meantime are buffered; the oldest are dropped when the buffer is full.
        """
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
        """Return the first message on each new connection: the lines that were sent last."""
        sent = self._sent.all()
        return [LogLines(self._incarnation, sent, self._sent_stuck)] if sent else []
