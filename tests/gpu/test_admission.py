"""An agent with the real driver: it admits a healthy node, and names a foreign process on a GPU that must be free."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rrl.core.types import Finding, Verdict
from rrl.tests.gpu.conftest import StartProcess
from rrl.tests.support.listening_manager import lab
from rrl.transport.messages import AgentHeartbeat, AgentHello

pytestmark = pytest.mark.gpu

ADMISSION_S = 25.0
"""Time (s) for the first round of checks: without persistence mode the driver takes seconds to open each GPU."""


def admitted(folder: Path, environ: str, gpus: int = 0) -> tuple[Finding, ...]:
    """Return the findings in the Hello of an agent that reads NVML; the agent's process first executes ``environ``."""
    folder.mkdir()
    with lab(folder) as at:

        async def story() -> tuple[Finding, ...]:
            async with at.manager() as manager:
                launch = at.launch(replica="agent/local1")
                launch = msgspec.structs.replace(launch, readers=("nvml",), admission_timeout=ADMISSION_S, gpus=gpus)
                at.run.launch_file(launch.tag).write_bytes(msgspec.json.encode(launch))
                at.start(launch, "node_agent.main", environ)
                hello = await manager.wait_for(AgentHello)
                await manager.wait_for(AgentHeartbeat)
                return hello.findings

        return asyncio.run(story())


def failures(findings: tuple[Finding, ...]) -> list[str]:
    return [found.detector for found in findings if found.verdict is Verdict.FAIL]


def test_node_with_the_requested_gpus_is_admitted_and_one_gpu_too_few_fails(
    tmp_path: Path, nvml: Any, driver_env: str
) -> None:
    present = nvml.nvmlDeviceGetCount()
    assert failures(admitted(tmp_path / "a", driver_env, gpus=present)) == []
    assert failures(admitted(tmp_path / "b", driver_env, gpus=present + 1)) == ["gpu_count"]


def test_memory_of_a_foreign_process_is_found_on_a_gpu_that_must_be_free(
    tmp_path: Path, nvml: Any, driver_env: str, cuda_process: StartProcess
) -> None:
    step_has_gpu = f"{driver_env}; os.environ['SLURM_STEP_GPUS'] = '0'"
    uuid = str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(0)))
    before = {found.key for found in admitted(tmp_path / "a", step_has_gpu)}
    cuda_process(4096, "idle")
    given = admitted(tmp_path / "b", step_has_gpu)
    assert {found.component for found in given if found.key not in before} == {uuid}
