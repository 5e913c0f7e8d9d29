"""SlurmCluster works with a real Slurm. Scenarios run as a plain user in a forked child, as a manager does."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from rrl.cluster.base import AllocationRequest, AllocationState, ClusterSnapshot, NodeState, Refused, Unanswered
from rrl.cluster.slurm.cluster import SlurmCluster
from rrl.cluster.slurm.commands import SlurmLimits
from rrl.core.types import NodeName, Resources
from rrl.tests.support.slurm import processes as slurm_processes
from rrl.tests.support.slurm.cluster_run import (
    FAST,
    SCRIPT_IGNORING_SIGTERM,
    Run,
    as_user,
    is_alive,
    state,
    until,
    until_file,
)
from rrl.tests.support.slurm.lab import SlurmLab

pytestmark = pytest.mark.slurm


@pytest.fixture
def lab(slurm_lab: SlurmLab) -> Iterator[SlurmLab]:
    yield slurm_lab
    slurm_lab.clear()

    def is_empty() -> bool:
        return all(p.comm not in ("srun", "salloc", "sh", "sleep") for p in slurm_lab.processes().values())

    # After a SIGKILL of a shell, the `sleep 0.1` that it waited for is still running.
    slurm_lab.wait_for(is_empty, "commands of a cancelled step or job did not end")


@pytest.fixture
def run(lab: SlurmLab) -> Run:
    path = lab.user_home / f"run{len(list(lab.user_home.glob('run*')))}"
    lab.call_as_user(path.mkdir)
    return Run(path)


def test_pool_is_requested_listed_used_and_released(lab: SlurmLab, run: Run) -> None:
    async def scenario() -> None:
        slurm = run.cluster()
        nodes = await run.hold(slurm, 2)
        assert len(nodes) == 2
        await slurm.launch(run.step("agent-a.1", nodes[0], gpus=2, agent=True))
        await slurm.launch(run.step("rollout-0.1", nodes[0], cpus=2, gpus=1, mem=1500))
        await slurm.launch(run.step("rollout-1.1", nodes[0], cpus=2, gpus=1, mem=1500))
        await slurm.launch(run.step("rollout-2.1", nodes[1]))
        observed = await slurm.observe()
        assert observed.steps == {
            run.tag("agent-a.1"): nodes[0],
            run.tag("rollout-0.1"): nodes[0],
            run.tag("rollout-1.1"): nodes[0],
            run.tag("rollout-2.1"): nodes[1],
        }
        assert observed.nodes is not None
        assert {name: status.state for name, status in observed.nodes.items()} == dict.fromkeys(nodes, NodeState.UP)
        pids = [await run.pid(name) for name in ("agent-a.1", "rollout-0.1", "rollout-1.1", "rollout-2.1")]
        gpus = [slurm_processes.running_processes()[pid].environ.get("CUDA_VISIBLE_DEVICES") for pid in pids]
        assert gpus == ["0,1", "0", "1", None]
        await slurm.release(run.pool)
        await until(slurm, lambda snapshot: state(snapshot, run.pool) is AllocationState.ENDED and snapshot.steps == {})
        await slurm.release(run.pool)
        await slurm.close()

    as_user(lab, scenario)


def test_step_survives_the_kill_of_its_srun_and_can_be_stopped(lab: SlurmLab, run: Run) -> None:
    async def scenario() -> None:
        slurm = run.cluster()
        node = (await run.hold(slurm, 1))[0]
        await slurm.launch(run.step("rollout-0.1", node))
        pid = await run.pid("rollout-0.1")
        sruns = [
            p.pid
            for p in slurm_processes.running_processes().values()
            if p.comm == "srun" and f"{run.id}." in p.command
        ]
        assert len(sruns) == 2, "the first srun of the step has not forked a second one, which can end the step"
        await slurm.release_launcher(run.tag("rollout-0.1"))
        while any(is_alive(srun) for srun in sruns):  # endless only until the test's own time limit
            await asyncio.sleep(0.05)
        await asyncio.sleep(4.0)  # if only srun was killed, its step ends after 2.5 s (measured), without an event
        assert is_alive(pid)
        assert (await slurm.observe()).steps == {run.tag("rollout-0.1"): node}
        await slurm.stop(run.tag("rollout-0.1"), grace=10.0)
        assert not is_alive(pid)
        assert (run.folder / "rollout-0.1.launch.signals").read_text() == "TERM\n"
        assert (await slurm.observe()).steps == {}
        await slurm.stop(run.tag("rollout-0.1"), grace=10.0)
        assert [name for name in os.listdir(run.folder) if name.endswith(".srun")] == []

    as_user(lab, scenario)


def test_step_that_ignores_sigterm_is_killed_after_its_grace(lab: SlurmLab, run: Run) -> None:
    async def scenario() -> None:
        slurm = run.cluster(script=SCRIPT_IGNORING_SIGTERM)
        node = (await run.hold(slurm, 1))[0]
        await slurm.launch(run.step("rollout-0.1", node))
        pid = await run.pid("rollout-0.1")
        await slurm.stop(run.tag("rollout-0.1"), grace=0.2)
        await until(slurm, lambda snapshot: snapshot.steps == {})
        assert not is_alive(pid)
        assert (run.folder / "rollout-0.1.launch.signals").exists()
        await slurm.close()

    as_user(lab, scenario)


def test_request_that_slurm_rejects_is_refused(lab: SlurmLab, run: Run) -> None:
    async def scenario() -> None:
        for hold in ("salloc", "sbatch"):
            slurm = run.cluster(hold=hold)
            with pytest.raises(Refused, match="Invalid partition"):
                await slurm.request(run.allocation_request(partition="nowhere"))
            with pytest.raises(Refused, match="Memory specification can not be satisfied"):
                await slurm.request(AllocationRequest(run.pool, 1, Resources(mem=2**40), 60.0))
            with pytest.raises(Refused, match="is reserved"):
                await slurm.request(run.allocation_request(array="1-3"))
        with pytest.raises(Refused, match="is not running"):
            await slurm.launch(run.step("rollout-0.1", "n1"))
        nodes = await run.hold(slurm, 1)
        elsewhere = next(node for node in lab.nodes if node not in nodes)
        with pytest.raises(Refused, match="Requested node configuration is not available"):
            await slurm.launch(run.step("rollout-1.1", elsewhere))
        with pytest.raises(Refused, match="Memory required by task is not available"):
            await slurm.launch(run.step("rollout-2.1", nodes[0], mem=5000))
        assert (await slurm.observe()).steps == {}
        await slurm.close()

    as_user(lab, scenario)


def test_stop_withdraws_a_launch_that_waits_for_resources(lab: SlurmLab, run: Run) -> None:
    async def scenario() -> None:
        slurm = run.cluster(SlurmLimits(min_poll_interval_s=0.05, launch_watch_s=1.0, reads_per_minute=100_000))
        node = (await run.hold(slurm, 1))[0]
        await slurm.launch(run.step("rollout-0.1", node, mem=3000))
        await slurm.launch(run.step("rollout-1.1", node, mem=3000))
        assert (await slurm.observe()).steps == {run.tag("rollout-0.1"): node}
        await slurm.stop(run.tag("rollout-1.1"), grace=5.0)
        await slurm.stop(run.tag("rollout-0.1"), grace=5.0)
        await slurm.launch(run.step("rollout-2.1", node, mem=3000))
        await run.pid("rollout-2.1")
        assert (await slurm.observe()).steps == {run.tag("rollout-2.1"): node}
        assert not (run.folder / "rollout-1.1.launch.pid").exists()
        await slurm.close()

    as_user(lab, scenario)


def test_request_without_free_nodes_is_queued_and_can_be_released(lab: SlurmLab, run: Run) -> None:
    async def scenario() -> None:
        slurm = run.cluster()
        await slurm.request(run.allocation_request(5))
        await slurm.request(run.allocation_request(5, "more-1"))
        observed = await until(slurm, lambda snapshot: state(snapshot, run.pool) is AllocationState.RUNNING)
        assert observed.allocations is not None
        waiting = observed.allocations[run.tag("more-1")]
        assert (waiting.state, waiting.nodes) == (AllocationState.PENDING, ())
        assert not [
            p for p in slurm_processes.running_processes().values() if p.comm == "salloc" and run.id in p.command
        ]
        await slurm.release(run.tag("more-1"))
        observed = await until(slurm, lambda snapshot: state(snapshot, run.tag("more-1")) is AllocationState.ENDED)
        assert state(observed, run.pool) is AllocationState.RUNNING

    as_user(lab, scenario)


def test_pending_request_outlives_its_manager_and_starts_once_nodes_are_free(lab: SlurmLab, run: Run) -> None:
    async def first() -> None:
        slurm = run.cluster()
        await slurm.request(run.allocation_request(5))
        await slurm.request(run.allocation_request(5, "more-1"))
        os._exit(0)

    async def second() -> None:
        slurm = run.cluster()
        await slurm.release(run.pool)
        await until(slurm, lambda snapshot: state(snapshot, run.tag("more-1")) is AllocationState.RUNNING)
        await asyncio.sleep(5.0)  # a job with an unreachable salloc ends 3 s after its start (measured)
        assert state(await slurm.observe(), run.tag("more-1")) is AllocationState.RUNNING

    as_user(lab, first)
    as_user(lab, second)


def test_each_hetjob_component_is_an_allocation_of_its_own(lab: SlurmLab, run: Run) -> None:
    first, second, third = (run.tag(name) for name in ("rollout", "trainer", "shared"))

    async def scenario() -> None:
        slurm = run.cluster()
        parts = [
            run.allocation_request(2, "rollout"),
            run.allocation_request(1, "trainer"),
            run.allocation_request(1, "shared"),
        ]
        await slurm.request(msgspec.structs.replace(parts[0], further_components=tuple(parts[1:])))
        observed = await until(slurm, lambda snapshot: state(snapshot, third) is AllocationState.RUNNING)
        assert observed.allocations is not None
        nodes = {tag: status.nodes for tag, status in observed.allocations.items()}
        assert {tag: len(names) for tag, names in nodes.items()} == {first: 2, second: 1, third: 1}
        assert len({node for names in nodes.values() for node in names}) == 4
        for index, tag in enumerate(nodes):
            step = run.step(f"role-{index}.1", nodes[tag][0], gpus=1)
            await slurm.launch(msgspec.structs.replace(step, allocation=tag))
            await run.pid(f"role-{index}.1")
        expected = {run.tag(f"role-{index}.1"): nodes[tag][0] for index, tag in enumerate(nodes)}
        assert (await slurm.observe()).steps == expected
        with pytest.raises(Refused, match="the first component of its job"):
            await slurm.release(first)
        await slurm.stop(run.tag("role-1.1"), grace=10.0)
        assert (run.folder / "role-1.1.launch.signals").read_text() == "TERM\n"
        await slurm.release(second)
        observed = await until(slurm, lambda snapshot: state(snapshot, second) is AllocationState.ENDED)
        assert {state(observed, tag) for tag in (first, third)} == {AllocationState.RUNNING}
        await slurm.launch(msgspec.structs.replace(run.step("role-2.2", nodes[third][0]), allocation=third))
        await run.pid("role-2.2")
        await asyncio.gather(slurm.release(first), slurm.release(third))  # only the last release ends the job
        await until(slurm, lambda snapshot: snapshot.steps == {} and state(snapshot, first) is AllocationState.ENDED)
        await slurm.close()

    as_user(lab, scenario)


def test_pending_hetjob_is_released_as_a_whole_and_names_its_holder(lab: SlurmLab, run: Run) -> None:
    async def scenario() -> None:
        slurm = run.cluster(hold="sbatch")
        await run.hold(slurm, 3)
        await slurm.request(
            msgspec.structs.replace(
                run.allocation_request(1, "rollout"),
                further_components=(run.allocation_request(1, "trainer", hold=""),),
            )
        )
        observed = await until(slurm, lambda snapshot: state(snapshot, run.tag("trainer")) is AllocationState.PENDING)
        assert observed.allocations is not None
        assert observed.allocations[run.tag("trainer")].detail == "PENDING: held by its user (scontrol release)"
        await slurm.release(run.tag("trainer"))
        observed = await until(
            slurm, lambda snapshot: state(snapshot, run.tag("rollout")) is not AllocationState.PENDING
        )
        assert state(observed, run.pool) is AllocationState.RUNNING

    as_user(lab, scenario)


def test_second_allocation_avoids_the_runs_own_nodes(lab: SlurmLab, run: Run) -> None:
    async def scenario() -> None:
        slurm = run.cluster()
        await run.hold(slurm, 2)  # the two steps take half of each node
        await slurm.request(run.allocation_request(3, "more-1"))
        observed = await until(slurm, lambda snapshot: state(snapshot, run.tag("more-1")) is AllocationState.RUNNING)
        assert observed.allocations is not None
        nodes = [node for snapshot in observed.allocations.values() for node in snapshot.nodes]
        assert len(set(nodes)) == 5
        with pytest.raises(Refused, match="Requested node configuration is not available"):
            await slurm.request(run.allocation_request(1, "more-2"))

    as_user(lab, scenario)


def test_managers_own_pool_is_not_requested_and_ends_with_the_manager(lab: SlurmLab, run: Run) -> None:
    async def scenario() -> None:
        await run.hold(run.cluster(), 1)
        slurm = SlurmCluster(run.id, sys.executable, FAST, own_tag=run.pool)
        await slurm.request(run.allocation_request(1))
        observed = await slurm.observe()
        assert observed.allocations is not None
        assert observed.allocations[run.pool].detail == "RUNNING", "a second job was requested"
        await slurm.release(run.pool)
        observed = await slurm.observe()
        assert observed.allocations is not None
        assert observed.allocations[run.pool].detail == "ends with its manager"
        assert state(observed, run.pool) is AllocationState.ENDED
        assert state(await run.cluster().observe(), run.pool) is AllocationState.RUNNING, (
            "the release has ended the pool, and with it the manager of the pool"
        )

    as_user(lab, scenario)


def test_unanswered_request_is_settled_by_its_tag_later(lab: SlurmLab, run: Run) -> None:
    async def deaf() -> None:
        slurm = run.cluster(hold="sbatch")
        observed, *others = await asyncio.gather(
            slurm.observe(),
            slurm.request(run.allocation_request(1)),
            slurm.release(run.pool),
            slurm.stop(run.tag("rollout-0.1"), grace=1.0),
            run.cluster(SlurmLimits(write_timeout_s=0.5), hold="salloc").request(run.allocation_request(1, "more-1")),
            return_exceptions=True,
        )
        assert isinstance(observed, ClusterSnapshot)
        assert (observed.allocations, observed.steps, observed.nodes) == (None, None, None)
        assert [type(other) for other in others] == [Unanswered] * 4, others
        assert "timed out" in observed.unknown
        assert "timed out" in str(others[0])
        # "timed out" if slurmctld let the command wait
        assert re.search(r"no answer within 0.5 s|timed out", str(others[3]))

    async def later() -> None:  # the request took effect, and the poll finds it by its tag
        await until(run.cluster(), lambda snapshot: state(snapshot, run.pool) is AllocationState.RUNNING)

    with lab.controller_stopped():
        as_user(lab, deaf)
    as_user(lab, later)


def test_inactive_limit_decides_between_salloc_and_sbatch(lab: SlurmLab, run: Run) -> None:
    async def one_pool() -> None:
        await run.hold(run.cluster(), 1)

    as_user(lab, one_pool)
    # by salloc --no-shell, so that no node is the batch host, whose failure would end the pool
    assert batch_flags(lab) == ["BatchFlag=0"]
    lab.clear()
    conf = lab.conf.read_text()
    try:
        with lab.controller_down():  # after "scontrol reconfigure", 24.11 and 26.05 would miss dead nodes (measured)
            lab.conf.write_text(conf.replace("InactiveLimit=0", "InactiveLimit=3600"))
        as_user(lab, one_pool)
        assert batch_flags(lab) == ["BatchFlag=1"]
    finally:
        with lab.controller_down():
            lab.conf.write_text(conf)


def batch_flags(lab: SlurmLab) -> list[str]:
    shown = (lab.slurm("scontrol", "show", "job", "-o", job.split()[0]) for job in lab.jobs())
    return [next(word for word in job.split() if word.startswith("BatchFlag=")) for job in shown]


def test_steps_outlive_a_killed_manager_and_are_found_by_the_next_one(lab: SlurmLab, run: Run) -> None:
    async def first() -> None:
        slurm = run.cluster()
        node = (await run.hold(slurm, 1))[0]
        for name in ("rollout-0.1", "rollout-1.1"):
            await slurm.launch(run.step(name, node))
            await run.pid(name)
        await slurm.release_launcher(run.tag("rollout-0.1"))
        os._exit(0)  # as after kill -9: of the manager's processes, only the srun of rollout-1 still runs

    async def second() -> None:
        slurm = run.cluster()
        observed = await slurm.observe()
        assert sorted(observed.steps or {}) == [run.tag("rollout-0.1"), run.tag("rollout-1.1")]
        await slurm.stop(run.tag("rollout-1.1"), grace=5.0)
        await until(slurm, lambda snapshot: list(snapshot.steps or {}) == [run.tag("rollout-0.1")])
        await slurm.release(run.pool)
        await until(slurm, lambda snapshot: state(snapshot, run.pool) is AllocationState.ENDED and snapshot.steps == {})

    as_user(lab, first)
    as_user(lab, second)


MANAGER = """
import asyncio, sys
from pathlib import Path
from rrl.tests.support.slurm.cluster_run import Run
async def main(run):
    slurm = run.cluster()
    node = (await run.hold(slurm, 1))[0]
    for name in ("rollout-0.1", "rollout-1.1"):
        await slurm.launch(run.step(name, node))
        await run.pid(name)
    await slurm.release_launcher(run.tag("rollout-0.1"))
    (run.folder / "ready").touch()
    await asyncio.sleep(1000)
asyncio.run(main(Run(Path(sys.argv[1]))))
"""


def test_connected_steps_outlive_a_scancel_of_the_managers_job(lab: SlurmLab, run: Run) -> None:
    path = run.folder / "manager.sh"
    path.write_text(f"#!/bin/sh\nexec {sys.executable} - {run.folder} <<'EOF'\n{MANAGER}EOF\n")
    path.chmod(0o644)
    lab.run_as_user(
        [
            "sbatch",
            "-J",
            run.tag("manager"),
            "--comment",
            f"rrl {run.id} manager",
            "-n1",
            "--mem=500M",
            "-o",
            f"{run.folder}/manager.out",
            str(path),
        ]
    )

    async def scenario() -> None:
        slurm = run.cluster()
        await until_file(run.folder / "ready")
        observed = await slurm.observe()
        assert list(observed.allocations or {}) == [run.pool], (
            "the allocations are not exactly the pool: the manager's own job must not count"
        )
        joined, carried = await run.pid("rollout-0.1"), await run.pid("rollout-1.1")
        await asyncio.to_thread(subprocess.run, ["scancel", "--name", run.tag("manager")], check=True)
        await until(slurm, lambda snapshot: list(snapshot.steps or {}) == [run.tag("rollout-0.1")])
        assert is_alive(joined)
        assert not is_alive(carried)

    as_user(lab, scenario)


def test_crashed_node_is_down_and_the_rest_of_the_pool_continues(lab: SlurmLab, run: Run) -> None:
    node = ""

    async def first() -> None:
        slurm = run.cluster()
        nodes = await run.hold(slurm, 3)
        for index, name in enumerate(nodes):
            await slurm.launch(run.step(f"rollout-{index}.1", name))
            await run.pid(f"rollout-{index}.1")
        await asyncio.gather(*(slurm.release_launcher(run.tag(f"rollout-{index}.1")) for index in range(3)))
        (run.folder / "lost").write_text(nodes[0])

    async def second() -> None:
        slurm = run.cluster()
        observed = await slurm.observe()
        assert observed.allocations is not None
        nodes = observed.allocations[run.pool].nodes
        assert node in nodes
        observed = await until(
            slurm, lambda snapshot: snapshot.nodes and snapshot.nodes[NodeName(node)].state is NodeState.DOWN
        )
        assert observed.nodes is not None
        assert observed.nodes[NodeName(node)].detail == "DOWN+NOT_RESPONDING: Not responding"
        left = [name for name in nodes if name != node]
        observed = await until(
            slurm, lambda snapshot: snapshot.allocations and len(snapshot.allocations[run.pool].nodes) == 2
        )
        assert observed.steps == {run.tag("rollout-1.1"): left[0], run.tag("rollout-2.1"): left[1]}
        await slurm.launch(run.step("rollout-0.2", left[0]))
        await run.pid("rollout-0.2")
        await slurm.close()

    as_user(lab, first)
    node = (run.folder / "lost").read_text()
    lab.crash(node)
    as_user(lab, second)


def test_polls_are_rationed_and_never_stale_after_a_change(lab: SlurmLab, run: Run) -> None:
    async def scenario() -> None:
        seldom = run.cluster(SlurmLimits(min_poll_interval_s=3600.0, reads_per_minute=6))
        before = await seldom.observe()
        assert before.allocations == {}
        assert await seldom.observe() is before
        await seldom.request(run.allocation_request(1))
        assert (await seldom.observe()).allocations != {}
        await seldom.release(run.pool)
        spent = await seldom.observe()
        assert (spent.allocations, spent.unknown) == (None, "the budget of 6 Slurm queries per minute is used up")

    as_user(lab, scenario)
