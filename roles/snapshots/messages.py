"""What is said to an agent about snapshots, by members on its node and on others."""

from __future__ import annotations

from msgspec import Struct

from ...core.types import ReplicaId
from .format import SnapshotInfo


class Member(Struct, frozen=True, array_like=True):
    """On whose behalf. Whoever speaks for a life fences the earlier ones of its gang."""

    gang: ReplicaId
    rank: int
    incarnation: int


class Attach(Struct, frozen=True, tag=True):
    """I write the snapshots of this rank here from now on. Answered ``Granted`` for the buffers that are there."""

    member: Member


class Resize(Struct, frozen=True, tag=True):
    """Have this buffer made anew, with room for so many bytes. Answered ``Granted``."""

    member: Member
    slot: int
    nbytes: int


class MapSnapshot(Struct, frozen=True, tag=True):
    """Let me read it. Answered ``Granted``."""

    member: Member
    snapshot: SnapshotInfo


class ListSnapshots(Struct, frozen=True, tag=True):
    """What is kept of this gang? Answered ``Listed``."""

    member: Member


class Forget(Struct, frozen=True, tag=True):
    """Drop what earlier lives left of this rank: mine are complete. Answered ``Listed`` with what is left."""

    member: Member


class Upload(Struct, frozen=True, tag=True):
    """Answered ``Ready``; then ``meta`` and the bytes follow, and ``Listed`` with it once it counts."""

    member: Member
    snapshot: SnapshotInfo
    meta: int


class Download(Struct, frozen=True, tag=True):
    """Answered ``Here``, then ``meta`` and the bytes."""

    member: Member
    snapshot: SnapshotInfo


Request = Attach | Resize | MapSnapshot | ListSnapshots | Forget | Upload | Download


class BuffersGranted(Struct, frozen=True, tag=True):
    """``slots``: which of the buffers the descriptors that follow are, and the room of each in bytes."""

    slots: tuple[tuple[int, int], ...]


class SnapshotList(Struct, frozen=True, tag=True):
    snapshots: tuple[SnapshotInfo, ...]


class ReadyForUpload(Struct, frozen=True, tag=True):
    pass


class SnapshotFound(Struct, frozen=True, tag=True):
    meta: int


class Refused(Struct, frozen=True, tag=True):
    why: str
    fenced: bool = False


Answer = BuffersGranted | SnapshotList | ReadyForUpload | SnapshotFound | Refused
