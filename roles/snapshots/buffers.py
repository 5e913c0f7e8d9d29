"""Snapshot buffers of an agent: their contents, the order in which they are reused, and the limit on their memory.

The buffers are memfds without a name: their memory is freed when the agent ends, or when the agent has closed them and
no process maps them. This module contains no socket code.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ...core.types import ReplicaId
from .format import EMPTY_HEAD, HEAD_BYTES, PAYLOAD_OFFSET, SLOTS, Fenced, Head, SnapshotError, SnapshotInfo, next_slot
from .messages import Member

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def available_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return the bytes of memory that may still be used: ``MemAvailable``, or less if a cgroup's limit leaves less.

    Memory is charged to the process that touches it first. A process that reaches its cgroup's limit is killed without
    an earlier error, so the limit must be checked first.
    """
    available = _field(proc / "meminfo", "MemAvailable:") * 1024
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return available
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            available = min(
                available, _available_in_cgroup(cgroups, path, "memory.max", "memory.current", "inactive_file")
            )
        elif "memory" in controllers.split(","):
            v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            available = min(available, _available_in_cgroup(cgroups / "memory", path, *v1))
    return max(0, available)


def _available_in_cgroup(mount: Path, path: str, limit: str, usage: str, cache: str) -> int:
    """Return the bytes left by the tightest limit from ``path`` up to the mount; 2**63 if there is no limit.

    ``cache`` is the name of the field in ``memory.stat`` with the memory that the kernel reclaims before it kills a
    process.
    """
    folder, tightest = mount / path.lstrip("/"), 2**63
    while folder != mount.parent:
        try:
            maximum = (folder / limit).read_text().strip()
            if maximum != "max":
                used = int((folder / usage).read_text()) - _field(folder / "memory.stat", cache)
                tightest = min(tightest, int(maximum) - used)
        except (OSError, ValueError):  # the controller is absent, or hidden from this container
            pass
        folder = folder.parent
    return tightest


def _field(file: Path, name: str) -> int:
    """Return the value of a field of a file with lines ``name value``; 0 if the field is missing."""
    for line in file.read_text().splitlines():
        key, value, *_ = line.split()
        if key == name:
            return int(value)
    return 0


MAX_MEMORY_SHARE = 0.5
"""Maximum size of all snapshots together, as a share of the memory that would be available without snapshots. The rest
is for the next incarnation of a trainer, which reads its state from a snapshot before the memory of the earlier
incarnation is free."""


class Buffer:
    """A memfd for ``capacity`` bytes of payload. Its memory is allocated when it is written.

    Raises:
        OSError: The memfd cannot be created.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.capacity = capacity
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, PAYLOAD_OFFSET + capacity)  # beyond RLIMIT_FSIZE: EFBIG
        except OSError:
            os.close(self.fd)
            raise
        self.writing = False
        """True while a snapshot of another node is being received into the buffer."""
        self._users = 0
        self._closed = False

    @property
    def head(self) -> Head | None:
        """Head of the snapshot in the buffer; None if there is no complete snapshot."""
        head = Head.decode(os.pread(self.fd, HEAD_BYTES, 0))
        return head if head is not None and head.nbytes <= self.capacity else None

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory that are allocated so far."""
        return os.fstat(self.fd).st_blocks * 512

    def clear(self) -> None:
        """Invalidate the snapshot in the buffer."""
        os.pwrite(self.fd, EMPTY_HEAD, 0)

    def read_only(self) -> int:
        """Return a new read-only descriptor, which the caller closes."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    @contextlib.contextmanager
    def in_use(self, *, writing: bool = False) -> Iterator[int]:
        """Yield the descriptor, which stays open inside the block even if the buffer is closed in the meantime.

        ``writing`` is True if the block receives a snapshot of another node into the buffer.
        """
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
        """Close the descriptor at once, or at the end of the last :meth:`in_use` block."""
        if not self._closed:
            self._closed = True
            if not self._users:
                os.close(self.fd)


class DoubleBuffer:
    """The two buffers of one writer.

    The writer is a member on this node (``own``), or a member on another node that copies its snapshots here.
    """

    def __init__(self, member: Member, own: bool) -> None:
        self.member, self.own = member, own
        self.buffers: list[Buffer | None] = [None for _ in SLOTS]
        self.writer: int | None = None
        """pidfd of the member that maps these buffers. None if the member is on another node, or if no pidfd could be
        opened."""

    def snapshots(self) -> Iterator[tuple[SnapshotInfo, Buffer]]:
        """Yield the complete snapshots with their buffers."""
        for buffer in filter(None, self.buffers):
            if not buffer.writing and (head := buffer.head) is not None:
                member = self.member
                yield (
                    SnapshotInfo(
                        member.gang, member.rank, head.step, head.incarnation, head.nbytes, head.digest, self.own
                    ),
                    buffer,
                )

    def close(self) -> None:
        """Close both buffers and the pidfd."""
        for buffer in filter(None, self.buffers):
            buffer.close()
        self.buffers = [None for _ in SLOTS]
        if self.writer is not None:
            os.close(self.writer)
            self.writer = None


class SnapshotBuffers:
    """All snapshot buffers of an agent.

    Args:
        name: Name of the memory as shown in /proc.
        free: Returns how many bytes of memory may still be used.
    """

    def __init__(self, name: str, free: Callable[[], int] = available_memory) -> None:
        self._name, self._free = name, free
        self._pairs: dict[tuple[ReplicaId, int, bool], DoubleBuffer] = {}
        self._abandoned: dict[tuple[ReplicaId, int], DoubleBuffer] = {}
        """Buffers of members that may still run although a later incarnation has replaced them.

        These buffers can be read, but are never given to another writer."""
        self._newest_incarnation: dict[ReplicaId, int] = {}
        """Newest known incarnation number by gang."""

    # ── fencing ────────────────────────────────────────────────────────────────────────────────────────────────────
    def admit(self, member: Member) -> None:
        """Record the incarnation of a member that sent a request.

        Raises:
            Fenced: A newer incarnation of the gang is known.
        """
        newest = max(member.incarnation, self._newest_incarnation.get(member.gang, 0))
        self._newest_incarnation[member.gang] = newest
        if member.incarnation < newest:
            raise Fenced(f"{member.gang}#{member.incarnation} is fenced: its successor is #{newest}")

    def fence(self, gang: ReplicaId, newest: int) -> None:
        """Refuse requests of incarnations before ``newest`` from now on."""
        self._newest_incarnation[gang] = max(newest, self._newest_incarnation.get(gang, 0))

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────
    def snapshots(self, gang: ReplicaId) -> list[SnapshotInfo]:
        """Return the complete snapshots of a gang, newest first."""
        infos = [info for pair in self._all() if pair.member.gang == gang for info, _ in pair.snapshots()]
        return sorted(infos, key=lambda info: info.order, reverse=True)

    def find(self, wanted: SnapshotInfo) -> Buffer:
        """Return the buffer of a snapshot.

        Raises:
            SnapshotError: The snapshot is not stored on this node.
        """
        for pair in self._all():
            for snapshot, buffer in pair.snapshots():
                if snapshot == wanted:
                    return buffer
        raise SnapshotError(f"{wanted} is not stored on this node")

    # ── allocating ─────────────────────────────────────────────────────────────────────────────────────────────────
    def attached(self, member: Member) -> DoubleBuffer | None:
        """Return the buffers that this or an earlier incarnation of the rank attached; None if there are none."""
        return self._pairs.get((member.gang, member.rank, True))

    def attach(self, member: Member, writer: int | None, *, ended: bool) -> DoubleBuffer:
        """Return the buffers of this member, and store ``writer``, the pidfd of the member's process.

        If the previous member is known to have ``ended``, its buffers are reused. Otherwise the member gets new
        buffers, because the previous member may still write to the old buffers.
        """
        key = (member.gang, member.rank, True)
        if (pair := self._pairs.get(key)) is not None and not ended:
            before = self._abandoned.pop(key[:2], None)
            newer, older = (
                (pair, before) if before is None or _newest_order(pair) >= _newest_order(before) else (before, pair)
            )
            self._abandoned[key[:2]] = newer
            if older is not None:
                older.close()
            pair = None
        if pair is None:
            pair = self._pairs[key] = DoubleBuffer(member, True)
        pair.member = member
        if pair.writer is not None:
            os.close(pair.writer)
        pair.writer = writer
        return pair

    def resize(self, member: Member, slot: int, nbytes: int) -> Buffer:
        """Replace a buffer by a new buffer for ``nbytes`` of payload.

        Raises:
            SnapshotError: The memory is not available, or this member has not attached buffers.
        """
        pair = self.attached(member)
        if pair is None or pair.member != member or slot not in SLOTS:
            rank = f"rank {member.rank} of {member.gang}#{member.incarnation}"
            raise SnapshotError(f"the agent of this node has no snapshot buffer for {rank}, slot {slot}")
        return self._allocate(pair, slot, nbytes)

    def allocate_copy(self, member: Member, snapshot: SnapshotInfo) -> tuple[Buffer, int]:
        """Return a buffer for a snapshot of another node, and the sequence number of its head.

        Raises:
            SnapshotError: The memory is not available, or another copy of this rank is being received.
        """
        pair = self._pairs.setdefault((member.gang, member.rank, False), DoubleBuffer(member, False))
        pair.member = member
        if any(buffer is not None and buffer.writing for buffer in pair.buffers):
            raise SnapshotError(f"another snapshot of rank {member.rank} is being received")
        heads = [buffer.head if buffer is not None else None for buffer in pair.buffers]
        slot = next_slot(heads, snapshot.step)
        buffer = pair.buffers[slot]
        if buffer is None or buffer.capacity < snapshot.nbytes:
            buffer = self._allocate(pair, slot, snapshot.nbytes)
        buffer.clear()
        return buffer, 1 + max((head.sequence for head in heads if head is not None), default=0)

    def _allocate(self, pair: DoubleBuffer, slot: int, capacity: int) -> Buffer:
        old = pair.buffers[slot]
        others = [
            buffer for other in self._all() for buffer in other.buffers if buffer is not None and buffer is not old
        ]
        promised, taken = sum(buffer.capacity for buffer in others), sum(buffer.resident_bytes for buffer in others)
        maximum = int(MAX_MEMORY_SHARE * (self._free() + taken + (old.resident_bytes if old else 0)))
        if promised + capacity > maximum:
            used = f", {_mb(promised)} of which are in use" if promised else ""
            raise SnapshotError(
                f"a buffer of {_mb(capacity)} does not fit: snapshots may use {_mb(maximum)} of this node's memory"
                f"{used}"
            )
        try:
            buffer = Buffer(self._name, capacity)
        except OSError as error:
            limit = " (ulimit -f)" if error.errno == errno.EFBIG else ""
            raise SnapshotError(f"a buffer of {_mb(capacity)} cannot be created: {error.strerror}{limit}") from error
        if old is not None:
            old.close()
        pair.buffers[slot] = buffer
        return buffer

    # ── releasing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def forget(self, member: Member) -> None:
        """Drop snapshots of earlier incarnations of this member's rank. Called once the member has complete ones."""
        self._drop(
            [
                pair
                for pair in self._all()
                if (pair.member.gang, pair.member.rank) == (member.gang, member.rank)
                and pair.member.incarnation < member.incarnation
            ]
        )

    def close(self) -> None:
        """Close all buffers."""
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
    """Return the sort key of the newest snapshot in the buffers; (0, 0) if there is none."""
    return max((info.order for info, _ in pair.snapshots()), default=(0, 0))


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.0f} MB"
