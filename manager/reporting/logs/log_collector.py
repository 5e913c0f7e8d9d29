"""Receive the newest log lines of all incarnations, in a thread and on a socket of its own.

This way neither a flood of lines nor a hung disk delays the manager's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

import msgspec

from ....core.run_dir import write_atomically
from ....core.types import Incarnation
from ....transport.control.endpoints import Address, Listener
from ....transport.control.log_messages import LOG_BOUNDS, LogLines, LogLinesAck
from ....transport.keys import RunKeys
from ...context import RunContext
from ...model import events as ev
from ...model.actions import Fence, RestartAll
from ...model.queries import promoted_to, step_alias
from ...model.state import State
from . import log_buffers
from .log_buffers import LogBuffers

_log = logging.getLogger("rrl.manager")

WRITE_INTERVAL_S = 0.5
"""Seconds between two checks for buffers that are due."""
MAX_MESSAGES_PER_S = 1000
"""Maximum number of messages handled per second. A message of 8 KiB costs 0.14 ms of a core (measured), and this thread
shares its interpreter with the manager's loop. Beyond the limit, senders wait for their acknowledgements and send
their newest lines later."""
_MESSAGE_BURST = 100
"""Number of messages that may be handled at once before the limit of :data:`MAX_MESSAGES_PER_S` applies."""
_CLOSE_POLL_S = 0.02
_CLOSE_TIMEOUT_S = 5.0
"""Maximum time (s) that an exiting manager waits for the last buffers to be written, because storage may hang."""


class LogCollector:
    """Collects log lines. ``buffers`` and all I/O belong to the collector's thread.

    Args:
        context: the run and its newest state, which the collector's thread reads too.
        epoch: epoch of the manager, which is part of the files' names.
    """

    def __init__(self, context: RunContext, epoch: int) -> None:
        self._context, self._epoch = context, epoch
        self.buffers = LogBuffers(context.run_dir, epoch, lambda incarnation: _is_current(context.state(), incarnation))
        self._loop = asyncio.new_event_loop()
        self._leaving = asyncio.Event()
        self._thread: threading.Thread | None = None

    async def open(self, keys: RunKeys, host: str) -> None:
        """Listen on a free port of ``host`` and publish the address in the run directory.

        Must be called after the run has a state. Raises what :meth:`rrl.transport.control.endpoints.Listener.open`
        raises.
        """
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = loop.create_future()

        def report_opened(error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the caller was cancelled
                loop.call_soon_threadsafe(_complete, opened, error)

        self._thread = threading.Thread(
            target=self._run, args=(keys, host, report_opened), name="log collector", daemon=True
        )
        self._thread.start()
        await opened

    def on_event(self, event: ev.Event) -> None:
        """Schedule the writing of the buffers of an incarnation that has ended or was fenced."""
        if isinstance(event, ev.StepEnded):
            self._call_in_thread(self._write_later, self._log_owner(event.incarnation))
        elif isinstance(event, ev.Decided) and isinstance(event.action, Fence | RestartAll):
            for fence in event.action.fences if isinstance(event.action, RestartAll) else (event.action,):
                self._call_in_thread(self._write_later, self._log_owner(fence.incarnation))

    def _log_owner(self, incarnation: Incarnation) -> Incarnation:
        return step_alias(self._context.state(), incarnation)

    async def close(self) -> None:
        """Write the buffers that are due, and stop listening. May be called repeatedly."""
        if self._thread is None:  # it was never opened
            self._loop.close()
            return
        self._call_in_thread(self._leaving.set)
        await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT_S)

    def _call_in_thread(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(function, *arguments)

    # ── collector thread ───────────────────────────────────────────────────────────────────────────────────────────
    def _run(self, keys: RunKeys, host: str, report_opened: Callable[[BaseException | None], None]) -> None:
        try:
            self._loop.run_until_complete(self._listen(keys, host, report_opened))
        except Exception as error:
            report_opened(error)
            _log.error("logs of roles are no longer collected: %r", error)
        finally:
            self._loop.close()

    async def _listen(self, keys: RunKeys, host: str, report_opened: Callable[[BaseException | None], None]) -> None:
        listener = await Listener.open(keys, LogLines, epoch=self._epoch, host=host, bounds=LOG_BOUNDS)
        try:
            report_opened(None)
            taking = asyncio.create_task(self._receive_loop(listener))
            writing = asyncio.create_task(self._write_loop(listener.address))
            leaving = asyncio.create_task(self._wait_for_close())
            done, unfinished = await asyncio.wait((taking, writing, leaving), return_when=asyncio.FIRST_COMPLETED)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
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
        """Wait until the manager exits, then for the last lines of incarnations that have just ended.

        The second wait takes at most COMPLETION_GRACE_S.
        """
        await self._leaving.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(log_buffers.COMPLETION_GRACE_S):
                while self.buffers.due:
                    await asyncio.sleep(_CLOSE_POLL_S)

    async def _write_loop(self, address: Address) -> None:
        """Publish the collector's address as soon as it can be written, and write due buffers periodically."""
        published = False
        while True:
            if not published:
                with contextlib.suppress(OSError):
                    write_atomically(self._context.run_dir.log_collector, msgspec.json.encode(address))
                    published = True
            await asyncio.sleep(WRITE_INTERVAL_S)
            self.buffers.write_due(self._loop.time())

    def _write_later(self, incarnation: Incarnation) -> None:
        self.buffers.write_later(incarnation, self._loop.time())


def _is_current(state: State, incarnation: Incarnation) -> bool | None:
    """Return whether an incarnation is current; None if the run never had it.

    A promoted standby process counts as current while the member that it became is current.
    """
    replica = state.replicas.get(incarnation.replica)
    if replica is None or not 0 < incarnation.number <= replica.incarnation_number:
        return None
    return state.is_current(incarnation) or promoted_to(state, incarnation) is not None


def _complete(opened: asyncio.Future[None], error: BaseException | None) -> None:
    if opened.done():
        return
    if error is None:
        opened.set_result(None)
    else:
        opened.set_exception(error)
