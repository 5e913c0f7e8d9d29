"""Messages between an agent's snapshot server and trainer members on the same node and on other nodes."""

from __future__ import annotations

from msgspec import Struct

from ...core.types import ReplicaId
from .format import SnapshotInfo


class Member(Struct, frozen=True, array_like=True):
    """The member that sends a request. A request fences the earlier incarnations of its gang."""

    gang: ReplicaId
    rank: int
    incarnation: int


class Attach(Struct, frozen=True, tag=True):
    """Request to write this rank's snapshots. Answered with :class:`BuffersGranted` for the existing buffers."""

    member: Member


class Resize(Struct, frozen=True, tag=True):
    """Request to replace a buffer by a new buffer for ``nbytes`` of payload. Answered with :class:`BuffersGranted`."""

    member: Member
    slot: int
    nbytes: int


class MapSnapshot(Struct, frozen=True, tag=True):
    """Request to read a snapshot. Answered with :class:`BuffersGranted`."""

    member: Member
    snapshot: SnapshotInfo


class ListSnapshots(Struct, frozen=True, tag=True):
    """Request for the snapshots of the gang. Answered with :class:`SnapshotList`."""

    member: Member


class Forget(Struct, frozen=True, tag=True):
    """Request to drop the snapshots of earlier incarnations of this rank.

    Answered with :class:`SnapshotList`: the remaining snapshots.
    """

    member: Member


class Upload(Struct, frozen=True, tag=True):
    """Request to store a copy of a snapshot.

    Answered with :class:`ReadyForUpload`. The sender then sends the metadata (``meta`` is its length in bytes) and the
    snapshot, and the agent answers with :class:`SnapshotList` once the copy is valid. If the agent has the snapshot
    already, it answers with :class:`SnapshotList` at once.
    """

    member: Member
    snapshot: SnapshotInfo
    meta: int


class Download(Struct, frozen=True, tag=True):
    """Request for a snapshot. Answered with :class:`SnapshotFound`, which the metadata and the snapshot follow."""

    member: Member
    snapshot: SnapshotInfo


Request = Attach | Resize | MapSnapshot | ListSnapshots | Forget | Upload | Download


class BuffersGranted(Struct, frozen=True, tag=True):
    """Answer that announces one descriptor per buffer. ``slots`` contains (slot, capacity in bytes) of each buffer."""

    slots: tuple[tuple[int, int], ...]


class SnapshotList(Struct, frozen=True, tag=True):
    """Answer with snapshots of a gang."""

    snapshots: tuple[SnapshotInfo, ...]


class ReadyForUpload(Struct, frozen=True, tag=True):
    """Answer to :class:`Upload`: the bytes may follow."""


class SnapshotFound(Struct, frozen=True, tag=True):
    """Answer to :class:`Download`. The metadata follows (``meta`` is its length in bytes), then the snapshot."""

    meta: int


class Refused(Struct, frozen=True, tag=True):
    """Answer that refuses a request for the reason ``why``. ``fenced`` is True if a newer incarnation exists."""

    why: str
    fenced: bool = False


Answer = BuffersGranted | SnapshotList | ReadyForUpload | SnapshotFound | Refused
