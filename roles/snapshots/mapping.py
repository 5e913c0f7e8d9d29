"""An agent's memory as a member sees it: mapped, so that writing a snapshot is one copy."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import threading
from collections.abc import Callable

from ...transport.weights.base import Line
from .buffers import available
from .format import CLEARED, HEAD, HEAD_ROOM, PAYLOAD, Damaged, Head, Kept, SnapshotError

_WARMED = 16 * 2**20
"""bytes mapped at once: Python's other threads wait meanwhile, 5 ms"""
_MADV_POPULATE_WRITE = 23
"""madvise(2), since Linux 5.14"""
_SENDING_ENDS_WITHIN = 5.0
"""s; ended at its next chunk. Should it not, what it sends on has the wrong digest and counts nowhere"""


class Sending:
    """A snapshot on its way to another node, in a thread and loop of its own."""

    def __init__(self) -> None:
        self.over = False
        self.ended = threading.Event()
        self._abort: Callable[[], object] = lambda: None

    def begin(self, line: Line) -> None:
        """In its loop."""
        loop = asyncio.get_running_loop()
        self._abort = lambda: loop.call_soon_threadsafe(line.abort)
        if self.over:
            line.abort()

    def end(self) -> None:
        """In any thread: it ends, and raises where it was begun."""
        self.over = True
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._abort()
        self.ended.wait(_SENDING_ENDS_WITHIN)


class Mapped:
    """One buffer. ``room`` is in bytes of payload; ``fd`` is closed here."""

    def __init__(self, fd: int, room: int) -> None:
        """Raises SnapshotError."""
        self.room, self._fd, self._warm = room, fd, False
        try:
            self._map = mmap.mmap(fd, PAYLOAD + room)
        except OSError as error:
            os.close(fd)
            raise SnapshotError(f"the agent's memory of {room / 1e6:.0f} MB cannot be mapped: {error}") from error
        self._map.madvise(mmap.MADV_DONTFORK)  # a child that outlives us must not keep it
        self.view = memoryview(self._map)
        self.sendings: set[Sending] = set()

    @property
    def head(self) -> Head | None:
        head = Head.decode(bytes(self.view[:HEAD]))
        return head if head is not None and head.nbytes <= self.room else None

    def begin(self) -> None:
        """It is written anew: what was there counts no more."""
        self._end_sendings()
        self.view[:HEAD] = CLEARED

    def seal(self, head: Head) -> None:
        """From now on it counts. A kill in the middle of this leaves a head that is none."""
        self.view[:HEAD] = head.encode()

    def warm(self) -> None:
        """Have its memory really there, so that no copy pays for it, or is ended by a signal for want of it. Raises
        SnapshotError."""
        if self._warm:
            return
        missing = PAYLOAD + self.room - os.fstat(self._fd).st_blocks * 512
        if missing > (left := available()):
            raise SnapshotError(f"a snapshot takes {missing / 1e6:.0f} MB more, {left / 1e6:.0f} MB are left here")
        try:
            for start in range(PAYLOAD, PAYLOAD + self.room, _WARMED):
                size = min(_WARMED, PAYLOAD + self.room - start)
                os.posix_fallocate(self._fd, start, size)
                with contextlib.suppress(OSError):  # an older kernel: the first copy pays for it
                    self._map.madvise(_MADV_POPULATE_WRITE, start, size)
        except OSError as error:
            raise SnapshotError(f"no memory for a snapshot of {self.room / 1e6:.0f} MB: {error.strerror}") from error
        self._warm = True

    def close(self) -> None:
        self._end_sendings()
        os.close(self._fd)
        with contextlib.suppress(BufferError):  # a view that the caller has keeps it mapped
            self.view.release()
            self._map.close()

    def _end_sendings(self) -> None:
        for sending in list(self.sendings):
            sending.end()


def lent(fd: int, kept: Kept) -> tuple[bytes, memoryview]:
    """Meta and bytes of a buffer that was lent to be read; ``fd`` is closed here. What the reader changes in them it
    changes for itself alone: torch wants memory that may be written. Raises Damaged when it is another snapshot's by
    now, SnapshotError where it cannot be mapped (such memory counts against the limits of ``vm.overcommit_memory``)."""
    try:
        mapped = memoryview(mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    except OSError as error:
        raise SnapshotError(f"{kept} cannot be mapped: {error}") from error
    finally:
        os.close(fd)
    head = Head.decode(bytes(mapped[:HEAD]))
    if head is None or (head.step, head.incarnation, head.digest) != (kept.step, kept.incarnation, kept.digest):
        raise Damaged(f"{kept} has been overwritten")
    return bytes(mapped[HEAD_ROOM : HEAD_ROOM + head.meta]), mapped[PAYLOAD : PAYLOAD + head.nbytes]


def private(nbytes: int) -> memoryview:
    """Fresh memory of this process alone, in huge pages where the kernel has them: half of the time to fill it goes to
    page faults (measured)."""
    mapped = mmap.mmap(-1, max(nbytes, 1))
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)[:nbytes]
