"""The newest weight version and the replicas that serve it, according to the reports of trainer and rollouts.

The store is the only directory of versions, so that rollouts keep receiving weights while the manager is frozen or
dead. The addresses of the replicas are in the manager's ``Peers`` message.

The directory is not durable. Each trainer or rollout keeps one request open at the store, which carries the versions
that it serves and is sent again on every reconnect. So a store that restarts knows the newest version as soon as one
replica that serves it has reconnected, even if the trainer is dead. Until then, rollouts keep what they knew.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Protocol

from msgspec import Struct

from ...core.types import Incarnation, Version
from ...transport.control.endpoints import Incoming
from .types import Denied, FollowVersions, NewestVersion, NotReady


class VersionDirectory:
    """The newest version that any current replica serves, and all replicas that serve it.

    Before the caller passes a report to :meth:`report`, it must check that the incarnation of the report is current.
    """

    def __init__(self) -> None:
        self._held: dict[Incarnation, tuple[Version, ...]] = {}
        self._sources: dict[tuple[Version, ...], dict[Incarnation, None]] = {}
        """Replicas by the versions that they serve, in the order of their reports. They are few groups."""

    @property
    def newest(self) -> NewestVersion | None:
        """The answer to ``FollowVersions`` requests; None while no version is known."""
        if not self._sources:
            return None
        version = max(map(max, self._sources))
        return NewestVersion(
            version, tuple((held, tuple(sources)) for held, sources in self._sources.items() if version in held)
        )

    def report(self, source: Incarnation, versions: tuple[Version, ...]) -> None:
        """Record which versions, at least one, ``source`` serves. Repeating a report changes nothing."""
        known = self._held.get(source)
        if known == versions:
            return
        if known is not None:
            del self._sources[known][source]
            if not self._sources[known]:
                del self._sources[known]
        self._held[source] = versions
        self._sources.setdefault(versions, {})[source] = None

    def remove(self, is_fenced: Callable[[Incarnation], bool]) -> None:
        """Remove fenced sources. If all sources of the newest version are fenced, an older version is the newest."""
        remaining = {source: held for source, held in self._held.items() if not is_fenced(source)}
        self._held, self._sources = {}, {}
        for source, held in remaining.items():
            self.report(source, held)


class VersionStore(Protocol):
    """The methods of the store that requests about versions use."""

    @property
    def newest_version(self) -> NewestVersion | None:
        """The newest weight version and its sources."""
        ...

    def report_versions(self, source: Incarnation, versions: tuple[Version, ...]) -> Denied | NotReady | None:
        """Record the versions that ``source`` serves, if any. Return why the report is rejected; None if accepted."""
        ...


def report_and_read(store: VersionStore, request: FollowVersions) -> NewestVersion | NotReady | Denied:
    """Report the versions that the sender serves, and return the newest known version."""
    return store.report_versions(request.incarnation, request.weight_versions) or store.newest_version or NotReady()


class _Following(Struct):
    """An open request for a version newer than the sender knows, and the loop time (s) until which it waits."""

    incoming: Incoming
    until: float


class Followers:
    """The open ``FollowVersions`` requests at ``store``: nearly always one request of each trainer and rollout.

    They are stored apart from requests for work or batches, which are evaluated in every round of the server.
    ``FollowVersions`` requests are evaluated only when they arrive, when the newest version or the membership has
    changed, or when a wait is over. ``now`` is the time of the server's loop in seconds.
    """

    def __init__(self, store: VersionStore) -> None:
        self._store = store
        self._waiting: dict[Incarnation, _Following] = {}
        self._arrived: set[Incarnation] = set()
        self._answered_version: Version | None = None
        """Newest version when all requests were last evaluated."""
        self._evaluate_all = False

    def add(self, incoming: Incoming, now: float) -> None:
        """Add a request. Drop an earlier request of the same incarnation: its sender waits only for the new one."""
        incarnation = incoming.message.incarnation
        self._waiting[incarnation] = _Following(incoming, now + incoming.message.wait)
        self._arrived.add(incarnation)

    def membership_changed(self) -> None:
        """Evaluate every request again in the next round, because its sender may have become current or fenced."""
        self._evaluate_all = True

    @property
    def due(self) -> float:
        """Loop time (s) at which the first wait is over; inf without requests."""
        return min((waiting.until for waiting in self._waiting.values()), default=inf)

    def answers(self, now: float) -> list[tuple[Incoming, NewestVersion | NotReady | Denied]]:
        """Return the answers that can be given now, and remove their requests."""
        for incarnation in self._arrived:
            report_and_read(self._store, self._waiting[incarnation].incoming.message)
        newest = self._store.newest_version
        version = None if newest is None else newest.version
        changed, self._answered_version = version != self._answered_version, version
        members_changed, self._evaluate_all = self._evaluate_all, False
        incarnations = list(self._waiting) if changed or members_changed or self.due <= now else list(self._arrived)
        self._arrived.clear()
        answers: list[tuple[Incoming, NewestVersion | NotReady | Denied]] = []
        for incarnation in incarnations:
            waiting, request = self._waiting[incarnation], self._waiting[incarnation].incoming.message
            answer = report_and_read(self._store, request)
            is_news = isinstance(answer, Denied)
            if isinstance(answer, NewestVersion):  # who still pulls it may have lost all sources that it knows
                is_pulled = members_changed and answer.version not in request.weight_versions
                is_news = answer.version != request.known or is_pulled
            if is_news or waiting.until <= now:
                answers.append((waiting.incoming, answer))
                del self._waiting[incarnation]
        return answers
