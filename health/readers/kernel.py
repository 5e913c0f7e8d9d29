"""The kernel log, from ``/dev/kmsg``: every reader of it sees every record, from the oldest that the kernel still has.

A record is ``priority,sequence,microseconds,flags;text`` (linux Documentation/ABI/testing/dev-kmsg), with lines of
properties after it that begin with a blank. Its time counts as CLOCK_MONOTONIC does. There is no way around a missing
permission: the journal needs one as well.
"""

from __future__ import annotations

import errno
import os
import time

from rrl.health.readers import Absent, Denied, ReaderOptions
from rrl.health.readers.kernel_patterns import recognise
from rrl.health.readings import KernelData, KernelEvent

EVENTS_MOST = 200
"""events that one reading carries; what is cut counts as dropped"""
_READ_FOR = 0.5
"""s that one reading takes lines; a flood's rest is left to the next one, or overwritten and then counted"""
_RECORD = 8192
"""bytes; the kernel's CONSOLE_EXT_LOG_MAX: a smaller buffer makes it refuse a long record"""


class KernelReader:
    name = "kernel"
    every = 1.0
    within = 10.0

    def __init__(self, options: ReaderOptions) -> None:
        """Raises Absent or Denied."""
        self._path = options.kmsg
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Absent(f"there is no {self._path}") from None
        except OSError as error:
            raise self._denied(error, options) from None
        self._options = options
        self._held = b""
        self._next: int | None = None
        """sequence number that is to come"""

    def read(self) -> KernelData:
        events: list[KernelEvent] = []
        dropped = 0
        until = time.monotonic() + _READ_FOR
        while time.monotonic() < until:
            try:
                data = os.read(self._fd, _RECORD)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # overwritten before we came; the next number tells how many
                    continue
                if error.errno in (errno.EPERM, errno.EACCES):
                    raise self._denied(error, self._options) from None
                raise
            if not data:
                break
            *lines, self._held = (self._held + data).split(b"\n")
            now = time.monotonic()
            for line in lines:
                dropped += self._take(line, now, events)
        kept = _most_telling(events, EVENTS_MOST)
        return KernelData(tuple(kept), dropped + len(events) - len(kept))

    def close(self) -> None:
        os.close(self._fd)

    def _take(self, line: bytes, now: float, events: list[KernelEvent]) -> int:
        """One line; returns how many records were lost before it."""
        head, found, text = line.partition(b";")
        fields = head.split(b",")
        if not found or line.startswith(b" ") or len(fields) < 3 or not (fields[1] + fields[2]).isdigit():
            return 0  # a property of the record before, or nothing that the kernel wrote
        number = int(fields[1])
        lost = 0 if self._next is None else max(0, number - self._next)
        self._next = number + 1
        event = recognise(text, max(0.0, now - int(fields[2]) / 1e6))
        if event is not None:
            events.append(event)
        return lost

    def _denied(self, error: OSError, options: ReaderOptions) -> Exception:
        if error.errno not in (errno.EPERM, errno.EACCES):
            return error
        try:
            with open(f"{options.proc}/sys/kernel/dmesg_restrict") as file:
                why = f" (dmesg_restrict={file.read().strip()})"
        except OSError:
            why = ""
        return Denied(f"{self._path}: not permitted{why}")


def _most_telling(events: list[KernelEvent], most: int) -> list[KernelEvent]:
    """At most so many, in their order. What says something new goes before what was said already, Xids before others:
    a flood of one thing hides no other, and none hides an Xid that was not there yet."""
    if len(events) <= most:
        return events
    seen: set[tuple[object, ...]] = set()
    ranks: list[tuple[int, int]] = []
    for place, event in enumerate(events):
        what = (event.kind, event.xid, event.pci, event.device, event.pid if event.kind == "oom" else None)
        gpu = event.kind in ("xid", "sxid")
        ranks.append(((0 if gpu else 2) if what in seen else (-2 if gpu else -1), place))
        seen.add(what)
    return [events[place] for place in sorted(place for _, place in sorted(ranks)[:most])]
