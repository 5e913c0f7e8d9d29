"""An agent's memory as a member sees it: mapped, so that writing a snapshot is one copy."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import threading
from collections.abc import Callable

from ...transport.streams.connection import Connection
from .buffers import available_memory
from .format import EMPTY_HEAD, HEAD_AREA_BYTES, HEAD_BYTES, PAYLOAD_OFFSET, Damaged, Head, SnapshotError, SnapshotInfo

_PREFAULT_BYTES = 16 * 2**20
"""bytes mapped at once: Python's other threads wait meanwhile, 5 ms"""
_MADV_POPULATE_WRITE = 23
"""madvise(2), since Linux 5.14"""
_SENDING_END_TIMEOUT_S = 5.0
"""s; ended at its next chunk. Should it not, what it sends on has the wrong digest and counts nowhere"""


class Sending:
    """A snapshot on its way to another node, in a thread and loop of its own."""

    def __init__(self) -> None:
        self.cancelled = False
        self.ended = threading.Event()
        self._abort: Callable[[], object] = lambda: None

    def begin(self, connection: Connection) -> None:
        """In its loop."""
        loop = asyncio.get_running_loop()
        self._abort = lambda: loop.call_soon_threadsafe(connection.abort)
        if self.cancelled:
            connection.abort()

    def cancel(self) -> None:
        """In any thread: it ends, and raises where it was begun."""
        self.cancelled = True
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._abort()
        self.ended.wait(_SENDING_END_TIMEOUT_S)


class MappedBuffer:
    """One buffer. ``room`` is in bytes of payload; ``fd`` is closed here."""

    def __init__(self, fd: int, capacity: int) -> None:
        """Raises SnapshotError."""
        self.capacity, self._fd, self._prefaulted = capacity, fd, False
        try:
            self._map = mmap.mmap(fd, PAYLOAD_OFFSET + capacity)
        except OSError as error:
            os.close(fd)
            raise SnapshotError(f"the agent's memory of {capacity / 1e6:.0f} MB cannot be mapped: {error}") from error
        self._map.madvise(mmap.MADV_DONTFORK)  # a child that outlives us must not keep it
        self.view = memoryview(self._map)
        self.sendings: set[Sending] = set()

    @property
    def head(self) -> Head | None:
        head = Head.decode(bytes(self.view[:HEAD_BYTES]))
        return head if head is not None and head.nbytes <= self.capacity else None

    def invalidate(self) -> None:
        """It is written anew: what was there counts no more."""
        self._end_sendings()
        self.view[:HEAD_BYTES] = EMPTY_HEAD

    def commit(self, head: Head) -> None:
        """From now on it counts. A kill in the middle of this leaves a head that is none."""
        self.view[:HEAD_BYTES] = head.encode()

    def prefault(self) -> None:
        """Have its memory really there, so that no copy pays for it, or is ended by a signal for want of it. Raises
        SnapshotError."""
        if self._prefaulted:
            return
        missing = PAYLOAD_OFFSET + self.capacity - os.fstat(self._fd).st_blocks * 512
        if missing > (left := available_memory()):
            raise SnapshotError(f"a snapshot takes {missing / 1e6:.0f} MB more, {left / 1e6:.0f} MB are left here")
        try:
            for start in range(PAYLOAD_OFFSET, PAYLOAD_OFFSET + self.capacity, _PREFAULT_BYTES):
                size = min(_PREFAULT_BYTES, PAYLOAD_OFFSET + self.capacity - start)
                os.posix_fallocate(self._fd, start, size)
                with contextlib.suppress(OSError):  # an older kernel: the first copy pays for it
                    self._map.madvise(_MADV_POPULATE_WRITE, start, size)
        except OSError as error:
            raise SnapshotError(
                f"no memory for a snapshot of {self.capacity / 1e6:.0f} MB: {error.strerror}"
            ) from error
        self._prefaulted = True

    def close(self) -> None:
        self._end_sendings()
        os.close(self._fd)
        with contextlib.suppress(BufferError):  # a view that the caller has keeps it mapped
            self.view.release()
            self._map.close()

    def _end_sendings(self) -> None:
        for sending in list(self.sendings):
            sending.cancel()


def map_snapshot(fd: int, snapshot: SnapshotInfo) -> tuple[bytes, memoryview]:
    """Meta and bytes of a buffer that was lent to be read; ``fd`` is closed here. What the reader changes in them it
    changes for itself alone: torch wants memory that may be written. Raises Damaged when it is another snapshot's by
    now, SnapshotError where it cannot be mapped (such memory counts against the limits of ``vm.overcommit_memory``)."""
    try:
        mapped = memoryview(mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    except OSError as error:
        raise SnapshotError(f"{snapshot} cannot be mapped: {error}") from error
    finally:
        os.close(fd)
    head = Head.decode(bytes(mapped[:HEAD_BYTES]))
    if head is None or (head.step, head.incarnation, head.digest) != (
        snapshot.step,
        snapshot.incarnation,
        snapshot.digest,
    ):
        raise Damaged(f"{snapshot} has been overwritten")
    return bytes(mapped[HEAD_AREA_BYTES : HEAD_AREA_BYTES + head.meta]), mapped[
        PAYLOAD_OFFSET : PAYLOAD_OFFSET + head.nbytes
    ]


def anonymous_memory(nbytes: int) -> memoryview:
    """Fresh memory of this process alone, in huge pages where the kernel has them: half of the time to fill it goes to
    page faults (measured)."""
    mapped = mmap.mmap(-1, max(nbytes, 1))
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)[:nbytes]
