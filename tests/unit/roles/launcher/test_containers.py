"""A role in an apptainer container: its launcher runs outside and still finds all its processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from rrl.core.launch import ExitReason, ExitRecord, Launch
from rrl.core.processes import Process, read_process
from rrl.core.role_environment import EnvSpec, prelude
from rrl.core.run_dir import write_atomically
from rrl.core.run_spec import ContainerSpec, RoleSpec
from rrl.core.types import Resources
from rrl.manager.execute.launch import apptainer
from rrl.tests.support.listening_manager import Lab, eventually, lab
from rrl.transport.messages import AgentHeartbeat, AgentHello, StepVanished

FAKE = Path(__file__).parents[3] / "support" / "fake_apptainer"
ROLE = RoleSpec("rollout", "rollout", 1, 1, Resources(cpus=1, gpus=1), True, (), {}, "apptainer", "box.sif")
DAEMON = "echo $SET $PWD; (setsid sleep 1001 &) ; sleep 1000; exit 3"


def contained(at: Lab, job: Path, command: str) -> Launch:
    """Return a launch in the fake apptainer. A setup line adds its folder to PATH, as ``module load`` would."""
    programs = job / "bin"
    programs.mkdir(parents=True)
    (programs / "apptainer").symlink_to(FAKE)
    argv = apptainer(ROLE, ContainerSpec(), str(at.run.path), str(job), ("sh", "-c", command))
    launch = at.launch(*argv, env={"FAKE_APPTAINER_CALL": str(job / "call")})
    setup = prelude(EnvSpec(setup=(f"PATH={programs}:$PATH", "export SET=up")))
    launch = msgspec.structs.replace(launch, setup=setup)
    write_atomically(at.run.launch_file(launch.tag), msgspec.json.encode(launch))
    return launch


async def daemon(at: Lab, launch: Launch) -> Process:
    """Wait for the process that has left the role's session, and return it."""

    def there() -> Process | None:
        processes = (process for process in at.processes(launch) if process.step)
        return next(
            (process for process in processes if b"1001" in Path(f"/proc/{process.pid}/cmdline").read_bytes()), None
        )

    return await eventually(there, "the daemon")


def test_command_runs_in_the_image_and_its_exit_code_is_the_roles(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        job = tmp_path / "job"
        async with at.manager() as manager:
            launch = contained(at, job, "echo $SET $PWD; exit 3")
            at.start(launch)
            report = await manager.wait_for(ExitRecord)
            assert (report.code, report.reason) == (3, ExitReason.EXITED)
            await eventually(lambda: f"up {job}" in at.log(launch))
            assert (job / "call").read_text().splitlines() == [
                "exec",
                "--no-eval",
                f"--bind={at.run.path}:{at.run.path}",
                f"--bind={job}:{job}",
                "--bind=/dev/shm:/dev/shm",
                f"--pwd={job}",
                "--nv",
                f"{job}/box.sif",
                "sh",
                "-c",
                "echo $SET $PWD; exit 3",
            ]

    with lab(tmp_path) as at:
        asyncio.run(story(at))


@pytest.mark.parametrize("how", ["asked", "killed"])
def test_processes_in_a_container_are_found_by_their_marks_and_end_with_the_step(tmp_path: Path, how: str) -> None:
    async def story(at: Lab) -> None:
        async with at.manager() as manager:
            at.start(at.launch(replica="agent/local1", env={"RRL_HEARTBEAT_INTERVAL": "0.1"}), "node_agent.main")
            await manager.wait_for(AgentHello)
            launch = contained(at, tmp_path / "job", DAEMON)
            step = at.start(launch)
            inside = await daemon(at, launch)
            if how == "asked":
                step.terminate()
                assert (await manager.wait_for(ExitRecord)).reason == ExitReason.STOPPED
            else:
                await manager.wait_for(
                    AgentHeartbeat, lambda heartbeat: launch.tag in heartbeat.alive
                )  # an agent reports a vanished step only if it has observed the step
                step.send_signal(9)
                await at.end_of(step)
                assert await manager.wait_for(StepVanished) == StepVanished(launch.incarnation, launch.tag, launch.node)
            await eventually(lambda: not at.processes(launch), "the end of all processes of the launch")
            now = read_process(inside.pid)
            assert now is None or now.started != inside.started

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_node_without_apptainer_is_reported(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager() as manager:
            launch = msgspec.structs.replace(contained(at, tmp_path / "job", "true"), setup="")
            write_atomically(at.run.launch_file(launch.tag), msgspec.json.encode(launch))
            at.start(launch)
            assert (await manager.wait_for(ExitRecord)).detail.endswith("No such file or directory: 'apptainer'")

    with lab(tmp_path) as at:
        asyncio.run(story(at))
