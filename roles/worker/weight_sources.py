"""Which weight version a rollout pulls next and whom it asks, from the manager's ``Peers`` and the store's news.

While the manager is present it names every replica that serves weights, from which the chains of relays follow, and it
fences. The store names a version as soon as the trainer has published it, and a few replicas that serve it. What the
store says counts where the manager has not said it yet: a newer version, a trainer of a later incarnation. A life that
the manager has fenced is not asked, whoever names it.
"""

from __future__ import annotations

from ...core.types import ReplicaId, Version
from ...transport.messages import Holder, Peers
from ..trajectories.leases import Believed
from ..trajectories.types import NewestVersion


class WeightSources:
    """The latest word of the manager and of the store. Belongs to one asyncio loop."""

    def __init__(self) -> None:
        self._membership = Believed()
        self._of_manager: Peers | None = None
        self._of_store: NewestVersion | None = None

    def on_peers(self, peers: Peers) -> None:
        """Take in the manager's newest ``Peers``; the caller drops outdated ones."""
        self._of_manager = peers
        self._membership.told(peer.life for peer in peers.peers.values())

    def on_news(self, news: NewestVersion | None) -> None:
        """Take in the store's answer; None, which a store gives that has just restarted, changes nothing."""
        self._of_store = news or self._of_store

    @property
    def newest(self) -> Version | None:
        """The newest version that somebody serves who is not fenced, as far as is known."""
        named = [self._of_manager.newest if self._of_manager is not None else None]
        if self._of_store is not None and self._not_fenced():
            named.append(self._of_store.version)
        return max((version for version in named if version is not None), default=None)

    def holders(self) -> tuple[Holder, ...]:
        """Every replica that serves weights: those that the manager named, each brought up to date by what the store
        says of it, and those that only the store named."""
        holders: dict[ReplicaId, Holder] = {}
        for holder in (*(self._of_manager.holders if self._of_manager is not None else ()), *self._not_fenced()):
            other = holders.get(holder.life.replica)
            if other is None or _order(holder) > _order(other):
                holders[holder.life.replica] = holder
        return tuple(holders.values())

    def _not_fenced(self) -> list[Holder]:
        """The store's holders without those that the manager has fenced since."""
        named = self._of_store.holders if self._of_store is not None else ()
        return [holder for holder in named if self._membership.refused(holder.life) is None]


def _order(holder: Holder) -> tuple[int, Version]:
    return holder.life.incarnation, holder.holds or _NOTHING


_NOTHING = Version(-1, -1)
"""older than every version"""
