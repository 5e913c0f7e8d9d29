"""Snapshot buffers of an agent: which snapshots it holds, which buffer is next, and how much memory they may take.

No sockets here. The bytes lie in memfds, which have no name: they are freed when the agent ends, or when it releases
them and no process maps them any more.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ...core.types import ReplicaId
from .format import EMPTY_HEAD, HEAD_BYTES, PAYLOAD_OFFSET, Fenced, Head, SnapshotError, SnapshotInfo, next_slot
from .messages import Member

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def available_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Bytes: what the machine has available (``MemAvailable``), or less where a cgroup above this process allows less.
    Memory is charged to whoever touches it first; at a cgroup's limit that one is killed, without an error before."""
    left = _field(proc / "meminfo", "MemAvailable:") * 1024
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return left
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            left = min(left, _left_in_cgroup(cgroups, path, "memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            left = min(left, _left_in_cgroup(cgroups / "memory", path, *v1))
    return max(0, left)


def _left_in_cgroup(mount: Path, path: str, limit: str, usage: str, cache: str) -> int:
    """Left under the tightest limit from ``path`` up to the mount; without any, more than there can be. ``cache`` is
    given back before anybody is killed."""
    folder, least = mount / path.lstrip("/"), 2**63
    while folder != mount.parent:
        try:
            at_most = (folder / limit).read_text().strip()
            if at_most != "max":
                used = int((folder / usage).read_text()) - _field(folder / "memory.stat", cache)
                least = min(least, int(at_most) - used)
        except (OSError, ValueError):  # no such controller here, or outside of what a container sees
            pass
        folder = folder.parent
    return least


def _field(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        key, value, *_ = line.split()
        if key == name:
            return int(value)
    return 0


MAX_MEMORY_SHARE = 0.5
"""of the memory that this node would have without snapshots, for all of them together: the rest is for the next life
of a trainer, whose state is read from here before the old one's place is free"""


class Buffer:
    """One memfd. ``room`` is in bytes of payload."""

    def __init__(self, name: str, capacity: int) -> None:
        """Raises OSError. Memory is taken as it is written."""
        self.capacity = capacity
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, PAYLOAD_OFFSET + capacity)  # beyond RLIMIT_FSIZE: EFBIG
        except OSError:
            os.close(self.fd)
            raise
        self.writing = False
        """another node's snapshot is on its way into it"""
        self._users = 0
        self._closed = False

    @property
    def head(self) -> Head | None:
        head = Head.decode(os.pread(self.fd, HEAD_BYTES, 0))
        return head if head is not None and head.nbytes <= self.capacity else None

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory that it really takes."""
        return os.fstat(self.fd).st_blocks * 512

    def clear(self) -> None:
        os.pwrite(self.fd, EMPTY_HEAD, 0)

    def read_only(self) -> int:
        """A descriptor, for the caller to close."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    @contextlib.contextmanager
    def in_use(self, *, writing: bool = False) -> Iterator[int]:
        """Its descriptor, which stays what it is inside the block even if the buffer is let go of meanwhile."""
        self._users += 1
        self.writing = writing or self.writing
        try:
            yield self.fd
        finally:
            self._users -= 1
            self.writing = self.writing and not writing
            if self._closed and not self._users:
                os.close(self.fd)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if not self._users:
                os.close(self.fd)


class DoubleBuffer:
    """The two buffers of one writer: of a member on this node (``own``), or of the one that sends copies here."""

    def __init__(self, member: Member, own: bool) -> None:
        self.member, self.own = member, own
        self.buffers: list[Buffer | None] = [None, None]
        self.writer: int | None = None
        """pidfd of the member that maps these buffers; None where it cannot be had"""

    def snapshots(self) -> Iterator[tuple[SnapshotInfo, Buffer]]:
        for buffer in filter(None, self.buffers):
            if not buffer.writing and (head := buffer.head) is not None:
                member = self.member
                yield SnapshotInfo(
                    member.gang, member.rank, head.step, head.incarnation, head.nbytes, head.digest, self.own
                ), buffer  # fmt: skip

    def close(self) -> None:
        for buffer in filter(None, self.buffers):
            buffer.close()
        self.buffers = [None, None]
        if self.writer is not None:
            os.close(self.writer)
            self.writer = None


class SnapshotBuffers:
    """``name`` is what the memory is called in /proc. ``free`` says how many bytes could still be taken."""

    def __init__(self, name: str, free: Callable[[], int] = available_memory) -> None:
        self._name, self._free = name, free
        self._pairs: dict[tuple[ReplicaId, int, bool], DoubleBuffer] = {}
        self._abandoned: dict[tuple[ReplicaId, int], DoubleBuffer] = {}
        """of members that may still be alive although a later life has taken their place: what they left is read, and
        never given to another writer"""
        self._newest_incarnation: dict[ReplicaId, int] = {}
        """incarnation by gang"""

    # ── who counts ─────────────────────────────────────────────────────────────────────────────────────────────────
    def admit(self, member: Member) -> None:
        """Raises Fenced for a life that has been succeeded."""
        newest = max(member.incarnation, self._newest_incarnation.get(member.gang, 0))
        self._newest_incarnation[member.gang] = newest
        if member.incarnation < newest:
            raise Fenced(f"{member.gang}#{member.incarnation} is fenced: #{newest} has taken its place")

    def fence(self, gang: ReplicaId, newest: int) -> None:
        """Lives before ``newest`` no longer count."""
        self._newest_incarnation[gang] = max(newest, self._newest_incarnation.get(gang, 0))

    # ── finding ────────────────────────────────────────────────────────────────────────────────────────────────────
    def snapshots(self, gang: ReplicaId) -> list[SnapshotInfo]:
        """Newest first."""
        found = [kept for pair in self._all() if pair.member.gang == gang for kept, _ in pair.snapshots()]
        return sorted(found, key=lambda kept: kept.order, reverse=True)

    def find(self, wanted: SnapshotInfo) -> Buffer:
        """Raises SnapshotError."""
        for pair in self._all():
            for snapshot, buffer in pair.snapshots():
                if snapshot == wanted:
                    return buffer
        raise SnapshotError(f"{wanted} is not kept here")

    # ── room ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def attached(self, member: Member) -> DoubleBuffer | None:
        """The pair that a member of an earlier or the same life left."""
        return self._pairs.get((member.gang, member.rank, True))

    def attach(self, member: Member, writer: int | None, *, ended: bool) -> DoubleBuffer:
        """The buffers of this member from now on, and its pidfd. Where the last one is known to have ``ended`` these
        are its own; else fresh ones, for it may still write to them."""
        key = (member.gang, member.rank, True)
        if (pair := self._pairs.get(key)) is not None and not ended:
            before = self._abandoned.pop(key[:2], None)
            keep, drop = (
                (pair, before) if before is None or _newest_order(pair) >= _newest_order(before) else (before, pair)
            )
            self._abandoned[key[:2]] = keep
            if drop is not None:
                drop.close()
            pair = None
        if pair is None:
            pair = self._pairs[key] = DoubleBuffer(member, True)
        pair.member = member
        if pair.writer is not None:
            os.close(pair.writer)
        pair.writer = writer
        return pair

    def resize(self, member: Member, slot: int, nbytes: int) -> Buffer:
        """Raises SnapshotError: there is no room, or this member has not been attached."""
        pair = self.attached(member)
        if pair is None or pair.member != member or slot not in (0, 1):
            raise SnapshotError(f"rank {member.rank} of {member.gang}#{member.incarnation} has no buffers here")
        return self._allocate(pair, slot, nbytes)

    def allocate_copy(self, member: Member, snapshot: SnapshotInfo) -> tuple[Buffer, int]:
        """Where this copy goes, and its sequence. Raises SnapshotError: there is no room, or one is on its way."""
        pair = self._pairs.setdefault((member.gang, member.rank, False), DoubleBuffer(member, False))
        pair.member = member
        if any(buffer is not None and buffer.writing for buffer in pair.buffers):
            raise SnapshotError(f"another snapshot of rank {member.rank} is on its way here")
        heads = [buffer.head if buffer is not None else None for buffer in pair.buffers]
        slot = next_slot(heads, snapshot.step)
        buffer = pair.buffers[slot]
        if buffer is None or buffer.capacity < snapshot.nbytes:
            buffer = self._allocate(pair, slot, snapshot.nbytes)
        buffer.clear()
        return buffer, 1 + max((head.sequence for head in heads if head is not None), default=0)

    def _allocate(self, pair: DoubleBuffer, slot: int, capacity: int) -> Buffer:
        old = pair.buffers[slot]
        others = [buffer for each in self._all() for buffer in each.buffers if buffer is not None and buffer is not old]
        promised, taken = sum(buffer.capacity for buffer in others), sum(buffer.resident_bytes for buffer in others)
        most = int(MAX_MEMORY_SHARE * (self._free() + taken + (old.resident_bytes if old else 0)))
        if promised + capacity > most:
            held = f", {_mb(promised)} of them are taken" if promised else ""
            raise SnapshotError(
                f"a buffer of {_mb(capacity)} has no room: snapshots may take {_mb(most)} of this node's memory{held}"
            )
        try:
            buffer = Buffer(self._name, capacity)
        except OSError as error:
            limit = " (ulimit -f)" if error.errno == errno.EFBIG else ""
            raise SnapshotError(f"a buffer of {_mb(capacity)} cannot be made: {error.strerror}{limit}") from error
        if old is not None:
            old.close()
        pair.buffers[slot] = buffer
        return buffer

    # ── letting go ─────────────────────────────────────────────────────────────────────────────────────────────────
    def forget(self, member: Member) -> None:
        """``who`` has complete snapshots of its own: what earlier lives left of its rank is of no more use."""
        self._drop([
            pair for pair in self._all()
            if (pair.member.gang, pair.member.rank) == (member.gang, member.rank) and pair.member.incarnation < member.incarnation
        ])  # fmt: skip

    def close(self) -> None:
        self._drop(list(self._all()))

    def _drop(self, gone: list[DoubleBuffer]) -> None:
        for pair in gone:
            pair.close()
        self._pairs = {key: pair for key, pair in self._pairs.items() if pair not in gone}
        self._abandoned = {key: pair for key, pair in self._abandoned.items() if pair not in gone}

    def _all(self) -> Iterator[DoubleBuffer]:
        yield from self._pairs.values()
        yield from self._abandoned.values()


def _newest_order(pair: DoubleBuffer) -> tuple[int, int]:
    return max((kept.order for kept, _ in pair.snapshots()), default=(0, 0))


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.0f} MB"
