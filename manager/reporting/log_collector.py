"""Where lives tell the newest lines of their logs: a thread and a socket beside the manager's loop, so that neither a
flood of lines nor a disk that hangs delays a beat."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

import msgspec

from ...core.run_dir import RunDir, write_atomically
from ...core.types import Life
from ...transport.control.endpoints import Address, Listener
from ...transport.control.log_messages import LOGS, Lines, Taken
from ...transport.keys import RunKeys
from ..model import events as ev
from ..model.actions import Fence, RestartAll
from ..model.queries import became, named_by
from ..model.state import State
from . import log_buffers
from .log_buffers import Copies

_log = logging.getLogger("rrl.manager")

LOOK = 0.5
"""s between two looks at copies that are due"""
MESSAGES = 1000
"""taken per s; one of 8 KiB costs 0.14 ms of a core (measured), and this thread shares its interpreter with the
manager's loop. Beyond it lives wait for their answers, and tell their newest lines when it is their turn"""
_AT_ONCE = 100
"""messages that may be taken before that counts"""
_LOOK_LEAVING = 0.02
_CLOSE = 5.0
"""s for the last copies to be written when the manager leaves: storage may hang"""


class LogCollector:
    """``copies`` belongs to the collector's thread; so does all I/O."""

    def __init__(self, copies: Copies, state: Callable[[], State | None]) -> None:
        self.copies = copies
        self._state = state
        self._loop = asyncio.new_event_loop()
        self._leaving = asyncio.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    async def open(
        cls, run: RunDir, keys: RunKeys, epoch: int, host: str, state: Callable[[], State | None]
    ) -> LogCollector:
        """Listen on a free port of ``host`` and say so in the run directory. ``state`` is called from another thread.

        Raises what :meth:`rrl.transport.control.endpoints.Listener.open` raises."""
        collector = cls(Copies(run, epoch, lambda life: _believed(state(), life)), state)
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = loop.create_future()

        def tell(error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(_settle, opened, error)

        collector._thread = threading.Thread(
            target=collector._run, args=(run, keys, epoch, host, tell), name="log collector", daemon=True
        )
        collector._thread.start()
        await opened
        return collector

    def notice(self, event: ev.Event) -> None:
        """A life that ended or is no longer believed: its newest lines are kept."""
        if isinstance(event, ev.StepEnded):
            self._call(self._keep, self._named(event.life))
        elif isinstance(event, ev.Decided) and isinstance(event.action, Fence | RestartAll):
            for fence in event.action.fences if isinstance(event.action, RestartAll) else (event.action,):
                self._call(self._keep, self._named(fence.life))

    def _named(self, life: Life) -> Life:
        state = self._state()
        return life if state is None else named_by(state, life)

    async def close(self) -> None:
        """Write what is due, and listen no more. Repeatable."""
        self._call(self._leaving.set)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _CLOSE)

    def _call(self, what: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(what, *arguments)

    # ── in its thread ──────────────────────────────────────────────────────────────────────────────────────────────
    def _run(
        self, run: RunDir, keys: RunKeys, epoch: int, host: str, tell: Callable[[BaseException | None], None]
    ) -> None:
        try:
            self._loop.run_until_complete(self._listen(run, keys, epoch, host, tell))
        except Exception as error:
            tell(error)
            _log.error("logs of roles are no longer collected: %r", error)
        finally:
            self._loop.close()

    async def _listen(
        self, run: RunDir, keys: RunKeys, epoch: int, host: str, tell: Callable[[BaseException | None], None]
    ) -> None:
        listener = await Listener.open(keys, Lines, epoch=epoch, host=host, bounds=LOGS)
        try:
            tell(None)
            taking = asyncio.create_task(self._take(listener))
            writing = asyncio.create_task(self._write(run, listener.address))
            leaving = asyncio.create_task(self._leave())
            done, left = await asyncio.wait((taking, writing, leaving), return_when=asyncio.FIRST_COMPLETED)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            self.copies.write_all_due()
            for task in done:
                task.result()
        finally:
            await listener.close()

    async def _take(self, listener: Listener) -> None:
        free_at = 0.0
        while True:
            incoming = await listener.receive()
            now = self._loop.time()
            self.copies.take(incoming.message, now)
            await listener.send(incoming.peer, Taken(), incoming.ask)
            free_at = max(now, free_at) + 1 / MESSAGES
            if (wait := free_at - now - _AT_ONCE / MESSAGES) > 0:
                await asyncio.sleep(wait)

    async def _leave(self) -> None:
        """Once we are to leave and those that have just ended have had time for their last word."""
        await self._leaving.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(log_buffers.LAST_WORD):
                while self.copies.due:
                    await asyncio.sleep(_LOOK_LEAVING)

    async def _write(self, run: RunDir, address: Address) -> None:
        """Where we listen, as soon as there is room for it; and what is due."""
        said = False
        while True:
            if not said:
                with contextlib.suppress(OSError):
                    write_atomically(run.collector, msgspec.json.encode(address))
                    said = True
            await asyncio.sleep(LOOK)
            self.copies.write_due(self._loop.time())

    def _keep(self, life: Life) -> None:
        self.copies.keep(life, self._loop.time())


def _believed(state: State | None, life: Life) -> bool | None:
    """Of a step that began as a shadow's: whether the member is that it became."""
    replica = None if state is None else state.replicas.get(life.replica)
    if state is None or replica is None or not 0 < life.incarnation <= replica.incarnation:
        return None
    return state.believed(life) or became(state, life) is not None


def _settle(opened: asyncio.Future[None], error: BaseException | None) -> None:
    if opened.done():
        return
    if error is None:
        opened.set_result(None)
    else:
        opened.set_exception(error)
