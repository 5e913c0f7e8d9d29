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
from ...core.types import Incarnation
from ...transport.control.endpoints import Address, Listener
from ...transport.control.log_messages import LOG_BOUNDS, LogLines, LogLinesAck
from ...transport.keys import RunKeys
from ..model import events as ev
from ..model.actions import Fence, RestartAll
from ..model.queries import promoted_to, step_alias
from ..model.state import State
from . import log_buffers
from .log_buffers import LogBuffers

_log = logging.getLogger("rrl.manager")

WRITE_INTERVAL_S = 0.5
"""s between two looks at copies that are due"""
MAX_MESSAGES_PER_S = 1000
"""taken per s; one of 8 KiB costs 0.14 ms of a core (measured), and this thread shares its interpreter with the
manager's loop. Beyond it lives wait for their answers, and tell their newest lines when it is their turn"""
_MESSAGE_BURST = 100
"""messages that may be taken before that counts"""
_CLOSE_POLL_S = 0.02
_CLOSE_TIMEOUT_S = 5.0
"""s for the last copies to be written when the manager leaves: storage may hang"""


class LogCollector:
    """``buffers`` belongs to the collector's thread; so does all I/O."""

    def __init__(self, buffers: LogBuffers, state: Callable[[], State | None]) -> None:
        self.buffers = buffers
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
        collector = cls(LogBuffers(run, epoch, lambda incarnation: _is_current(state(), incarnation)), state)
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = loop.create_future()

        def report_opened(error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(_complete, opened, error)

        collector._thread = threading.Thread(
            target=collector._run, args=(run, keys, epoch, host, report_opened), name="log collector", daemon=True
        )
        collector._thread.start()
        await opened
        return collector

    def on_event(self, event: ev.Event) -> None:
        """A life that ended or is no longer believed: its newest lines are kept."""
        if isinstance(event, ev.StepEnded):
            self._call_in_thread(self._write_later, self._log_owner(event.incarnation))
        elif isinstance(event, ev.Decided) and isinstance(event.action, Fence | RestartAll):
            for fence in event.action.fences if isinstance(event.action, RestartAll) else (event.action,):
                self._call_in_thread(self._write_later, self._log_owner(fence.incarnation))

    def _log_owner(self, incarnation: Incarnation) -> Incarnation:
        state = self._state()
        return incarnation if state is None else step_alias(state, incarnation)

    async def close(self) -> None:
        """Write what is due, and listen no more. Repeatable."""
        self._call_in_thread(self._leaving.set)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT_S)

    def _call_in_thread(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(function, *arguments)

    # ── in its thread ──────────────────────────────────────────────────────────────────────────────────────────────
    def _run(
        self, run: RunDir, keys: RunKeys, epoch: int, host: str, report_opened: Callable[[BaseException | None], None]
    ) -> None:
        try:
            self._loop.run_until_complete(self._listen(run, keys, epoch, host, report_opened))
        except Exception as error:
            report_opened(error)
            _log.error("logs of roles are no longer collected: %r", error)
        finally:
            self._loop.close()

    async def _listen(
        self, run: RunDir, keys: RunKeys, epoch: int, host: str, report_opened: Callable[[BaseException | None], None]
    ) -> None:
        listener = await Listener.open(keys, LogLines, epoch=epoch, host=host, bounds=LOG_BOUNDS)
        try:
            report_opened(None)
            taking = asyncio.create_task(self._receive_loop(listener))
            writing = asyncio.create_task(self._write_loop(run, listener.address))
            leaving = asyncio.create_task(self._wait_for_close())
            done, left = await asyncio.wait((taking, writing, leaving), return_when=asyncio.FIRST_COMPLETED)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            self.buffers.write_all_due()
            for task in done:
                task.result()
        finally:
            await listener.close()

    async def _receive_loop(self, listener: Listener) -> None:
        free_at = 0.0
        while True:
            incoming = await listener.receive()
            now = self._loop.time()
            self.buffers.add(incoming.message, now)
            await listener.send(incoming.peer, LogLinesAck(), incoming.request_id)
            free_at = max(now, free_at) + 1 / MAX_MESSAGES_PER_S
            if (wait := free_at - now - _MESSAGE_BURST / MAX_MESSAGES_PER_S) > 0:
                await asyncio.sleep(wait)

    async def _wait_for_close(self) -> None:
        """Once we are to leave and those that have just ended have had time for their last word."""
        await self._leaving.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(log_buffers.COMPLETION_GRACE_S):
                while self.buffers.due:
                    await asyncio.sleep(_CLOSE_POLL_S)

    async def _write_loop(self, run: RunDir, address: Address) -> None:
        """Where we listen, as soon as there is room for it; and what is due."""
        published = False
        while True:
            if not published:
                with contextlib.suppress(OSError):
                    write_atomically(run.log_collector, msgspec.json.encode(address))
                    published = True
            await asyncio.sleep(WRITE_INTERVAL_S)
            self.buffers.write_due(self._loop.time())

    def _write_later(self, incarnation: Incarnation) -> None:
        self.buffers.write_later(incarnation, self._loop.time())


def _is_current(state: State | None, incarnation: Incarnation) -> bool | None:
    """Of a step that began as a shadow's: whether the member is that it became."""
    replica = None if state is None else state.replicas.get(incarnation.replica)
    if state is None or replica is None or not 0 < incarnation.number <= replica.incarnation_number:
        return None
    return state.is_current(incarnation) or promoted_to(state, incarnation) is not None


def _complete(opened: asyncio.Future[None], error: BaseException | None) -> None:
    if opened.done():
        return
    if error is None:
        opened.set_result(None)
    else:
        opened.set_exception(error)
