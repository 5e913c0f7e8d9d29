"""Checks of the host: mounts, disk space, memory, CPU, clock and processes that do not end."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...config.health_rules import Rules
from ...core.types import Cause, Flag, Remedy
from ..readers.samples import MOUNT_ATTEMPTS, HostData, StuckProcess
from .base import Check, CheckResult, Passed, Unknown, fail, warn
from .node_state import NodeState

_SHARED_FILESYSTEMS = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "wekafs",
    "panfs",
    "smb",
    "cifs",
    "fuse",
    "9p",
    "virtiofs",
    "pvfs",
    "afs",
    "orangefs",
    "gfs2",
    "ocfs2",
)
"""Prefixes of the names of shared file systems. If a shared file system is full, the node is not at fault."""
_IMAGE_FILESYSTEMS = ("squashfs", "iso9660", "erofs", "cramfs", "romfs")
"""Read-only image file systems, from which nodes without a disk boot. They are always full."""
_ROOT = 0
_STORAGE_FUNCTION = re.compile(
    r"_*(nfs|rpc_|ll_|ptlrpc|cl_sync|jbd2|xfs|xlog|ext4|btrfs|mmfs|fuse|ceph|folio_wait|wait_on_page|io_schedule"
    r"|rq_qos|blkdev|balance_dirty|wb_wait|wait_sb_inodes|writeback)"
)
"""Kernel functions in which a process in state D waits for a disk or a file system (linux fs/, mm/, block/, net/sunrpc;
Lustre)."""


def _host(state: NodeState) -> HostData:
    data = state.data("host")
    return data if isinstance(data, HostData) else HostData()


def _mounts(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    """Fail the node if a mount does not answer.

    One run of the check suffices for a FAIL if all of these conditions hold: ``MOUNT_ATTEMPTS`` processes wait for an
    answer of the mount, the first of them has waited for ``mount_hung`` s, and another mount answers.
    """
    probed = set()
    mounts = _host(state).mounts
    node_runs = any(mount.answers for mount in mounts)
    for mount in mounts:
        probed.add(mount.path)
        if not mount.answers:
            kind = f" ({mount.filesystem})" if mount.filesystem else ""
            text = f"{mount.path}{kind}: {mount.why or 'does not answer'}"
            hangs = mount.attempts >= MOUNT_ATTEMPTS and mount.hung_for >= rules.host.mount_hung
            needs = 1 if hangs and node_runs else None
            flags = (Flag.STORAGE_STALLS,)
            yield fail(Cause.STORAGE, Remedy.EXCLUDE, text, component=mount.path, failures_to_raise=needs, flags=flags)
    for path in rules.expect.mounts:
        if path not in probed:
            yield Unknown(f"{path} was not probed", makes_node_unknown=True)


def _disk(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    limits = rules.host
    for mount in _host(state).mounts:
        if mount.filesystem in _IMAGE_FILESYSTEMS:
            continue
        shared = mount.filesystem.lower().startswith(_SHARED_FILESYSTEMS)
        for share, resource in ((mount.used, "its bytes"), (mount.inodes_used, "its inodes")):
            if share is None or share < limits.disk:
                continue
            if share >= limits.disk_full and not shared:
                text = f"{mount.path}: at least {limits.disk_full:.0%} of {resource} are used"
                yield fail(Cause.STORAGE, Remedy.EXCLUDE, text, component=mount.path)
            else:
                text = f"{mount.path}: at least {limits.disk:.0%} of {resource} are used"
                yield warn(Cause.STORAGE, Remedy.NONE, text, component=mount.path, passes_to_clear=rules.hysteresis.bad)


def _memory(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    host, share = _host(state), rules.host.memory
    total, wanted = host.memory_total, rules.expect.memory
    if total is None:
        yield Unknown(host.unread.get("memory_total", "not read"))
        return
    if wanted and abs(total - wanted) > share * wanted:
        text = f"main memory is {total / 2**30:.0f} GiB, {wanted / 2**30:.0f} GiB are expected"
        yield warn(Cause.NODE, Remedy.SUPPORT, text)
    if host.memory_available is not None and host.memory_available < share * total:
        text = f"less than {share:.0%} of main memory is available"
        yield warn(Cause.USER, Remedy.NONE, text, component="available")


def _cpu(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    host, wanted = _host(state), rules.expect
    if wanted.governor and host.governor is None:
        yield Unknown(host.unread.get("governor", "this machine reports no frequency governor"))
    elif wanted.governor and host.governor != wanted.governor:
        text = f"the CPU frequency governor is {host.governor}, {wanted.governor} is expected"
        yield warn(Cause.NODE, Remedy.SUPPORT, text)


def _clock(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    source, wanted = _host(state).clock_source, rules.expect.clock_source
    if source is None:
        yield Unknown(_host(state).unread.get("clock_source", "not read"))
    elif wanted and source != wanted:
        yield warn(Cause.NODE, Remedy.SUPPORT, f"the clock source is {source}, {wanted} is expected")
    elif not wanted and source in rules.host.clock_sources:
        yield warn(
            Cause.NODE, Remedy.SUPPORT, f"the clock source is {source}, which is slow: the kernel rejected a better one"
        )


def _stuck(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    """Warn of processes in state D, and fail the node if such a process survives rrl's SIGKILL.

    A process that survives SIGKILL keeps its resources, so the node cannot be used.
    """
    at, host = state.reading_at("host"), _host(state)
    for process in host.stuck:
        since = at - process.seconds
        # kernel threads, which belong to root, are often in state D
        owned_by_us = process.uid == state.own_uid if state.own_uid is not None else process.uid != _ROOT
        if owned_by_us and any(at - kill >= rules.host.stuck_after_kill and since <= kill for kill in state.our_kills):
            yield fail(
                Cause.NODE,
                Remedy.REBOOT,
                f"{_process_text(process)} is still in state D after SIGKILL by rrl",
                component=f"pid {process.pid}",
            )
        elif process.seconds >= rules.host.stuck:
            text = f"{_process_text(process)} has been in state D for {rules.host.stuck:g} s or more"
            stalls = _STORAGE_FUNCTION.match(process.kernel_function)
            flags = (Flag.STORAGE_STALLS,) if stalls else ()
            yield warn(Cause.NODE, Remedy.NONE, text, component=f"pid {process.pid}", flags=flags)


def _process_text(process: StuckProcess) -> str:
    kernel_function = f", in {process.kernel_function}" if process.kernel_function else ""
    return f"process {process.pid} ({process.name}, uid {process.uid}{kernel_function})"


def _zombies(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    if _host(state).zombies > rules.host.zombies:
        yield warn(Cause.NODE, Remedy.NONE, f"more than {rules.host.zombies} zombies are older than 300 s")
    else:
        yield Passed("few zombies" if _host(state).zombies else "no zombies")


_HOST = ("host",)
CHECKS = (
    Check(
        "mounts",
        _HOST,
        _mounts,
        "paths that the node needs, each probed with a deadline of its own",
        "a path does not answer in three runs in a row, or does not answer three processes for host.mount_hung s"
        " while other paths answer: FAIL, exclude (cause storage; if several nodes have it at the same time,"
        " it is not a node's fault)",
        "NVRx",
    ),
    Check(
        "disk",
        _HOST,
        _disk,
        "bytes and inodes in use on these paths",
        ">= host.disk: WARN; >= host.disk_full, unless the file system is shared: FAIL, exclude (cause storage)",
        "gcm",
    ),
    Check(
        "memory",
        _HOST,
        _memory,
        "available main memory; its size, compared with expect.memory",
        "less than the share host.memory is available, or the size differs by more than that share: WARN",
        "NHC",
    ),
    Check(
        "cpu_governor",
        _HOST,
        _cpu,
        "the CPU frequency governor, compared with expect.governor",
        "a difference: WARN, evidence of a straggler",
        "gcm",
    ),
    Check(
        "clock_source",
        _HOST,
        _clock,
        "the kernel's clock source, compared with expect.clock_source",
        "a difference; without expect.clock_source, a slow source (host.clock_sources): WARN",
        "ours",
    ),
    Check(
        "stuck",
        _HOST,
        _stuck,
        "processes in state D",
        "for host.stuck s: WARN; if rrl killed the process host.stuck_after_kill s ago: FAIL, reboot",
        "gcm",
    ),
    Check("zombies", _HOST, _zombies, "zombies older than 300 s", "> host.zombies: WARN", "gcm"),
)
