"""Allocations that the cluster takes back before a run ends: preempted, suspended, cancelled, or out of walltime."""

from __future__ import annotations

import msgspec
import pytest

from rrl.cluster.base import AllocationState, AllocationStatus
from rrl.core.launch import ExitReason
from rrl.core.run_spec import Limits, NodeGroup, RunSpec
from rrl.core.types import AGENT, Cause, Evidence, Finding, NodeName, Outcome, Remedy, ReplicaId, Verdict, role_of
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, Finish, Launch, Release, Request, Rung
from rrl.manager.model.state import Status
from rrl.manager.planner.capacity.allocation_requests import MAX_REJECTIONS
from rrl.tests.support.manager.jobs import ROLLOUTS, RUN, STORE, TRAINER, in_node_groups, job
from rrl.tests.support.manager.world import GRACE_S, World, assert_nothing_is_left, preempt, requests, with_status

R0, R1 = ROLLOUTS
FIRST, TRAIN = f"{RUN}.rollout-0", f"{RUN}.trainer-0"
POOL = f"{RUN}.pool"
HOUR = 3600.0


def fences(world: World) -> list[Fence]:
    return [fence for fence in world.decided(Fence) if role_of(fence.incarnation.replica) != AGENT]


# ── preempted ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_replica_on_a_preempted_node_leaves_uncharged_and_gets_a_replacement() -> None:
    world = World(in_node_groups()).steady()
    world.closed["rollout"] = "Priority"
    preempt(world, FIRST)
    (fence,) = fences(world)
    assert (fence.incarnation.replica, fence.rung, fence.charged) == (R0, Rung.REPLACEMENT, False)
    assert fence.why.evidence == (f"its allocation {FIRST} is preempted, and ends in 30 s",)
    assert requests(world)[4:] == [f"{RUN}.rollout-2"]
    world.wait(5 * HOUR)
    assert (world.state.replica(R0).status, requests(world)[5:]) == (Status.WANTED, []), (
        "a second request was made while the first one is in the queue"
    )
    world.commit(2)
    world.open("rollout")
    world.steady()
    assert world.incarnations() == {STORE: 1, ReplicaId("reward/0"): 1, TRAINER: 1, R0: 2, R1: 1}


def test_nothing_is_launched_on_reclaimed_nodes() -> None:
    world = World(in_node_groups()).steady()
    with_status(world, FIRST, time_left_s=GRACE_S, reclaimed=True)
    before = len(world.decided(Launch))
    world.play(lambda: FIRST not in world.state.allocations, timeout_s=GRACE_S)
    assert [launch.allocation for launch in world.decided(Launch)[before:]] == []
    assert [release.allocation for release in world.decided(Release)] == [FIRST], (
        "an allocation without replicas was not released before its end"
    )


def test_repeated_preemption_costs_no_budget() -> None:
    world = World(in_node_groups(), nodes=40).steady()
    for incarnation in range(1, 31):
        assert world.state.replica(R0).incarnation_number == incarnation
        preempt(world, world.state.replica(R0).allocation or "")
        world.steady()
    allocation = world.state.replica(R0)
    assert (allocation.failures, allocation.incarnation_number, world.state.rejected_requests) == ((), 31, ())
    assert world.state.recoveries == 0


def test_preempted_trainer_returns_once_it_has_a_node_without_effect_on_others() -> None:
    world = World(in_node_groups(), nodes=9).steady()
    world.commit(1)
    preempt(world, TRAIN)
    world.steady()
    assert world.incarnations() == {STORE: 1, ReplicaId("reward/0"): 1, TRAINER: 2, R0: 1, R1: 1}
    assert world.state.replica(TRAINER).failures == ()


def test_allocation_that_ends_before_any_report_is_not_requested_without_end() -> None:
    world = World(in_node_groups(), nodes=99).steady()
    world.drop(FIRST)
    for _ in range(50):
        world.play(lambda: any(a.running for tag, a in world.state.allocations.items() if tag > FIRST + "0"), 50.0)
        late = [tag for tag in requests(world)[4:] if tag in world.state.allocations]
        if late and world.state.allocations[late[0]].running:
            world.drop(late[0])
        world.wait(1.0)
    asked = len(requests(world)) - 4
    assert asked == MAX_REJECTIONS
    assert world.state.replica(R0).status is Status.RETIRED


def test_replicas_leave_an_ending_job_before_its_reason_is_known() -> None:
    world = World(in_node_groups(), nodes=9).steady()
    with_status(world, FIRST, state=AllocationState.ENDING, detail="COMPLETING")
    (fence,) = fences(world)
    assert (fence.why.evidence, fence.charged) == ((f"its allocation {FIRST} ends: COMPLETING",), False)
    world.steady()
    assert [release.allocation for release in world.decided(Release)] == []
    allocation = world.state.allocations[FIRST]
    assert (allocation.pending, allocation.running, allocation.running_since is None) == (False, False, False)
    world.drop(FIRST, AllocationState.ENDED)
    assert world.state.rejected_requests == ()


def test_process_ended_with_the_walltime_has_not_failed_before_the_cluster_reports() -> None:
    world = World(job(spares=0), nodes=9).steady()
    with_status(world, POOL, time_left_s=-1.0)
    incarnation, step = world.state.replica(R0).incarnation, world.state.replica(R0).step
    assert step is not None
    assert fences(world) == [], "the replica was fenced although it may still work for a while"
    del world.steps[step]
    world.happen(ev.StepEnded(incarnation, step, 0, None, ExitReason.STOPPED))
    (fence,) = fences(world)
    assert (fence.incarnation, fence.charged) == (incarnation, False)
    world.play(lambda: world.state.replica(R0).status is Status.JOINED, timeout_s=60.0)
    assert world.state.replica(R0).allocation != POOL


def test_nothing_is_launched_on_nodes_whose_walltime_is_over() -> None:
    world = World(job(spares=0), nodes=9).steady()
    world.closed["pool"] = "Priority"
    with_status(world, POOL, time_left_s=-1.0)
    world.kill(R0)
    world.wait(60.0)
    assert R0 not in {incarnation.replica for incarnation, _ in world.steps.values()}


def test_flapping_node_moves_its_replica_once() -> None:
    world = World(job(spares=2)).steady()
    node = world.node_of(R0)
    evidence = (Evidence("cluster", "down: DOWN*", world.now),)
    down = Finding("node_down", Verdict.FAIL, Cause.NODE, Remedy.EXCLUDE, world.now, evidence, node=node, proof=True)
    for _ in range(20):
        world.happen(ev.FindingChanged(down))
        world.play(timeout_s=3.0)
        world.happen(ev.FindingChanged(msgspec.structs.replace(down, verdict=Verdict.OK)))
        world.play(timeout_s=3.0)
    world.steady()
    assert [fence.incarnation.replica for fence in fences(world)] == [R0]
    assert world.node_of(R0) != node


# ── suspended ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_suspended_allocation_keeps_its_nodes_and_gets_nothing_new() -> None:
    world = World(in_node_groups()).steady()
    before = world.incarnations()
    with_status(world, FIRST, state=AllocationState.SUSPENDED, detail="SUSPENDED")
    allocation = world.state.allocations[FIRST]
    assert (allocation.running, allocation.suspended, allocation.pending, allocation.ends_at) == (
        True,
        True,
        False,
        float("inf"),
    )
    world.wait(3 * 86400.0 / 24)
    assert (requests(world)[4:], world.incarnations()) == ([], before)
    with_status(world, FIRST, state=AllocationState.RUNNING, detail="RUNNING", time_left_s=50_000.0)
    assert world.state.allocations[FIRST].ends_at == world.now + 50_000.0
    assert world.incarnations() == before


def test_restart_on_a_suspended_node_waits_or_goes_elsewhere() -> None:
    world = World(job(spares=0)).steady()
    with_status(world, POOL, state=AllocationState.SUSPENDED)
    world.kill(R0)
    world.wait(60.0)
    assert R0 not in {incarnation.replica for incarnation, _ in world.steps.values()}
    with_status(world, POOL, state=AllocationState.RUNNING)
    world.steady()
    assert world.state.replica(R0).incarnation_number == 2


# ── external cancellations ───────────────────────────────────────────────────────────────────────────────────────────
def cancel_all(world: World) -> None:
    for tag in list(world.state.allocations):
        nodes = world._give_back(tag)
        status = AllocationStatus(AllocationState.ENDED, "7", nodes, "CANCELLED", cancelled=True)
        world.record(ev.AllocationChanged(tag, status))
    world.play(timeout_s=0.0)


@pytest.mark.parametrize("small", [job(), in_node_groups()], ids=["pool", "replica"])
def test_second_external_cancellation_of_all_nodes_ends_the_run(small: RunSpec) -> None:
    world = World(small, nodes=9).steady()
    cancel_all(world)
    world.steady()
    assert {*world.incarnations().values()} == {2}
    assert all(replica.failures == () for replica in world.state.replicas.values() if replica.role != AGENT)
    cancel_all(world)
    world.play()
    (finish,) = world.decided(Finish)
    assert finish.why.evidence == (
        "all allocations of the run were cancelled 2 times within an hour, and not by rrl cancel",
    )
    assert_nothing_is_left(world, Outcome.CANCELLED)


def test_requests_before_the_reason_hide_no_cancellation_and_several_count_once() -> None:
    world = World(in_node_groups(), nodes=40).steady()
    for incarnation in (1, 2):
        old = list(world.state.allocations)
        for tag in old:
            with_status(world, tag, state=AllocationState.ENDING, detail="COMPLETING")
        world.play(timeout_s=1.5)
        assert len(world.state.allocations) > len(old), "no nodes were requested when the allocation began to end"
        for tag in old:  # its nodes leave the allocation one after the other
            with_status(world, tag, state=AllocationState.ENDING, detail="COMPLETING", nodes=())
        for tag in old:
            nodes = world._give_back(tag)
            status = AllocationStatus(AllocationState.ENDED, "7", nodes, "CANCELLED", cancelled=True)
            world.happen(ev.AllocationChanged(tag, status))
        assert len(world.state.external_cancellations) == incarnation, (
            "allocations that were cancelled together do not count as one cancellation"
        )
        if incarnation == 1:
            world.steady()
    assert world.decided(Finish)[0].outcome is Outcome.CANCELLED


def test_cancelling_one_of_two_allocations_does_not_count() -> None:
    world = World(in_node_groups(), nodes=40).steady()
    for tag in (FIRST, TRAIN):
        with_status(world, tag, state=AllocationState.ENDING, detail="COMPLETING")
        nodes = world._give_back(tag)
        status = AllocationStatus(AllocationState.ENDED, "7", nodes, "CANCELLED", cancelled=True)
        world.happen(ev.AllocationChanged(tag, status))
        world.steady()
    assert world.state.external_cancellations == ()


def test_request_cancelled_twice_in_the_queue_ends_the_run() -> None:
    world = World(job(), nodes=1).play(timeout_s=5.0)
    for _ in range(2):
        (tag,) = world.state.allocations
        status = AllocationStatus(AllocationState.ENDED, "7", (), "CANCELLED", cancelled=True)
        world.happen(ev.AllocationChanged(tag, status))
        world.play(timeout_s=5.0)
    assert world.decided(Finish)[0].outcome is Outcome.CANCELLED


def test_cancelled_allocation_of_several_is_replaced_every_time() -> None:
    world = World(in_node_groups(), nodes=30).steady()
    for _ in range(5):
        tag = world.state.replica(R0).allocation or ""
        nodes = world._give_back(tag)
        status = AllocationStatus(AllocationState.ENDED, "7", nodes, "CANCELLED", cancelled=True)
        world.happen(ev.AllocationChanged(tag, status))
        world.steady()
    assert (world.state.finish, world.state.replica(R0).incarnation_number) == (None, 6)


def test_held_request_does_not_end_the_run_however_long_it_waits() -> None:
    world = World(job(), nodes=1).play(timeout_s=5.0)
    with_status(world, POOL, detail="PENDING: held by an administrator (scontrol release)")
    world.wait(10 * HOUR)
    assert (world.state.finish, list(world.state.allocations)) == (None, [POOL])


# ── out of walltime ──────────────────────────────────────────────────────────────────────────────────────────────────
def terms(small: RunSpec, term: float) -> RunSpec:
    """Return the job with this ``[cluster] job_walltime``."""
    (pool,) = small.node_groups
    part: NodeGroup = msgspec.structs.replace(pool, walltime=term)
    return msgspec.structs.replace(small, node_groups=(part,))


def test_expiring_pool_is_replaced_with_its_spares_and_left_role_by_role() -> None:
    small = terms(job(rollouts=3, spares=2, walltime=20 * HOUR, steps=10**6), 4 * HOUR)
    world = World(small, nodes=30).steady()
    asked = world.decided(Request)[0].request
    world.play(lambda: len(requests(world)) == 2, timeout_s=5 * HOUR)
    ends = world.state.allocations[POOL].ends_at
    assert world.now == ends - small.limits.rotate
    follow = world.decided(Request)[1].request
    assert (asked.may_reuse_own_nodes, follow.may_reuse_own_nodes) == (False, True), (
        "the successor may not reuse nodes of the run that become free"
    )
    assert (follow.count, follow.walltime) == (asked.count, 4 * HOUR)
    while world.state.replica(R0).incarnation_number == 1 or not world.works():
        down = [r.role for r in world.state.replicas.values() if r.role != AGENT and r.status is not Status.JOINED]
        assert len(down) == len(set(down)), "two replicas of a role were down at the same time"
        world.wait(0.25)
    world.play(lambda: POOL not in world.state.allocations, timeout_s=HOUR)
    assert world.now < ends
    assert world.incarnations() == dict.fromkeys(world.incarnations(), 2)
    world.wait(13 * HOUR)
    assert max(world.incarnations().values()) == 5, (
        "the replicas were not moved once per allocation until the end of the run"
    )
    assert all(replica.failures == () for replica in world.state.workers)


def test_successor_is_requested_for_the_remaining_time() -> None:
    world = World(terms(job(walltime=6 * HOUR, steps=10**6), 4 * HOUR), nodes=30).steady()
    world.play(lambda: len(requests(world)) == 2, timeout_s=5 * HOUR)
    assert world.decided(Request)[1].request.walltime == pytest.approx(world.state.ends_at - world.now, abs=1.0)


def test_end_moved_forward_is_prepared_for_and_a_postponed_one_is_not() -> None:
    world = World(job(walltime=20 * HOUR, steps=10**6), nodes=30).steady()
    with_status(world, POOL, time_left_s=HOUR)
    world.play(lambda: len(requests(world)) == 2, timeout_s=2 * HOUR)
    assert world.now == world.state.allocations[POOL].ends_at - world.state.job.limits.rotate
    world = World(terms(job(walltime=20 * HOUR, steps=10**6), 4 * HOUR), nodes=30).steady()
    with_status(world, POOL, time_left_s=19.9 * HOUR)
    world.wait(3.9 * HOUR)
    assert len(requests(world)) == 1


def test_trainer_killed_with_its_allocation_continues_from_its_last_commit() -> None:
    limits = Limits(rotate=1.0)  # too late to move a replica in time
    world = World(msgspec.structs.replace(terms(job(walltime=20 * HOUR, steps=10**6), 4 * HOUR), limits=limits), 30)
    world.steady()
    world.commit(41)
    world.play(lambda: world.state.replica(TRAINER).incarnation_number == 2, timeout_s=5 * HOUR)
    world.steady()
    assert (world.state.step, world.state.replica(TRAINER).failures) == (41, ())
    assert world.state.finish is None


def test_manager_inside_a_suspended_pool_does_not_count_it_as_lost() -> None:
    world = World(job()).steady()
    with_status(world, POOL, state=AllocationState.SUSPENDED)
    assert NodeName("n1") in world.state.nodes
    world.cancel()
    world.play(timeout_s=600.0)
    assert_nothing_is_left(world, Outcome.CANCELLED)
