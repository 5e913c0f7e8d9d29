from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rrl.core.faults import Fault, FaultKind, FaultTrigger
from rrl.core.launch import LAUNCH_ENV, ExitReason, ExitRecord
from rrl.core.processes import read_process
from rrl.core.types import Incarnation, ReplicaId
from rrl.roles.node_agent.main import _removed
from rrl.tests.support.listening_manager import Lab, eventually, lab
from rrl.tests.support.roles.agent_node import SLEEP, first_of, node
from rrl.transport.messages import AgentHeartbeat, AgentHello, Fenced, Inject, Injected, StepVanished, Stop

DAEMON = ("sh", "-c", "(setsid sleep 1001 &) ; exec sleep 1000")


def test_agent_reports_itself_and_the_steps_running_on_its_node(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as lab_node:
            hello = await lab_node.manager.wait_for(AgentHello)
            assert (hello.incarnation, hello.node, hello.pid) == (
                lab_node.launch.incarnation,
                "local1",
                lab_node.agent.pid,
            )
            first, _ = await lab_node.step(*SLEEP, replica="rollout/0")
            second, command_of_second = await lab_node.step(*SLEEP, replica="rollout/1")
            await lab_node.step(*SLEEP, replica="rollout/2", node="local2")
            await lab_node.wait_for_steps(first, second)
            os.killpg(command_of_second.pid, signal.SIGKILL)
            await lab_node.wait_for_steps(first)

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_vanished_step_is_reported_and_its_orphans_are_killed(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as lab_node:
            lost, _ = await lab_node.step(*DAEMON, replica="rollout/0")
            other, _ = await lab_node.step(*DAEMON, replica="rollout/1")
            await lab_node.wait_for_steps(lost, other)
            os.kill(first_of(at, lost).pid, signal.SIGKILL)
            assert await lab_node.manager.wait_for(StepVanished) == StepVanished(lost.incarnation, lost.tag, lost.node)
            await eventually(lambda: not at.processes(lost))
            assert len(at.processes(other)) == 3
            assert lab_node.agent.poll() is None

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_orphans_older_than_the_agent_are_killed_and_their_step_is_reported(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager() as manager:
            lost = at.launch(*DAEMON)
            step = at.start(lost)
            await eventually(lambda: len(at.processes(lost)) == 3)
            step.kill()
            step.wait()
            await eventually(lambda: len(at.processes(lost)) == 1)
            at.start(at.launch(replica="agent/local1", env={"RRL_HEARTBEAT_INTERVAL": "0.1"}), "node_agent.main")
            assert (await manager.wait_for(StepVanished)).tag == lost.tag
            await eventually(lambda: not at.processes(lost))

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_step_with_an_exit_record_is_not_reported_as_vanished(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as lab_node:
            ended, command_of_ended = await lab_node.step(*SLEEP, replica="rollout/0")
            lost, _ = await lab_node.step(*SLEEP, replica="rollout/1")
            await lab_node.wait_for_steps(ended, lost)
            os.killpg(command_of_ended.pid, signal.SIGKILL)
            await lab_node.manager.wait_for(ExitRecord)
            await lab_node.wait_for_steps(lost)
            os.kill(first_of(at, lost).pid, signal.SIGKILL)
            await lab_node.manager.wait_for(StepVanished)
            assert [message.tag for message in lab_node.manager.received if isinstance(message, StepVanished)] == [
                lost.tag
            ]

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_wrapper_that_will_exec_a_first_process_is_not_killed(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as lab_node:
            file = str(at.run.launch_file(at.launch(*SLEEP, replica="rollout/1").tag))
            env = {"PATH": "/usr/bin:/bin", LAUNCH_ENV: file}
            wrapper = await asyncio.create_subprocess_exec("sleep", "1001", env=env)
            lost, _ = await lab_node.step(*DAEMON)
            await lab_node.wait_for_steps(lost)
            os.kill(first_of(at, lost).pid, signal.SIGKILL)
            await lab_node.manager.wait_for(StepVanished)
            await eventually(lambda: not at.processes(lost))
            assert wrapper.returncode is None
            wrapper.kill()
            await wrapper.wait()

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_next_manager_receives_reports_that_the_last_one_may_have_missed(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as lab_node:
            lost, _ = await lab_node.step(*SLEEP)
            await lab_node.wait_for_steps(lost)
            os.kill(first_of(at, lost).pid, signal.SIGKILL)
            await lab_node.manager.wait_for(StepVanished)
        async with at.manager(epoch=2) as second:
            await second.wait_for(AgentHello)
            assert (await second.wait_for(StepVanished)).tag == lost.tag
            await second.wait_for(AgentHeartbeat)

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_stop_request_ends_the_agent_and_no_other_process(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as lab_node:
            launch, role = await lab_node.step(*SLEEP)
            await lab_node.wait_for_steps(launch)
            await lab_node.manager.send(lab_node.launch.incarnation, Stop(lab_node.launch.incarnation, 1.0, "done"))
            assert await at.end_of(lab_node.agent) == 0
            assert read_process(role.pid) is not None
            record = at.record(lab_node.launch)
            assert record is not None
            assert record.reason == ExitReason.STOPPED

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_agent_that_stops_while_steps_end_logs_nothing(tmp_path: Path) -> None:
    """One step ends before the agent's loop begins to end, and one while the loop waits for a thread."""
    go_on = tmp_path / "go_on"
    patch = (
        "import time; from pathlib import Path; from rrl.roles.node_agent import main as a; real = a.sweep;"
        f" wait = lambda: Path({str(go_on)!r}).exists() or (time.sleep(0.05), wait())[1];"
        " a.sweep = lambda find, timeout: (wait(), real(find, timeout))[1]"
    )

    async def story(at: Lab) -> None:
        async with node(at, patch) as lab_node:
            first, _ = await lab_node.step(*SLEEP, replica="rollout/0")
            second, _ = await lab_node.step(*SLEEP, replica="rollout/1")
            await lab_node.wait_for_steps(first, second)
            os.kill(first_of(at, first).pid, signal.SIGKILL)
            await lab_node.wait_for_steps(second)
            await lab_node.manager.send(lab_node.launch.incarnation, Stop(lab_node.launch.incarnation, 1.0, "done"))
            await lab_node.manager.wait_for(ExitRecord)
            os.kill(first_of(at, second).pid, signal.SIGKILL)
            await eventually(lambda: not any(p.module for p in at.processes(second)))
            go_on.touch()
            assert await at.end_of(lab_node.agent) == 0
        assert (at.run.logs / f"{lab_node.launch.tag}.first.log").read_text() == ""

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_unmounted_run_directory_does_not_count_as_removed(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    assert _removed(tmp_path / "runs" / "run-1", device)
    assert not _removed(tmp_path / "runs" / "run-1", device + 1), (
        "the run counts as removed, though its file system is not mounted"
    )
    assert not _removed(tmp_path, device)


@pytest.mark.parametrize("gone", ["summary", "folder"])
def test_agent_ends_remaining_steps_and_exits_after_the_run_is_over(tmp_path: Path, gone: str) -> None:
    async def story(at: Lab) -> None:
        patch = (
            "from rrl.roles.node_agent import main as a; from rrl.roles.launcher import first_process as f;"
            " a.RUN_OVER_GRACE_S = 0.3; f.EXIT_REPORT_TIMEOUT_S = 0.1"
        )
        async with node(at, patch) as lab_node:
            launch, _ = await lab_node.step(*DAEMON)
            await lab_node.wait_for_steps(launch)
        if gone == "summary":
            at.run.summary.write_text("{}")
        else:
            at.run.path.rename(tmp_path / "away")
        await at.end_of(lab_node.agent)
        assert at.processes() == []

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_agent_without_a_manager_removes_the_disk_filler(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as lab_node:
            at.run.disk_filler.write_bytes(b"1")
            await lab_node.wait_for_steps()
            await lab_node.wait_for_steps()
            assert at.run.disk_filler.exists()
        await eventually(lambda: not at.run.disk_filler.exists())

    with lab(tmp_path) as at:
        asyncio.run(story(at))


@pytest.mark.parametrize("adopted", [False, True], ids=["as launched", "adopted since"])
def test_fenced_incarnation_is_ended_by_its_agent(tmp_path: Path, adopted: bool) -> None:
    """A promoted standby process is found by its step's tag, because its launch file names the standby process."""

    async def story(at: Lab) -> None:
        async with node(at) as lab_node:
            frozen, role = await lab_node.step(*SLEEP, replica="rollout/0")
            other, _ = await lab_node.step(*SLEEP, replica="rollout/1")
            await lab_node.wait_for_steps(frozen, other)
            for process in (first_of(at, frozen), role):
                os.kill(process.pid, signal.SIGSTOP)
            incarnation, tag = (
                (Incarnation(ReplicaId("trainer/0"), 2), frozen.tag) if adopted else (frozen.incarnation, "")
            )
            await lab_node.manager.send(lab_node.launch.incarnation, Fenced(incarnation, "superseded", tag))
            await eventually(lambda: not at.processes(frozen))
            await lab_node.wait_for_steps(other)

    with lab(tmp_path) as at:
        asyncio.run(story(at))


@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.FREEZE, FaultKind.KILL_STEP])
def test_injected_fault_hits_its_target_and_is_reported(tmp_path: Path, kind: FaultKind) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as lab_node:
            launch, role = await lab_node.step(*SLEEP)
            await lab_node.wait_for_steps(launch)
            fault = Fault("f1", kind, "rollout/0", FaultTrigger(step=3))
            await lab_node.manager.send(lab_node.launch.incarnation, Inject(fault, launch.tag))
            report = await lab_node.manager.wait_for(Injected)
            assert (report.fault, report.ok) == (fault, True), report.detail
            if kind is FaultKind.FREEZE:
                await eventually(lambda: " (sleep) T " in Path(f"/proc/{role.pid}/stat").read_text())
                assert first_of(at, launch)
            elif kind is FaultKind.KILL:
                assert (await lab_node.manager.wait_for(ExitRecord)).signal == signal.SIGKILL
            else:
                await lab_node.manager.wait_for(StepVanished)
                assert at.record(launch) is None

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_fault_on_another_node_or_a_missing_step_is_not_performed(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as lab_node:
            launch, role = await lab_node.step(*SLEEP, node="local2")
            for tag in (launch.tag, "run-1.rollout-7.1"):
                lab_node.manager.received.clear()
                await lab_node.manager.wait_for(AgentHeartbeat)
                fault = Fault("f1", FaultKind.KILL, "rollout/0", FaultTrigger(step=3))
                await lab_node.manager.send(lab_node.launch.incarnation, Inject(fault, tag))
                assert not (await lab_node.manager.wait_for(Injected)).ok
            assert read_process(role.pid) is not None

    with lab(tmp_path) as at:
        asyncio.run(story(at))
