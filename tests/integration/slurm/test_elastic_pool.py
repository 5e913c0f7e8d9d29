"""An elastic pool on a real Slurm: preemption, suspension, a drained partition, no slurmctld, killed managers.

One run goes through all of it, since starts are what costs. A user sets the number of replicas, so that no rule
interferes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from rrl.core.types import AGENT, STANDBY_ROLE, ReplicaId, role_of
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, Request, Resize
from rrl.manager.model.state import Allocation, State, Status
from rrl.manager.storage.lease import holder
from rrl.tests.support.runs import TestRun, cancel, light_job, submit_on
from rrl.tests.support.slurm.lab import SlurmLab

FIRST, SECOND = ReplicaId("burst/0"), ReplicaId("burst/1")
POOL = """
[recovery]
window = "30s"
[rollouts.burst]
replicas = { min = 0, max = 2 }
node_hours = 50
slurm = { partition = "low" }
walltime = "30min"
"""
AWAY_S = 60.0
"""Seconds for which slurmctld is away."""
LONG_S = 300.0
"""Deadline (s) of a wait for a request that Slurm has refused before: rrl repeats it after pauses that double."""


@pytest.fixture
def lab(preempting_lab: SlurmLab) -> Iterator[SlurmLab]:
    yield preempting_lab
    preempting_lab.slurm("scontrol", "update", "PartitionName=low", "State=UP")
    preempting_lab.clear()


def _works(state: State, replica: ReplicaId, number: int = 1) -> bool:
    one = state.replicas.get(replica)
    joined = one is not None and one.status is Status.JOINED and one.weight_version is not None
    return joined and one is not None and one.incarnation_number >= number


def _others(state: State) -> dict[ReplicaId, int]:
    """Return the incarnation numbers of all workers that are not of the pool."""
    return {one.id: one.incarnation_number for one in state.workers if one.role != "burst"}


def _resizes(run: TestRun) -> list[Resize]:
    decided = [one.event.action for one in run.events() if isinstance(one.event, ev.Decided)]
    return [action for action in decided if isinstance(action, Resize)]


def _charged(run: TestRun) -> list[Fence]:
    """Return the fences of workers that count as failures."""
    decided = [one.event.action for one in run.events() if isinstance(one.event, ev.Decided)]
    fences = [action for action in decided if isinstance(action, Fence) and action.charged]
    return [fence for fence in fences if role_of(fence.incarnation.replica) not in (AGENT, STANDBY_ROLE)]


def _stopped(run: TestRun, replica: ReplicaId) -> int:
    """Return how many times a replica was stopped."""
    return sum(replica in action.stop for action in _resizes(run))


def _pool(state: State) -> list[Allocation]:
    return [one for one in state.allocations.values() if one.request.node_group == "burst"]


def _job_of(state: State, replica: ReplicaId) -> str:
    status = state.allocations[state.replica(replica).allocation or ""].status
    assert status is not None
    return status.job


def _goes_on(run: TestRun, others: dict[ReplicaId, int]) -> None:
    """Check that five further steps are committed, and that nothing but the pool was touched."""
    step = run.state().step
    state = run.wait(lambda state: state.step > step + 5)
    assert _others(state) == others


@pytest.mark.slurm
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_what_happens_to_an_elastic_pool_is_not_noticed_by_the_run(lab: SlurmLab) -> None:
    job = light_job("slurm", 100_000, rollouts=1, spares=0, warm=False, one_node=True, extra=POOL)
    run = submit_on(lab, "elastic", job)
    others = _others(run.wait_steps(1))
    run.resize("burst", 2)
    run.wait(lambda state: _works(state, FIRST) and _works(state, SECOND))
    _preempted(run, lab, others)
    _suspended(run, lab, others)
    _refused_and_without_slurmctld(run, lab, others)
    manager = _managers_killed(run, lab, others)
    assert not _charged(run), "a lost node of the pool counts as a failure of a worker"
    cancel(run)
    manager.wait(timeout=60)
    lab.wait_no_jobs()
    assert run.continued(dead=-10_101.0), "no trajectory that the preempted rollout began was continued"


def _preempted(run: TestRun, lab: SlurmLab, others: dict[ReplicaId, int]) -> None:
    """A foreign job takes the node; the pool gets another one, or this one again when the job has ended."""
    node = run.state().replica(SECOND).node
    assert node is not None
    run.hold_in_the_middle("burst-1")
    ask = ["sbatch", "--parsable", "-p", "main", "-w", node, "--exclusive", "-o/dev/null", "--wrap=sleep 600"]
    foreign = lab.run_as_user(ask).stdout.strip()
    run.wait(lambda _: _stopped(run, SECOND) == 1)
    run.let_go("burst-1")
    lab.wait_job(foreign, "RUNNING None")
    _goes_on(run, others)
    lab.slurm("scancel", foreign)
    run.wait(lambda state: _works(state, SECOND, 2))


def _suspended(run: TestRun, lab: SlurmLab, others: dict[ReplicaId, int]) -> None:
    """A suspended replica is given up, since the trainer would wait for its trajectories; another one replaces it."""
    lab.slurm("scontrol", "suspend", _job_of(run.state(), SECOND))
    run.wait(lambda _: _stopped(run, SECOND) == 2)
    _goes_on(run, others)
    run.wait(lambda state: _works(state, SECOND, 3))


def _refused_and_without_slurmctld(run: TestRun, lab: SlurmLab, others: dict[ReplicaId, int]) -> None:
    """Slurm refuses requests, then keeps one in its queue, and then does not answer for a minute."""
    run.resize("burst", 1)
    run.wait(lambda state: len(_pool(state)) == 1 and (FIRST in state.replicas) != (SECOND in state.replicas))
    lab.slurm("scontrol", "update", "PartitionName=low", "State=DRAIN")
    asked = _requests(run)
    run.resize("burst", 2)
    run.wait(lambda _: _requests(run) > asked)
    _goes_on(run, others)
    lab.slurm("scontrol", "update", "PartitionName=low", "State=DOWN")
    run.wait(lambda state: any(one.pending and not one.refused and one.status for one in _pool(state)), LONG_S)
    with lab.controller_down():
        time.sleep(AWAY_S)
        _goes_on(run, others)
    _goes_on(run, others)
    lab.slurm("scontrol", "update", "PartitionName=low", "State=UP")
    run.wait(lambda state: _works(state, FIRST) and _works(state, SECOND), LONG_S)
    assert _others(run.state()) == others


def _requests(run: TestRun) -> int:
    """Return how many times nodes were requested for the pool."""
    intended = [one.event.action for one in run.events() if isinstance(one.event, ev.Intended)]
    return sum(isinstance(action, Request) and action.request.node_group == "burst" for action in intended)


def _managers_killed(run: TestRun, lab: SlurmLab, others: dict[ReplicaId, int]) -> subprocess.Popen[str]:
    """Both managers are killed when the decision stands in the journal; the next one, which is returned, goes on."""
    before, first = len(_resizes(run)), holder(run.run)
    assert first is not None
    epoch = run.state().epoch
    resize = run.call("resize", run.run.id, "burst", "0", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run.wait(lambda _: len(_resizes(run)) > before)
    lab.run_as_user(["scancel", "--state=PENDING", f"--name={run.run.id}.manager"])
    os.kill(first.pid, signal.SIGKILL)
    resize.wait(timeout=120)
    manager = run.call("manage", run.run.id, stdout=subprocess.DEVNULL)
    run.wait(lambda state: state.epoch > epoch and not _pool(state))
    assert not {FIRST, SECOND} & run.state().replicas.keys()
    _goes_on(run, others)
    assert len(_resizes(run)) == before + 1
    assert lab.slurm("squeue", "-h", "-p", "low", "-t", "R,PD,S").split() == []
    run.resize("burst", 1)
    run.wait(lambda state: _works(state, FIRST) or _works(state, SECOND))
    return manager
