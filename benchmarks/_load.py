"""Measures how much CPU time other processes of this machine use, because they distort a measurement."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from pathlib import Path

QUIET_CORES = 0.3
"""Largest number of cores that other processes may use during a measurement on two cores; more would distort the
result."""
_SAMPLE_S = 0.4
"""Seconds of one measurement of the cores' use."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
QUIET_TIMEOUT_S = 4.0
"""Maximum time (s) for which a round waits until other processes use few cores."""


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time (s, user and system) that these processes have used so far."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / _TICKS_PER_S


def busy_seconds() -> float:
    """Return the busy time (s) of all cores together so far (proc(5): user, nice, system, irq, softirq, steal)."""
    fields = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:8])) / _TICKS_PER_S


async def wait_until_quiet(timeout_s: float) -> float:
    """Wait at most ``timeout_s`` seconds until other processes use less than ``QUIET_CORES`` cores.

    Return the number of cores that they use at the end. The benchmark's own processes must be idle.
    """
    end = time.monotonic() + timeout_s
    while True:
        before, since = busy_seconds(), time.monotonic()
        await asyncio.sleep(_SAMPLE_S)
        cores = (busy_seconds() - before) / (time.monotonic() - since)
        if cores < QUIET_CORES or time.monotonic() > end:
            return cores
