"""Runs whose nodes come in groups (one job per replica, or one heterogeneous job), and allocations that end early."""

from __future__ import annotations

import msgspec
import pytest

from rrl.cluster.base import AllocationState, NodeState, NodeStatus
from rrl.core.run_spec import Limits, Recovery, RunSpec
from rrl.core.types import AGENT, Outcome, ReplicaId, role_of
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, Finish, Launch, Release, Request, Rung
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import Status
from rrl.manager.planner.capacity.allocation_requests import initial_requests
from rrl.manager.planner.capacity.nodes import NodeInventory
from rrl.manager.planner.deadlines import UNSATISFIABLE_AFTER_S
from rrl.tests.support.manager.jobs import NODE, REWARD, ROLLOUTS, RUN, STORE, TRAINER, WIDE, in_node_groups, job
from rrl.tests.support.manager.world import World, assert_nothing_is_left, lost, requests

R0, R1 = ROLLOUTS
ALL = (STORE, REWARD, TRAINER, R0, R1)
ONCE = dict.fromkeys(ALL, 1)
SHARED, TRAIN = f"{RUN}.shared", f"{RUN}.trainer-0"
FIRST, SECOND = f"{RUN}.rollout-0", f"{RUN}.rollout-1"
HOUR = 3600.0


@pytest.fixture
def world() -> World:
    return World(in_node_groups()).steady()


def roles_launched(world: World) -> list[str]:
    return [str(launch.incarnation) for launch in world.decided(Launch) if role_of(launch.incarnation.replica) != AGENT]


def allocation_of(world: World, replica: ReplicaId) -> str:
    tag = world.state.replica(replica).allocation
    assert tag is not None
    return tag


def moves(world: World) -> list[Fence]:
    return [fence for fence in world.decided(Fence) if fence.target_node is not None]


# ── form replica: the start ──────────────────────────────────────────────────────────────────────────────────────────
def test_replicas_with_own_nodes_have_own_requests_and_the_others_share_one(world: World) -> None:
    assert requests(world) == [FIRST, SECOND, SHARED, TRAIN]
    assert {
        tag: (ask.node_group, ask.count, ask.node, ask.sbatch["partition"]) for tag, ask in world.requests.items()
    } == {
        SHARED: ("shared", 1, NODE, "cpu"),
        TRAIN: ("trainer", 1, WIDE, "trainer"),
        FIRST: ("rollout", 1, WIDE, "rollout"),
        SECOND: ("rollout", 1, WIDE, "rollout"),
    }
    homes = {replica: allocation_of(world, replica) for replica in ALL}
    assert homes == {STORE: SHARED, REWARD: SHARED, TRAINER: TRAIN, R0: FIRST, R1: SECOND}
    assert (world.incarnations(), world.decided(Fence)) == (ONCE, [])


@pytest.mark.parametrize("part", ["trainer", "shared", "rollout"])
def test_nothing_is_launched_before_the_minimum_of_nodes_is_there(part: str) -> None:
    world = World(in_node_groups())
    world.closed[part] = "Priority"
    world.wait(HOUR / 2)
    assert roles_launched(world) == []
    assert len(requests(world)) == 4
    world.open(part)
    world.steady()
    assert world.incarnations() == ONCE


def test_nodes_beyond_the_minimum_are_used_once_granted() -> None:
    world = World(in_node_groups(rollouts=3), nodes=3)
    world.closed["rollout"] = "Priority"
    world.play(timeout_s=60.0)
    world.open("rollout")
    world.play(lambda: world.state.replica(TRAINER).status is Status.JOINED)
    assert sorted(roles_launched(world)) == [f"{replica}#1" for replica in sorted((STORE, REWARD, TRAINER, R0))]
    world.wait(10 * HOUR)
    assert (len(requests(world)), world.decided(Release), world.state.finish) == (5, [], None)
    world.arrive(2)
    world.steady()
    assert set(world.incarnations().values()) == {1}


def test_start_timeout_releases_the_nodes_and_names_what_is_missing() -> None:
    world = World(in_node_groups(start_timeout_s=600.0))
    world.closed = {"trainer": "QOSGrpNodeLimit"}
    world.play()
    assert world.now == pytest.approx(1600.0, abs=2.0)
    (end,) = world.decided(Finish)
    needed = "0 of the 1 nodes that the run needs to start"
    assert end.why.evidence == (f"trainer: {needed}, after 600 s ({TRAIN}: QOSGrpNodeLimit)",)
    assert roles_launched(world) == []
    assert_nothing_is_left(world, Outcome.FAILED)


def test_node_lost_before_the_start_is_requested_again_and_released() -> None:
    world = World(in_node_groups(), nodes=6)
    world.closed["trainer"] = "Priority"
    world.play(lambda: allocation_is_running(world, FIRST))
    (node,) = world.held[FIRST]
    world.dead.add(node)
    world.happen(lost(node, world.now))
    world.wait(100.0)
    assert requests(world)[4:] == [f"{RUN}.rollout-2"]
    assert [release.allocation for release in world.decided(Release)] == [FIRST]
    world.open("trainer")
    world.steady()
    assert world.incarnations() == ONCE


def allocation_is_running(world: World, tag: str) -> bool:
    return tag in world.state.allocations and world.state.allocations[tag].running


def test_rejected_request_of_one_group_ends_the_run_before_it_starts() -> None:
    world = World(in_node_groups())
    world.refuse = "sbatch: error: invalid partition specified: rollout"
    world.play()
    assert world.decided(Finish)[0].why.evidence == (world.refuse,)
    assert_nothing_is_left(world, Outcome.REJECTED)


def test_next_manager_makes_the_remaining_first_requests() -> None:
    world = World(in_node_groups()).play(timeout_s=0.0)
    resumed = World(in_node_groups())
    resumed.events = []
    resumed._state = None
    for stamped in world.events:  # the journal's durable part ends with the intent of the second request
        resumed.record(stamped.event)
        if isinstance(stamped.event, ev.Intended) and stamped.event.action.tag == SECOND:
            break
    resumed.play(timeout_s=0.0)
    assert requests(resumed) == [SHARED, TRAIN]


@pytest.mark.parametrize("small", [job(), in_node_groups(), in_node_groups("hetjob")], ids=lambda small: small.form)
def test_first_requests_equal_those_that_rrl_check_shows(small: RunSpec) -> None:
    world = World(small).play(timeout_s=0.0)
    assert tuple(request.request for request in world.decided(Request)) == initial_requests(RUN, small)


# ── form replica: what is lost ───────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(("replica", "part"), [(TRAINER, "trainer"), (R0, "rollout"), (STORE, "shared")])
def test_ended_allocation_is_replaced_in_its_group_without_effect_on_others(replica: ReplicaId, part: str) -> None:
    world = World(in_node_groups(), nodes=9).steady()
    gone = allocation_of(world, replica)
    moved = {r for r in ALL if allocation_of(world, r) == gone}
    world.drop(gone, AllocationState.ENDED)
    world.steady()
    (more,) = requests(world)[4:]
    assert (world.requests[more].node_group, world.requests[more].count) == (part, 1)
    assert world.requests[more].sbatch == world.requests[gone].sbatch
    assert world.requests[more].node == world.requests[gone].node
    assert world.incarnations() == {r: 1 + (r in moved) for r in ALL}


def test_preempted_rollout_is_waited_for_while_the_run_can_spare_it() -> None:
    world = World(in_node_groups(limits=Limits(allocation=300.0))).steady()
    world.closed["rollout"] = "Priority"
    world.drop(FIRST)
    world.wait(5 * HOUR)
    assert (requests(world)[4:], world.decided(Release)) == ([f"{RUN}.rollout-2"], [])
    assert world.incarnations() == ONCE
    world.open("rollout")
    world.steady()
    assert world.incarnations() == ONCE | {R0: 2}


def test_nodes_for_a_required_replica_are_waited_for_until_the_deadline() -> None:
    world = World(in_node_groups(limits=Limits(allocation=300.0))).steady()
    world.closed["trainer"] = "Priority"
    world.drop(TRAIN)
    lost_at = world.now
    world.play()
    ended = next(s.at for s in world.events if isinstance(s.event, ev.Decided) and isinstance(s.event.action, Finish))
    assert ended - lost_at == pytest.approx(300.0, abs=1.0)
    assert world.decided(Finish)[0].why.evidence[1] == "trainer/0 has no node"
    assert_nothing_is_left(world, Outcome.FAILED)


def test_partition_that_rejects_rollouts_does_not_block_the_trainers_nodes() -> None:
    world = World(in_node_groups(), nodes=9).steady()
    world.refuse = "no"
    world.drop(FIRST)
    world.play(timeout_s=100.0)
    assert world.state.replica(R0).status is Status.RETIRED
    world.refuse = ""
    world.drop(TRAIN)
    world.play(lambda: world.state.replica(TRAINER).status is Status.JOINED, timeout_s=60.0)
    assert world.state.replica(TRAINER).incarnation_number == 2


def test_queued_replica_is_not_retired_for_rejections_of_others() -> None:
    world = World(in_node_groups(rollouts=3), nodes=9).steady()
    world.closed["rollout"] = "Priority"
    world.drop(FIRST)
    world.wait(10.0)
    world.refuse = "AssocMaxSubmitJobLimit"
    world.drop(SECOND)
    world.wait(100.0)
    given_up = [fence.incarnation.replica for fence in world.decided(Fence) if fence.rung is Rung.DEGRADED]
    assert [replica for replica in given_up if role_of(replica) != AGENT] == [R1]
    world.refuse = ""
    world.open("rollout")
    world.play(lambda: world.state.replica(R0).status is Status.JOINED, timeout_s=10.0)
    assert world.state.replica(R0).incarnation_number == 2


def test_node_of_one_group_is_never_given_to_a_role_of_another() -> None:
    world = World(in_node_groups(recovery=Recovery(per_node=1)), nodes=9).steady()
    world.drop(SECOND)
    world.closed["trainer"] = "Priority"
    world.drop(TRAIN)
    world.wait(100.0)
    world.steady() if world.works() else world.wait(100.0)
    assert world.state.replica(TRAINER).status is Status.WANTED
    assert world.requests[allocation_of(world, R1)].node_group == "rollout"


def test_allocation_with_a_bad_node_is_released_when_its_replica_has_moved() -> None:
    world = World(in_node_groups(), nodes=9).steady()
    world.lose_node(world.node_of(R0))
    world.play(lambda: world.incarnations()[R0] == 2).steady()
    assert [release.allocation for release in world.decided(Release)] == [FIRST]
    assert world.incarnations() == ONCE | {R0: 2}


def test_draining_node_is_released_after_its_replica_moved_and_replaced_once() -> None:
    world = World(in_node_groups(), nodes=9).steady()
    world.closed["rollout"] = "Priority"
    world.happen(ev.NodeChanged(world.node_of(R0), NodeStatus(NodeState.DRAINING, "MIXED+DRAIN")))
    world.play(timeout_s=100.0)
    assert world.incarnations() == ONCE
    world.kill(R0)
    world.play(timeout_s=100.0)
    assert (requests(world)[4:], [release.allocation for release in world.decided(Release)]) == (
        [f"{RUN}.rollout-2"],
        [FIRST],
    )
    world.open("rollout")
    world.steady()
    assert world.incarnations() == ONCE | {R0: 2}


def test_failing_node_is_kept_until_a_replacement_exists_then_released() -> None:
    world = World(in_node_groups(recovery=Recovery(per_node=1)), nodes=9).steady()
    world.closed["rollout"] = "Priority"
    world.kill(R0)
    world.steady()
    world.kill(R0)
    world.play(timeout_s=100.0)
    assert (requests(world)[4:], world.decided(Release)) == ([f"{RUN}.rollout-2"], [])
    world.open("rollout")
    world.steady()
    world.play(timeout_s=30.0)
    assert (allocation_of(world, R0), [release.allocation for release in world.decided(Release)]) == (
        f"{RUN}.rollout-2",
        [FIRST],
    )


def test_cancelled_run_with_node_groups_releases_everything(world: World) -> None:
    world.cancel()
    world.play()
    assert_nothing_is_left(world, Outcome.CANCELLED)


# ── form hetjob ──────────────────────────────────────────────────────────────────────────────────────────────────────
COMPONENTS = [f"{RUN}.rollout", f"{RUN}.shared", f"{RUN}.trainer"]


def test_a_heterogeneous_job_is_one_request_with_a_tag_for_each_component() -> None:
    world = World(in_node_groups("hetjob")).steady()
    (request,) = world.decided(Request)
    assert [component.tag for component in (request.request, *request.request.further_components)] == COMPONENTS
    assert [
        (component.node_group, component.count) for component in (request.request, *request.request.further_components)
    ] == [("rollout", 2), ("shared", 1), ("trainer", 1)]
    assert [allocation_of(world, r) for r in ALL] == [COMPONENTS[i] for i in (1, 1, 2, 0, 0)]
    assert world.incarnations() == ONCE


def test_refused_heterogeneous_job_leaves_no_allocation_of_any_component() -> None:
    world = World(in_node_groups("hetjob"))
    world.refuse = "sbatch: error: Batch job submission failed: Requested node configuration is not available"
    world.play()
    assert_nothing_is_left(world, Outcome.REJECTED)


def test_no_component_is_released_before_their_shared_request_is_settled() -> None:
    world = World(in_node_groups("hetjob"))
    world.unanswered = True
    world.play(timeout_s=1.0)
    world.cancel()
    world.play(timeout_s=30.0)
    assert (len(world.state.allocations), world.decided(Release), world.over) == (3, [], False)
    world.happen(ev.IntentSettled(COMPONENTS[0], False, "never appeared in the queue", undelivered=True))
    assert_nothing_is_left(world, Outcome.CANCELLED)


def test_lost_component_is_replaced_by_an_ordinary_request_for_its_group() -> None:
    world = World(in_node_groups("hetjob"), nodes=9).steady()
    world.drop(COMPONENTS[2], AllocationState.ENDED)
    world.steady()
    more = world.decided(Request)[1].request
    assert (more.node_group, more.count, more.node, more.further_components) == ("trainer", 1, WIDE, ())
    assert world.incarnations() == ONCE | {TRAINER: 2}


def test_dequeued_heterogeneous_job_is_repeated_under_other_tags_within_limits() -> None:
    world = World(in_node_groups("hetjob"), nodes=1)
    for asked in (1, 2, 3):
        world.play(timeout_s=5.0)
        latest = world.decided(Request)[-1].request
        assert len(world.decided(Request)) == asked
        for component in (latest, *latest.further_components):
            world.record(ev.AllocationChanged(component.tag, None))
        world.held = {}
        world.play(timeout_s=1.0)
    assert (
        len(
            {
                component.tag
                for request in world.decided(Request)
                for component in (request.request, *request.request.further_components)
            }
        )
        == 9
    )
    assert world.decided(Finish)[0].outcome is Outcome.FAILED


# ── unsatisfiable requests ───────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("form", ["replica", "hetjob"])
def test_unsatisfiable_first_request_ends_the_run_with_the_clusters_message(form: str) -> None:
    world = World(in_node_groups(form))
    world.hopeless["trainer"] = "PartitionConfig: no partition of this site has such nodes"
    world.wait(170.0)
    assert world.decided(Finish) == [], (
        "the request was given up early: without slurmdbd, Slurm calls every request unsatisfiable"
    )
    world.play(timeout_s=60.0)
    tag = TRAIN if form == "replica" else COMPONENTS[2]
    assert world.decided(Finish)[0].why.evidence == (f"{tag}: {world.hopeless['trainer']}",)
    assert_nothing_is_left(world, Outcome.REJECTED)


def test_request_must_be_unsatisfiable_all_the_time_to_be_given_up() -> None:
    world = World(in_node_groups())
    world.closed["trainer"] = "Priority"
    world.play(timeout_s=5.0)
    status = world.state.allocations[TRAIN].status
    assert status is not None
    for _ in range(5):
        for never in ("InvalidAccount", "InvalidQOS", ""):
            world.happen(ev.AllocationChanged(TRAIN, msgspec.structs.replace(status, unsatisfiable_reason=never)))
            world.wait(UNSATISFIABLE_AFTER_S / 2 - 1.0)
    assert world.decided(Finish) == []
    # each of these reasons means that the job never starts
    for never in ("InvalidAccount", "InvalidQOS", "InvalidAccount", "InvalidQOS"):
        world.happen(ev.AllocationChanged(TRAIN, msgspec.structs.replace(status, unsatisfiable_reason=never)))
        world.wait(UNSATISFIABLE_AFTER_S / 2 - 1.0)
    assert world.decided(Finish)[0].outcome is Outcome.REJECTED


def test_unsatisfiable_replacement_is_released_and_its_replica_retired(world: World) -> None:
    world.hopeless["rollout"] = "BadConstraints"
    world.drop(FIRST)
    world.wait(170.0)
    assert world.decided(Release) == [], (
        "the request was given up early: without slurmdbd, Slurm calls every request unsatisfiable"
    )
    world.play(timeout_s=60.0)
    assert [release.allocation for release in world.decided(Release)] == [f"{RUN}.rollout-2"]
    assert world.state.replica(R0).status is Status.RETIRED
    assert world.decided(Fence)[-1].why.evidence == (f"{RUN}.rollout-2: BadConstraints",)
    assert world.incarnations() == ONCE


def test_replica_retired_for_lack_of_nodes_is_requested_again_after_the_window(world: World) -> None:
    world.hopeless["rollout"] = "BadConstraints"
    world.drop(FIRST)
    world.wait(1500.0 + 2 * UNSATISFIABLE_AFTER_S)
    assert len(requests(world)) - 4 == 3  # one at once, and one after each of two windows of 600 s
    world.hopeless = {}
    world.play(lambda: world.state.replica(R0).status is Status.JOINED, timeout_s=700.0)
    assert world.incarnations() == ONCE | {R0: 2}


def test_unsatisfiable_replacement_of_a_required_role_ends_the_run(world: World) -> None:
    world.hopeless["trainer"] = "BadConstraints"
    world.drop(TRAIN)
    world.play(timeout_s=UNSATISFIABLE_AFTER_S + 60.0)
    assert world.decided(Finish)[0].why.evidence == (f"{RUN}.trainer-1: BadConstraints", "trainer/0 has no node")
    assert_nothing_is_left(world, Outcome.FAILED)


# ── allocations that end before the run does ─────────────────────────────────────────────────────────────────────────
def test_trainer_moves_to_a_successor_before_its_allocation_ends() -> None:
    world = World(in_node_groups(terms={"trainer": 4 * HOUR}), nodes=9).steady()
    began = world.state.allocations[TRAIN].running_since
    assert began is not None
    world.play(lambda: len(requests(world)) > 4, timeout_s=4 * HOUR)
    assert world.now == began + 4 * HOUR - world.state.job.limits.rotate
    world.play(lambda: bool(moves(world))).steady()
    (fence,) = moves(world)
    assert (fence.incarnation.replica, fence.rung, fence.target_node) == (
        TRAINER,
        Rung.REPLACEMENT,
        world.node_of(TRAINER),
    )
    assert fence.why.evidence == (f"its allocation {TRAIN} ends in 599 s",)
    assert (allocation_of(world, TRAINER), world.incarnations()) == (f"{RUN}.trainer-1", ONCE | {TRAINER: 2})
    world.play(lambda: TRAIN not in world.state.allocations, timeout_s=10.0)
    assert [release.allocation for release in world.decided(Release)] == [TRAIN]
    assert (world.state.replica(TRAINER).failures, world.state.recoveries) == ((), 0)


def test_half_of_a_short_allocation_is_used_before_rotation() -> None:
    world = World(in_node_groups(terms={"trainer": 600.0}), nodes=9).steady()
    began = world.state.allocations[TRAIN].running_since
    world.play(lambda: len(requests(world)) > 4, timeout_s=4 * HOUR)
    assert began is not None
    assert world.now == began + 300.0


def test_replicas_of_a_role_move_one_at_a_time() -> None:
    world = World(in_node_groups(rollouts=4, terms={"rollout": 2 * HOUR}), nodes=20).steady()
    began = len(world.events)
    world.play(lambda: len(moves(world)) == 4, timeout_s=2 * HOUR).steady()
    state, down = None, []
    for stamped in world.events:
        state = fold(state, stamped)
        down.append(sum(r.status is not Status.JOINED for r in state.workers if r.role == "rollout"))
    assert max(down[began:]) == 1
    assert {r.incarnation_number for r in world.state.workers if r.role == "rollout"} == {2}
    world.wait(30.0)
    assert sorted(release.allocation for release in world.decided(Release)) == [f"{RUN}.rollout-{n}" for n in range(4)]


def test_allocations_are_rotated_again_and_again_until_the_run_ends() -> None:
    world = World(in_node_groups(walltime=10 * HOUR, terms={"trainer": 2 * HOUR, "rollout": 3 * HOUR}), nodes=30)
    world.play(timeout_s=20 * HOUR)
    assert_nothing_is_left(world, Outcome.FAILED)
    assert [
        fence
        for fence in world.decided(Fence)
        if fence.target_node is None and role_of(fence.incarnation.replica) != AGENT
    ] == []
    ended = [s.event.status for s in world.events if isinstance(s.event, ev.AllocationChanged)]
    assert not any(status is not None and status.detail == "TIMEOUT" for status in ended)
    assert all(ask.walltime <= 3 * HOUR for ask in world.requests.values() if ask.node_group != "shared")
    last = [ask for ask in world.requests.values() if ask.node_group == "trainer"][-1]
    assert last.walltime < 2 * HOUR  # the rest of the run's walltime


def test_successor_of_a_component_is_waited_for_as_long_as_the_queue_takes() -> None:
    world = World(
        in_node_groups("hetjob", terms={"rollout": 4 * HOUR}, limits=Limits(allocation=300.0)), nodes=9
    ).steady()
    world.closed["rollout"] = "Priority"
    world.play(lambda: len(requests(world)) > 1, timeout_s=4 * HOUR)
    world.wait(500.0)
    assert (len(requests(world)), world.decided(Release)) == (2, [])


def test_replica_stays_and_restarts_in_place_while_its_successor_is_queued() -> None:
    world = World(in_node_groups(terms={"trainer": 4 * HOUR}), nodes=9).steady()
    world.closed["trainer"] = "Priority"
    world.play(lambda: len(requests(world)) > 4, timeout_s=4 * HOUR)
    world.kill(TRAINER)
    world.steady()
    assert (allocation_of(world, TRAINER), world.state.replica(TRAINER).incarnation_number) == (TRAIN, 2)
    world.wait(400.0)
    assert (len(requests(world)), world.decided(Release)) == (5, [])
    world.open("trainer")
    world.play(lambda: bool(moves(world))).steady()
    assert world.state.replica(TRAINER).incarnation_number == 3


def test_late_successor_takes_replicas_that_ended_with_their_allocation() -> None:
    world = World(in_node_groups(terms={"trainer": 4 * HOUR}, limits=Limits(allocation=900.0)), nodes=9).steady()
    world.closed["trainer"] = "Priority"
    world.play(lambda: TRAIN not in world.state.allocations, timeout_s=5 * HOUR)
    assert world.state.replica(TRAINER).status is Status.WANTED
    world.wait(800.0)  # the deadline counts from the time at which the node was missing, not from the request
    world.open("trainer")
    world.steady()
    assert len(requests(world)) == 5
    assert world.incarnations() == ONCE | {TRAINER: 2}


def test_unsatisfiable_successor_is_not_requested_without_end() -> None:
    world = World(in_node_groups(terms={"rollout": 4 * HOUR}), nodes=9).steady()
    world.hopeless["rollout"] = "PartitionDown"
    world.play(timeout_s=4 * HOUR - 60.0)
    assert 2 < len(requests(world)) - 4 <= 12
    assert world.state.finish is None


def test_failing_replica_delays_moves_only_until_rotation_is_urgent() -> None:
    recovery = Recovery(per_node=99, per_replica=99, window=300.0)
    world = World(in_node_groups(rollouts=3, terms={"rollout": 4 * HOUR}, recovery=recovery), nodes=20).steady()
    ends = world.state.allocations[SECOND].ends_at
    world.closed["rollout"] = "Priority"
    world.play(lambda: len(requests(world)) > 5, timeout_s=4 * HOUR)
    world.broken_incarnations[R0] = "exited"
    world.kill(R0)
    world.open("rollout")
    world.play(lambda: bool(moves(world)), timeout_s=HOUR)
    assert world.now == ends - world.state.job.limits.rotate / 2
    assert moves(world)[0].incarnation.replica == R1
    world.play(timeout_s=30.0)
    assert [fence.incarnation.replica for fence in moves(world)] == [R1, ReplicaId("rollout/2")]


def test_expiring_component_is_left_by_all_before_it_is_released() -> None:
    world = World(in_node_groups("hetjob", terms={"rollout": 4 * HOUR}), nodes=9).steady()
    world.play(lambda: len(moves(world)) == 2, timeout_s=4 * HOUR)
    assert world.decided(Release) == []
    world.play(timeout_s=30.0)
    (more,) = [world.requests[tag] for tag in requests(world)[1:]]
    assert (more.node_group, more.count) == ("rollout", 2)
    assert [release.allocation for release in world.decided(Release)] == [COMPONENTS[0]]
    assert world.incarnations() == ONCE | {R0: 2, R1: 2}


def test_lasting_allocations_are_preferred_to_expiring_ones() -> None:
    world = World(in_node_groups(terms={"trainer": 4 * HOUR}), nodes=9).steady()

    def both() -> bool:
        """Return whether the new node has joined and its agent reported it healthy."""
        return len(NodeInventory(world.state, world.now).candidates("trainer")) > 1

    world.play(both, timeout_s=4 * HOUR)
    candidates = NodeInventory(world.state, world.now).candidates("trainer")
    assert [(candidate.allocation, candidate.expiring) for candidate in candidates] == [
        (f"{RUN}.trainer-1", False),
        (TRAIN, True),
    ]


def test_allocation_that_outlasts_the_run_needs_no_successor() -> None:
    world = World(in_node_groups(walltime=4 * HOUR), nodes=9)
    world.play(timeout_s=5 * HOUR)
    assert len(requests(world)) == 4
    assert moves(world) == []
