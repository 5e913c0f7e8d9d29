"""Send the peer directory to the workers of a run: the processes that run, and the weight versions that each serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from math import inf
from typing import Any

from ...core.types import STANDBY_ROLE, Incarnation, rank_of, role_of
from ...transport import messages as msg
from ..context import RunContext
from ..planner.peer_directory import PeerDirectory, build_directory

ANNOUNCE_INTERVAL_S = 0.05
"""Minimum seconds between two announcements. Each announcement carries the whole peer directory to every worker."""
VERSION_ANNOUNCE_S_PER_WORKER = 0.008
"""Minimum seconds per connected worker between two announcements if only the weight versions of receivers have changed.
Without this minimum, a new version would cause about a thousand announcements to 1,024 workers. A single announcement
to all of them takes 172 MB."""


class DirectoryAnnouncer:
    """Announces the peer directory of one run to its workers whenever the directory changed.

    ``send_all`` pushes one message to many connections; ``wake`` makes the manager's loop call :meth:`announce` again.
    """

    def __init__(
        self,
        context: RunContext,
        send_all: Callable[[Iterable[bytes], Any], Coroutine[Any, Any, None]],
        wake: Callable[[], None],
    ) -> None:
        self._context, self._send_all, self._wake = context, send_all, wake
        self._sent: PeerDirectory | None = None
        self._number = 0
        """Number of the newest announcement. Workers use it to ignore an older announcement of the same epoch."""
        self._announced_at = -inf
        self._timer: asyncio.TimerHandle | None = None
        """Timer that wakes the manager's loop when a delayed announcement is due."""

    async def announce(self) -> None:
        """Send the peer directory to every worker if it changed and the announcement interval has passed."""
        state, workers = self._context.state(), self._context.connections.workers
        directory = build_directory(state)
        if directory == self._sent:
            return
        urgent = self._sent is None or directory.without_versions != self._sent.without_versions
        version_interval_s = max(ANNOUNCE_INTERVAL_S, VERSION_ANNOUNCE_S_PER_WORKER * len(workers))
        pause_s = ANNOUNCE_INTERVAL_S if urgent else version_interval_s
        if self._timer is not None:
            self._timer.cancel()
        if (early_s := self._announced_at + pause_s - self._context.now()) > 0:
            self._timer = asyncio.get_running_loop().call_later(early_s, self._wake)
            return
        self._sent, self._announced_at = directory, self._context.now()
        self._number += 1
        peers = [peer for incarnation, peer in workers.items() if state.is_current(incarnation)]
        await self._send_all(peers, directory.message(state.epoch, self._number))

    def welcome(self, incarnation: Incarnation) -> msg.Welcome:
        """Return the reply to the Hello of a current incarnation. The reply contains the whole peer directory."""
        state, role = self._context.state(), role_of(incarnation.replica)
        rank, world = (0, 1) if role == STANDBY_ROLE else (rank_of(incarnation.replica), state.job.role(role).ranks)
        peers = build_directory(state).message(state.epoch, self._number)
        return msg.Welcome(incarnation, peers, rank, world, state.step)
