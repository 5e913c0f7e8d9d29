"""How much of this machine others use: a measurement beside them means little."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from pathlib import Path

QUIET_CORES = 0.3
"""cores; below this a measurement of two cores is worth having"""
_SAMPLE_S = 0.4
"""s"""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
QUIET_TIMEOUT_S = 4.0
"""s that a round waits for a quiet moment"""


def cpu_seconds(pids: Iterable[int]) -> float:
    """Of these processes so far, user and system: what they cost whoever else is there."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / _TICKS_PER_S


def _ticks() -> int:
    """Of all cores, not idle: user, nice, system, irq, softirq, steal (proc(5))."""
    fields = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return sum(fields[:3]) + sum(fields[5:8])


async def wait_until_quiet(timeout_s: float) -> float:
    """Waits until others leave the machine alone, or for ``patience`` s. Returns how many cores they use now; our own
    processes must be at rest."""
    end = time.monotonic() + timeout_s
    while True:
        before, since = _ticks(), time.monotonic()
        await asyncio.sleep(_SAMPLE_S)
        cores = (_ticks() - before) / _TICKS_PER_S / (time.monotonic() - since)
        if cores < QUIET_CORES or time.monotonic() > end:
            return cores
