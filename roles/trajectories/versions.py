"""The newest weight version and the replicas that serve it, according to the reports of trainer and rollouts.

Versions are announced this way in addition to the manager's ``Peers`` message, so that rollouts keep receiving weights
while the manager is frozen or dead. Only the current trainer determines which version is the newest; rollouts report
that they serve it too, in case the trainer dies right after it published.

The directory is not durable. Each trainer or rollout keeps one request open at the store, which carries the version
that it serves and is sent again on every reconnect. So a store that restarts knows the newest version as soon as the
trainer has reconnected.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.types import TRAINER, Incarnation, Version, role_of
from ...transport.messages import WeightSource
from .types import NewestVersion

MAX_SOURCES = 8
"""Maximum number of sources that are named to a rollout, some 100 bytes each in every answer. A rollout tries them one
after another, after the relays that the manager named: more sources would only help if all of them died at once."""


def is_publisher(incarnation: Incarnation) -> bool:
    """Return whether an incarnation is a trainer's.

    Other replicas serve only versions that they received.
    """
    return role_of(incarnation.replica) == role_of(TRAINER)


class VersionDirectory:
    """The newest version that the current trainer published, and up to :data:`MAX_SOURCES` replicas that serve it.

    The caller must check that an incarnation is current before it passes a report of this incarnation on.
    """

    def __init__(self) -> None:
        self._version: Version | None = None
        self._sources: dict[Incarnation, WeightSource] = {}
        """Replicas that serve ``_version``; the publisher is the first, because it reports first."""
        self.newest: NewestVersion | None = None
        """The answer to rollouts: a new object after each change, None while no version is known."""

    def report(self, source: WeightSource) -> None:
        """Record which version ``source`` serves. Repeating a report changes nothing."""
        version = source.version
        if version is None:
            return
        if is_publisher(source.incarnation) and (self._version is None or version > self._version):
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
