"""The newest lines of a life, told to the manager as they come: what a node takes with it when it dies is there.

A thread and a socket of its own, so that neither a flood nor a run directory that hangs delays anything else. It costs
``RATE`` at most; of a flood the newest lines are told. A new manager is told the newest lines again.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence

from ....core.types import Life
from ....transport.control.endpoints import Address, Dialer
from ....transport.control.log_messages import LOGS, TAIL_BYTES, TEXT_BYTES, Backlog, Lines, Taken
from ....transport.keys import RunKeys

RATE = 32 * 2**10
"""bytes/s told on average: 2,000 lives that all flood come to 64 MiB/s at the manager"""
BURST = 64 * 2**10
"""bytes that may be told at once: a whole tail"""
MESSAGE = 4 * 2**10
"""bytes that a message counts beside its text: one line at a time is told eight times a second for long, more often
for a moment"""
STRETCH = 8 * 2**10
"""bytes of a flood that are told at once: a hundred lines every 0.4 s are newer than a thousand every 2 s"""
STUCK_EVERY = 1.0
"""s between two looks whether the file still cannot be written"""
ANSWER = 10.0
"""s for an answer; then the same is said again"""


class Shipper:
    """Tells what is put into ``lines``. ``busy`` and ``stuck``: the file lacks lines; it cannot be written now."""

    def __init__(
        self, life: Life, keys: RunKeys, find: Callable[[], Address | None], busy: Callable[[], bool],
        stuck: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.lines = Backlog(TAIL_BYTES)
        self._life, self._keys, self._find, self._busy, self._stuck = life, keys, find, busy, stuck
        self._told = Backlog(TAIL_BYTES)
        self._told_stuck = False
        self._over: bool | None = None
        """the log has ended; whether its file lacks something"""
        self._free_at = 0.0
        self._loop = asyncio.new_event_loop()
        self._awake, self._ending = asyncio.Event(), asyncio.Event()
        self._dialer: Dialer | None = None
        self._thread = threading.Thread(target=self._run, name="log shipper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def news(self) -> None:
        """From any thread: look at ``lines``."""
        if not self._awake.is_set():
            self._call(self._awake.set)

    @property
    def connected(self) -> bool:
        return self._dialer is not None and self._dialer.connected

    def finish(self, unsaved: bool, within: float) -> bool:
        """Tell the rest and that the log ends here. False when nobody took it within so many s."""
        self._over = unsaved
        self._call(self._ending.set)
        self._call(self._awake.set)
        self._thread.join(within)
        return not self._thread.is_alive()

    def _call(self, what: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(what)

    def _run(self) -> None:
        self._loop.run_until_complete(self._live())
        self._loop.close()

    async def _live(self) -> None:
        self._dialer = dialer = Dialer(self._keys, Taken, self._find, self._again, LOGS)
        running = asyncio.create_task(dialer.run())
        over = False
        while not over:
            self._awake.clear()
            over, stuck = self._over is not None, self._over or self._stuck()
            text = self.lines.take(TEXT_BYTES if over else self._allowance())
            over = over and self.lines.empty
            if text or over or stuck != self._told_stuck:
                await self._say(dialer, Lines(self._life, text, stuck, over))
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STUCK_EVERY if self._busy() else None):
                    await self._awake.wait()
        running.cancel()
        await asyncio.wait([running])
        await dialer.close()

    def _allowance(self) -> int:
        """Bytes that the rate has room for."""
        spent = max(0.0, self._free_at - self._loop.time()) * RATE
        return max(STRETCH, min(TEXT_BYTES, int(BURST - spent)))

    async def _say(self, dialer: Dialer, lines: Lines) -> None:
        """Until it is taken. What comes meanwhile waits, or falls out."""
        while True:
            with contextlib.suppress(TimeoutError):
                await dialer.ask(lines, ANSWER)
                break
        self._told_stuck = lines.unsaved
        self._told.put(lines.text)
        self._free_at = max(self._loop.time(), self._free_at) + (len(lines.text) + MESSAGE) / RATE
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._free_at - BURST / RATE):
                await self._ending.wait()

    def _again(self) -> Sequence[Lines]:
        """What every new manager is told first."""
        told = self._told.all()
        return [Lines(self._life, told, self._told_stuck)] if told else []
