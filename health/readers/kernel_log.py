"""Read the kernel log from ``/dev/kmsg`` and recognise the relevant messages; each pattern names its source.

Every process that reads ``/dev/kmsg`` receives every record, from the oldest that the kernel still holds. A record is
``priority,sequence,microseconds,flags;text`` (linux Documentation/ABI/testing/dev-kmsg), followed by property lines
that begin with a blank. Its time is from CLOCK_MONOTONIC. A user who may not read ``/dev/kmsg`` has no other source,
because the systemd journal requires a permission as well.

Only the kernel's own records count. ``priority >> 3`` is the facility. Facility 0 is the kernel; a program that writes
to /dev/kmsg gets 1 (user) or a value above 0 that it names (linux kernel/printk/printk.c, devkmsg_write). A record with
the flag ``c`` or ``+`` is ignored: it continues another record, so its text may begin in the middle of a line.

The kernel prints names that users choose: a crashing program's ``comm`` and file name, or the prefix of a packet filter
rule. No node may be drained because of such a name:

- Every pattern is anchored at the start of the message and contains more fixed text than a ``comm`` (15 bytes) can
  imitate, or extends to the end of the message.
- A message that begins with such a name (:data:`_BEGINS_WITH_A_NAME`) or comes from a packet filter is dropped before
  any pattern is tried.

The named groups of the patterns are ``xid``, ``pci``, ``pid`` and ``device``. The first pattern that matches a message
decides its kind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from typing import Literal

from msgspec import structs

from .base import NotInstalled, PermissionDenied, ReaderOptions
from .samples import KernelData, KernelEvent

Kind = Literal["xid", "sxid", "mce", "oom", "nic", "io", "filesystem", "filesystem_back", "hung_task"]

MAX_TEXT_CHARS = 300
"""Maximum number of characters kept of a line."""

OFF_THE_BUS = 79
"""Xid of a GPU that has fallen off the bus; drivers also report this fault without a number."""

_PCI = rb"(?:PCI:)?(?P<pci>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.\d)?"
_BUS = rb"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]"
_OF_A_DRIVER = rb"(?:[\w-]+ " + _BUS + rb":? |[\w-]+ [\w.:-]+\.[\w-]+ )?(?:[\w.@-]+: ){0,2}"
"""Prefix that ``dev_printk`` writes: the driver, the device's address on its bus (a PCI address, or like
``ff0e0000.ethernet`` for a platform device), and the interface's name, which some drivers repeat."""
_END = rb"[.!]?\s*$"

_COMM = rb"(?:\\x[0-9a-f]{2}|[^\\]){0,15}"
"""A program's ``comm``, which it may set freely (prctl PR_SET_NAME): at most 15 bytes (linux include/linux/sched.h:
TASK_COMM_LEN); /dev/kmsg writes unprintable bytes as ``\\x0a``."""
_BEGINS_WITH_A_NAME = re.compile(
    # linux arch/*/kernel, arch/x86/mm/fault.c: ``NAME[77]: segfault at ...``, ``traps: NAME[77] general protection
    # ...``, ``umip: NAME[77] ip:...``, ``NAME[77]: unhandled exception``, ``NAME[77] bad frame in ...``; the file's
    # name follows. ``NAME (77): drop_caches: 3``, ``mmap: NAME (77): VmData ...``
    rb"(?:[\w-]+: )?" + _COMM + rb"(?:\[\d+\]| ?\(\d+\))[ :]"
    # mm/oom_kill.c, mm/page_alloc.c, mm/vmalloc.c, block/blk-core.c
    rb"|" + _COMM + rb"(?: invoked oom-killer: |: page allocation (?:failure|stalls)|: vmalloc "
    rb"|: attempt to access beyond )"
    # a fragment of an interrupted line of the first kind (``NAME[77] bad frame in ...``)
    rb"| in "
)
_PACKET_FILTER = re.compile(rb"IN=[\w.@-]* OUT=[\w.@-]* ")
"""Part of each message of a packet filter (linux net/netfilter/nf_log_syslog.c). Before this part is a prefix of up to
127 bytes that the filter rule sets."""

_PATTERNS: tuple[tuple[Kind, bytes], ...] = (
    # NVIDIA, "Xid Errors": ``NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics SM Warp ...``;
    # drivers before 319 omit ``PCI:``, and drivers from 5xx on write pid=1234. For a MIG instance they write
    # ``(PCI:0000:07:00 GPU-I:05 GPU-CI:00)`` (open-gpu-kernel-modules kernel_rc.c).
    ("xid", rb"NVRM: Xid \(" + _PCI + rb"[^)]*\): (?P<xid>\d+)(?:,.*?\bpid=(?P<pid>\d+))?"),
    # a GPU that fell off the bus, reported without an Xid number (NVSentinel #155, gpud #1209): ``NVRM: The NVIDIA GPU
    # 0000:b3:00.0\x0aNVRM: (PCI ID: ... fallen off the bus and is not responding``, ``NVRM: GPU 0000:01:00.0: GPU has
    # fallen off the bus.``
    ("xid", rb"NVRM: (?:The NVIDIA )?GPU " + _PCI + rb"\b.*fallen off the bus"),
    # NVIDIA, Fabric Manager guide, appendix D: ``nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 28 ...``
    ("sxid", rb"(?P<device>nvidia-nvswitch\d+): SXid \(" + _PCI + rb"\): (?P<xid>\d+)"),
    # linux arch/x86/kernel/cpu/mce/core.c, drivers/edac/mce_amd.c, drivers/firmware/efi/cper.c (``{1}[Hardware Error]:
    # ...``), drivers/acpi/apei/bert.c (``BERT: [Hardware Error]: ...``)
    ("mce", rb"(?:\w{1,12}: |\{\d+\})?\[Hardware Error\]: "),
    ("mce", rb"mce: Machine check events logged"),
    ("mce", rb"mce: Uncorrected hardware memory error in "),
    # linux drivers/edac/edac_mc.c: ``EDAC MC0: 1 UE memory read error on CPU_SrcID#0_...``; older kernels omit the
    # number: ``EDAC MC1: UE page 0x0, offset 0x0, ...``
    ("mce", rb"(?P<device>EDAC MC\d+): (?:\d+ )?[CU]E (?:page 0x|(?:\S.* )?on \S)"),
    # linux mm/memory-failure.c: ``Memory failure: 0x12345: recovery action for ...``
    ("mce", rb"Memory failure: 0x[0-9a-f]+: "),
    # linux mm/oom_kill.c: ``Out of memory: Killed process 123 (python) total-vm:...``, ``Memory cgroup out of ...``
    ("oom", rb"(?:Memory cgroup o|O)ut of memory(?: \([^)]*\))?: Kill(?:ed)? process (?P<pid>\d+)"),
    # linux drivers/net/ethernet/mellanox/mlx5/core/health.c: ``mlx5_core 0000:65:00.0: poll_health:...: Fatal error
    # 1 detected``, ``device's health compromised``, ``health recovery failed``
    (
        "nic",
        rb"(?P<device>mlx[45]_core " + _BUS + rb")\b.*(?:Fatal error|health compromised"
        rb"|recovery (?:flow )?fail)",
    ),
    ("nic", rb"(?P<device>mlx5_core " + _BUS + rb")\b.*(?:cmd_work_handler|wait_func).*timeout"),
    # ``mlx5_core 0000:65:00.0 ens1f0np0: Link down``; Intel and Broadcom drivers: ``ixgbe 0000:01:00.0 eth0: NIC Link
    # is Down``; ``eth0: NIC Link is Down``; ``igb 0000:01:00.0 eno1: igb: eno1 NIC Link is Down``
    ("nic", _OF_A_DRIVER + rb"(?P<device>[\w.@-]+)(?::| NIC) (?:NIC )?[Ll]ink (?:is )?[Dd]own" + _END),
    # InfiniBand, gpud #1209: ``mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link DOWN``
    ("nic", _OF_A_DRIVER + rb"(?P<device>mlx[45]_\d+): Port: \d+ Link DOWN" + _END),
    # drivers that use the text of systemd-networkd, as in Meta's gcm: ``ib0: Lost carrier``
    ("nic", _OF_A_DRIVER + rb"(?P<device>[\w.@-]+): Lost [Cc]arrier" + _END),
    # linux net/sched/sch_generic.c: ``NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 3 timed out``; since 6.5
    # ``mlx5_core 0000:65:00.0 eth0: NETDEV WATCHDOG: CPU: 3: transmit queue 3 timed out 5001 ms``
    ("nic", _OF_A_DRIVER + rb"(?P<device>[\w.@-]+): NETDEV WATCHDOG: .*timed out"),
    ("nic", rb"NETDEV WATCHDOG: (?P<device>[\w.@-]+?):? .*timed out"),
    # linux block/blk-core.c: ``[blk_update_request: ]I/O error, dev nvme0n1, sector 1 op ...``, ``critical medium
    # error, dev sda``; fs/buffer.c: ``Buffer I/O error on dev dm-0, logical block ...``
    ("io", rb"(?:\w+: )?(?:I/O|(?:critical )?(?:medium|target)) error, dev (?P<device>[\w-]+), sector \d"),
    ("io", rb"Buffer I/O error on dev(?:ice)? (?P<device>[\w-]+)"),
    # linux drivers/nvme/host/pci.c: ``nvme nvme0: I/O 12 QID 4 timeout, aborting``, since 6.8 ``I/O tag 12 (100c)
    # opcode 0x2 (Read) QID 4 timeout, ...``, ``controller is down; will reset``, ``Device not ready; aborting reset``,
    # ``Removing after probe failure``
    (
        "io",
        rb"nvme (?P<device>nvme\d+): (?:I/O (?:tag )?\d+ .*timeout|controller is down|Device not ready"
        rb"|Removing after)",
    ),
    # linux fs/ext4/super.c, fs/xfs, fs/btrfs
    ("filesystem", rb"EXT4-fs error \(device (?P<device>[\w-]+)\)"),
    ("filesystem", rb"EXT4-fs \((?P<device>[\w-]+)\): Remounting filesystem read-only"),
    (
        "filesystem",
        rb"XFS \((?P<device>[\w-]+)\): (?:[\w() ./-]*[Cc]orruption|(?:[Mm]etadata|[Ll]og) I/O [Ee]rror"
        rb"|.*(?:been shut down|Shutting down filesystem))",
    ),
    # ``BTRFS: error (device sda1) in btrfs_commit_transaction:2323: errno=-5 IO failure``, ``BTRFS error (device ...``
    ("filesystem", rb"BTRFS:? (?:error|critical) \(device (?P<device>[\w-]+)"),
    ("filesystem", rb"BTRFS \w+ \(device (?P<device>[\w-]+)[^)]*\): forced readonly"),
    # linux net/sunrpc/clnt.c: ``nfs: server filer not responding, still trying``
    ("filesystem", rb"nfs: server (?P<device>\S+) not responding"),
    # lustre ptlrpc/import.c: ``LustreError: 167-0: fs-OST0001-osc-...: This client was evicted by fs-OST0001``,
    # ``Lustre: fs-OST0001-osc-...: Connection to fs-OST0001 (at 10.0.0.1@o2ib) was lost``
    (
        "filesystem",
        rb"Lustre(?:Error)?: .*?(?P<device>[\w.-]+-(?:OST|MDT)[0-9a-f]{4})\S*: (?:This client was evicted"
        rb"|Connection to \S+ \(at \S+\) was lost)",
    ),
    # net/sunrpc/clnt.c and ptlrpc/import.c, when the server answers again: ``nfs: server filer OK``, ``Lustre:
    # fs-OST0001-osc-...: Connection restored to fs-OST0001 (at 10.0.0.1@o2ib)``
    ("filesystem_back", rb"nfs: server (?P<device>\S+) OK" + _END),
    ("filesystem_back", rb"Lustre: (?P<device>[\w.-]+-(?:OST|MDT)[0-9a-f]{4})\S*: Connection restored to \S+"),
    # linux kernel/hung_task.c: ``INFO: task python:1234 blocked for more than 120 seconds.``; kernel/watchdog.c
    ("hung_task", rb"INFO: task .*:(?P<pid>\d+) blocked (?:in I/O wait )?for more than \d+ seconds"),
    ("hung_task", rb"(?:NMI )?(?:watchdog: )?BUG: soft lockup - CPU#\d+ stuck for .*\[.*:(?P<pid>\d+)\]"),
)
_COMPILED = tuple((kind, re.compile(pattern)) for kind, pattern in _PATTERNS)
_PREFILTER = re.compile(
    rb"Xid|off the bus|Hardware Error|Machine check|EDAC MC|Memory failure|ut of memory|mlx|[Ll]ink |arrier|WATCHDOG"
    rb"|error|nvme|-fs |XFS|BTRFS|nfs: |Lustre|blocked |soft lockup"
)
"""Words of which every relevant line contains at least one. Most lines contain none and are rejected quickly."""


def recognise(line: bytes, age: float) -> KernelEvent | None:
    """Return the event that the message of one record reports, or None if it does not concern the node's health.

    Args:
        line: The text of the record, after its first semicolon, as /dev/kmsg escapes it.
        age: Seconds since the kernel wrote the record.
    """
    if _PREFILTER.search(line) is None or _BEGINS_WITH_A_NAME.match(line) or _PACKET_FILTER.search(line):
        return None
    for kind, pattern in _COMPILED:
        if (match := pattern.match(line)) is not None:
            found = match.groupdict()
            return KernelEvent(
                kind=kind,
                text=line.decode(errors="replace")[:MAX_TEXT_CHARS],
                age=age,
                xid=int(found["xid"]) if found.get("xid") else OFF_THE_BUS if kind == "xid" else None,
                pid=int(found["pid"]) if found.get("pid") else None,
                pci=_pci(found.get("pci")),
                device=(found.get("device") or b"").decode(errors="replace"),
            )
    return None


def _pci(text: bytes | None) -> str:
    """Return the PCI address like ``0000:1b:00``, with a domain of at least four digits, as NVML's reader writes it."""
    if text is None:
        return ""
    domain, rest = text.decode().lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"


MAX_EVENTS = 200
"""Maximum number of events in one sample; further events count as dropped."""
_MAX_READ_S = 0.5
"""Maximum time (s) for which one read takes lines. The next read takes the rest of a flood; lines that the kernel
overwrites meanwhile are counted as dropped."""
_FACILITY_SHIFT = 3
_KERNEL_FACILITY = 0
_CONTINUATIONS = (b"c", b"+")
_NVIDIA = "0x10de"
"""PCI vendor id of NVIDIA."""
_MAX_RECORD_BYTES = 8192
"""Size in bytes of the read buffer: the kernel's CONSOLE_EXT_LOG_MAX, because the kernel rejects a read into a smaller
buffer than the record needs."""


class KernelReader:
    """Reader of the kernel log."""

    name = "kernel"
    interval_s = 1.0
    timeout_s = 10.0

    def __init__(self, options: ReaderOptions) -> None:
        """Open the kernel log.

        Raises:
            NotInstalled: The node has no kernel log device.
            PermissionDenied: This user may not read it.
        """
        self._path = options.kmsg
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotInstalled(f"there is no {self._path}") from None
        except OSError as error:
            raise self._denied(error, options) from None
        self._options = options
        self._pci, self._driver = f"{options.sysfs}/bus/pci/devices", f"{options.proc}/driver/nvidia/gpus"
        self._devices = self._nvidia_devices()
        """PCI addresses of all NVIDIA devices found so far, because a GPU that falls off the bus may disappear from the
        lists of the kernel and the driver."""
        self._listed = True
        """Whether the devices have been listed during this read, so that a storm of Xids lists them only once."""
        self._partial_line = b""
        self._next_sequence: int | None = None
        """Sequence number of the next record."""

    def read(self) -> KernelData:
        """Read the new records and return their events."""
        events: list[KernelEvent] = []
        dropped = 0
        self._listed = False
        until = time.monotonic() + _MAX_READ_S
        while time.monotonic() < until:
            try:
                data = os.read(self._fd, _MAX_RECORD_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # records were overwritten; the next sequence number shows how many
                    continue
                if error.errno in (errno.EPERM, errno.EACCES):
                    raise self._denied(error, self._options) from None
                raise
            if not data:
                break
            *lines, self._partial_line = (self._partial_line + data).split(b"\n")
            now = time.monotonic()
            for line in lines:
                dropped += self._handle_line(line, now, events)
        kept_events = _most_relevant(events, MAX_EVENTS)
        return KernelData(tuple(kept_events), dropped + len(events) - len(kept_events))

    def close(self) -> None:
        """Close the kernel log."""
        os.close(self._fd)

    def _handle_line(self, line: bytes, now: float, events: list[KernelEvent]) -> int:
        """Process one line and return how many records were lost before this line."""
        head, found, text = line.partition(b";")
        fields = head.split(b",")
        if not found or line.startswith(b" ") or len(fields) < 4 or not b"".join(fields[:3]).isdigit():
            return 0  # a property of the previous record, or not a record of the kernel
        number = int(fields[1])
        lost = 0 if self._next_sequence is None else max(0, number - self._next_sequence)
        self._next_sequence = number + 1
        if int(fields[0]) >> _FACILITY_SHIFT != _KERNEL_FACILITY or fields[3] in _CONTINUATIONS:
            return lost
        event = recognise(text, max(0.0, now - int(fields[2]) / 1e6))
        if event is not None:
            events.append(self._completed(event))
        return lost

    def _completed(self, event: KernelEvent) -> KernelEvent:
        """Return the event with values that the message does not contain.

        For an Xid or SXid, ``pci_exists`` is added; for a hung task, the user id of the process.
        """
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
        """Return the PCI addresses, without function, of the NVIDIA devices that the kernel or the driver lists now."""
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
        return PermissionDenied(f"{self._path}: not permitted{why}")


def _most_relevant(events: list[KernelEvent], max_events: int) -> list[KernelEvent]:
    """Return at most ``max_events`` events, in their order.

    The first event about a subject has priority over repetitions, and Xids have priority over other kinds. So a flood
    of one message hides no other message, and no flood hides a new Xid.
    """
    if len(events) <= max_events:
        return events
    reported: set[tuple[object, ...]] = set()
    ranks: list[tuple[int, int]] = []
    for place, event in enumerate(events):
        subject = (event.kind, event.xid, event.pci, event.device, event.pid if event.kind == "oom" else None)
        gpu = event.kind in ("xid", "sxid")
        ranks.append(((0 if gpu else 2) if subject in reported else (-2 if gpu else -1), place))
        reported.add(subject)
    return [events[place] for place in sorted(place for _, place in sorted(ranks)[:max_events])]
