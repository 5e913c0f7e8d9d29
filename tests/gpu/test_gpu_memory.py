"""A step waits for GPU memory that another process holds, even one that an ended role has left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rrl.core.launch import ExitReason, Launch
from rrl.tests.gpu.conftest import StartProcess
from rrl.tests.support.listening_manager import Lab, eventually, lab, wait_until

pytestmark = pytest.mark.gpu

HELD_MIB = 2048
"""Memory that another process holds (MiB): four times the limit up to which a role starts."""
_FIRST_GPU = "os.environ.update({'SLURM_STEP_GPUS': '0', 'CUDA_VISIBLE_DEVICES': '0'})"


@asynccontextmanager
async def step(at: Lab, environ: str, waits_s: float) -> AsyncIterator[Launch]:
    """Start a step that was given the first GPU; it waits up to ``waits_s`` for its memory."""
    launch = msgspec.structs.replace(at.launch("sleep", "1000"), gpus=1)
    at.run.launch_file(launch.tag).write_bytes(msgspec.json.encode(launch))
    check = f"from rrl.roles.launcher import gpu_memory as g; g.FREE_TIMEOUT_S, g.POLL_INTERVAL_S = {waits_s}, 0.2"
    patch = f"{environ}; {_FIRST_GPU}; {check}; g.CHECK_SCRIPT = {check + '; g.main()'!r}"
    at.start(launch, "launcher.step", patch)
    yield launch


def free(nvml: Any) -> bool:
    used = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0), version=nvml.nvmlMemory_v2).used
    return bool(used <= 512 * 2**20)


def runs_the_command(at: Lab, launch: Launch) -> bool:
    return any(_comm(process.pid) == "sleep" for process in at.processes(launch))


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def test_role_is_not_started_on_a_gpu_whose_memory_another_process_holds(
    tmp_path: Path, nvml: Any, driver_env: str, cuda_process: StartProcess
) -> None:
    if not free(nvml):
        pytest.skip("another process uses this GPU")
    cuda_process(HELD_MIB, "idle")

    async def story(at: Lab) -> None:
        async with at.manager(), step(at, driver_env, waits_s=1.0) as launch:
            record = await eventually(lambda: at.record(launch), "the end of the step")
            assert record.reason is ExitReason.GPUS_OCCUPIED
            assert "are still in use" in record.detail

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_role_starts_once_the_memory_that_a_killed_role_left_is_free(
    tmp_path: Path, nvml: Any, driver_env: str, cuda_process: StartProcess
) -> None:
    if not free(nvml):
        pytest.skip("another process uses this GPU")
    role, words = cuda_process(HELD_MIB, "orphan")
    orphan = int(words[1])
    try:
        role.kill()
        role.wait()
        assert not free(nvml), "the process that outlives its role holds no memory"

        async def story(at: Lab) -> None:
            async with at.manager() as manager, step(at, driver_env, waits_s=600.0) as launch:
                await eventually(lambda: launch.incarnation in manager.peers, "the step's request for admission")
                assert not runs_the_command(at, launch)
                os.kill(orphan, signal.SIGKILL)
                await eventually(lambda: runs_the_command(at, launch), "the command")

        with lab(tmp_path) as at:
            asyncio.run(story(at))
    finally:
        with suppress(ProcessLookupError):
            os.kill(orphan, signal.SIGKILL)


def test_memory_of_a_killed_process_is_given_back(nvml: Any, cuda_process: StartProcess) -> None:
    if not free(nvml):
        pytest.skip("another process uses this GPU")
    process, _ = cuda_process(HELD_MIB, "spin")
    assert not free(nvml)
    process.kill()
    wait_until(lambda: free(nvml))
