"""The local cluster, with real processes as steps."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rrl.cluster.base import (
    AllocationRequest,
    AllocationState,
    AllocationStatus,
    NodeState,
    NodeStatus,
    Refused,
    Step,
    Unanswered,
)
from rrl.cluster.local import LocalCluster
from rrl.core.faults import Fault, FaultKind
from rrl.core.launch import ExitReason, ExitRecord, Launch
from rrl.core.processes import read_process
from rrl.core.types import NodeName, Resources
from rrl.tests.support.listening_manager import TIMEOUT_S, Lab, Manager, eventually, lab
from rrl.tests.support.local_cluster import crash, processes_on
from rrl.transport.messages import AdmissionRequest, AgentHeartbeat, AgentHello

SLEEP = ("sleep", "1000")
DAEMON = ("sh", "-c", "(setsid sleep 1001 &) ; exec sleep 1000")


def allocation_request(tag: str, count: int, *exclude: str) -> AllocationRequest:
    return AllocationRequest(tag, count, Resources(), walltime=3600.0, exclude=tuple(map(NodeName, exclude)))


def step_of(at: Lab, launch: Launch, allocation: str = "pool", agent: bool = False) -> Step:
    return Step(
        launch.tag,
        allocation,
        launch.node,
        Resources(),
        at.run.launch_file(launch.tag),
        at.run.logs / f"{launch.tag}.first.log",
        overlap=agent,
        agent=agent,
    )


def play(tmp_path: Path, story: Callable[[Lab, LocalCluster], Awaitable[None]], nodes: int | None = None) -> None:
    async def run_story(at: Lab) -> None:
        cluster = LocalCluster(at.run, nodes)
        await story(at, cluster)
        await cluster.close()

    with lab(tmp_path) as at:
        asyncio.run(run_story(at))


async def steps(cluster: LocalCluster) -> dict[str, NodeName]:
    snapshot = await cluster.observe()
    assert snapshot.steps is not None
    return snapshot.steps


async def nodes_of(cluster: LocalCluster, tag: str) -> tuple[NodeName, ...]:
    snapshot = await cluster.observe()
    assert snapshot.allocations is not None
    return snapshot.allocations[tag].nodes


async def wait_until_unlisted(cluster: LocalCluster) -> None:
    """Wait until the cluster lists no step."""
    async with asyncio.timeout(TIMEOUT_S):
        while await steps(cluster):
            await asyncio.sleep(0.01)


async def wait_for_admission(manager: Manager, launch: Launch) -> None:
    await manager.wait_for(AdmissionRequest, lambda message: message.tag == launch.tag)


async def wait_for_processes(at: Lab, launch: Launch, count: int) -> None:
    """Wait until the step has ``count`` processes."""
    await eventually(lambda: len(at.processes(launch)) == count, f"{count} processes of {launch.tag}")


def test_request_gets_the_lowest_free_nodes_that_are_up_and_not_excluded(tmp_path: Path) -> None:
    async def story(at: Lab, cluster: LocalCluster) -> None:
        await cluster.request(allocation_request("pool", 2, "local2"))
        crash(at.run, NodeName("local4"))
        await cluster.request(allocation_request("more", 2))
        snapshot = await cluster.observe()
        assert snapshot.allocations == {
            "pool": AllocationStatus(AllocationState.RUNNING, "pool", (NodeName("local1"), NodeName("local3"))),
            "more": AllocationStatus(AllocationState.RUNNING, "more", (NodeName("local2"), NodeName("local5"))),
        }
        assert snapshot.nodes is not None
        assert snapshot.nodes[NodeName("local1")].state is NodeState.UP
        assert snapshot.nodes[NodeName("local4")] == NodeStatus(NodeState.DOWN, "marked down")

    play(tmp_path, story)


def test_request_beyond_the_free_nodes_is_refused_without_a_record(tmp_path: Path) -> None:
    async def story(at: Lab, cluster: LocalCluster) -> None:
        with pytest.raises(Refused, match="4 requested, 3 of 3"):
            await cluster.request(allocation_request("pool", 4))
        await cluster.request(allocation_request("pool", 3))
        with pytest.raises(Refused, match="1 requested, 0 of 3"):
            await cluster.request(allocation_request("spare", 1))
        await cluster.release("pool")
        await cluster.request(allocation_request("spare", 1))
        snapshot = await cluster.observe()
        assert snapshot.allocations is not None
        assert snapshot.allocations.keys() == {"spare"}

    play(tmp_path, story, nodes=3)


def test_repeated_request_with_the_same_tag_keeps_its_nodes(tmp_path: Path) -> None:
    async def story(at: Lab, cluster: LocalCluster) -> None:
        await cluster.request(allocation_request("pool", 2))
        await cluster.request(allocation_request("pool", 2))
        assert await nodes_of(cluster, "pool") == ("local1", "local2")

    play(tmp_path, story)


def test_launched_step_is_listed_until_it_ends(tmp_path: Path) -> None:
    async def story(at: Lab, cluster: LocalCluster) -> None:
        async with at.manager() as manager:
            await cluster.request(allocation_request("pool", 2))
            launch = at.launch("sh", "-c", "read line < go", node="local2")
            os.mkfifo(at.run.path / "go")
            await cluster.launch(step_of(at, launch))
            await wait_for_admission(manager, launch)
            await cluster.release_launcher(launch.tag)
            assert await steps(cluster) == {launch.tag: "local2"}
            await asyncio.to_thread((at.run.path / "go").write_text, "\n")
            assert (await manager.wait_for(ExitRecord)).code == 0
            await wait_until_unlisted(cluster)
            with pytest.raises(Refused, match="already been launched"):
                await cluster.launch(step_of(at, launch))

    play(tmp_path, story)


def test_agent_is_launched_like_a_step(tmp_path: Path) -> None:
    async def story(at: Lab, cluster: LocalCluster) -> None:
        async with at.manager() as manager:
            await cluster.request(allocation_request("pool", 1))
            agent = at.launch(replica="agent/local1", env={"RRL_HEARTBEAT_INTERVAL": "0.1"})
            await cluster.launch(step_of(at, agent, agent=True))
            assert (await manager.wait_for(AgentHello)).node == "local1"
            launch = at.launch(*SLEEP)
            await cluster.launch(step_of(at, launch))
            await manager.wait_for(AgentHeartbeat, lambda heartbeat: heartbeat.alive == (launch.tag,))
            assert (await steps(cluster)).keys() == {agent.tag, launch.tag}

    play(tmp_path, story)


def test_impossible_launch_is_refused(tmp_path: Path) -> None:
    async def story(at: Lab, cluster: LocalCluster) -> None:
        await cluster.request(allocation_request("pool", 2))
        crash(at.run, NodeName("local2"))
        with pytest.raises(Refused, match="not in allocation"):
            await cluster.launch(step_of(at, at.launch(*SLEEP), allocation="none"))
        with pytest.raises(Refused, match="not in allocation"):
            await cluster.launch(step_of(at, at.launch(*SLEEP, node="local3")))
        with pytest.raises(Refused, match="is down"):
            await cluster.launch(step_of(at, at.launch(*SLEEP, node="local2")))
        with pytest.raises(Refused, match="cannot start"):
            await LocalCluster(at.run, python="/no/python").launch(step_of(at, at.launch(*SLEEP)))
        assert await steps(cluster) == {}
        launch = at.launch(*SLEEP)
        await cluster.launch(step_of(at, launch))
        with pytest.raises(Refused, match="already been launched"):
            await cluster.launch(step_of(at, launch))

    play(tmp_path, story)


def test_stopped_step_leaves_its_exit_record_and_no_process(tmp_path: Path) -> None:
    async def story(at: Lab, cluster: LocalCluster) -> None:
        async with at.manager():
            await cluster.request(allocation_request("pool", 1))
            launch = at.launch(*DAEMON)
            await cluster.launch(step_of(at, launch))
            await wait_for_processes(at, launch, 3)
            await cluster.stop(launch.tag, grace=5.0)
            assert at.processes(launch) == []
            assert await steps(cluster) == {}
            record = at.record(launch)
            assert record is not None
            assert record.reason == ExitReason.STOPPED
            await cluster.stop(launch.tag, grace=5.0)
            await cluster.stop("run-1.never.1", grace=5.0)

    play(tmp_path, story)


@pytest.mark.parametrize("victim", ["frozen", "dead"])
def test_step_that_ignores_sigterm_is_killed_with_its_processes(
    tmp_path: Path, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rrl.cluster.local.STOP_MARGIN_S", 0.1)

    async def story(at: Lab, cluster: LocalCluster) -> None:
        async with at.manager():
            await cluster.request(allocation_request("pool", 1))
            launch = at.launch(*DAEMON)
            await cluster.launch(step_of(at, launch))
            await wait_for_processes(at, launch, 3)
            first = next(process for process in at.processes(launch) if process.module)
            os.kill(first.pid, signal.SIGSTOP if victim == "frozen" else signal.SIGKILL)
            await cluster.stop(launch.tag, grace=0.1)
            assert at.processes(launch) == []

    play(tmp_path, story)


def test_unkillable_step_is_unanswered_and_keeps_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(at: Lab, cluster: LocalCluster) -> None:
        await cluster.request(allocation_request("pool", 1))
        launch = at.launch(*SLEEP)
        await cluster.launch(step_of(at, launch))
        with monkeypatch.context() as patch:
            patch.setattr("rrl.cluster.local.sweep", lambda find, within: (list(find()), list(find())))
            with pytest.raises(Unanswered, match="has not ended"):
                await cluster.release("pool")
        assert await steps(cluster) == {launch.tag: "local1"}
        assert await nodes_of(cluster, "pool") == ("local1",)

    monkeypatch.setattr("rrl.cluster.local.RELEASE_GRACE_S", 0.0)
    play(tmp_path, story)


def test_release_ends_its_allocation_and_no_other(tmp_path: Path) -> None:
    async def story(at: Lab, cluster: LocalCluster) -> None:
        async with at.manager():
            await cluster.request(allocation_request("pool", 2))
            await cluster.request(allocation_request("other", 1))
            released = [at.launch(*DAEMON, replica=f"rollout/{n}", node=f"local{n + 1}") for n in range(2)]
            other = at.launch(*DAEMON, replica="trainer/0", node="local3")
            for launch in released:
                await cluster.launch(step_of(at, launch))
            await cluster.launch(step_of(at, other, allocation="other"))
            for launch in (*released, other):
                await wait_for_processes(at, launch, 3)
            await cluster.release("pool")
            assert [at.processes(launch) for launch in released] == [[], []]
            assert len(at.processes(other)) == 3
            snapshot = await cluster.observe()
            assert snapshot.allocations is not None
            assert snapshot.allocations.keys() == {"other"}
            await cluster.release("pool")

    play(tmp_path, story)


def test_steps_of_a_killed_manager_are_found_by_the_next_one(tmp_path: Path) -> None:
    """The first manager has a process of its own, which is killed with SIGKILL."""
    code = """
import asyncio, sys, pathlib
from rrl.cluster.local import LocalCluster
from rrl.core.run_dir import RunDir
from rrl.cluster.base import Step
from rrl.core.types import Resources
async def main():
    run = RunDir(pathlib.Path(sys.argv[1]))
    for tag in sys.argv[2:]:
        step = Step(tag, "pool", "local1", Resources(), run.launch_file(tag), run.logs / "first.log")
        await LocalCluster(run).launch(step)
    print("launched", flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""

    async def story(at: Lab, cluster: LocalCluster) -> None:
        async with at.manager() as manager:
            await cluster.request(allocation_request("pool", 1))
            recorded, unrecorded = at.launch(*DAEMON, replica="rollout/0"), at.launch(*DAEMON, replica="rollout/1")
            argv = [sys.executable, "-c", code, str(at.run.path), recorded.tag, unrecorded.tag]
            killed = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
            assert killed.stdout is not None
            await killed.stdout.readline()
            killed.kill()
            await killed.wait()
            record = at.run.cluster / "steps" / f"{unrecorded.tag}.json"
            half = record.read_text().replace('"pid":', '"was":').replace('"started":', '"then":')
            record.write_text(half)  # as if the manager had died before it recorded the process id
            for launch in (recorded, unrecorded):
                await wait_for_admission(manager, launch)
                await wait_for_processes(at, launch, 3)
            assert await steps(cluster) == {recorded.tag: "local1", unrecorded.tag: "local1"}
            with pytest.raises(Refused, match="already been launched"):
                await cluster.launch(step_of(at, unrecorded))
            await cluster.release("pool")
            assert at.processes() == []

    play(tmp_path, story)


def test_launch_without_a_process_may_be_repeated(tmp_path: Path) -> None:
    async def story(at: Lab, cluster: LocalCluster) -> None:
        async with at.manager() as manager:
            await cluster.request(allocation_request("pool", 1))
            launch = at.launch(*SLEEP)
            record = at.run.cluster / "steps" / f"{launch.tag}.json"
            file = at.run.launch_file(launch.tag)
            record.write_text(f'{{"allocation":"pool","node":"local1","launch_file":"{file}"}}')
            assert await steps(cluster) == {}
            await cluster.launch(step_of(at, launch))
            await manager.wait_for(AdmissionRequest)
            assert await steps(cluster) == {launch.tag: "local1"}

    play(tmp_path, story)


def test_node_marked_down_loses_its_steps_and_no_others(tmp_path: Path) -> None:
    async def story(at: Lab, cluster: LocalCluster) -> None:
        async with at.manager():
            await cluster.request(allocation_request("pool", 2))
            first, second = (at.launch(*DAEMON, replica=f"rollout/{n}", node=f"local{n}") for n in (1, 2))
            for launch in (first, second):
                await cluster.launch(step_of(at, launch))
                await wait_for_processes(at, launch, 3)
            await asyncio.to_thread(crash, at.run, NodeName("local1"))
            assert processes_on(at.run, NodeName("local1")) == []
            assert len(at.processes(second)) == 3
            snapshot = await cluster.observe()
            assert snapshot.steps == {second.tag: "local2"}
            assert snapshot.nodes is not None
            assert snapshot.nodes[NodeName("local1")].state is NodeState.DOWN

    play(tmp_path, story)


def test_steps_outlive_the_cluster_object(tmp_path: Path) -> None:
    async def story(at: Lab, cluster: LocalCluster) -> None:
        async with at.manager():
            await cluster.request(allocation_request("pool", 1))
            launch = at.launch(*SLEEP)
            await cluster.launch(step_of(at, launch))
            await wait_for_processes(at, launch, 2)
            await cluster.close()
            assert len(at.processes(launch)) == 2

    play(tmp_path, story)


def test_ended_step_leaves_no_zombie(tmp_path: Path) -> None:
    async def story(at: Lab, cluster: LocalCluster) -> None:
        async with at.manager() as manager:
            await cluster.request(allocation_request("pool", 1))
            launch = at.launch("true")
            await cluster.launch(step_of(at, launch))
            pid = (await manager.wait_for(AdmissionRequest)).pid
            await eventually(lambda: not Path(f"/proc/{pid}").exists())
            assert read_process(pid) is None

    play(tmp_path, story)


def test_unreadable_records_make_the_snapshot_unknown(tmp_path: Path) -> None:
    async def story(at: Lab, cluster: LocalCluster) -> None:
        await cluster.request(allocation_request("pool", 1))
        (at.run.cluster / "pool.json").write_text("garbage")
        snapshot = await cluster.observe()
        assert (snapshot.nodes, snapshot.allocations, snapshot.steps) == (None, None, None)
        assert "pool" in snapshot.unknown or "JSON" in snapshot.unknown
        with pytest.raises(Refused):
            await cluster.launch(step_of(at, at.launch(*SLEEP)))

    play(tmp_path, story)


def test_injected_crash_kills_the_nodes_processes_and_ends_after_its_time(tmp_path: Path) -> None:
    async def story(at: Lab, cluster: LocalCluster) -> None:
        async with at.manager():
            await cluster.request(allocation_request("pool", 2))
            launches = [at.launch(*DAEMON, replica=f"rollout/{i}", node=f"local{i + 1}") for i in range(2)]
            for launch in launches:
                await cluster.launch(step_of(at, launch))
                await eventually(lambda launch=launch: len(at.processes(launch)) == 3)  # type: ignore[misc]
            crash = Fault("f0", FaultKind.CRASH, "local1", seconds=2.0)
            assert await cluster.inject_fault(crash) == "local1 is marked down and 3 of its processes were killed"
            assert (at.processes(launches[0]), len(at.processes(launches[1]))) == ([], 3)
            snapshot = (await cluster.observe()).nodes
            assert snapshot is not None
            assert (snapshot[NodeName("local1")].state, snapshot[NodeName("local2")].state) == (
                NodeState.DOWN,
                NodeState.UP,
            )
            deadline = asyncio.get_running_loop().time() + TIMEOUT_S
            while ((await cluster.observe()).nodes or {})[NodeName("local1")].state is NodeState.DOWN:
                assert asyncio.get_running_loop().time() < deadline
                await asyncio.sleep(0.05)

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("kind", "node", "why"),
    [
        (FaultKind.CUT, "local1", "inject cut"),
        (FaultKind.OUTAGE, "", "inject outage"),
        (FaultKind.CRASH, "n9", "n9 is in"),
    ],
)
def test_fault_that_the_local_cluster_cannot_inject_is_refused(
    tmp_path: Path, kind: FaultKind, node: str, why: str
) -> None:
    async def story(at: Lab, cluster: LocalCluster) -> None:
        await cluster.request(allocation_request("pool", 1))
        with pytest.raises(Refused, match=why):
            await cluster.inject_fault(Fault("f0", kind, node, seconds=1.0))

    play(tmp_path, story)
