"""The agent's sampler and the launcher's with the real driver: an idle GPU, and one that runs only spinning kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from rrl.core.processes import Process
from rrl.health.readers.base import ReaderOptions
from rrl.health.readers.nvml.reader import NvmlReader
from rrl.roles.launcher.gpus import NodeGpus
from rrl.roles.node_agent.load_sampler import StepLoadSampler
from rrl.tests.gpu.conftest import StartProcess
from rrl.tests.support.listening_manager import wait_until
from rrl.transport.messages import Load

pytestmark = pytest.mark.gpu

BUSY_SHARE = 0.5
"""Share of the time in which a GPU counts as busy.

A GPU that runs one kernel after another is busy nearly all of the time, and an idle GPU never.
"""


def sampled(pid: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Load]:
    """Return a function that returns the newest load of a step with this one process, which was given the first GPU."""
    monkeypatch.setattr("rrl.roles.node_agent.load_sampler._assigned_gpus", lambda pid: ("0",))
    sampler, reader = StepLoadSampler(lambda path: "step"), NvmlReader(ReaderOptions())
    process = Process(pid, 0, 0, pid, launch="step.launch")

    def load() -> Load:
        sampler.sample([process], reader.read().gpus, time.monotonic())
        time.sleep(1.0)  # NVML's utilization covers a period of up to one second
        (found,) = sampler.sample([process], reader.read().gpus, time.monotonic())
        return found

    return load


def test_spinning_kernels_are_a_busy_gpu_for_both_samplers(
    nvml: Any, cuda_process: StartProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _ = cuda_process(64, "spin")
    load = sampled(process.pid, monkeypatch)
    wait_until(lambda: (load().gpu or 0.0) > BUSY_SHARE)
    wait_until(NodeGpus().any_busy)


def test_process_that_only_holds_memory_is_an_idle_gpu_for_both_samplers(
    nvml: Any, cuda_process: StartProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = NodeGpus()
    wait_until(lambda: not gpus.any_busy())  # NVML's utilization may still include the kernels of an earlier test
    process, _ = cuda_process(900, "idle")
    load = sampled(process.pid, monkeypatch)
    wait_until(lambda: load().gpu == 0.0)
    wait_until(lambda: not gpus.any_busy())
