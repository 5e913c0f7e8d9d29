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
from ..launcher.activity import ProcessKey, Usage, usage
from ..launcher.environment import GPUS_ENV

SAMPLE_INTERVAL_S = 2.0
"""s between two looks: each reads two files of /proc for every process"""


class StepLoadSampler:
    """``tag`` names the step of a launch file; None: it is none whose load is told."""

    def __init__(self, tag: Callable[[str], str | None]) -> None:
        self._tag = tag
        self._previous: dict[str, dict[ProcessKey, Usage]] = {}
        self._sampled_at: float | None = None
        self._assigned: dict[str, tuple[str, ...]] = {}
        self._last_gpus: dict[str, tuple[str, ...]] = {}
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")

    def is_due(self, now: float) -> bool:
        return self._sampled_at is None or now - self._sampled_at >= SAMPLE_INTERVAL_S

    def sample(
        self, processes: Iterable[Process], gpus: Sequence[Gpu] | None, now: float,
        tensor: Mapping[str, float] = MappingProxyType({}),
    ) -> tuple[Load, ...]:  # fmt: skip
        """Since the last look; nothing at the first one of a step. ``found``: the run's processes on this node;
        ``gpus``: as NVML read them last, None where it did not; ``tensor``: by GPU's UUID, how busy its tensor cores
        are, where DCGM says so; ``now``: a monotonic clock (s)."""
        steps: dict[str, list[int]] = {}
        for process in processes:
            if process.module != STEP_MODULE and self._tag(process.launch) is not None:
                steps.setdefault(process.launch, []).append(process.pid)
        before, seconds = self._previous, now - self._sampled_at if self._sampled_at is not None else 0.0
        self._previous, self._sampled_at = {path: usage(pids) for path, pids in steps.items()}, now
        self._assigned = {path: names for path, names in self._assigned.items() if path in steps}
        loads = []
        for path, pids in steps.items():
            theirs = self._gpus_of(path, pids, gpus or ())
            if theirs:
                self._last_gpus[path] = tuple(gpu.uuid for gpu in theirs)
            if path in before and seconds > 0:
                cores = _ticks_used(before[path], self._previous[path]) / self._ticks_per_s / seconds
                cores_of_gpus = max((tensor[gpu.uuid] for gpu in theirs if gpu.uuid in tensor), default=None)
                loads.append(Load(self._tag(path) or "", round(cores, 3), _busiest(theirs), cores_of_gpus))
        return tuple(loads)

    def last_gpus(self, path: str) -> tuple[str, ...]:
        """UUIDs of the GPUs that a step was last seen with, also once it has ended."""
        return self._last_gpus.get(path, ())

    def forget(self, path: str) -> None:
        self._last_gpus.pop(path, None)

    def _gpus_of(self, path: str, pids: Sequence[int], gpus: Sequence[Gpu]) -> list[Gpu]:
        """Those that its processes compute on; else, where none does or NVML knows them by other ids, those that Slurm
        or the job gave it."""
        used = [gpu for gpu in gpus if any(one.pid in pids for one in gpu.processes or ())]
        if used or not gpus:
            return used
        if not self._assigned.get(path):  # a wrapper may be on its way to the command
            self._assigned[path] = next(filter(None, map(_assigned_gpus, pids)), ())
        names = self._assigned[path]
        return [gpu for gpu in gpus if str(gpu.index) in names or gpu.uuid in names]


def _ticks_used(before: dict[ProcessKey, Usage], now: dict[ProcessKey, Usage]) -> int:
    return sum(max(0, one.ticks - before[name].ticks if name in before else one.ticks) for name, one in now.items())


def _busiest(gpus: Sequence[Gpu]) -> float | None:
    utilizations = [gpu.utilization for gpu in gpus if gpu.utilization is not None]
    return max(utilizations) / 100 if utilizations else None


def _assigned_gpus(pid: int) -> tuple[str, ...]:
    """Numbers or UUIDs of the GPUs that a process was given: Slurm's numbers on this node, else what CUDA is told."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return ()
    variables = dict(word.split("=", 1) for word in os.fsdecode(environ).split("\0") if "=" in word)
    names = variables.get(GPUS_ENV) or variables.get("CUDA_VISIBLE_DEVICES") or ""
    return tuple(name.strip() for name in names.split(",") if name.strip())
