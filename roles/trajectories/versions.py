"""The newest weight version and the replicas that serve it, according to the reports of trainer and rollouts.

Versions are announced this way in addition to the manager's ``Peers`` message, so that rollouts keep receiving weights
while the manager is frozen or dead. Only the current trainer determines which version is the newest. Rollouts also
report that they serve the version, in case the trainer dies just after publishing it.

The directory is not durable. Each trainer or rollout keeps one request open at the store, which carries the version
that it serves and is sent again on every reconnect. So a store that restarts knows the newest version as soon as the
trainer has reconnected.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Protocol

from msgspec import Struct

from ...core.types import Incarnation, Version, is_trainer
from ...transport.control.endpoints import Incoming
from ...transport.messages import WeightSource
from .types import Denied, FollowVersions, NewestVersion, NotReady

MAX_SOURCES = 8
"""Maximum number of sources that an answer to a rollout names, about 100 bytes each. A rollout tries them one after
another, after the relays that the manager named. More sources would help only if all of these died at once."""


class VersionDirectory:
    """The newest version that the current trainer published, and up to :data:`MAX_SOURCES` replicas that serve it.

    Before the caller passes a report to :meth:`report`, it must check that the incarnation of the report is current.
    """

    def __init__(self) -> None:
        self._version: Version | None = None
        self._sources: dict[Incarnation, WeightSource] = {}
        """Replicas that serve ``_version``; the publisher is the first, because it reports first."""
        self.newest: NewestVersion | None = None
        """The answer to ``FollowVersions`` requests: a new object after each change, None while no version is known."""

    def report(self, source: WeightSource) -> None:
        """Record which version ``source`` serves. Repeating a report changes nothing."""
        version = source.version
        if version is None:
            return
        if is_trainer(source.incarnation.replica) and (self._version is None or version > self._version):
            self._version, self._sources = version, {}
        full = len(self._sources) >= MAX_SOURCES and source.incarnation not in self._sources
        if version == self._version and not full and self._sources.get(source.incarnation) != source:
            self._sources[source.incarnation] = source
            self._update_newest()

    def remove(self, is_fenced: Callable[[Incarnation], bool]) -> None:
        """Remove fenced sources. A version whose last source is removed is forgotten."""
        remaining = {incarnation: source for incarnation, source in self._sources.items() if not is_fenced(incarnation)}
        if remaining != self._sources:
            self._sources = remaining
            self._update_newest()

    def _update_newest(self) -> None:
        if not self._sources:
            self._version = None
        self.newest = None if self._version is None else NewestVersion(self._version, tuple(self._sources.values()))


class VersionStore(Protocol):
    """The methods of the store that requests about versions use."""

    @property
    def newest_version(self) -> NewestVersion | None:
        """The newest weight version and its sources: a new object after each change."""
        ...

    def report_version(self, source: WeightSource) -> Denied | NotReady | None:
        """Record the version that ``source`` serves, if any. Return why the report is rejected; None if accepted."""
        ...


def report_and_read(store: VersionStore, request: FollowVersions) -> NewestVersion | NotReady | Denied:
    """Report the version that the sender serves, and return the newest known version."""
    source = WeightSource(
        request.incarnation, request.weight_address or "", request.weight_version if request.weight_address else None
    )
    return store.report_version(source) or store.newest_version or NotReady()


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
        self._answered_version: NewestVersion | None = None
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
        changed = self._store.newest_version is not self._answered_version
        self._answered_version = self._store.newest_version
        incarnations = list(self._waiting) if changed or self._evaluate_all or self.due <= now else list(self._arrived)
        self._evaluate_all = False
        self._arrived.clear()
        answers: list[tuple[Incoming, NewestVersion | NotReady | Denied]] = []
        for incarnation in incarnations:
            waiting = self._waiting[incarnation]
            answer = report_and_read(self._store, waiting.incoming.message)
            known = waiting.incoming.message.known
            is_news = isinstance(answer, Denied) or (isinstance(answer, NewestVersion) and answer.version != known)
            if is_news or waiting.until <= now:
                answers.append((waiting.incoming, answer))
                del self._waiting[incarnation]
        return answers
