"""Lasting faults, and faults of an agent on itself, with real steps, a real agent and a real pause helper."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rrl.core.faults import Fault, FaultKind
from rrl.core.launch import Launch
from rrl.core.processes import Process, read_process
from rrl.roles.node_agent.fault_injection import PAUSED_SUFFIX
from rrl.tests.support.listening_manager import Lab, eventually
from rrl.tests.support.roles.agent_node import SLEEP, Node, node
from rrl.transport.messages import AgentHeartbeat, Inject, Injected

SLOW = Fault("f1", FaultKind.SLOW, "rollout/0", amount=0.5)
SPINS = ("sh", "-c", "while :; do :; done")


def state(process: Process) -> str:
    """Return the state of a process as /proc shows it. ``T`` means stopped."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


async def runs(process: Process) -> None:
    """Wait until a process was not stopped for 0.5 s.

    A pause helper that slows the process would stop it within this time.
    """
    loop = asyncio.get_running_loop()
    since = loop.time()
    deadline = since + 30.0
    while loop.time() - since < 0.5:
        if state(process) == "T":
            since = loop.time()
        assert loop.time() < deadline, "the process is still stopped from time to time"
        await asyncio.sleep(0.005)


async def fault_request(lab_node: Node, launch: Launch, fault: Fault) -> Injected:
    await lab_node.manager.send(lab_node.launch.incarnation, Inject(fault, launch.tag))
    answer = await lab_node.manager.wait_for(Injected)
    assert (answer.ok, answer.incarnation, answer.node) == (True, launch.incarnation, lab_node.launch.node), answer
    return answer


def mark(at: Lab, launch: Launch) -> Path:
    return Path(f"{at.run.launch_file(launch.tag)}{PAUSED_SUFFIX}")


async def test_timed_freeze_ends_by_itself_and_both_ends_are_reported(at: Lab) -> None:
    async with node(at) as lab_node:
        launch, role = await lab_node.step(*SLEEP)
        await lab_node.wait_for_steps(launch)
        answer = await fault_request(lab_node, launch, Fault("f1", FaultKind.FREEZE, "rollout/0", seconds=1.0))
        assert f"process group {role.pid}" in answer.detail
        await eventually(lambda: state(role) == "T")
        over = await lab_node.manager.wait_for(Injected, lambda answer: answer.ended)
        assert over.detail == "SIGCONT: the target runs again"
        # wait for state S: the last state may have been read between two stops
        await eventually(lambda: state(role) == "S")
        assert not mark(at, launch).exists()


async def test_slowed_process_alternates_until_the_time_is_over(at: Lab) -> None:
    async with node(at) as lab_node:
        launch, role = await lab_node.step(*SPINS)
        await lab_node.wait_for_steps(launch)
        await fault_request(lab_node, launch, Fault("f1", FaultKind.SLOW, "rollout/0", amount=0.5, seconds=2.0))
        for wanted in "TRTR":
            await eventually(lambda wanted=wanted: state(role) == wanted)  # type: ignore[misc]
        await lab_node.manager.wait_for(Injected, lambda answer: answer.ended)
        await runs(role)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_slowed_process_is_continued_when_the_agent_ends(at: Lab, number: signal.Signals) -> None:
    async with node(at) as lab_node:
        launch, role = await lab_node.step(*SPINS)
        await lab_node.wait_for_steps(launch)
        await fault_request(lab_node, launch, SLOW)
        await eventually(lambda: state(role) == "T")
        lab_node.agent.send_signal(number)
        await at.end_of(lab_node.agent)
        await runs(role)
        await eventually(lambda: not mark(at, launch).exists())


async def test_next_agent_continues_a_step_left_stopped_by_a_killed_helper(at: Lab) -> None:
    async with node(at) as lab_node:
        launch, role = await lab_node.step(*SLEEP)
        await lab_node.wait_for_steps(launch)
        await fault_request(lab_node, launch, Fault("f1", FaultKind.FREEZE, "rollout/0", seconds=1000.0))
        await eventually(lambda: state(role) == "T")
        holder = int(mark(at, launch).read_text().partition(".")[0])
        lab_node.agent.send_signal(signal.SIGSTOP)  # a stopped agent does not notice the end of its pause helper
        os.kill(holder, signal.SIGKILL)
        lab_node.agent.kill()
        await at.end_of(lab_node.agent)
        assert state(role) == "T"
        at.start(at.launch(replica="agent/local1", number=2, env={"RRL_HEARTBEAT_INTERVAL": "0.1"}), "node_agent.main")
        await runs(role)
        assert not mark(at, launch).exists()


async def test_killed_pause_helper_leaves_its_target_running_and_is_reported(at: Lab) -> None:
    async with node(at) as lab_node:
        launch, role = await lab_node.step(*SLEEP)
        await lab_node.wait_for_steps(launch)
        await fault_request(lab_node, launch, Fault("f1", FaultKind.FREEZE, "rollout/0", seconds=1000.0))
        await eventually(lambda: state(role) == "T")
        os.kill(int(mark(at, launch).read_text().partition(".")[0]), signal.SIGKILL)
        over = await lab_node.manager.wait_for(Injected, lambda answer: answer.ended)
        assert over.detail == "the pause helper was killed"
        # wait for state S: the last state may have been read between two stops
        await eventually(lambda: state(role) == "S")


async def test_agent_reports_before_it_kills_itself(at: Lab) -> None:
    async with node(at) as lab_node:
        launch, role = await lab_node.step(*SLEEP)
        await lab_node.wait_for_steps(launch)
        await fault_request(lab_node, lab_node.launch, Fault("f1", FaultKind.KILL, "agent/local1"))
        assert await at.end_of(lab_node.agent) == -signal.SIGKILL
        assert read_process(role.pid) is not None


async def test_agent_frozen_for_a_time_resumes_its_heartbeats(at: Lab) -> None:
    async with node(at) as lab_node:
        await lab_node.wait_for_steps()
        await fault_request(lab_node, lab_node.launch, Fault("f1", FaultKind.FREEZE, "agent/local1", seconds=0.5))
        agent = read_process(lab_node.agent.pid)
        assert agent is not None
        await eventually(lambda: state(agent) == "T")
        await lab_node.manager.wait_for(Injected, lambda answer: answer.ended)
        lab_node.manager.received.clear()
        await lab_node.manager.wait_for(AgentHeartbeat)


@pytest.mark.parametrize("kind", [FaultKind.EXIT, FaultKind.CRASH])
async def test_fault_that_an_agent_cannot_perform_is_refused(at: Lab, kind: FaultKind) -> None:
    async with node(at) as lab_node:
        launch, role = await lab_node.step(*SLEEP)
        await lab_node.wait_for_steps(launch)
        await lab_node.manager.send(lab_node.launch.incarnation, Inject(Fault("f1", kind, "rollout/0"), launch.tag))
        assert not (await lab_node.manager.wait_for(Injected)).ok
        assert read_process(role.pid) is not None
