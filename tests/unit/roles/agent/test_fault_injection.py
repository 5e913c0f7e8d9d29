"""What lasts, and what an agent does to itself: on real steps, with a real agent and a real holder."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rrl.core.faults import Fault, FaultKind
from rrl.core.launch import Launch
from rrl.core.processes import Process, read_process
from rrl.roles.agent.fault_injection import PAUSED_SUFFIX
from rrl.tests.support.listening_manager import Lab, eventually, lab
from rrl.tests.unit.roles.agent.test_main import SLEEP, Node, node
from rrl.transport.messages import AgentHeartbeat, Inject, Injected

SLOW = Fault("f1", FaultKind.SLOW, "rollout/0", amount=0.5)
SPINS = ("sh", "-c", "while :; do :; done")


def state(process: Process) -> str:
    """``T``: stopped."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


async def runs(process: Process) -> None:
    """It is not stopped, again and again for longer than anybody who slows it would leave it alone."""
    loop = asyncio.get_running_loop()
    since = loop.time()
    deadline = since + 30.0
    while loop.time() - since < 0.5:
        if state(process) == "T":
            since = loop.time()
        assert loop.time() < deadline, "it is still stopped now and then"
        await asyncio.sleep(0.005)


async def fault_request(here: Node, launch: Launch, fault: Fault) -> Injected:
    await here.manager.send(here.launch.incarnation, Inject(fault, launch.tag))
    answer = await here.manager.wait_for(Injected)
    assert (answer.ok, answer.incarnation, answer.node) == (True, launch.incarnation, here.launch.node), answer
    return answer


def mark(at: Lab, launch: Launch) -> Path:
    return Path(f"{at.run.launch_file(launch.tag)}{PAUSED_SUFFIX}")


def test_timed_freeze_ends_by_itself_and_both_ends_are_reported(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as here:
            launch, role = await here.step(*SLEEP)
            await here.sees(launch)
            answer = await fault_request(here, launch, Fault("f1", FaultKind.FREEZE, "rollout/0", seconds=1.0))
            assert f"process group {role.pid}" in answer.detail
            await eventually(lambda: state(role) == "T")
            over = await here.manager.wait_for(Injected, lambda answer: answer.ended)
            assert over.detail == "SIGCONT: the target runs again"
            await eventually(lambda: state(role) == "S")  # it may just be running
            assert not mark(at, launch).exists()

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_slowed_process_alternates_until_the_time_is_over(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as here:
            launch, role = await here.step(*SPINS)
            await here.sees(launch)
            await fault_request(here, launch, Fault("f1", FaultKind.SLOW, "rollout/0", amount=0.5, seconds=2.0))
            for wanted in "TRTR":
                await eventually(lambda wanted=wanted: state(role) == wanted)  # type: ignore[misc]
            await here.manager.wait_for(Injected, lambda answer: answer.ended)
            await runs(role)

    with lab(tmp_path) as at:
        asyncio.run(story(at))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_slowed_process_is_continued_when_the_agent_ends(tmp_path: Path, number: signal.Signals) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as here:
            launch, role = await here.step(*SPINS)
            await here.sees(launch)
            await fault_request(here, launch, SLOW)
            await eventually(lambda: state(role) == "T")
            here.agent.send_signal(number)
            await at.end_of(here.agent)
            await runs(role)
            await eventually(lambda: not mark(at, launch).exists())

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_next_agent_continues_a_step_left_stopped_by_a_killed_helper(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as here:
            launch, role = await here.step(*SLEEP)
            await here.sees(launch)
            await fault_request(here, launch, Fault("f1", FaultKind.FREEZE, "rollout/0", seconds=1000.0))
            await eventually(lambda: state(role) == "T")
            holder = int(mark(at, launch).read_text().partition(".")[0])
            here.agent.send_signal(signal.SIGSTOP)  # so that it does not see its holder's end
            os.kill(holder, signal.SIGKILL)
            here.agent.kill()
            await at.end_of(here.agent)
            assert state(role) == "T"
            at.start(at.launch(replica="agent/local1", number=2, env={"RRL_HEARTBEAT_INTERVAL": "0.1"}), "agent.main")
            await runs(role)
            assert not mark(at, launch).exists()

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_killed_pause_helper_leaves_its_target_running_and_is_reported(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as here:
            launch, role = await here.step(*SLEEP)
            await here.sees(launch)
            await fault_request(here, launch, Fault("f1", FaultKind.FREEZE, "rollout/0", seconds=1000.0))
            await eventually(lambda: state(role) == "T")
            os.kill(int(mark(at, launch).read_text().partition(".")[0]), signal.SIGKILL)
            over = await here.manager.wait_for(Injected, lambda answer: answer.ended)
            assert over.detail == "the pause helper was killed"
            await eventually(lambda: state(role) == "S")  # it may just be running

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_agent_reports_before_it_kills_itself(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as here:
            launch, role = await here.step(*SLEEP)
            await here.sees(launch)
            await fault_request(here, here.launch, Fault("f1", FaultKind.KILL, "agent/local1"))
            assert await at.end_of(here.agent) == -signal.SIGKILL
            assert read_process(role.pid) is not None

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_agent_frozen_for_a_time_resumes_its_heartbeats(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as here:
            await here.sees()
            await fault_request(here, here.launch, Fault("f1", FaultKind.FREEZE, "agent/local1", seconds=0.5))
            agent = read_process(here.agent.pid)
            assert agent is not None
            await eventually(lambda: state(agent) == "T")
            await here.manager.wait_for(Injected, lambda answer: answer.ended)
            here.manager.received.clear()
            await here.manager.wait_for(AgentHeartbeat)

    with lab(tmp_path) as at:
        asyncio.run(story(at))


@pytest.mark.parametrize("kind", [FaultKind.EXIT, FaultKind.CRASH])
def test_fault_that_an_agent_cannot_perform_is_refused(tmp_path: Path, kind: FaultKind) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as here:
            launch, role = await here.step(*SLEEP)
            await here.sees(launch)
            await here.manager.send(here.launch.incarnation, Inject(Fault("f1", kind, "rollout/0"), launch.tag))
            assert not (await here.manager.wait_for(Injected)).ok
            assert read_process(role.pid) is not None

    with lab(tmp_path) as at:
        asyncio.run(story(at))
