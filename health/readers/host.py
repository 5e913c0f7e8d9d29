"""Reader of the host: required mounts, stuck processes, memory, load, clock.

Each mount is probed by a process of its own (:mod:`rrl.health.readers.mounts`). All of /proc is read once per sample,
one small file per process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from .base import ReaderOptions
from .mounts import Mounts
from .samples import HostData, StuckProcess

ZOMBIE_AGE_S = 300.0
"""Minimum age (s) of a zombie that is counted, as in the zombie check of Meta's gcm."""
MAX_STUCK_PROCESSES = 50
"""Maximum number of stuck processes in one sample, longest stuck first. A dead file system may block hundreds of
processes."""
SCAN_TIMEOUT_S = 5.0
"""Seconds that reading all of /proc may take."""
_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD (linux include/linux/sched.h): kernel threads are often in state D without a fault."""
_KERNEL_REFRESH_READS = 30
"""Number of reads after which the list of kernel threads is renewed, because a pid may have been reused."""
_STAT_BYTES = 1024
"""Maximum number of bytes read from a stat file, which has about 300 bytes."""
_ObservedSince = dict[tuple[int, int], float]
"""(pid, start time of the process) → time (s, monotonic) since which every read has found it stuck, or as a zombie."""


class HostReader:
    """Reader of mounts, processes, memory, load and clock."""

    name = "host"
    interval_s = 10.0
    timeout_s = 30.0
    """Timeout (s) of a read, longer than the timeout of the mounts
    (:attr:`rrl.health.readers.base.ReaderOptions.mount_timeout_s`)."""

    def __init__(self, options: ReaderOptions) -> None:
        self._proc, self._sysfs = options.proc, options.sysfs
        self._mounts = Mounts(options.mounts, options.mount_timeout_s)
        self._stuck: _ObservedSince = {}
        self._zombies: _ObservedSince = {}
        self._kernel: set[int] = set()
        """Pids of the kernel's threads."""
        self._reads = 0

    def read(self) -> HostData:
        """Read the mounts, processes, memory, load and clock."""
        unread: dict[str, str] = {}
        mounts = self._mounts.read()
        stuck, zombies = self._processes(time.monotonic(), unread)
        memory = self._table("meminfo", {"MemTotal": "memory_total", "MemAvailable": "memory_available"}, unread)
        vmstat = self._table("vmstat", {"oom_kill": "oom_kills"}, unread)
        load = self._text(f"{self._proc}/loadavg", "load", unread)
        cpu = f"{self._sysfs}/devices/system/cpu"
        clock = f"{self._sysfs}/devices/system/clocksource/clocksource0/current_clocksource"
        return HostData(
            mounts=mounts,
            stuck=stuck,
            zombies=zombies,
            memory_total=_kib(memory.get("MemTotal")),
            memory_available=_kib(memory.get("MemAvailable")),
            load=float(load.split()[0]) if load else None,
            cpus=os.cpu_count(),
            governor=self._text(f"{cpu}/cpu0/cpufreq/scaling_governor", "governor", unread),
            clock_source=self._text(clock, "clock_source", unread),
            oom_kills=vmstat.get("oom_kill"),
            unread=unread,
        )

    def close(self) -> None:
        """Kill the probes of mounts that are still running."""
        self._mounts.close()

    # ── processes ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _processes(self, now: float, unread: dict[str, str]) -> tuple[tuple[StuckProcess, ...], int]:
        stuck: _ObservedSince = {}
        zombies: _ObservedSince = {}
        names: dict[tuple[int, int], str] = {}
        deadline = now + SCAN_TIMEOUT_S
        self._reads += 1
        if self._reads % _KERNEL_REFRESH_READS == 0:
            self._kernel.clear()
        for pid in self._pids():
            if time.monotonic() > deadline:
                unread["stuck"] = f"reading {self._proc} took longer than {SCAN_TIMEOUT_S:g} s"
                break
            state, name, started = self._state(pid)
            if not state:
                continue
            key = (pid, started)
            if state == "D":
                stuck[key] = self._stuck.get(key, now)
                names[key] = name
            else:
                zombies[key] = self._zombies.get(key, now)
        self._stuck, self._zombies = stuck, zombies
        oldest = sorted(stuck, key=lambda key: (stuck[key], key))[:MAX_STUCK_PROCESSES]
        described = [self._describe(key[0], names[key], now - stuck[key]) for key in oldest]
        return tuple(filter(None, described)), sum(now - since > ZOMBIE_AGE_S for since in zombies.values())

    def _state(self, pid: int) -> tuple[str, str, int]:
        """Return state, command name and start time (ticks) of a process in state ``D`` or ``Z``, else empty values.

        Kernel threads give empty values too. The pids of kernel threads are stored, so that the threads are not read
        again at each sample, because on a large node most processes are kernel threads.
        """
        if pid in self._kernel:
            return "", "", 0
        try:
            fd = os.open(f"{self._proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return "", "", 0
        try:
            text = os.read(fd, _STAT_BYTES)
        except OSError:  # the process has ended
            return "", "", 0
        finally:
            os.close(fd)
        end = text.rfind(b")")
        fields = text[end + 2 :].split(None, 20)
        if len(fields) < 20:
            return "", "", 0
        if int(fields[6]) & _KERNEL_THREAD:
            self._kernel.add(pid)
            return "", "", 0
        state = fields[0].decode()
        name = text[text.find(b"(") + 1 : end].decode(errors="replace")
        return (state, name, int(fields[19])) if state in ("D", "Z") else ("", "", 0)

    def _describe(self, pid: int, name: str, seconds: float) -> StuckProcess | None:
        try:
            uid = os.stat(f"{self._proc}/{pid}").st_uid
        except OSError:  # the process has ended since
            return None
        kernel_function = self._text(f"{self._proc}/{pid}/wchan", "", {}) or ""
        return StuckProcess(pid, uid, name, seconds, "" if kernel_function == "0" else kernel_function)

    def _pids(self) -> Iterator[int]:
        with os.scandir(self._proc) as entries:
            for entry in entries:
                if entry.name.isdigit():
                    yield int(entry.name)

    # ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _table(self, name: str, fields: dict[str, str], unread: dict[str, str]) -> dict[str, int]:
        """Read a file of ``key: value ...`` or ``key value`` lines.

        ``fields`` maps the wanted keys to field names. If a key is missing, the reason is stored in ``unread`` under
        its field name.
        """
        found: dict[str, int] = {}
        why: dict[str, str] = {}
        for line in (self._text(f"{self._proc}/{name}", name, why) or "").splitlines():
            key, *values = line.replace(":", " ").split()
            if key in fields and values and values[0].isdigit():
                found[key] = int(values[0])
        unread.update({fields[key]: why.get(name, "not there") for key in fields.keys() - found.keys()})
        return found

    @staticmethod
    def _text(path: str, field: str, unread: dict[str, str]) -> str | None:
        try:
            with open(path, "rb") as file:
                return file.read().decode(errors="replace").strip()
        except FileNotFoundError:
            unread[field] = "not there"
        except PermissionError:
            unread[field] = "not permitted"
        except OSError as error:
            unread[field] = os.strerror(error.errno or 0)
        return None


def _kib(value: int | None) -> int | None:
    return None if value is None else value * 1024
