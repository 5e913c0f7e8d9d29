"""Checks of the kernel log other than Xids.

They cover disks, file systems, machine checks, network links, hung tasks and memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...config.health_rules import Rules
from ...core.types import Cause, Flag, Remedy
from .base import Check, CheckResult, Problem, fail, warn
from .node_state import LogLine, NodeState
from .xid_events import is_fatal

_LOST_WRITES = re.compile(
    r"remount\w* .*read-only|EXT4-fs error|XFS .*(corruption|shut ?down)|BTRFS.*error|I/O error", re.I
)
"""Messages of a local file system that has lost writes. Network file systems (NFS, Lustre) wait instead; the check
``mounts`` detects whether they hang."""
_NOTHING_LOST = re.compile(r"op 0x[359]:\((?:DISCARD|SECURE_ERASE|WRITE_ZEROES)\)")
"""Requests that a disk may refuse without loss of data: discards by fstrim, and requests to write zeros (the file
system then writes the zeros itself)."""
_POLLED = re.compile(r"timeout, completion polled")
"""Text about a disk's request that was completed although its interrupt was missed (linux drivers/nvme/host/pci.c)."""
_UNCORRECTED = re.compile(
    r"uncorrect|context corrupt|unrecoverable|panic|event severity: recoverable|multi-bit ECC|Memory failure: 0x", re.I
)
"""Words that mark a machine check as uncorrected. ``recoverable`` is the firmware's term for an error that the hardware
could not correct, and from which the kernel may recover (linux include/linux/cper.h). The kernel reports the loss of a
page of memory by ``Memory failure`` (mm/memory-failure.c)."""
_UE = re.compile(r"\bUE\b")
"""Abbreviation of "uncorrected error" by EDAC and AMD's decoder: ``1 UE memory read error``,
``MC18_STATUS[-|UE|MiscV|...]``."""
_STATUS = re.compile(r"Machine Check(?: Exception)?: [0-9a-f]+ Bank \d+: (?P<status>[0-9a-f]{16})\b", re.I)
_UC = 1 << 61
"""Bit of the status register that is set if the error was not corrected (Intel SDM vol. 3B, 16.3.2.2; same for AMD)."""
_BEFORE_BOOT_S = 60.0
"""Seconds after boot in which the kernel reports errors that happened before the boot. It reads them from the
firmware's boot error record table (BERT) or from the machine-check banks."""
_STORAGE_TASK = re.compile(r"in I/O wait|nfs|lustre|ll_|ptlrpc|jbd2|xfs|ext4|btrfs|gpfs|mmfs|beegfs|ceph|flush-", re.I)
"""Pattern in the kernel's message about a hung task, if the task waits for a disk or a file system."""
_BOOT_PERIOD_S = 600.0
"""Seconds after boot in which links that go down are not reported."""
_INFINIBAND = re.compile(r"^(ib|mlx|hsi|hfi)", re.I)


def _lines(state: NodeState, kind: str, window: float, now: float) -> dict[str, list[LogLine]]:
    """Return the kernel messages of one kind from the last ``window`` s, by device and with the oldest first."""
    found: dict[str, list[LogLine]] = {}
    for logged in state.log:
        if logged.event.kind == kind and logged.at > now - window:
            found.setdefault(logged.event.device, []).append(logged)
    return found


def _first(lines: list[LogLine]) -> str:
    return lines[0].event.text


def _disks(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    for device, device_lines in _lines(state, "io", rules.kernel.window, now).items():
        lines = [line for line in device_lines if not _NOTHING_LOST.search(line.event.text)]
        if not lines or device.startswith(rules.kernel.quiet_devices):
            continue
        lost = [line for line in lines if not _POLLED.search(line.event.text)]
        name = device or "a disk"
        if lost:
            text = f"I/O errors of {name}: {_first(lost)}"
            yield fail(Cause.STORAGE, Remedy.EXCLUDE, text, component=device, failures_to_raise=1, at=lost[0].at)
        else:
            yield warn(Cause.STORAGE, Remedy.NONE, f"{name}: {_first(lines)}", component=device, at=lines[0].at)


def _filesystems(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    back = _lines(state, "filesystem_back", rules.kernel.stall_window, now)
    for device, lines in _lines(state, "filesystem", rules.kernel.window, now).items():
        if device.startswith(rules.kernel.quiet_devices):  # loop devices contain users' images
            continue
        lost = next((line for line in lines if _LOST_WRITES.search(line.event.text)), None)
        shown = lost or lines[0]
        make = fail if lost else warn
        remedy = Remedy.EXCLUDE if lost else Remedy.NONE
        text = f"file system{f' on {device}' if device else ''}: {shown.event.text}"
        stalls = (
            lost is None
            and _is_recent(lines, rules, now)
            and (device not in back or back[device][-1].at < lines[-1].at)
        )
        flags = (Flag.STORAGE_STALLS,) if stalls else ()
        yield make(Cause.STORAGE, remedy, text, component=device, failures_to_raise=1, at=shown.at, flags=flags)


def _is_recent(lines: list[LogLine], rules: Rules, now: float) -> bool:
    """Return whether the newest line is recent enough that storage probably still stalls."""
    return lines[-1].at > now - rules.kernel.stall_window


def _machine_checks(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    for lines in _lines(state, "mce", rules.kernel.window, now).values():
        new = (line for line in lines if line.at > _BEFORE_BOOT_S)
        uncorrected = next((line for line in new if _is_uncorrected(line.event.text)), None)
        if uncorrected is not None:
            text = f"uncorrected machine check: {uncorrected.event.text}"
            yield fail(Cause.NODE, Remedy.REBOOT, text, failures_to_raise=1, at=uncorrected.at)
        else:
            yield warn(Cause.NODE, Remedy.SUPPORT, f"machine check: {_first(lines)}", at=lines[0].at)


def _is_uncorrected(text: str) -> bool:
    status = _STATUS.search(text)
    uncorrected = status is not None and bool(int(status["status"], 16) & _UC)
    return uncorrected or bool(_UNCORRECTED.search(text) or _UE.search(text)) or is_fatal(text)


def _flaps(state: NodeState, rules: Rules, now: float) -> Iterator[Problem]:
    for device, device_lines in _lines(state, "nic", rules.kernel.flap_window, now).items():
        if not (lines := [line for line in device_lines if line.at > _BOOT_PERIOD_S]):
            continue
        often = len(lines) >= rules.kernel.flaps and _INFINIBAND.match(device)
        text = f"link of {device or 'a network device'} went down: {_first(lines)}"
        if often:
            again = f"at least {rules.kernel.flaps} times within {rules.kernel.flap_window:g} s"
            yield fail(
                Cause.FABRIC, Remedy.SUPPORT, f"{text}, {again}", component=device, failures_to_raise=1, at=lines[0].at
            )
        else:
            yield warn(Cause.FABRIC, Remedy.NONE, text, component=device, at=lines[0].at)


def _hung(state: NodeState, rules: Rules, now: float) -> Iterator[Problem]:
    for several in _lines(state, "hung_task", rules.kernel.hung_window, now).values():
        storage = [line for line in several if _STORAGE_TASK.search(line.event.text)]
        others = [line for line in several if line not in storage]
        for cause, component, lines in ((Cause.STORAGE, "storage", storage), (Cause.NODE, "", others)):
            if lines:
                stalls = cause is Cause.STORAGE and _is_recent(lines, rules, now)
                flags = (Flag.STORAGE_STALLS,) if stalls else ()
                text = f"hung task: {_first(lines)}"
                yield warn(cause, Remedy.NONE, text, component=component, at=lines[0].at, flags=flags)


def _memory(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    lines = [line for several in _lines(state, "oom", rules.kernel.window, now).values() for line in several]
    counter = state.counter("host", "", "oom_kills")
    if recent := [line for line in lines if not line.before_start]:
        yield warn(Cause.USER, Remedy.NONE, f"out of memory: {_first(recent)}", at=recent[0].at)
    elif counter and counter.increase_within(rules.kernel.window, now):
        yield warn(
            Cause.USER, Remedy.NONE, "the kernel killed a process of this node because memory ran out", source="host"
        )


_KERNEL = ("kernel",)
CHECKS = (
    Check(
        "kernel_io",
        _KERNEL,
        _disks,
        "I/O errors of disks, within a day",
        "an error: FAIL, exclude (cause storage); a completion that was polled: WARN; a refused discard: ignored",
        "gcm",
    ),
    Check(
        "kernel_filesystem",
        _KERNEL,
        _filesystems,
        "messages about file systems within a day",
        "an error, or a file system that became read-only: FAIL, exclude (cause storage); a server that does"
        " not answer: WARN",
        "gcm",
    ),
    Check(
        "kernel_mce",
        _KERNEL,
        _machine_checks,
        "machine checks, within a day",
        "uncorrected, according to the text or the status bit: FAIL, reboot; corrected, or from before this boot: WARN",
        "ByteRobust",
    ),
    Check(
        "kernel_nic",
        _KERNEL,
        _flaps,
        "links that went down, within an hour",
        "kernel.flaps times on one InfiniBand port: FAIL, support; else: WARN",
        "gcm",
    ),
    Check(
        "kernel_hung",
        _KERNEL,
        _hung,
        "tasks that the kernel reports as hung, and soft lockups, within kernel.hung_window",
        "any of them: WARN (cause storage if the message shows that the task waits for storage, else node)",
        "ours",
    ),
    Check(
        "oom",
        ("kernel", "host"),
        _memory,
        "processes that the kernel killed because memory ran out",
        "any such process since monitoring began: WARN (cause user)",
        "ByteRobust",
        any_reader=True,
    ),
)
