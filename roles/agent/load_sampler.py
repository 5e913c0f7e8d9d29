"""What each step on a node takes of it: CPU time from /proc, GPU time from the newest reading of NVML. By this the
manager sees who must compute and does not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from ...core.processes import STEP_MODULE, Process
from ...health.readers.samples import Gpu
from ...transport.messages import Load
from ..launcher.activity import Name, Usage, usage
from ..launcher.environment import GPUS_ENV

EVERY = 2.0
"""s between two looks: each reads two files of /proc for every process"""


class StepLoads:
    """``tag`` names the step of a launch file; None: it is none whose load is told."""

    def __init__(self, tag: Callable[[str], str | None]) -> None:
        self._tag = tag
        self._before: dict[str, dict[Name, Usage]] = {}
        self._at: float | None = None
        self._given: dict[str, tuple[str, ...]] = {}
        self._had: dict[str, tuple[str, ...]] = {}
        self._ticks = os.sysconf("SC_CLK_TCK")

    def due(self, now: float) -> bool:
        return self._at is None or now - self._at >= EVERY

    def take(
        self, found: Iterable[Process], gpus: Sequence[Gpu] | None, now: float,
        tensor: Mapping[str, float] = MappingProxyType({}),
    ) -> tuple[Load, ...]:  # fmt: skip
        """Since the last look; nothing at the first one of a step. ``found``: the run's processes on this node;
        ``gpus``: as NVML read them last, None where it did not; ``tensor``: by GPU's UUID, how busy its tensor cores
        are, where DCGM says so; ``now``: a monotonic clock (s)."""
        steps: dict[str, list[int]] = {}
        for process in found:
            if process.module != STEP_MODULE and self._tag(process.launch) is not None:
                steps.setdefault(process.launch, []).append(process.pid)
        before, seconds = self._before, now - self._at if self._at is not None else 0.0
        self._before, self._at = {path: usage(pids) for path, pids in steps.items()}, now
        self._given = {path: names for path, names in self._given.items() if path in steps}
        loads = []
        for path, pids in steps.items():
            theirs = self._theirs(path, pids, gpus or ())
            if theirs:
                self._had[path] = tuple(gpu.uuid for gpu in theirs)
            if path in before and seconds > 0:
                cores = _ticks(before[path], self._before[path]) / self._ticks / seconds
                cores_of_gpus = max((tensor[gpu.uuid] for gpu in theirs if gpu.uuid in tensor), default=None)
                loads.append(Load(self._tag(path) or "", round(cores, 3), _busiest(theirs), cores_of_gpus))
        return tuple(loads)

    def had(self, path: str) -> tuple[str, ...]:
        """UUIDs of the GPUs that a step was last seen with, also once it has ended."""
        return self._had.get(path, ())

    def forget(self, path: str) -> None:
        self._had.pop(path, None)

    def _theirs(self, path: str, pids: Sequence[int], gpus: Sequence[Gpu]) -> list[Gpu]:
        """Those that its processes compute on; else, where none does or NVML knows them by other ids, those that Slurm
        or the job gave it."""
        used = [gpu for gpu in gpus if any(one.pid in pids for one in gpu.processes or ())]
        if used or not gpus:
            return used
        if not self._given.get(path):  # a wrapper may be on its way to the command
            self._given[path] = next(filter(None, map(_given, pids)), ())
        names = self._given[path]
        return [gpu for gpu in gpus if str(gpu.index) in names or gpu.uuid in names]


def _ticks(before: dict[Name, Usage], now: dict[Name, Usage]) -> int:
    return sum(max(0, one.ticks - before[name].ticks if name in before else one.ticks) for name, one in now.items())


def _busiest(gpus: Sequence[Gpu]) -> float | None:
    told = [gpu.utilization for gpu in gpus if gpu.utilization is not None]
    return max(told) / 100 if told else None


def _given(pid: int) -> tuple[str, ...]:
    """Numbers or UUIDs of the GPUs that a process was given: Slurm's numbers on this node, else what CUDA is told."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return ()
    said = dict(word.split("=", 1) for word in os.fsdecode(environ).split("\0") if "=" in word)
    names = said.get(GPUS_ENV) or said.get("CUDA_VISIBLE_DEVICES") or ""
    return tuple(name.strip() for name in names.split(",") if name.strip())
