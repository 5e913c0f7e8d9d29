"""Checks of the host: what is mounted, room, memory, processor, processes that do not end."""

from __future__ import annotations

from collections.abc import Iterator

from ...config.health_rules import Rules
from ...core.types import Cause, Remedy
from ..readers.samples import MOUNT_ATTEMPTS, HostData, Stuck
from .base import Check, Good, Said, Unknown, fail, warn
from .node_state import Seen

_SHARED = (
    "nfs", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "smb", "cifs", "fuse", "9p", "virtiofs", "pvfs",
    "afs", "orangefs", "gfs2", "ocfs2",
)  # fmt: skip
"""beginnings of the names of file systems that many nodes share: what is full there is no node's fault"""
_IMAGES = ("squashfs", "iso9660", "erofs", "cramfs", "romfs")
"""always full: nodes without a disk boot from them"""


_ROOT = 0


def _host(seen: Seen) -> HostData:
    data = seen.data("host")
    return data if isinstance(data, HostData) else HostData()


def _mounts(seen: Seen, rules: Rules, now: float) -> Iterator[Said]:
    looked_at = set()
    mounts = _host(seen).mounts
    node_runs = any(mount.answers for mount in mounts)
    for mount in mounts:
        looked_at.add(mount.path)
        if not mount.answers:
            kind = f" ({mount.filesystem})" if mount.filesystem else ""
            text = f"{mount.path}{kind}: {mount.why or 'does not answer'}"
            hangs = mount.attempts >= MOUNT_ATTEMPTS and mount.hung_for >= rules.host.mount_hung
            needs = 1 if hangs and node_runs else None
            yield fail(Cause.STORAGE, Remedy.EXCLUDE, text, part=mount.path, needs=needs)
    for path in rules.expect.mounts:
        if path not in looked_at:
            yield Unknown(f"{path} was not looked at", decides=True)


def _disk(seen: Seen, rules: Rules, now: float) -> Iterator[Said]:
    limits = rules.host
    for mount in _host(seen).mounts:
        if mount.filesystem in _IMAGES:
            continue
        shared = mount.filesystem.lower().startswith(_SHARED)
        for share, what in ((mount.used, "its bytes"), (mount.inodes_used, "its inodes")):
            if share is None or share < limits.disk:
                continue
            if share >= limits.disk_full and not shared:
                text = f"{mount.path}: {limits.disk_full:.0%} of {what} or more are used"
                yield fail(Cause.STORAGE, Remedy.EXCLUDE, text, part=mount.path)
            else:
                text = f"{mount.path}: {limits.disk:.0%} of {what} or more are used"
                yield warn(Cause.STORAGE, Remedy.NONE, text, part=mount.path, clears=rules.hysteresis.bad)


def _memory(seen: Seen, rules: Rules, now: float) -> Iterator[Said]:
    host, share = _host(seen), rules.host.memory
    total, wanted = host.memory_total, rules.expect.memory
    if total is None:
        yield Unknown(host.unread.get("memory_total", "not read"))
        return
    if wanted and abs(total - wanted) > share * wanted:
        text = f"main memory is {total / 2**30:.0f} GiB, {wanted / 2**30:.0f} GiB are expected"
        yield warn(Cause.NODE, Remedy.SUPPORT, text)
    if host.memory_available is not None and host.memory_available < share * total:
        text = f"less than {share:.0%} of main memory is available"
        yield warn(Cause.USER, Remedy.NONE, text, part="available")


def _cpu(seen: Seen, rules: Rules, now: float) -> Iterator[Said]:
    host, wanted = _host(seen), rules.expect
    if wanted.governor and host.governor is None:
        yield Unknown(host.unread.get("governor", "this machine tells no frequency governor"))
    elif wanted.governor and host.governor != wanted.governor:
        text = f"the CPU frequency governor is {host.governor}, {wanted.governor} is expected"
        yield warn(Cause.NODE, Remedy.SUPPORT, text)


def _clock(seen: Seen, rules: Rules, now: float) -> Iterator[Said]:
    source, wanted = _host(seen).clock_source, rules.expect.clock_source
    if source is None:
        yield Unknown(_host(seen).unread.get("clock_source", "not read"))
    elif wanted and source != wanted:
        yield warn(Cause.NODE, Remedy.SUPPORT, f"the clock source is {source}, {wanted} is expected")
    elif not wanted and source in rules.host.clock_sources:
        yield warn(Cause.NODE, Remedy.SUPPORT, f"the clock source is {source}, which is slow: the kernel gave up a"
                   " better one")  # fmt: skip


def _stuck(seen: Seen, rules: Rules, now: float) -> Iterator[Said]:
    """A process that survives our own kill holds what it has: the node cannot be used."""
    at, host = seen.at("host"), _host(seen)
    for one in host.stuck:
        since = at - one.seconds
        ours = one.uid == seen.uid if seen.uid is not None else one.uid != _ROOT  # kernel threads are often in state D
        if ours and any(at - kill >= rules.host.stuck_after_kill and since <= kill for kill in seen.kills):
            yield fail(Cause.NODE, Remedy.REBOOT, f"{_named(one)} outlived our kill in state D", part=f"pid {one.pid}")
        elif one.seconds >= rules.host.stuck:
            text = f"{_named(one)} is in state D for {rules.host.stuck:g} s or more"
            yield warn(Cause.NODE, Remedy.NONE, text, part=f"pid {one.pid}")


def _named(one: Stuck) -> str:
    return f"process {one.pid} ({one.name}, uid {one.uid}{f', in {one.where}' if one.where else ''})"


def _zombies(seen: Seen, rules: Rules, now: float) -> Iterator[Said]:
    if _host(seen).zombies > rules.host.zombies:
        yield warn(Cause.NODE, Remedy.NONE, f"more than {rules.host.zombies} zombies are older than 300 s")
    else:
        yield Good("few zombies" if _host(seen).zombies else "no zombies")


_HOST = ("host",)
CHECKS = (
    Check("mounts", _HOST, _mounts, "paths that the node needs: each is looked at with a deadline of its own",
          "one does not answer in three looks, or for host.mount_hung s to three processes while others answer: FAIL,"
          " exclude (cause storage; several nodes at once are no node's fault)", "NVRx"),
    Check("disk", _HOST, _disk, "bytes and inodes in use there",
          ">= host.disk: WARN; >= host.disk_full, and not a shared file system: FAIL, exclude (cause storage)", "gcm"),
    Check("memory", _HOST, _memory, "main memory that is available, and all of it against expect.memory",
          "less than host.memory of it; off by more than that: WARN", "NHC"),
    Check("cpu_governor", _HOST, _cpu, "the CPU frequency governor, against expect.governor",
          "another: WARN, evidence of a straggler", "gcm"),
    Check("clock_source", _HOST, _clock, "the kernel's clock source, against expect.clock_source",
          "another, or one of host.clock_sources: WARN", "ours"),
    Check("stuck", _HOST, _stuck, "processes in state D",
          "for host.stuck s: WARN; one that outlived our kill for host.stuck_after_kill s: FAIL, reboot",
          "gcm"),
    Check("zombies", _HOST, _zombies, "zombies older than 300 s", "> host.zombies: WARN", "gcm"),
)  # fmt: skip
