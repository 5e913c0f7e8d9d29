"""The peer directory: the address of every process, derived from the state, and sent to all processes when it changes.

It is derived by pure functions, and only :class:`DirectoryAnnouncer` sends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from math import inf
from typing import Any

from msgspec.structs import replace

from ..core.types import STANDBY_ROLE, Incarnation, NodeName, is_support, is_trainer, rank_of, role_of
from ..transport.messages import Peer, Peers, Welcome
from .context import RunContext
from .model.state import Replica, State, Status

ANNOUNCE_INTERVAL_S = 0.05
"""Minimum seconds between two announcements. Each announcement carries the whole peer directory to every worker."""


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
        self._sent: Peers | None = None
        self._number = 0
        """Number of the newest announcement. Workers use it to ignore an older announcement of the same epoch."""
        self._announced_at = -inf
        self._timer: asyncio.TimerHandle | None = None
        """Timer that wakes the manager's loop when a delayed announcement is due."""

    async def announce(self) -> None:
        """Send the peer directory to every worker if it changed and the announcement interval has passed."""
        state, workers = self._context.state(), self._context.connections.workers
        directory = build_directory(state, self._number)
        if directory == self._sent:
            return
        if self._timer is not None:
            self._timer.cancel()
        if (early_s := self._announced_at + ANNOUNCE_INTERVAL_S - self._context.now()) > 0:
            self._timer = asyncio.get_running_loop().call_later(early_s, self._wake)
            return
        self._number += 1
        self._sent, self._announced_at = replace(directory, seq=self._number), self._context.now()
        await self._send_all(
            [peer for incarnation, peer in workers.items() if state.is_current(incarnation)], self._sent
        )

    def welcome(self, incarnation: Incarnation) -> Welcome:
        """Return the reply to the Hello of a current incarnation. The reply contains the whole peer directory."""
        state, role = self._context.state(), role_of(incarnation.replica)
        rank, world = (
            (0, 1) if is_support(incarnation.replica) else (rank_of(incarnation.replica), state.job.role(role).ranks)
        )
        return Welcome(incarnation, build_directory(state, self._number), rank, world, state.step)


def build_directory(state: State, number: int) -> Peers:
    """Return announcement ``number`` of all current incarnations, and of a trainer that still finishes its step."""
    current = [one for one in (*state.workers, *state.guests) if one.is_current or _may_commit(state, one)]
    peers = {replica.id: _peer(replica) for replica in current}
    return Peers(state.epoch, number, peers, _snapshot_servers(state), state.evaluated)


def _peer(replica: Replica) -> Peer:
    joined = replica.status is Status.JOINED
    weights = replica.weight_address if joined else None
    return Peer(replica.incarnation, replica.listen_address, joined, weights, replica.rendezvous_address)


def _may_commit(state: State, replica: Replica) -> bool:
    """Return whether the replica is a trainer of a run that ends, and its step is still being stopped.

    Such a trainer may still commit the training step that it is working on. It stays in the directory, because the
    store accepts commits only from incarnations in the directory. This is safe, since no further incarnation of the
    trainer will follow.
    """
    if state.finish is None or not is_trainer(replica.id):
        return False
    return any(orphan.incarnation == replica.incarnation for orphan in state.orphan_steps.values())


def _snapshot_servers(state: State) -> dict[NodeName, str]:
    """Return the snapshot servers' addresses on the nodes of the trainer and of its standby processes.

    The trainer's nodes are included while it is down, too.
    """
    nodes = {
        replica.node or replica.preferred_node
        for replica in state.replicas.values()
        if is_trainer(replica.id) or (replica.is_current and replica.role == STANDBY_ROLE)
    }
    candidates = (state.nodes[node] for node in nodes if node is not None and node in state.nodes)
    return {
        node.name: node.snapshot_address
        for node in sorted(candidates, key=lambda node: node.name)
        if node.snapshot_address and node.excluded is None
    }
