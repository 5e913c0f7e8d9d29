"""The kernel log, from ``/dev/kmsg``: every reader of it sees every record, from the oldest that the kernel still has.

A record is ``priority,sequence,microseconds,flags;text`` (linux Documentation/ABI/testing/dev-kmsg), with lines of
properties after it that begin with a blank. Its time counts as CLOCK_MONOTONIC does. There is no way around a missing
permission: the journal needs one as well.

Only the kernel's own records count. ``priority >> 3`` is the facility: 0 is the kernel, which no program can claim, for
what is written into /dev/kmsg gets 1 (user) or what the writer says above 0 (linux kernel/printk/printk.c,
devkmsg_write). A record with the flag ``c`` or ``+`` goes on with another one: it may begin with any part of a line.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time

from msgspec import structs

from rrl.health.readers import Absent, Denied, ReaderOptions
from rrl.health.readers.kernel_patterns import recognise
from rrl.health.readings import KernelData, KernelEvent

EVENTS_MOST = 200
"""events that one reading carries; what is cut counts as dropped"""
_READ_FOR = 0.5
"""s that one reading takes lines; a flood's rest is left to the next one, or overwritten and then counted"""
_FACILITY_SHIFT = 3
_KERNEL_FACILITY = 0
_CONTINUATIONS = (b"c", b"+")
_NVIDIA = "0x10de"
"""PCI vendor id"""
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
        self._pci, self._driver = f"{options.sysfs}/bus/pci/devices", f"{options.proc}/driver/nvidia/gpus"
        self._devices = self._nvidia_devices()
        """all that were seen here: a GPU that falls off its bus may be gone from the lists"""
        self._listed = True
        """in this reading: a storm of Xids lists them once"""
        self._held = b""
        self._next: int | None = None
        """sequence number that is to come"""

    def read(self) -> KernelData:
        events: list[KernelEvent] = []
        dropped = 0
        self._listed = False
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
        if not found or line.startswith(b" ") or len(fields) < 4 or not b"".join(fields[:3]).isdigit():
            return 0  # a property of the record before, or nothing that the kernel wrote
        number = int(fields[1])
        lost = 0 if self._next is None else max(0, number - self._next)
        self._next = number + 1
        if int(fields[0]) >> _FACILITY_SHIFT != _KERNEL_FACILITY or fields[3] in _CONTINUATIONS:
            return lost
        event = recognise(text, max(0.0, now - int(fields[2]) / 1e6))
        if event is not None:
            events.append(self._completed(event))
        return lost

    def _completed(self, event: KernelEvent) -> KernelEvent:
        """Add what the message does not say: whether an Xid's PCI address is of an NVIDIA device of this node, and the
        owner of a hung task."""
        if event.kind == "hung_task":
            with contextlib.suppress(OSError):
                return structs.replace(event, uid=os.stat(f"{self._options.proc}/{event.pid}").st_uid)
        if event.kind not in ("xid", "sxid"):
            return event
        if event.pci not in self._devices and not self._listed:
            self._devices |= self._nvidia_devices()
            self._listed = True
        known = event.pci in self._devices
        return structs.replace(event, pci_exists=known if known or os.path.isdir(self._pci) else None)

    def _nvidia_devices(self) -> set[str]:
        """PCI addresses, without the function, of the NVIDIA devices that the kernel or the driver knows now."""
        found = set()
        with contextlib.suppress(OSError):
            for name in os.listdir(self._pci):
                with contextlib.suppress(OSError), open(f"{self._pci}/{name}/vendor") as file:
                    if file.read().strip().lower() == _NVIDIA:
                        found.add(name.lower().partition(".")[0])
        with contextlib.suppress(OSError):
            found |= {name.lower().partition(".")[0] for name in os.listdir(self._driver)}
        return found

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
