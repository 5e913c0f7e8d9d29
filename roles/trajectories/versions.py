"""The newest weight version of a run and the replicas that serve it, as trainer and rollouts report it to the store.

News of a version travels this way beside the manager's ``Peers``, so that rollouts go on receiving weights while the
manager is frozen or dead. The current trainer alone says which version is the newest; rollouts add that they serve it
too, for the case that the trainer dies right after it published.

Nothing here is durable. A trainer or rollout keeps one request open at the store, which carries what it serves and is
sent again on every reconnect: a store that restarts knows the newest version within one round trip of its trainer.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.types import TRAINER, Incarnation, Version, role_of
from ...transport.messages import WeightSource
from .types import NewestVersion

MAX_SOURCES = 8
"""holders that are named to a rollout, some 100 bytes each in every answer. They are asked one after another, after the
relays that the manager named: more would only matter if all of these had died at once"""


def is_publisher(incarnation: Incarnation) -> bool:
    """Return whether ``life`` is a trainer's: the other replicas that serve weights received them first."""
    return role_of(incarnation.replica) == role_of(TRAINER)


class VersionDirectory:
    """Names the newest version that the current trainer published, and up to :data:`MAX_HOLDERS` lives that serve it.

    The caller checks that the reporting lives are current (not fenced) before it reports them here."""

    def __init__(self) -> None:
        self._version: Version | None = None
        self._sources: dict[Incarnation, WeightSource] = {}
        """who serves exactly ``_version``; the publisher first, as it reports first"""
        self.newest: NewestVersion | None = None
        """the answer to rollouts; None: no version is known. Another object after each change"""

    def report(self, source: WeightSource) -> None:
        """Take note that ``holder`` serves the version ``holder.holds``. Repeating a report changes nothing."""
        version = source.version
        if version is None:
            return
        if is_publisher(source.incarnation) and (self._version is None or _succeeds(version, self._version)):
            self._version, self._sources = version, {}
        full = len(self._sources) >= MAX_SOURCES and source.incarnation not in self._sources
        if version == self._version and not full and self._sources.get(source.incarnation) != source:
            self._sources[source.incarnation] = source
            self._update_newest()

    def remove(self, is_fenced: Callable[[Incarnation], bool]) -> None:
        """Forget holders that are fenced. A version that nobody serves any more is forgotten with its last holder."""
        remaining = {incarnation: holder for incarnation, holder in self._sources.items() if not is_fenced(incarnation)}
        if remaining != self._sources:
            self._sources = remaining
            self._update_newest()

    def _update_newest(self) -> None:
        if not self._sources:
            self._version = None
        self.newest = None if self._version is None else NewestVersion(self._version, tuple(self._sources.values()))


def _succeeds(version: Version, other: Version) -> bool:
    """Return whether ``version`` was published after ``other``: a trainer that restarted may have gone back some steps,
    and still its versions are the newer ones."""
    return (version.incarnation, version.step) > (other.incarnation, other.step)
