"""The planner's decisions on single events, from an empty state to a run that has ended.

:class:`World` checks the rules that hold for every plan, and these tests check the decisions.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from rrl.cluster.base import AllocationState, NodeState, NodeStatus
from rrl.core.faults import Fault, FaultKind, FaultTrigger
from rrl.core.run_spec import Limits, Recovery, TrainerSettings
from rrl.core.task_spec import EvalSpec
from rrl.core.types import AGENT, Cause, Evidence, Finding, NodeName, Outcome, Remedy, ReplicaId, Verdict, role_of
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Exclude, Fence, Finish, InjectFault, Launch, Release, Request, Rung, StopStep
from rrl.manager.model.reduce_replicas import RETRY_PAUSE_S
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import Status
from rrl.manager.peer_directory import build_directory
from rrl.manager.planner import Plan, plan
from rrl.manager.planner.capacity.allocation_requests import MAX_REJECTIONS
from rrl.manager.planner.deadlines import MIN_WALLTIME_MARGIN_S, UNSATISFIABLE_AFTER_S
from rrl.manager.planner.shutdown import final_reason
from rrl.tests.support.manager.jobs import REWARD, ROLLOUTS, RUN, STORE, TRAINER, job
from rrl.tests.support.manager.world import World, assert_nothing_is_left, fail, found, lost, requests, rungs

POOL = f"{RUN}.pool"
R0, R1 = ROLLOUTS
ALL = (STORE, REWARD, TRAINER, R0, R1)
ONCE = dict.fromkeys(ALL, 1)
DAY = 86400.0
N1, N2, N3, N4, N5, N6, N7 = (NodeName(f"n{i}") for i in range(1, 8))


@pytest.fixture
def world() -> World:
    return World(job()).steady()


def launches(world: World) -> list[str]:
    return [str(action.incarnation) for action in world.decided(Launch)]


def stopped_at(world: World) -> list[float]:
    return [s.at for s in world.events if isinstance(s.event, ev.Intended) and isinstance(s.event.action, StopStep)]


# ── the start ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_new_run_has_one_request_one_agent_per_node_and_one_launch_per_replica(world: World) -> None:
    assert requests(world) == [POOL]
    assert world.requests[POOL].count == 5
    assert sorted(launches(world)) == sorted([f"{r}#1" for r in ALL] + [f"agent/n{i}#1" for i in range(1, 6)])
    assert {r: world.node_of(r) for r in ALL} == {STORE: N1, REWARD: N1, TRAINER: N2, R0: N3, R1: N4}
    assert world.decided(Fence) == []


def test_rejected_pool_ends_the_run_with_the_clusters_message() -> None:
    world = World(job())
    world.refuse = "sbatch: error: invalid partition specified: gpuu"
    world.play()
    (end,) = world.decided(Finish)
    assert (end.outcome, end.why.evidence) == (Outcome.REJECTED, (world.refuse,))
    assert len(requests(world)) == 1
    assert_nothing_is_left(world, Outcome.REJECTED)


def test_undelivered_request_is_repeated_under_other_tags_but_not_without_end() -> None:
    world = World(job())
    world.unanswered = True
    world.play(timeout_s=1.0)
    world.happen(ev.IntentSettled(POOL, False, "never appeared in the queue", undelivered=True))
    assert len(set(requests(world))) == 2
    world.happen(ev.IntentSettled(requests(world)[1], False, "never appeared in the queue", undelivered=True))
    assert len(set(requests(world))) == 3
    world.happen(ev.IntentSettled(requests(world)[2], False, "never appeared in the queue", undelivered=True))
    assert_nothing_is_left(world, Outcome.FAILED)


def test_the_first_pool_is_waited_for_as_long_as_the_queue_takes() -> None:
    world = World(job(limits=Limits(allocation=500.0)), nodes=3).wait(10 * DAY)
    assert (requests(world), world.decided(Release), world.state.finish) == ([POOL], [], None)
    world.arrive(5)
    world.steady()
    assert world.incarnations() == ONCE


def test_dequeued_pool_is_requested_under_other_tags_but_not_without_end() -> None:
    world = World(job(), nodes=3)
    for asked in range(1, MAX_REJECTIONS + 1):
        world.play(timeout_s=5.0)
        assert len(set(requests(world))) == asked
        world.drop(requests(world)[-1], AllocationState.ENDED)
    assert world.decided(Finish)[0].why.evidence == (f"{requests(world)[-1]}: CANCELLED by 1000",)
    assert_nothing_is_left(world, Outcome.FAILED)


# ── failure of one replica ───────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("replica", ALL)
def test_a_killed_process_is_restarted_in_place_and_nothing_else_changes(replica: ReplicaId, world: World) -> None:
    home = world.node_of(replica)
    world.kill(replica)
    world.steady()
    assert world.incarnations() == ONCE | {replica: 2}
    assert world.node_of(replica) == home
    assert rungs(world) == [Rung.IN_PLACE]
    assert requests(world) == [POOL]


@pytest.mark.parametrize("replica", ALL)
def test_a_hung_process_is_fenced_stopped_and_restarted(replica: ReplicaId, world: World) -> None:
    step = world.state.replica(replica).step
    world.freeze(replica)
    world.steady()
    assert [action.step for action in world.decided(StopStep)] == [step]
    assert world.state.orphan_steps == {}
    assert world.incarnations() == ONCE | {replica: 2}


def test_replica_that_fails_repeatedly_on_one_node_moves_to_the_spare() -> None:
    world = World(job(recovery=Recovery(per_node=2))).steady()
    homes = []
    for _ in range(3):
        world.kill(R0)
        homes.append(world.steady().node_of(R0))
    assert homes == [N3, N3, N5]
    assert rungs(world) == [Rung.IN_PLACE, Rung.IN_PLACE, Rung.SPARE]
    assert world.incarnations() == ONCE | {R0: 4}
    assert world.decided(Exclude) == []


@pytest.mark.parametrize(
    ("backoff", "expected"), [(1.0, [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]), (90.0, [0.0, 90.0, 90.0])]
)
def test_pause_before_a_restart_doubles_up_to_a_minute_unless_it_is_configured_longer(
    backoff: float, expected: list[float]
) -> None:
    world = World(job(recovery=Recovery(per_node=99, per_replica=99, backoff=backoff))).steady()
    pauses = []
    for _ in expected:
        world.kill(R0)
        killed = world.now
        world.play(lambda: world.state.replica(R0).status is Status.LAUNCHING)
        pauses.append(round(world.now - killed, 3))
    assert pauses == expected


@pytest.mark.parametrize("spares", [0, 1])
def test_minute_of_simultaneous_failures_costs_only_restarts(spares: int) -> None:
    world = World(job(spares=spares), nodes=20).steady()
    began = world.now
    while world.now < began + 60.0:
        for replica in ALL:
            world.kill(replica)
        world.wait(1.5)
    world.steady()
    assert world.now < began + 180.0
    assert requests(world) == [POOL]
    assert Rung.DEGRADED not in rungs(world)
    assert world.state.finish is None


def test_replica_that_fails_on_two_nodes_gets_no_third_node() -> None:
    world = World(job(recovery=Recovery(per_replica=99, breaker=1.0), steps=99), nodes=20).steady()
    for step in range(1, 13):
        world.commit(step)
        world.kill(TRAINER)
        world.steady()
    assert requests(world) == [POOL]
    assert world.node_of(TRAINER) == N5
    assert [rung for rung in rungs(world) if rung is not Rung.IN_PLACE] == [Rung.SPARE]


def test_replica_whose_launches_are_refused_on_two_nodes_gets_a_third_node() -> None:
    world = World(job(), nodes=20)
    world.refuse_launch = {N3, N5}
    world.steady()
    assert world.node_of(R0) == N6
    assert len(requests(world)) == 2


def test_two_required_replicas_end_the_run_once() -> None:
    world = World(job(recovery=Recovery(per_node=9, per_replica=1)))
    world.refuse_launch = {N1, N2}
    world.play()
    assert_nothing_is_left(world, Outcome.FAILED)


def test_trainer_that_always_fails_is_retried_for_minutes_then_ends_the_run() -> None:
    world = World(job(recovery=Recovery(full_restarts=0)), nodes=20).steady()
    began = world.now
    while not world.over and world.now < began + 3600.0:
        world.kill(TRAINER)
        world.play(lambda: world.works() or world.over, timeout_s=100.0)
    assert 180.0 < world.now - began < 600.0
    assert_nothing_is_left(world, Outcome.FAILED)
    assert requests(world) == [POOL]


def test_retired_rollout_returns_when_its_failures_have_left_the_window() -> None:
    world = World(job(recovery=Recovery(per_node=9, per_replica=3))).steady()
    for _ in range(4):
        world.kill(R0)
        world.play(timeout_s=60.0)
    last = world.state.replica(R0).failures[-1].at
    world.play(lambda: world.state.replica(R0).status is not Status.RETIRED)
    assert world.now == last + world.state.job.recovery.window
    world.steady()
    assert world.incarnations() == ONCE | {R0: 5}
    assert requests(world) == [POOL]


def test_retired_rollout_takes_no_node_from_a_wanted_one() -> None:
    world = World(job(spares=0, recovery=Recovery(per_node=9, per_replica=1))).steady()
    for _ in range(2):
        world.kill(R0)
        world.play(timeout_s=30.0)
    assert world.state.replica(R0).status is Status.RETIRED
    world.wait(560.0)
    world.lose_node(N4)
    world.play(lambda: world.incarnations()[R1] == 2)
    world.play(lambda: world.state.replica(R1).status is Status.JOINED)
    assert world.node_of(R1) == N3
    assert (world.state.replica(R0).status, requests(world)) == (Status.RETIRED, [POOL])
    world.play(lambda: world.state.replica(R0).status is Status.JOINED, timeout_s=600.0)
    assert len(requests(world)) == 2, "no node was requested for the retired rollout after the window"
    assert world.node_of(R1) == N3


def test_rollout_that_exceeded_its_budget_is_retired() -> None:
    world = World(job(recovery=Recovery(per_node=9, per_replica=3))).steady()
    for _ in range(4):
        world.kill(R0)
        world.play(timeout_s=60.0)
    assert world.state.replica(R0).status is Status.RETIRED
    assert rungs(world) == [Rung.IN_PLACE] * 3 + [Rung.DEGRADED]
    assert "3 restarts of rollout/0 within 600 s" in world.decided(Fence)[-1].why.evidence
    assert world.state.finish is None
    assert world.incarnations() == ONCE | {R0: 4}


@pytest.mark.parametrize(("replica", "min_rollouts"), [(STORE, 1), (TRAINER, 1), (R0, 2)])
def test_required_replica_ends_the_run_when_its_budget_is_spent(replica: ReplicaId, min_rollouts: int) -> None:
    recovery = Recovery(per_node=9, per_replica=3, full_restarts=0)
    world = World(job(min_rollouts=min_rollouts, recovery=recovery)).steady()
    for _ in range(4):
        world.kill(replica)
        world.play(timeout_s=60.0)
    world.play()
    assert_nothing_is_left(world, Outcome.FAILED)
    assert f"3 restarts of {replica} within 600 s" in world.decided(Finish)[0].why.evidence


def test_only_one_of_two_failed_rollouts_is_retired_if_one_is_needed() -> None:
    world = World(job(recovery=Recovery(per_node=9, per_replica=1, full_restarts=0))).steady()
    for replica in ROLLOUTS:
        world.kill(replica)
    world.steady()
    for replica in ROLLOUTS:
        world.record(found(world.state.replica(replica).incarnation, "exit_record", world.now))
    world.play()
    assert_nothing_is_left(world, Outcome.FAILED)
    assert "1 restarts of rollout/1 within 600 s" in world.decided(Finish)[0].why.evidence


def test_rollout_may_be_retired_while_another_restarts() -> None:
    world = World(job(recovery=Recovery(per_node=9, per_replica=2, backoff=30.0))).steady()
    for _ in range(2):
        world.kill(R0)
        world.steady()
    world.kill(R1)
    world.steady()
    world.kill(R1)  # the rollout pauses for 30 s before its second restart
    assert world.state.replica(R1).status is Status.WANTED
    world.kill(R0)
    world.play(timeout_s=60.0)
    assert world.state.finish is None
    assert world.state.replica(R0).status is Status.RETIRED
    assert world.state.replica(R1).status is Status.JOINED


def test_restarts_older_than_the_window_do_not_count() -> None:
    world = World(job(recovery=Recovery(per_node=1, per_replica=2, window=600.0))).steady()
    for _ in range(4):
        world.kill(R0)
        assert world.steady().node_of(R0) == N3
        world.wait(700.0)
    assert rungs(world) == [Rung.IN_PLACE] * 4


def test_refused_launch_is_repeated_until_the_budget_is_spent() -> None:
    world = World(job(min_rollouts=1, recovery=Recovery(per_node=9, per_replica=2)))
    world.refuse_launch = {N3}
    world.play(timeout_s=120.0)
    tried = [action for action in world.decided(Launch) if action.incarnation.replica == R0]
    assert [action.node for action in tried] == [N3] * 3
    assert world.state.replica(R0).status is Status.RETIRED
    assert "its launches were refused" in world.decided(Fence)[0].why.evidence


def test_after_too_many_refused_launches_on_one_node_the_next_node_is_tried() -> None:
    world = World(job(recovery=Recovery(per_node=2)))
    world.refuse_launch = {N3}
    world.steady()
    assert world.node_of(R0) == N5


def test_refused_stop_is_repeated_after_a_pause() -> None:
    world = World(job(recovery=Recovery(per_node=1))).steady()
    world.refuse_stop = 2
    world.freeze(R0)
    world.wait(60.0)
    assert world.state.orphan_steps == {}
    assert [round(later - earlier, 1) for earlier, later in pairwise(stopped_at(world))] == [
        RETRY_PAUSE_S + 0.2,
        RETRY_PAUSE_S + 0.2,
    ]


def test_refused_stop_is_repeated_while_the_run_ends() -> None:
    world = World(job(limits=Limits(step_grace=20.0))).steady()
    world.refuse_stop = 1
    world.cancel()
    world.play()
    steps = [action.step for action in world.decided(StopStep)]
    again = 5
    assert (len(steps), len(set(steps)), steps.index(steps[again])) == (11, 10, 0)
    assert round(stopped_at(world)[again] - stopped_at(world)[0], 1) == RETRY_PAUSE_S + 0.2
    assert_nothing_is_left(world, Outcome.CANCELLED)


def test_late_report_of_a_fenced_step_does_not_restore_it(world: World) -> None:
    old = world.state.replica(R0)
    world.freeze(R0)
    assert old.step is not None
    world.record(ev.Joined(old.incarnation, N3, "n3", 9))
    world.steady()
    assert world.state.replica(R0).incarnation_number == 2


def test_orphan_step_occupies_its_node_until_it_has_ended() -> None:
    world = World(job(recovery=Recovery(per_node=1, breaker=1.0))).steady()
    world.kill(R1)  # the rollout has failed on n4 once, and after its next failure there it moves to n5
    world.steady()
    world.slow_to_stop = 30.0
    world.freeze(R1)
    world.steady()
    assert (world.node_of(R1), [orphan.node for orphan in world.state.orphan_steps.values()]) == (N5, [N4])
    world.kill(R0)
    world.steady()  # in place
    world.kill(R0)  # the rollout moves to n4, once the orphan step there has ended
    assert world.state.orphan_steps
    world.play(lambda: world.state.replica(R0).incarnation_number == 3)
    assert (world.state.orphan_steps, world.node_of(R0)) == ({}, N4)


# ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_lost_node_is_excluded_and_its_replica_moves_to_the_spare(world: World) -> None:
    world.lose_node(N3)
    world.play(lambda: world.incarnations()[R0] == 2).steady()
    assert world.node_of(R0) == N5
    assert world.state.nodes[N3].excluded == "node lost: manager: agent of n3 is silent"
    assert rungs(world) == [Rung.SPARE]
    assert world.incarnations() == ONCE | {R0: 2}
    assert requests(world) == [POOL]
    assert world.decided(StopStep) == []  # the planner does not wait for a node that does not answer


def test_replicas_of_a_lost_node_are_not_restarted_on_it(world: World) -> None:
    world.record(found(world.state.replica(R0).incarnation, "worker_silence", world.now))
    world.happen(lost(N3, world.now))
    world.steady()
    assert (rungs(world), world.node_of(R0)) == ([Rung.SPARE], N5)


def test_node_is_reserved_for_the_replica_that_is_about_to_restart_there() -> None:
    world = World(job(spares=0, recovery=Recovery(per_node=9, backoff=60.0)), nodes=6).steady()
    world.kill(R0)
    world.steady()
    world.kill(R0)  # the rollout pauses for 60 s before its second restart
    world.lose_node(N4)
    world.play(lambda: world.incarnations()[R1] == 2)
    assert (world.node_of(R1), world.state.replica(R0).status) == (N5, Status.WANTED)
    assert world.steady().node_of(R0) == N3


def test_free_node_goes_to_a_replica_due_now_before_one_in_backoff() -> None:
    world = World(job(recovery=Recovery(per_node=9, backoff=60.0, breaker=1.0)), nodes=9).steady()
    world.kill(R0)
    world.steady()
    world.lose_node(N3)  # the second failure of the rollout, which pauses for 60 s
    world.play(lambda: world.state.replica(R0).status is Status.WANTED)
    world.lose_node(N4)
    world.play(lambda: world.incarnations()[R1] == 2)
    assert (world.node_of(R1), world.state.replica(R0).status) == (N5, Status.WANTED)
    assert world.steady().node_of(R0) == N6


def test_replicas_that_shared_a_lost_node_move_together(world: World) -> None:
    world.lose_node(N1)
    world.play(lambda: world.incarnations()[STORE] == 2).steady()
    assert (world.node_of(STORE), world.node_of(REWARD)) == (N5, N5)
    assert world.incarnations() == ONCE | {STORE: 2, REWARD: 2}


def test_without_a_spare_a_replacement_is_requested_that_excludes_the_bad_node() -> None:
    world = World(job(spares=0), nodes=6).steady()
    world.lose_node(N3)
    world.play(lambda: world.incarnations()[R0] == 2).steady()
    (more,) = requests(world)[1:]
    assert (world.requests[more].count, world.requests[more].exclude) == (1, (N3,))
    assert world.node_of(R0) == N5
    assert rungs(world) == [Rung.REPLACEMENT]
    assert world.incarnations() == ONCE | {R0: 2}
    assert sum(name.startswith("agent/n5#") for name in launches(world)) == 1


def test_a_node_that_left_with_its_allocation_stays_excluded_in_later_requests() -> None:
    world = World(job(spares=0), nodes=8).steady()
    world.lose_node(N3)
    world.play(lambda: world.incarnations()[R0] == 2).steady()
    world.drop(requests(world)[1], AllocationState.ENDED)
    world.record(lost(N5, world.now))
    world.steady()
    world.drop(POOL, AllocationState.ENDED)
    world.steady()
    assert [world.requests[tag].exclude for tag in requests(world)] == [(), (N3,), (N3,), (N3, N5)]


def test_pending_replacement_is_waited_for_and_not_requested_again() -> None:
    world = World(job(spares=0)).steady()
    world.lose_node(N3)
    world.wait(100.0)
    world.kill(R1)
    world.wait(100.0)
    assert len(requests(world)) == 2


def test_replacements_rejected_thrice_degrade_a_role_that_can_spare_a_replica() -> None:
    world = World(job(spares=0)).steady()
    world.refuse = "Requested node configuration is not available"
    world.lose_node(N3)
    world.play(timeout_s=600.0)
    assert len(requests(world)) == 1 + MAX_REJECTIONS
    assert world.state.replica(R0).status is Status.RETIRED
    assert rungs(world) == [Rung.REPLACEMENT, Rung.DEGRADED]
    assert world.decided(Fence)[-1].why.evidence == (world.refuse,) * 3
    assert world.state.finish is None
    assert world.incarnations() == ONCE


def test_replacements_rejected_thrice_end_the_run_of_a_required_role() -> None:
    world = World(job(spares=0)).steady()
    world.refuse = "Requested node configuration is not available"
    world.lose_node(N2)
    world.play()
    (end,) = world.decided(Finish)
    assert len(requests(world)) == 1 + MAX_REJECTIONS
    left = f"{N2} is excluded: {world.state.nodes[N2].excluded}"
    assert end.why.evidence == (world.refuse, "trainer/0 has no node", left)
    assert_nothing_is_left(world, Outcome.FAILED)


def test_nothing_is_launched_with_the_decision_to_end_for_lack_of_nodes() -> None:
    world = World(job(spares=0)).steady()
    world.refuse = "no"
    world.lose_node(N2)
    world.play(lambda: len(requests(world)) == 1 + MAX_REJECTIONS)
    world.record(found(world.state.replica(R1).incarnation, "exit_record", world.now))
    world.happen(ev.IntentSettled(requests(world)[-1], False, "no"))
    assert world.decided(Finish)
    assert "rollout/1#2" not in launches(world)
    world.play()
    assert_nothing_is_left(world, Outcome.FAILED)


def test_pause_between_refused_requests_grows() -> None:
    world = World(job(spares=0)).steady()
    world.refuse = "no"
    world.lose_node(N3)
    world.play(timeout_s=600.0)
    times = [s.at for s in world.events if isinstance(s.event, ev.Intended) and isinstance(s.event.action, Request)]
    gaps = [round(later - earlier) for earlier, later in pairwise(times[1:])]
    assert gaps == [10, 20]


def test_old_rejections_do_not_block_a_new_replacement_request() -> None:
    world = World(job(rollouts=3, spares=0), nodes=7).steady()
    world.refuse = "no"
    world.lose_node(N3)
    world.play(timeout_s=300.0)
    assert len(requests(world)) == 1 + MAX_REJECTIONS
    world.wait(1000.0)
    assert len(requests(world)) == 2 + MAX_REJECTIONS, (
        "the retired rollout did not get exactly one more request per window"
    )
    world.refuse = ""
    world.wait(600.0)
    assert (len(requests(world)), world.node_of(R0)) == (3 + MAX_REJECTIONS, N6)
    world.lose_node(N4)
    world.play(lambda: world.incarnations()[R1] == 2)
    assert (len(requests(world)), world.node_of(R1)) == (4 + MAX_REJECTIONS, N7)


def test_unsatisfiable_replacement_is_requested_once_per_window() -> None:
    world = World(job(rollouts=3, spares=0), nodes=7).steady()
    world.hopeless["pool"] = "BadConstraints"
    world.lose_node(N3)
    world.wait(1500.0 + 2 * UNSATISFIABLE_AFTER_S)
    assert world.state.replica(R0).status is Status.RETIRED
    assert len(requests(world)) == 1 + 3
    assert not [allocation for allocation in world.state.allocations.values() if allocation.pending]
    world.hopeless = {}
    world.play(world.works, timeout_s=700.0)
    assert world.incarnations()[R0] == 2


def test_late_replacement_is_used_by_the_retired_replica() -> None:
    world = World(job(spares=0, limits=Limits(allocation=300.0))).steady()
    world.lose_node(N3)
    world.play(timeout_s=2000.0)
    assert world.state.replica(R0).status is Status.RETIRED
    assert len(requests(world)) == 2
    assert not world.decided(Release), "the request of a retired rollout was withdrawn from the queue"
    world.arrive(1)
    world.play(world.works)
    assert world.incarnations()[R0] == 2
    assert len(requests(world)) == 2


def test_breaker_stops_the_exclusion_of_a_third_of_six_nodes() -> None:
    world = World(job(spares=2)).steady()
    world.lose_node(N3)
    world.lose_node(N4)
    world.lose_node(N5)
    world.play(timeout_s=300.0)
    assert [action.node for action in world.decided(Exclude)] == [N3, N4], (
        "the breaker must permit two exclusions among six nodes, but not three"
    )
    assert world.incarnations() == ONCE | {R0: 2}, "rollout/1 must wait for a node, because the spare node is lost, too"
    assert len(requests(world)) == 2
    world.play(lambda: len(world.decided(Exclude)) == 3, timeout_s=600.0)
    first, _, third = (
        s.at for s in world.events if isinstance(s.event, ev.Decided) and isinstance(s.event.action, Exclude)
    )
    assert third - first == world.state.job.recovery.window


@pytest.mark.parametrize(
    ("settings", "excluded"), [({"spares": 0}, [N3]), ({"rollouts": 6, "spares": 2}, [N3, N4])], ids=["of 4", "of 10"]
)
def test_breaker_permits_the_exclusion_of_one_node_or_a_fifth_of_the_nodes(
    settings: dict[str, int], excluded: list[NodeName]
) -> None:
    world = World(job(**settings)).steady()  # type: ignore[arg-type]
    for node in (N3, N4, N5):
        world.lose_node(node)
    world.play(timeout_s=300.0)
    assert [action.node for action in world.decided(Exclude)] == excluded


def _loses_three(spares: int) -> World:
    """Return a world in which the breaker prevents the exclusion of the third lost node, on which rollout/0 is."""
    world = World(job(spares=spares), nodes=12).steady()
    for replica in (R0, R1, R0):
        world.lose_node(world.node_of(replica))
        world.play(timeout_s=100.0)
    assert world.incarnations() == ONCE | {R0: 2, R1: 2}
    return world


def test_replica_that_is_gone_leaves_a_lost_node_that_the_breaker_keeps() -> None:
    world = _loses_three(spares=3)
    lost_node = world.node_of(R0)
    world.happen(found(world.state.replica(R0).incarnation, "step_gone", world.now, proof=True))
    world.steady()
    assert (world.incarnations()[R0], rungs(world)) == (3, [Rung.SPARE] * 3)
    assert world.node_of(R0) != lost_node
    assert world.state.nodes[lost_node].excluded is None
    assert len(requests(world)) == 1
    world.play(lambda: world.state.nodes[lost_node].excluded is not None, timeout_s=600.0)
    assert world.state.nodes[lost_node].excluded is not None, (
        "the lost node is not excluded although the breaker permits it"
    )
    assert world.incarnations() == ONCE | {R0: 3, R1: 2}


def test_replica_that_is_gone_waits_for_another_node_and_not_for_a_lost_one_that_the_breaker_keeps() -> None:
    world = _loses_three(spares=2)
    lost_node = world.node_of(R0)
    world.happen(found(world.state.replica(R0).incarnation, "step_gone", world.now, proof=True))
    world.steady()
    assert (world.incarnations()[R0], rungs(world)[-1]) == (3, Rung.REPLACEMENT)
    assert world.node_of(R0) != lost_node
    assert lost_node in world.requests[requests(world)[-1]].exclude
    assert [launch.node for launch in world.decided(Launch) if launch.incarnation.replica == R0].count(lost_node) == 1


def test_failed_replica_waits_on_a_suspected_node_that_the_breaker_keeps() -> None:
    """Many failures with a shared cause are no proof against the node, and would also fail the replica elsewhere."""
    world = World(job(spares=3), nodes=12).steady()
    for replica in (R0, R1):
        world.lose_node(world.node_of(replica))
        world.play(timeout_s=100.0)
    node = world.node_of(R0)
    evidence = (Evidence("fabric", "port down", world.now),)
    world.happen(
        ev.FindingChanged(Finding("port", Verdict.FAIL, Cause.FABRIC, Remedy.DRAIN, world.now, evidence, node=node))
    )
    fail(world, R0)
    world.play(timeout_s=100.0)
    assert (world.incarnations()[R0], world.state.nodes[node].excluded) == (2, None)


def test_draining_node_keeps_its_replicas_and_gets_no_new_ones(world: World) -> None:
    for node in (N5, N4):
        world.record(ev.NodeChanged(node, NodeStatus(NodeState.DRAINING, "MIXED+DRAIN")))
    world.play(timeout_s=100.0)
    assert world.incarnations() == ONCE
    world.kill(R1)
    world.play(timeout_s=5.0)
    assert len(requests(world)) == 2
    assert all(action.node not in (N4, N5) for action in world.decided(Launch)[10:])


def test_pool_that_the_cluster_ends_is_replaced_and_the_run_continues(world: World) -> None:
    world.commit(1)
    world.drop(POOL)
    world.steady()
    assert len(requests(world)) == 2
    assert world.requests[requests(world)[1]].count == 4
    assert world.incarnations() == dict.fromkeys(ALL, 2)
    assert set(rungs(world)) == {Rung.REPLACEMENT}


def test_failed_agent_is_restarted_without_effect_on_replicas(world: World) -> None:
    world.kill(ReplicaId("agent/n3"))
    world.play(timeout_s=30.0)
    agent = world.state.replica(ReplicaId("agent/n3"))
    assert (agent.status, agent.incarnation_number) == (Status.JOINED, 2)
    assert world.incarnations() == ONCE


def test_an_agent_whose_budget_is_spent_is_retired_and_tried_again_after_the_window() -> None:
    world = World(job(recovery=Recovery(per_replica=2))).steady()
    agent = ReplicaId("agent/n3")
    for _ in range(3):
        world.kill(agent)
        world.play(timeout_s=30.0)
    assert world.state.replica(agent).status is Status.RETIRED
    world.play(timeout_s=700.0)
    assert world.state.replica(agent).status is Status.JOINED
    assert world.incarnations() == ONCE


# ── planned faults ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_planned_fault_is_triggered_once_when_its_step_is_committed() -> None:
    faults = [Fault(f"f{i}", FaultKind.KILL, target, FaultTrigger(step=2)) for i, target in enumerate((R0, TRAINER))]
    world = World(job(faults=faults)).steady()
    world.commit(1)
    world.play(timeout_s=10.0)
    assert world.decided(InjectFault) == []
    world.commit(2)
    world.play(timeout_s=60.0)
    world.steady()
    world.kill(R1)
    world.steady()
    assert [action.fault.id for action in world.decided(InjectFault)] == ["f0", "f1"]
    assert world.incarnations() == ONCE | {R0: 2, TRAINER: 2, R1: 2}


def test_planned_fault_waits_until_its_target_works() -> None:
    world = World(job(faults=[Fault("f0", FaultKind.KILL, R0, FaultTrigger(step=0))]))
    world.play(lambda: world.state.replica(R0).status is Status.STARTING)
    assert world.decided(InjectFault) == []
    world.play(timeout_s=10.0)
    assert len(world.decided(InjectFault)) == 1


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def end_of(world: World) -> None:
    """Assert that roles end first, agents next and allocations last, each after the previous kind has ended."""
    order = []
    running: set[str] = set(world.steps)
    world.play()
    for stamped in world.events:
        event = stamped.event
        if isinstance(event, ev.StepEnded):
            running.discard(event.step)
        elif isinstance(event, ev.Intended) and isinstance(event.action, StopStep):
            agent = role_of(event.action.incarnation.replica) == AGENT
            order.append("agent" if agent else "role")
            assert not (agent and any(".agent-" not in step for step in running))
        elif isinstance(event, ev.Intended) and isinstance(event.action, Release):
            order.append("allocation")
            assert not running
    assert order == ["role"] * 5 + ["agent"] * 5 + ["allocation"]


def test_cancelled_run_is_over_once_everything_is_released_in_order(world: World) -> None:
    world.cancel()
    assert not world.over
    end_of(world)
    assert world.decided(Finish)[0].why.evidence == ("cancelled by me",)
    assert_nothing_is_left(world, Outcome.CANCELLED)


@pytest.mark.parametrize(("every", "first"), [(1, {STORE, REWARD, TRAINER, R0, R1}), (3, {TRAINER})])
def test_trainer_of_a_cancelled_run_is_stopped_first_if_commits_cover_several_steps(
    every: int, first: set[ReplicaId]
) -> None:
    world = World(msgspec.structs.replace(job(), trainer=TrainerSettings(checkpoint_every=every))).steady()
    world.cancel()
    world.play(lambda: bool(world.decided(StopStep)))
    assert {stop.incarnation.replica for stop in world.decided(StopStep)} == first
    assert TRAINER in build_directory(world.state, 1).peers, (
        "the trainer is not in the directory, though the store still accepts its commit"
    )
    world.play()
    assert build_directory(world.state, 1).peers == {}
    assert_nothing_is_left(world, Outcome.CANCELLED)


def test_completed_run_is_over_once_everything_is_released_in_order() -> None:
    world = World(job(steps=3)).steady()
    world.commit(2)
    assert world.state.finish is None
    world.commit(3)
    end_of(world)
    assert_nothing_is_left(world, Outcome.COMPLETED)


def test_run_with_evaluations_is_complete_once_its_last_step_is_evaluated() -> None:
    world = World(msgspec.structs.replace(job(steps=3), eval=EvalSpec(every=2))).steady()
    store = world.state.replica(STORE).incarnation
    world.commit(3)
    world.record(ev.Evaluated(store, 2, {"reward": 0.5}))
    world.play(timeout_s=5.0)
    assert world.state.finish is None
    world.record(ev.Evaluated(store, 3, {"reward": 0.5}))
    end_of(world)
    assert_nothing_is_left(world, Outcome.COMPLETED)


def test_run_is_not_over_while_its_allocation_is_listed(world: World) -> None:
    world.cancel()
    world.play(lambda: bool(world.decided(Release)))
    world.play(lambda: f"{POOL}!release" not in world.state.intents)
    assert (world.over, list(world.state.allocations)) == (False, [POOL])
    world.play()
    assert_nothing_is_left(world, Outcome.CANCELLED)


def test_run_cancelled_before_it_has_nodes_releases_its_request() -> None:
    world = World(job(), nodes=2)
    world.play(timeout_s=10.0)
    world.cancel()
    world.play()
    assert launches(world) == []
    assert_nothing_is_left(world, Outcome.CANCELLED)


def test_unanswered_request_is_not_released_before_it_is_settled() -> None:
    world = World(job())
    world.unanswered = True
    world.play(timeout_s=1.0)
    world.cancel()
    world.play(timeout_s=30.0)
    assert (world.decided(Release), world.over) == ([], False)
    world.land()  # the timed-out sbatch
    world.play()
    assert_nothing_is_left(world, Outcome.CANCELLED)


def test_overdue_unanswered_request_is_not_released_before_it_is_settled() -> None:
    world = World(job(spares=0, limits=Limits(allocation=100.0))).steady()
    world.unanswered = True
    world.lose_node(N2)
    world.play(timeout_s=300.0)
    assert (len(requests(world)), world.decided(Release)) == (2, [])
    world.land()
    world.play()
    assert_nothing_is_left(world, Outcome.FAILED)


# ── walltime ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_run_shuts_down_before_the_walltime_counted_from_its_pool() -> None:
    world = World(job(walltime=3600.0), nodes=3).wait(2 * DAY)
    world.arrive(5)
    world.steady()
    ran = world.state.running_since
    assert ran is not None
    assert ran > 2 * DAY
    world.commit(2)
    world.play(lambda: world.state.finish is not None)
    assert world.now == ran + 3600.0 - (MIN_WALLTIME_MARGIN_S + world.state.job.limits.poll)
    world.play()
    assert world.now < ran + 3600.0
    assert_nothing_is_left(world, Outcome.FAILED)
    assert world.decided(Finish)[0].why.evidence == ("the walltime of 3600 s ends; 2 of 3 steps are committed",)
    assert final_reason(world.state).endswith(f"; rrl resume {RUN} goes on from step 2")


def test_run_that_completes_in_its_last_minute_is_completed() -> None:
    world = World(job(walltime=3600.0)).steady()
    world.wait(world.state.ends_at - MIN_WALLTIME_MARGIN_S - world.state.job.limits.poll - world.now - 1.0)
    world.record(ev.StepCommitted(world.state.replica(TRAINER).incarnation, 3))
    world.now += 10.0
    world.play()
    assert_nothing_is_left(world, Outcome.COMPLETED)


def test_shutdown_margin_covers_long_graces_and_at_most_half_the_walltime() -> None:
    world = World(job(walltime=3600.0, limits=Limits(step_grace=100.0, poll=10.0))).play()
    assert world.decided(Finish)[0].outcome is Outcome.FAILED
    (decided,) = (s.at for s in world.events if isinstance(s.event, ev.Decided))
    assert decided == world.state.ends_at - 810.0
    world = World(job(walltime=60.0)).play()
    (decided,) = (s.at for s in world.events if isinstance(s.event, ev.Decided))
    assert decided == world.state.ends_at - 30.0


def test_replacements_are_requested_for_the_remaining_walltime() -> None:
    world = World(job(spares=0, walltime=7200.0), nodes=3).wait(5000.0)
    world.arrive(20)
    world.steady()
    world.wait(1000.0)
    world.drop(POOL, AllocationState.ENDED)
    (more,) = requests(world)[1:]
    assert world.requests[more].walltime == world.state.ends_at - world.now
    assert 6000.0 < world.requests[more].walltime < 6200.0
    world.steady()
    for _ in range(20):
        for tag in list(world.state.allocations):
            world.drop(tag, AllocationState.ENDED)
        world.wait(400.0)
    assert_nothing_is_left(world, Outcome.FAILED)
    assert min(ask.walltime for ask in world.requests.values()) >= MIN_WALLTIME_MARGIN_S


def test_request_that_was_certainly_not_made_is_not_released() -> None:
    world = World(job())
    world.unanswered = True
    world.play(timeout_s=1.0)
    world.cancel()
    world.happen(ev.IntentSettled(POOL, False, "never appeared in the queue"))
    assert world.decided(Release) == []
    assert_nothing_is_left(world, Outcome.CANCELLED)


def test_refused_release_is_repeated_after_a_pause(world: World) -> None:
    world.refuse_release = 2
    world.cancel()
    world.play()
    times = [s.at for s in world.events if isinstance(s.event, ev.Intended) and isinstance(s.event.action, Release)]
    assert [round(later - earlier, 1) for earlier, later in pairwise(times)] == [
        RETRY_PAUSE_S + 0.1,
        RETRY_PAUSE_S + 0.1,
    ]
    assert_nothing_is_left(world, Outcome.CANCELLED)


def test_step_that_does_not_end_is_given_up_and_goes_with_its_allocation(world: World) -> None:
    world.slow_to_stop = float("inf")
    world.cancel()
    began = world.now
    world.play()
    assert_nothing_is_left(world, Outcome.CANCELLED)
    assert world.now - began < 6 * world.state.job.limits.step_grace


def test_lost_node_does_not_delay_the_end_of_the_run(world: World) -> None:
    world.lose_node(N3)
    world.play(lambda: world.incarnations()[R0] == 2).steady()
    world.cancel()
    began = world.now
    world.play()
    assert_nothing_is_left(world, Outcome.CANCELLED)
    assert world.now - began < 2.0


def test_nothing_is_launched_or_injected_once_the_end_is_decided() -> None:
    world = World(job(faults=[Fault("f0", FaultKind.KILL, R0, FaultTrigger(step=3))], steps=3)).steady()
    before = len(world.decided(Launch))
    world.kill(R1)
    world.cancel()
    world.commit(3)
    world.play()
    # the restart of the replica that was killed before the cancellation
    assert len(world.decided(Launch)) == before + 1
    assert world.decided(InjectFault) == []
    assert_nothing_is_left(world, Outcome.CANCELLED)


def test_ended_run_is_over_and_has_no_further_plan(world: World) -> None:
    world.kill(R0)
    state = fold(world.state, ev.Stamped(99999, world.now, 1, ev.RunEnded(Outcome.FAILED, "")))
    assert plan(state, world.now) == Plan(over=True)


def test_replicas_of_a_role_start_in_order_on_nodes_in_natural_order() -> None:
    world = World(job(rollouts=9)).steady()
    assert [world.node_of(r.id) for r in world.state.workers if r.role == "rollout"] == [f"n{i}" for i in range(3, 12)]
