"""A run continues if an allocation is preempted, suspended, cancelled or at its walltime.

The tests use a real Slurm as a plain user, and the lab performs the actions of an administrator.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from rrl.cluster.base import AllocationState
from rrl.core.types import ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, Request
from rrl.manager.model.state import State, Status
from rrl.tests.support.runs import (
    all_work,
    cancel,
    check_sound,
    current_incarnations,
    joined_incarnations,
    light_job,
    submit_on,
    without_replicas,
)
from rrl.tests.support.slurm.lab import SlurmLab

VICTIM = ReplicaId("rollout/1")
TRAINER = ReplicaId("trainer/0")


@pytest.fixture
def lab(preempting_lab: SlurmLab) -> Iterator[SlurmLab]:
    yield preempting_lab
    preempting_lab.clear()


def replicas(steps: int, partition: str, extra: str = "", rollouts: int = 2) -> str:
    toml = light_job("slurm", steps, rollouts=rollouts, spares=0, extra=extra).replace("spares = 0", 'form = "replica"')
    return toml.replace("[roles.rollout]\n", f'[roles.rollout]\nslurm = {{ partition = "{partition}" }}\n')


def job_of(state: State, replica: ReplicaId) -> str:
    status = state.allocations[state.replica(replica).allocation or ""].status
    assert status is not None
    return status.job


def is_waiting(state: State) -> bool:
    return state.replica(VICTIM).status is Status.WANTED


def preempt(lab: SlurmLab, node: str) -> str:
    """Submit a job with a higher priority for the node, and return the job's id."""
    done = lab.run_as_user(
        ["sbatch", "--parsable", "-p", "main", "-w", node, "--exclusive", "-o/dev/null", "--wrap=sleep 600"]
    )
    return done.stdout.strip()


@pytest.mark.long
@pytest.mark.parametrize(("partition", "times"), [("low", 1), ("lowest", 3)], ids=["cancel", "requeue"])
def test_preempted_rollout_exits_within_its_grace_and_returns_with_a_new_node(
    lab: SlurmLab, partition: str, times: int
) -> None:
    """A preempted rollout exits within its grace, and returns with a new node.

    ``per_replica`` is 0: if this restart counted against the budget, the run would end.
    """
    # long, because the rollouts use all nodes of the lab
    toml = replicas(100_000, partition, "[recovery]\nper_replica = 0\n", rollouts=3)
    run = submit_on(lab, f"preempted-{partition}", toml)
    before = joined_incarnations(run)
    for incarnation in range(2, 2 + times):
        node = run.state().replica(VICTIM).node
        assert node is not None
        run.hold_in_the_middle(1)
        began = time.time()
        wanted = preempt(lab, node)
        run.wait(is_waiting)
        fence = next(s for s in reversed(run.events()) if isinstance(s.event, ev.Decided))
        assert fence.at - began < 6.0, "the replica was fenced later than Slurm's grace"
        run.let_go(1)
        lab.wait_job(wanted, "RUNNING None")
        step = run.state().step
        run.wait(lambda s, step=step: s.step > step + 3)  # type: ignore[misc]
        assert is_waiting(run.state())
        lab.slurm("scancel", wanted)
        run.wait(lambda s, incarnation=incarnation: s.replica(VICTIM).incarnation_number == incarnation and all_work(s))  # type: ignore[misc]
    after = current_incarnations(run.state())
    kept, now = without_replicas(before, after, [VICTIM, ReplicaId(f"agent/{before[VICTIM][2]}")])
    assert now == kept, "another replica was affected"
    assert run.state().replica(VICTIM).failures == ()
    decided = [s.event.action for s in run.events() if isinstance(s.event, ev.Decided)]
    fences = [action for action in decided if isinstance(action, Fence) and action.incarnation.replica == VICTIM]
    assert [fence.charged for fence in fences] == [False] * times
    cancel(run)
    assert run.continued(dead=-101.0), "no trajectory that the preempted rollout began was continued"


@pytest.mark.long
def test_suspended_rollout_and_trainer_are_waited_for_and_not_fenced(lab: SlurmLab) -> None:
    run = submit_on(lab, "suspended", replicas(100_000, "main"))
    before = joined_incarnations(run)
    for replica in (VICTIM, TRAINER):
        job = job_of(run.state(), replica)
        tag = run.state().replica(replica).allocation or ""
        lab.slurm("scontrol", "suspend", job)
        run.wait(lambda s, tag=tag: s.allocations[tag].suspended)  # type: ignore[misc]
        suspended = run.state()
        time.sleep(4 * suspended.job.limits.silence)
        assert run.state().allocations[tag].suspended
        lab.slurm("scontrol", "resume", job)
        step = run.state().step
        run.wait(lambda s, step=step: s.step > step + 3 and all_work(s))  # type: ignore[misc]
    assert current_incarnations(run.state()) == before, "a suspended job was taken for a failure"
    assert not [s for s in run.events() if isinstance(s.event, ev.Decided)]
    cancel(run)


@pytest.mark.long
def test_jobs_that_take_turns_on_a_node_are_not_failures(lab: SlurmLab) -> None:
    """Jobs that take turns on a node are not failures.

    Gang scheduling suspends the job every five seconds, whether or not the manager polls during a suspension.
    """
    run = submit_on(lab, "turns", replicas(100_000, "timeslice"))
    before = joined_incarnations(run)
    node = run.state().replica(VICTIM).node
    other = ["sbatch", "-p", "timeslice", "-w", str(node), "-c8", "--mem=100", "-o/dev/null", "--wrap=sleep 600"]
    lab.run_as_user(other)
    time.sleep(45)
    states = {
        s.event.status.state
        for s in run.events()
        if isinstance(s.event, ev.AllocationChanged) and s.event.status is not None
    }
    step = run.state().step
    run.wait(lambda s: s.step > step + 3)
    assert current_incarnations(run.state()) == before
    assert AllocationState.SUSPENDED in states
    cancel(run)


@pytest.mark.long
def test_pool_at_its_walltime_is_replaced_and_the_run_continues(lab: SlurmLab) -> None:
    limited_walltime = 'spares = 0\nwalltime = "1h"\njob_walltime = "2min"'
    toml = light_job("slurm", 100_000, rollouts=1, spares=0, extra='rotate = "60s"').replace(
        "spares = 0", limited_walltime
    )
    run = submit_on(lab, "rotates", toml)
    before = run.wait_steps(3)
    first = {replica.allocation for replica in before.replicas.values()}
    run.wait(lambda s: not first & {r.allocation for r in s.replicas.values() if r.is_current} and all_work(s), 240.0)
    step = run.state().step
    state = run.wait(lambda s: s.step > step + 3)
    assert {replica.id: replica.failures for replica in state.workers if replica.failures} == {}
    run.wait(lambda s: not first & s.allocations.keys(), 120.0)
    asked = [
        s.event.action.request
        for s in run.events()
        if isinstance(s.event, ev.Intended) and isinstance(s.event.action, Request)
    ]
    assert {ask.walltime for ask in asked} == {120.0}
    cancel(run)


@pytest.mark.long
def test_pool_cancelled_by_an_administrator_is_requested_once_more(lab: SlurmLab) -> None:
    run = submit_on(lab, "cancelled", light_job("slurm", 100_000, rollouts=1, spares=0))
    run.wait_steps(3)
    for _ in range(2):
        number = run.wait(all_work).replica(TRAINER).incarnation_number  # a first launch may fail if slurmctld is busy
        pools = [line.split()[0] for line in lab.jobs() if ".manager" not in line and "COMPLETING" not in line]
        lab.slurm("scancel", *pools)
        run.wait(lambda s, n=number: s.replica(TRAINER).incarnation_number > n or s.finish is not None)  # type: ignore[misc]
        assert not [r for r in run.state().workers if r.failures], (
            "a replica counts as failed because its allocation was cancelled"
        )
    state = run.wait_end()
    assert (state.outcome, "not by rrl cancel" in state.why) == ("cancelled", True), state.why
    run.wait_gone()
    check_sound(run.run)


@pytest.mark.long
def test_held_replacement_job_is_waited_for_until_it_is_released(lab: SlurmLab) -> None:
    run = submit_on(lab, "held", replicas(100_000, "low", rollouts=3))
    before = joined_incarnations(run)
    wanted = preempt(lab, str(before[VICTIM][2]))
    run.wait(is_waiting)
    asked = run.wait(lambda s: any(a.pending and a.status is not None for a in s.allocations.values()))
    (job,) = [a.status.job for a in asked.allocations.values() if a.pending and a.status is not None]
    lab.slurm("scontrol", "hold", job)
    run.wait(lambda s: any("held by an administrator" in a.status.detail for a in s.allocations.values() if a.status))
    lab.slurm("scancel", wanted)
    step = run.state().step
    run.wait(lambda s: s.step > step + 10)
    assert is_waiting(run.state())
    lab.slurm("scontrol", "release", job)
    after = current_incarnations(run.wait(lambda s: s.replica(VICTIM).incarnation_number == 2 and all_work(s)))
    kept, now = without_replicas(before, after, [VICTIM, ReplicaId(f"agent/{before[VICTIM][2]}")])
    assert now == kept
    cancel(run)
