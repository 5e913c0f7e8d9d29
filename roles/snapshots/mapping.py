"""Map an agent's memory into a member, so that writing a snapshot takes one copy."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import threading
from collections.abc import Callable
from typing import Protocol

from ...transport.streams.connection import Connection
from .buffers import available_memory
from .format import EMPTY_HEAD, HEAD_AREA_BYTES, HEAD_BYTES, PAYLOAD_OFFSET, Damaged, Head, SnapshotError, SnapshotInfo

_PREFAULT_BYTES = 16 * 2**20
"""Bytes of memory that one call allocates. Other Python threads wait for the call for about 5 ms."""
_MADV_POPULATE_WRITE = 23
"""Advice number of madvise(2), available since Linux 5.14."""
_SENDING_END_TIMEOUT_S = 5.0
"""Seconds to wait for the end of an aborted copy, which ends at its next chunk. A copy that does not end is harmless,
because its digest will not match."""


class Sending:
    """The transfer of a snapshot to another node. The transfer runs in a thread and event loop of its own."""

    def __init__(self) -> None:
        self.cancelled = False
        self.ended = threading.Event()
        self._abort: Callable[[], object] = lambda: None

    def begin(self, connection: Connection) -> None:
        """Register the connection; called in the loop of the copy."""
        loop = asyncio.get_running_loop()
        self._abort = lambda: loop.call_soon_threadsafe(connection.abort)
        if self.cancelled:
            connection.abort()

    def cancel(self) -> None:
        """Abort the copy, whose thread then raises an exception, and wait for its end. May be called in any thread."""
        self.cancelled = True
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._abort()
        self.ended.wait(_SENDING_END_TIMEOUT_S)


class Pinning(Protocol):
    """Page-locks memory for copies from a GPU; implemented with torch in ``roles.trainer.host_buffers``."""

    def pin(self, memory: memoryview) -> None:
        """Lock the pages of this memory in RAM. The pages must already be allocated."""

    def unpin(self, memory: memoryview) -> None:
        """Make memory pageable again, before it is unmapped. Memory that is not page-locked is left unchanged."""


class MappedBuffer:
    """A mapped buffer of the agent for ``capacity`` bytes of payload; owns the descriptor ``fd``.

    Args:
        fd: Descriptor of the memory.
        capacity: Bytes of payload.
        pinning: Page-locks the memory once it is allocated, if given.

    Raises:
        SnapshotError: The memory cannot be mapped.
    """

    def __init__(self, fd: int, capacity: int, pinning: Pinning | None = None) -> None:
        self.capacity, self._fd, self._prefaulted, self._pinning = capacity, fd, False, pinning
        try:
            self._map = mmap.mmap(fd, PAYLOAD_OFFSET + capacity)
        except OSError as error:
            os.close(fd)
            raise SnapshotError(f"the agent's memory of {capacity / 1e6:.0f} MB cannot be mapped: {error}") from error
        self._map.madvise(mmap.MADV_DONTFORK)  # a child that outlives this process must not keep the memory
        self.view = memoryview(self._map)
        self.sendings: set[Sending] = set()

    @property
    def head(self) -> Head | None:
        """Head of the snapshot in the buffer; None if there is no complete snapshot."""
        head = Head.decode(bytes(self.view[:HEAD_BYTES]))
        return head if head is not None and head.nbytes <= self.capacity else None

    def invalidate(self) -> None:
        """Invalidate the snapshot before it is overwritten, and abort copies of it."""
        self._end_sendings()
        self.view[:HEAD_BYTES] = EMPTY_HEAD

    def commit(self, head: Head) -> None:
        """Write the head and so make the snapshot valid. A snapshot whose writer is killed earlier stays invalid."""
        self.view[:HEAD_BYTES] = head.encode()

    def prefault(self) -> None:
        """Allocate and page-lock all memory now.

        Page faults then do not slow down a copy, and a lack of memory raises an error instead of killing the process.

        Raises:
            SnapshotError: The memory is not available.
        """
        if self._prefaulted:
            return
        missing = PAYLOAD_OFFSET + self.capacity - os.fstat(self._fd).st_blocks * 512
        if missing > (available := available_memory()):
            raise SnapshotError(
                f"a snapshot needs {missing / 1e6:.0f} MB more, but this node has only {available / 1e6:.0f} MB left"
            )
        try:
            for start in range(PAYLOAD_OFFSET, PAYLOAD_OFFSET + self.capacity, _PREFAULT_BYTES):
                size = min(_PREFAULT_BYTES, PAYLOAD_OFFSET + self.capacity - start)
                os.posix_fallocate(self._fd, start, size)
                with contextlib.suppress(OSError):  # on an older kernel the first copy allocates the pages
                    self._map.madvise(_MADV_POPULATE_WRITE, start, size)
        except OSError as error:
            raise SnapshotError(
                f"cannot allocate a snapshot of {self.capacity / 1e6:.0f} MB: {error.strerror}"
            ) from error
        self._prefaulted = True
        if self._pinning is not None:
            self._pinning.pin(self.view)

    def close(self) -> None:
        """Abort copies and unmap the buffer."""
        self._end_sendings()
        os.close(self._fd)
        if self._pinning is not None:
            self._pinning.unpin(self.view)
        with contextlib.suppress(BufferError):  # the caller still has a view, which keeps it mapped
            self.view.release()
            self._map.close()

    def _end_sendings(self) -> None:
        for sending in list(self.sendings):
            sending.cancel()


def map_snapshot(fd: int, snapshot: SnapshotInfo) -> tuple[bytes, memoryview]:
    """Return the writer's metadata and the bytes of a buffer that the agent granted for reading; closes ``fd``.

    The mapping is private and writable, because torch requires writable memory. Changes stay in this process.

    Raises:
        Damaged: The buffer now contains another snapshot.
        SnapshotError: The buffer cannot be mapped (private writable memory counts against ``vm.overcommit_memory``).
    """
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
    """Return new private memory, in huge pages if the kernel has them.

    With small pages, half of the time to fill the memory is spent on page faults (measured).
    """
    mapped = mmap.mmap(-1, max(nbytes, 1))
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)[:nbytes]
