"""Which weight version a rollout pulls next and whom it asks, from the manager's ``Peers`` and the store's news.

While the manager is present it names every replica that serves weights, from which the chains of relays follow, and it
fences. The store names a version as soon as the trainer has published it, and a few replicas that serve it. What the
store says counts where the manager has not said it yet: a newer version, a trainer of a later incarnation. A life that
the manager has fenced is not asked, whoever names it.
"""

from __future__ import annotations

from ...core.types import ReplicaId, Version
from ...transport.messages import Peers, WeightSource
from ..trajectories.leases import Membership
from ..trajectories.types import NewestVersion


class WeightSources:
    """The latest word of the manager and of the store. Belongs to one asyncio loop."""

    def __init__(self) -> None:
        self._membership = Membership()
        self._from_manager: Peers | None = None
        self._from_store: NewestVersion | None = None

    def on_peers(self, peers: Peers) -> None:
        """Take in the manager's newest ``Peers``; the caller drops outdated ones."""
        self._from_manager = peers
        self._membership.update(peer.incarnation for peer in peers.peers.values())

    def on_newest_version(self, newest: NewestVersion | None) -> None:
        """Take in the store's answer; None, which a store gives that has just restarted, changes nothing."""
        self._from_store = newest or self._from_store

    @property
    def newest(self) -> Version | None:
        """The newest version that somebody serves who is not fenced, as far as is known."""
        named = [self._from_manager.newest if self._from_manager is not None else None]
        if self._from_store is not None and self._current_sources():
            named.append(self._from_store.version)
        return max((version for version in named if version is not None), default=None)

    def sources(self) -> tuple[WeightSource, ...]:
        """Every replica that serves weights: those that the manager named, each brought up to date by what the store
        says of it, and those that only the store named."""
        sources: dict[ReplicaId, WeightSource] = {}
        for holder in (
            *(self._from_manager.weight_sources if self._from_manager is not None else ()),
            *self._current_sources(),
        ):
            other = sources.get(holder.incarnation.replica)
            if other is None or _order(holder) > _order(other):
                sources[holder.incarnation.replica] = holder
        return tuple(sources.values())

    def _current_sources(self) -> list[WeightSource]:
        """The store's holders without those that the manager has fenced since."""
        named = self._from_store.sources if self._from_store is not None else ()
        return [holder for holder in named if self._membership.fenced_reason(holder.incarnation) is None]


def _order(holder: WeightSource) -> tuple[int, Version]:
    return holder.incarnation.number, holder.version or _NO_VERSION


_NO_VERSION = Version(-1, -1)
"""older than every version"""
