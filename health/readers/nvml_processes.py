"""Whose processes compute on a GPU: NVML gives process ids, ``/proc`` the rest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rrl.health.readings import GpuProcess

_INITIAL_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h: in any other, NVML's process ids are not ours"""


class Owners:
    """Looks processes up below ``proc``."""

    def __init__(self, proc: str) -> None:
        self._proc = Path(proc)
        self._ours = _namespace(self._proc) in ("", _INITIAL_NAMESPACE)

    def told(self, process: Any) -> GpuProcess:
        """Of one of nvmlDeviceGetComputeRunningProcesses."""
        pid = int(process.pid)
        memory = None if process.usedGpuMemory is None else int(process.usedGpuMemory)
        uid, name = self._look_up(pid) if self._ours else (None, "")
        return GpuProcess(pid, uid, memory, name)

    def _look_up(self, pid: int) -> tuple[int | None, str]:
        """(real uid, name). The owner of the folder would not do: it is root's for a process that may not be dumped."""
        try:
            text = (self._proc / str(pid) / "status").read_text(errors="replace")
        except OSError:
            return None, ""
        lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        uid = lines.get("Uid", "").split()
        return int(uid[0]) if uid else None, lines.get("Name", "").strip()


def _namespace(proc: Path) -> str:
    try:
        return os.readlink(proc / "self" / "ns" / "pid")
    except OSError:
        return ""
