"""The first process of a step on a real Slurm gets its GPUs and environment; a missing interpreter is reported."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Callable, Coroutine, Iterator

import msgspec
import pytest

from rrl.cluster.base import AllocationRequest, AllocationState, Refused, Step
from rrl.cluster.slurm.cluster import SlurmCluster
from rrl.cluster.slurm.commands import SlurmLimits
from rrl.core.launch import ExitRecord, Launch
from rrl.core.run_dir import write_atomically
from rrl.core.types import NodeName, Resources
from rrl.tests.support.listening_manager import TIMEOUT_S, Lab, eventually, lab
from rrl.tests.support.slurm.lab import SlurmLab
from rrl.transport.messages import AgentHello

pytestmark = pytest.mark.slurm

NODE = Resources(cpus=4, gpus=2, mem=2000 * 2**20)
FAST = SlurmLimits(min_poll_interval_s=0.05, reads_per_minute=100_000)
HOSTILE = {
    "SLURM_NTASKS": "64",
    "SLURM_STEP_GPUS": "9",
    "PMI_RANK": "5",
    "PMIX_RANK": "5",
    "OMPI_COMM_WORLD_RANK": "5",
    "SRUN_EXPORT_ENV": "ALL",
    "SLURM_EXPORT_ENV": "ALL",
}


@pytest.fixture
def site(slurm_lab: SlurmLab) -> Iterator[SlurmLab]:
    yield slurm_lab
    slurm_lab.clear()


def as_user(site: SlurmLab, name: str, story: Callable[[Lab], Coroutine[None, None, None]]) -> None:
    folder = site.user_home / name

    def play() -> None:
        folder.mkdir()
        with lab(folder) as at:
            asyncio.run(story(at))

    site.call_as_user(play, timeout_s=3 * TIMEOUT_S)


async def hold(slurm: SlurmCluster, at: Lab) -> NodeName:
    """Allocate a pool of one node and return the node once it runs."""
    pool = f"{at.run.id}.pool"
    await slurm.request(AllocationRequest(pool, 1, NODE, walltime=600.0, comment=f"rrl {at.run.id}"))
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        allocations = (await slurm.observe()).allocations or {}
        if pool in allocations and allocations[pool].state is AllocationState.RUNNING:
            return allocations[pool].nodes[0]
        assert time.monotonic() < deadline, allocations
        await asyncio.sleep(0.2)


def step(at: Lab, launch: Launch, resources: Resources, agent: bool = False) -> Step:
    log = at.run.log_file(f"{launch.tag}.step")
    return Step(
        launch.tag, f"{at.run.id}.pool", launch.node, resources, at.run.launch_file(launch.tag), log, agent, agent
    )


def test_roles_have_own_gpus_beside_an_agent_and_no_slurm_or_mpi_variables(site: SlurmLab) -> None:
    async def story(at: Lab) -> None:
        os.environ.update(HOSTILE)
        slurm = SlurmCluster(at.run.id, sys.executable, FAST)
        try:
            node = await hold(slurm, at)
            async with at.manager() as manager:
                agent = at.launch(
                    replica=f"agent/{node}", node=node, env={"RRL_HEARTBEAT_INTERVAL": "0.2"}, virtual_node=False
                )
                await slurm.launch(step(at, agent, Resources(cpus=1, gpus=2), agent=True))
                await manager.wait_for(AgentHello)
                roles = []
                for index in range(2):
                    role = at.launch("env", replica=f"rollout/{index}", node=node, virtual_node=False)
                    role = msgspec.structs.replace(role, gpus=1, network="127.0.0.0/8")
                    write_atomically(at.run.launch_file(role.tag), msgspec.json.encode(role))
                    roles.append(role)
                roles[0] = hold_gpu(at, roles[0])
                for role in roles:
                    await slurm.launch(step(at, role, Resources(cpus=1, gpus=1, mem=100 * 2**20)))
                await manager.wait_for(ExitRecord, lambda end: end.incarnation == roles[1].incarnation)
                environments = [await environment(at, role) for role in roles]
            assert not [
                name for variables in environments for name in variables if re.match(r"SLURM|SRUN|PMI|OMPI", name)
            ]
            assert sorted(variables["RRL_GPUS"] for variables in environments) == ["0", "1"]
            assert sorted(variables["CUDA_VISIBLE_DEVICES"] for variables in environments) == ["0", "1"]
            assert {(variables["GLOO_SOCKET_IFNAME"], variables["RRL_ADDRESS"]) for variables in environments} == {
                ("lo", "127.0.0.1")
            }
        finally:
            await slurm.release(f"{at.run.id}.pool")
            await slurm.close()

    as_user(site, "gpus", story)


def test_missing_interpreter_on_the_node_is_refused_with_slurms_message(site: SlurmLab) -> None:
    async def story(at: Lab) -> None:
        patient = msgspec.structs.replace(FAST, launch_watch_s=TIMEOUT_S, interpreter_watch_s=TIMEOUT_S)
        slurm = SlurmCluster(at.run.id, "/no/such/venv/bin/python", patient)
        try:
            node = await hold(slurm, at)
            message = r"^not started: .*execve\(\): /no/such/venv/bin/python: No such file or directory"
            with pytest.raises(Refused, match=message):
                await slurm.launch(step(at, at.launch("true", node=node), Resources(cpus=1)))
        finally:
            await slurm.release(f"{at.run.id}.pool")
            await slurm.close()

    as_user(site, "absent", story)


def hold_gpu(at: Lab, role: Launch) -> Launch:
    """Let the role's command run until the lab is closed, so that the role keeps its GPU."""
    role = msgspec.structs.replace(role, argv=("sh", "-c", "env; exec sleep 1005"))
    write_atomically(at.run.launch_file(role.tag), msgspec.json.encode(role))
    return role


async def environment(at: Lab, role: Launch) -> dict[str, str]:
    await eventually(lambda: "RRL_ADDRESS" in at.log(role) and at.log(role).endswith("\n"), "its environment")
    lines = (line.rpartition(" ")[2] for line in at.log(role).splitlines())
    return dict(line.split("=", 1) for line in lines if "=" in line)
