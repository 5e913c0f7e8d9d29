"""Sample the load of each step on a node: CPU time from /proc, GPU use from the newest reading of the GPUs.

The manager uses the samples to detect idle replicas that report progress, or whose phase requires them to compute.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from ...core.processes import STEP_MODULE, Process
from ...core.types import GpuUse
from ...health.readers.samples import Accelerator
from ...transport.messages import Load
from ..launcher.activity import ProcessKey, Usage, usage
from ..launcher.environment import GPUS_ENV

SAMPLE_INTERVAL_S = 2.0
"""Seconds between two samples. A sample reads two files of /proc for every process."""


class StepLoadSampler:
    """Computes the load of each step between two samples.

    ``tag`` is a function that returns the tag of a launch file's step, or None if the step's load is not reported.
    """

    def __init__(self, tag: Callable[[str], str | None]) -> None:
        self._tag = tag
        self._previous: dict[str, dict[ProcessKey, Usage]] = {}
        self._sampled_at: float | None = None
        self._assigned: dict[str, tuple[str, ...]] = {}
        self._last_gpus: dict[str, tuple[str, ...]] = {}
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")

    def is_due(self, now: float) -> bool:
        """Return whether the next sample is due at ``now`` (s, a monotonic clock)."""
        return self._sampled_at is None or now - self._sampled_at >= SAMPLE_INTERVAL_S

    def sample(
        self,
        processes: Iterable[Process],
        gpus: Sequence[Accelerator] | None,
        now: float,
        tensor: Mapping[str, float] = MappingProxyType({}),
    ) -> tuple[Load, ...]:
        """Return the load of each step since the last sample, except for steps that are sampled for the first time.

        Args:
            processes: the run's processes on this node.
            gpus: the GPUs of their newest reading, or None if there is none.
            now: the time in seconds of a monotonic clock.
            tensor: share of time in which tensor cores were active, by GPU UUID, from DCGM.
        """
        steps: dict[str, list[int]] = {}
        for process in processes:
            if process.module != STEP_MODULE and self._tag(process.launch) is not None:
                steps.setdefault(process.launch, []).append(process.pid)
        before, seconds = self._previous, now - self._sampled_at if self._sampled_at is not None else 0.0
        self._previous, self._sampled_at = {path: usage(pids) for path, pids in steps.items()}, now
        self._assigned = {path: names for path, names in self._assigned.items() if path in steps}
        loads = []
        for path, pids in steps.items():
            step_gpus = self._gpus_of(path, pids, gpus or ())
            if step_gpus:
                self._last_gpus[path] = tuple(gpu.uuid for gpu in step_gpus)
            if path in before and seconds > 0:
                cores = _ticks_used(before[path], self._previous[path]) / self._ticks_per_s / seconds
                tensor_active = max((tensor[gpu.uuid] for gpu in step_gpus if gpu.uuid in tensor), default=None)
                stopped = any(process.stopped for process in self._previous[path].values())
                tag = self._tag(path) or ""
                loads.append(Load(tag, round(cores, 3), _busiest(step_gpus), tensor_active, stopped))
        return tuple(loads)

    def last_gpus(self, path: str) -> tuple[str, ...]:
        """Return the UUIDs of the GPUs that a launch file's step used last, even if the step has ended."""
        return self._last_gpus.get(path, ())

    def forget(self, path: str) -> None:
        """Forget the GPUs that the step of a launch file used last; called after the step has ended."""
        self._last_gpus.pop(path, None)

    def _gpus_of(self, path: str, pids: Sequence[int], gpus: Sequence[Accelerator]) -> list[Accelerator]:
        """Return the GPUs on which a step's processes compute, according to the driver.

        If the driver lists no process of the step, return the GPUs that Slurm or the job assigned to the step. It lists
        none if no process computes, or if it uses the ids of another PID namespace.
        """
        used = [gpu for gpu in gpus if any(process.pid in pids for process in gpu.processes or ())]
        if used or not gpus:
            return used
        if not self._assigned.get(path):  # read again, since a wrapper may not have started the command yet
            self._assigned[path] = next(filter(None, map(_assigned_gpus, pids)), ())
        names = self._assigned[path]
        return [gpu for gpu in gpus if str(gpu.index) in names or gpu.uuid in names]


def gpu_use(gpus: Sequence[Accelerator] | None, own: Collection[str]) -> GpuUse | None:
    """Return how much the GPUs of a reading are used; None if there is no reading or no GPU.

    Args:
        gpus: the GPUs of their newest reading, or None if there is none.
        own: numbers or UUIDs of the GPUs that Slurm assigned to the run; empty if the run may use all GPUs.
    """
    shown = [gpu for gpu in gpus or () if not own or str(gpu.index) in own or gpu.uuid in own]
    if not shown:
        return None
    utilizations = [gpu.utilization for gpu in shown if gpu.utilization is not None]
    busy = round(sum(utilizations) / len(utilizations) / 100, 3) if utilizations else None
    known = [gpu for gpu in shown if gpu.memory_used is not None and gpu.memory_total is not None]
    used, total = sum(gpu.memory_used or 0 for gpu in known), sum(gpu.memory_total or 0 for gpu in known)
    return GpuUse(len(shown), busy, used, total)


def _ticks_used(before: dict[ProcessKey, Usage], now: dict[ProcessKey, Usage]) -> int:
    return sum(max(0, new.ticks - before[key].ticks if key in before else new.ticks) for key, new in now.items())


def _busiest(gpus: Sequence[Accelerator]) -> float | None:
    utilizations = [gpu.utilization for gpu in gpus if gpu.utilization is not None]
    return max(utilizations) / 100 if utilizations else None


def _assigned_gpus(pid: int) -> tuple[str, ...]:
    """Return the GPUs in a process's environment: the numbers that Slurm assigned, else CUDA_VISIBLE_DEVICES."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return ()
    variables = dict(word.split("=", 1) for word in os.fsdecode(environ).split("\0") if "=" in word)
    names = variables.get(GPUS_ENV) or variables.get("CUDA_VISIBLE_DEVICES") or ""
    return tuple(name.strip() for name in names.split(",") if name.strip())
