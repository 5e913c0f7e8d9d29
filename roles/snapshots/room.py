"""How much memory this process could still fill without anybody being killed for it."""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def available(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Bytes: what the machine has available (``MemAvailable``), or less where a cgroup above this process allows less.
    Memory is charged to whoever touches it first; at a cgroup's limit that one is killed, without an error before."""
    left = _field(proc / "meminfo", "MemAvailable:") * 1024
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return left
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            left = min(left, _below(cgroups, path, "memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            left = min(left, _below(cgroups / "memory", path, *v1))
    return max(0, left)


def _below(mount: Path, path: str, limit: str, usage: str, cache: str) -> int:
    """Left under the tightest limit from ``path`` up to the mount; without any, more than there can be. ``cache`` is
    given back before anybody is killed."""
    folder, least = mount / path.lstrip("/"), 2**63
    while folder != mount.parent:
        try:
            at_most = (folder / limit).read_text().strip()
            if at_most != "max":
                used = int((folder / usage).read_text()) - _field(folder / "memory.stat", cache)
                least = min(least, int(at_most) - used)
        except (OSError, ValueError):  # no such controller here, or outside of what a container sees
            pass
        folder = folder.parent
    return least


def _field(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        key, value, *_ = line.split()
        if key == name:
            return int(value)
    return 0
