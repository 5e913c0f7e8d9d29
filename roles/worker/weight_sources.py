"""Selects from reports of the manager and the store which weight version a rollout pulls next, and from where.

The manager's ``Peers`` message names every replica that serves weights (the relay chains are derived from this list)
and shows which incarnations are fenced. The store names a version as soon as the trainer has published it, together
with a few replicas that serve the version. The store's report is used if it is newer than the manager's: if it names a
newer version of the same trainer incarnation, or any version of a later incarnation. An incarnation that the manager
has fenced is never a source.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from ...core.types import ReplicaId, Version
from ...transport.messages import Peers, WeightSource
from ...transport.weights.pull import PullFailed
from ..trajectories.leases import Membership
from ..trajectories.types import NewestVersion

T = TypeVar("T")


class Superseded(PullFailed):
    """A pull is dropped because its source failed and a newer version is available."""


class WeightSources:
    """The newest reports of the manager and the store about weight versions. Used by one asyncio loop only."""

    def __init__(self) -> None:
        self._membership = Membership()
        self._from_manager: Peers | None = None
        self._from_store: NewestVersion | None = None

    def on_peers(self, peers: Peers) -> None:
        """Record the manager's newest ``Peers``; the caller drops outdated messages."""
        self._from_manager = peers
        self._membership.update(peer.incarnation for peer in peers.peers.values())

    def on_newest_version(self, newest: NewestVersion | None) -> None:
        """Record the store's answer. None, which a store returns after a restart, changes nothing."""
        self._from_store = newest or self._from_store

    @property
    def newest(self) -> Version | None:
        """The newest version that the manager or the store reported; None if there is none.

        The store's report does not count if the manager has fenced all sources that it names.
        """
        versions = [self._from_manager.newest if self._from_manager is not None else None]
        if self._from_store is not None and self._current_sources():
            versions.append(self._from_store.version)
        return max((version for version in versions if version is not None), default=None)

    def sources(self) -> tuple[WeightSource, ...]:
        """Return every replica that serves weights, with the newest state that the manager or the store reported."""
        sources: dict[ReplicaId, WeightSource] = {}
        for source in (
            *(self._from_manager.weight_sources if self._from_manager is not None else ()),
            *self._current_sources(),
        ):
            other = sources.get(source.incarnation.replica)
            if other is None or _order(source) > _order(other):
                sources[source.incarnation.replica] = source
        return tuple(sources.values())

    def _current_sources(self) -> list[WeightSource]:
        """Return the sources that the store named, without the sources that the manager has fenced."""
        sources = self._from_store.sources if self._from_store is not None else ()
        return [source for source in sources if self._membership.fenced_reason(source.incarnation) is None]


def _order(source: WeightSource) -> tuple[int, Version]:
    return source.incarnation.number, source.version or _NO_VERSION


_NO_VERSION = Version(-1, -1)
"""A version that is older than every published version."""


async def unless_set(event: asyncio.Event, request: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of ``request``; cancel it and return None if ``event`` is set first."""
    requesting, waiting = asyncio.create_task(request), asyncio.create_task(event.wait())
    try:
        await asyncio.wait((requesting, waiting), return_when=asyncio.FIRST_COMPLETED)
        return requesting.result() if requesting.done() else None
    finally:
        requesting.cancel()
        waiting.cancel()
