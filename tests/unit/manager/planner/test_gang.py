"""The members of a gang are launched and fenced together and share an incarnation number.

Other replicas are not affected.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl.cluster.base import RejectReason
from rrl.core.launch import ExitReason, tag_of
from rrl.core.run_spec import Limits, Recovery, RunSpec
from rrl.core.types import (
    AGENT,
    STANDBY_ROLE,
    Incarnation,
    NodeName,
    Outcome,
    ReplicaId,
    gang_of,
    member_id,
    replica_id,
    role_of,
)
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, Launch, Request, Rung, StopStep
from rrl.manager.model.queries import progress, to_launch
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import NEVER_APPEARED, Replica, Status
from rrl.manager.planner import plan
from rrl.tests.support.examples import examples
from rrl.tests.support.manager.jobs import REWARD, RUN, STORE, TRAINER, command, commands, gang_job, in_node_groups
from rrl.tests.support.manager.world import World, assert_nothing_is_left, found, requests, rungs

MEMBERS = tuple(member_id(TRAINER, rank) for rank in range(4))
M0, M1, M2, M3 = MEMBERS
OTHERS = (STORE, REWARD, *(replica_id("rollout", i) for i in range(3)))
N2, N3, N4, N5, N6, N7, N8 = (NodeName(f"n{i}") for i in range(2, 9))
COLD = gang_job(warm=False)


@pytest.fixture
def world() -> World:
    return World(COLD).steady().warmed()


def incarnations(world: World) -> dict[ReplicaId, int]:
    return {id: world.incarnations()[id] for id in MEMBERS}


def nodes_of(world: World) -> list[NodeName]:
    return [world.node_of(id) for id in MEMBERS]


def launches(world: World, incarnation: int) -> list[Launch]:
    """Return the launches of members with this incarnation number."""
    return [
        launch
        for launch in world.decided(Launch)
        if launch.incarnation.replica in MEMBERS and launch.incarnation.number == incarnation
    ]


def assert_others_were_not_touched(world: World) -> None:
    assert {id: world.incarnations()[id] for id in OTHERS} == dict.fromkeys(OTHERS, 1)
    fenced = [
        fence.incarnation
        for fence in world.decided(Fence)
        if role_of(fence.incarnation.replica) not in (AGENT, STANDBY_ROLE)
    ]
    assert {str(incarnation) for incarnation in fenced} <= {
        str(Incarnation(id, n)) for id in MEMBERS for n in range(1, 9)
    }


# ── launches ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_gang_is_launched_whole_and_its_ranks_fill_nodes_in_order() -> None:
    world = World(COLD).steady()
    assert incarnations(world) == dict.fromkeys(MEMBERS, 1)
    assert nodes_of(world) == [N2, N2, N3, N3]
    assert [launch.incarnation.replica for launch in launches(world, 1)] == list(MEMBERS)
    # one shared node, two for the four members, three for the rollouts, and one spare
    assert world.requests[f"{RUN}.pool"].count == 7
    taken = Counter(world.node_of(id) for id in world.incarnations())
    assert (taken[N2], taken[N3], taken[N4]) == (2, 2, 1)


def test_gang_with_one_member_per_node_takes_a_node_each() -> None:
    world = World(gang_job(4, 1, warm=False)).steady()
    assert nodes_of(world) == [N2, N3, N4, N5]


def test_gang_that_lacks_a_node_is_not_launched_and_keeps_its_other_nodes() -> None:
    world = World(gang_job(warm=False, spares=0, recovery=Recovery(breaker=0.5))).steady().warmed()
    world.lose_node(N3)
    world.wait(30.0)
    assert {id: world.state.replica(id).status for id in MEMBERS} == dict.fromkeys(MEMBERS, Status.WANTED)
    world.lose_node(N4)
    world.wait(30.0)
    assert launches(world, 2) == []
    assert world.node_of(OTHERS[2]) == N4  # it does not take n2
    assert [request.request.count for request in world.decided(Request)] == [6, 1, 1]
    world.arrive(2)
    world.steady()
    assert nodes_of(world)[:2] == [N2, N2]
    assert set(incarnations(world).values()) == {2}


# ── a member dies ────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_failure_of_any_member_restarts_its_gang_only(member: ReplicaId, warm: bool) -> None:
    world = World(gang_job(warm=warm)).steady().warmed()
    before = nodes_of(world)
    world.kill(member)
    world.steady()
    assert incarnations(world) == dict.fromkeys(MEMBERS, 2)
    assert nodes_of(world) == before
    assert_others_were_not_touched(world)
    assert {id: len(world.state.replica(id).failures) for id in MEMBERS} == {id: int(id == member) for id in MEMBERS}
    assert world.state.recoveries == 1
    assert {launch.standby is not None for launch in launches(world, 2)} == {warm}


def test_restart_of_a_gang_is_recorded_for_its_first_member_only(world: World) -> None:
    world.kill(M2)
    world.steady()
    assert [world.state.replica(id).uncharged_restart for id in MEMBERS] == [None] * 4, (
        "a member has a second reason for its restart besides its failure"
    )
    world.happen(ev.CommandReceived("restart", "ada", "c1", target=M0))
    world.steady()
    assert incarnations(world) == dict.fromkeys(MEMBERS, 3)
    restarts = [world.state.replica(id).uncharged_restart for id in MEMBERS]
    assert restarts[0] is not None
    assert (restarts[0].why, restarts[1:]) == ("restart requested by ada", [None] * 3)


def test_members_that_fail_together_count_as_one_failure(world: World) -> None:
    for member in MEMBERS[1:]:
        step = world.state.replica(member).step
        assert step is not None
        incarnation, _ = world.steps.pop(step)
        world.record(ev.StepEnded(incarnation, step, None, 9, ExitReason.SIGNALED))
        world.record(found(incarnation, "exit_record", world.now, proof=True))
    world.wait(0.0)
    world.steady()
    assert incarnations(world) == dict.fromkeys(MEMBERS, 2)
    assert sum(len(world.state.replica(id).failures) for id in MEMBERS) == 1
    assert world.state.recoveries == 1


def test_gang_waits_for_its_orphan_steps_and_gives_them_no_grace(world: World) -> None:
    world.slow_to_stop = 7.0
    world.kill(M1)
    killed = world.now
    world.play(lambda: bool(launches(world, 2)))
    assert world.now - killed == pytest.approx(7.0)
    assert {stop.grace for stop in world.decided(StopStep)} == {0.0}
    assert {str(stop.incarnation) for stop in world.decided(StopStep)} == {f"{id}#1" for id in (M0, M2, M3)}


def test_orphan_that_never_ends_is_waited_for_four_graces(world: World) -> None:
    world.slow_to_stop = float("inf")
    world.kill(M1)
    killed = world.now
    world.play(lambda: bool(launches(world, 2)))
    assert world.now - killed == pytest.approx(4 * world.state.job.limits.step_grace)
    assert len(world.state.orphan_steps) == 3


def test_orphan_on_a_lost_node_is_not_waited_for() -> None:
    world = World(gang_job(warm=False, spares=2)).steady().warmed()
    world.lose_node(N3)
    world.play(lambda: bool(launches(world, 2)))
    lost = next(s.at for s in world.events if isinstance(s.event, ev.FindingChanged))
    assert world.now - lost < 1.0
    assert {orphan.node for orphan in world.state.orphan_steps.values()} <= {N2, N3}


def test_backoff_of_the_failed_member_delays_its_whole_gang() -> None:
    world = World(gang_job(warm=False, recovery=Recovery(per_node=9, backoff=30.0))).steady().warmed()
    world.kill(M1)
    world.steady().warmed()
    world.kill(M1)
    killed = world.now
    world.play(lambda: bool(launches(world, 3)))
    assert world.now - killed == pytest.approx(30.0)
    assert len(launches(world, 3)) == 4


# ── a node dies ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_members_of_a_lost_node_move_together_and_the_others_stay(world: World) -> None:
    world.lose_node(N2)
    world.play(lambda: bool(launches(world, 2)))
    world.steady()
    assert nodes_of(world) == [N7, N7, N3, N3]
    assert incarnations(world) == dict.fromkeys(MEMBERS, 2)
    assert requests(world) == [f"{RUN}.pool"]
    assert_others_were_not_touched(world)


def test_only_the_missing_node_is_requested_and_the_gang_spans_two_allocations() -> None:
    world = World(gang_job(warm=False, spares=0), nodes=12).steady().warmed()
    world.lose_node(N3)
    world.play(lambda: bool(launches(world, 2)))
    world.steady()
    requested = [request.request for request in world.decided(Request)]
    assert [ask.count for ask in requested] == [6, 1]
    assert requested[1].exclude == (N3,)
    assert nodes_of(world) == [N2, N2, N7, N7]
    allocations = [world.state.replica(id).allocation for id in MEMBERS]
    assert allocations == [requested[0].tag] * 2 + [requested[1].tag] * 2
    assert_others_were_not_touched(world)


def test_gang_with_one_job_per_node_requests_one_job_for_its_lost_node() -> None:
    small = in_node_groups(rollouts=2)
    roles = tuple(
        msgspec.structs.replace(role, ranks=4, per_node=2) if role.name == "trainer" else role for role in small.roles
    )
    parts = tuple(
        msgspec.structs.replace(part, nodes=2, min_nodes=2) if part.name == "trainer" else part
        for part in small.node_groups
    )
    world = World(msgspec.structs.replace(small, roles=roles, node_groups=parts), nodes=12).steady().warmed()
    before = dict(zip(MEMBERS, nodes_of(world), strict=True))
    asked = len(requests(world))
    world.lose_node(before[M2])
    world.play(lambda: incarnations(world)[M0] == 2)
    world.steady()
    assert len(requests(world)) == asked + 1
    assert [world.node_of(M0), world.node_of(M1)] == [before[M0], before[M1]]
    assert world.node_of(M2) == world.node_of(M3)
    assert world.node_of(M2) not in set(before.values())


# ── failed launches ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_rejected_launch_of_a_member_restarts_the_gang() -> None:
    world = World(gang_job(warm=False, spares=2, recovery=Recovery(per_node=1)))
    world.refuse_launch = {N3}
    world.steady()
    assert set(incarnations(world).values()) == {2}
    assert nodes_of(world)[:2] == [N2, N2]
    assert N3 not in nodes_of(world)


def test_lost_launch_of_a_member_restarts_the_gang(world: World) -> None:
    world.slow_to_join = 90.0
    world.kill(M1)
    world.play(lambda: bool(launches(world, 2)), timeout_s=60.0)
    step = tag_of(RUN, Incarnation(M2, 2))
    del world.steps[step]
    world.happen(ev.IntentSettled(step, False, NEVER_APPEARED, True, RejectReason.NEVER_APPEARED))
    assert world.state.replica(M2).failures == ()
    world.slow_to_join = 0.7
    world.steady()
    assert incarnations(world) == dict.fromkeys(MEMBERS, 3)
    assert nodes_of(world) == [N2, N2, N3, N3]


def test_next_manager_launches_missing_members_with_the_same_number(world: World) -> None:
    world.kill(M1)
    world.play(lambda: bool(launches(world, 2)))
    state = None
    for stamped in world.events:
        cut = isinstance(stamped.event, ev.Intended) and stamped.event.action.tag == tag_of(RUN, Incarnation(M2, 2))
        if cut:
            break
        state = fold(state, stamped)
    assert state is not None
    assert [state.replica(id).status for id in MEMBERS] == [Status.LAUNCHING] * 2 + [Status.WANTED] * 2
    planned = [action.incarnation for action in plan(state, world.now).actions if isinstance(action, Launch)]
    assert planned == [Incarnation(M2, 2), Incarnation(M3, 2)]


def test_member_is_never_launched_twice_with_one_number() -> None:
    begun = [Replica(M0, Status.JOINED, 3), Replica(M1, Status.WANTED, 2), Replica(M2, Status.WANTED, 3)]
    assert to_launch(begun) == [begun[1]]
    assert to_launch([Replica(M0, Status.COMPLETED, 3), begun[2]]) == [Replica(M0, Status.COMPLETED, 3), begun[2]]
    assert to_launch([Replica(M0, Status.RETIRED, 3), begun[2]]) == []


@pytest.mark.parametrize("distance", [7, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_manager_failure_before_any_record_does_not_change_the_end(warm: bool, distance: int) -> None:
    """A member is killed, later a node is lost, and the run completes.

    World asserts that no tag and no incarnation is launched twice.
    """

    def lived(die_before: int) -> World:
        world = World(gang_job(warm=warm, donors=True, steps=4, limits=Limits(quiet=20.0)), nodes=9)
        world.die_before = die_before
        world.steady().warmed()
        world.kill(M1)
        world.steady().warmed()
        world.lose_node(N3)
        world.play(lambda: N3 not in nodes_of(world))
        world.steady().warmed()
        world.commit(4)
        world.play()
        assert_nothing_is_left(world, Outcome.COMPLETED)
        return world

    unharmed = lived(0)
    assert unharmed.planned > 50
    for die_before in range(1, unharmed.planned + 1, distance):
        try:
            world = lived(die_before)
            assert {id: world.incarnations()[id] for id in (STORE, REWARD)} == {STORE: 1, REWARD: 1} or die_before < 20
            assert len(set(incarnations(world).values())) == 1
            assert nodes_of(world) == nodes_of(unharmed)
        except BaseException as error:
            error.add_note(f"died before record {die_before}")
            raise


# ── replicas are counted, never members ──────────────────────────────────────────────────────────────────────────────
def sharded(replicas: int, least: int, ranks: int = 2, per_node: int = 1, spares: int = 0) -> RunSpec:
    """Return a job with one role: ``replicas`` gangs of ``ranks`` commands each, of which the run needs ``least``."""
    role = msgspec.structs.replace(command("shard", replicas, least), ranks=ranks, per_node=per_node)
    small = commands(role, spares=spares)
    nodes = replicas * role.nodes + spares
    return msgspec.structs.replace(
        small, node_groups=(msgspec.structs.replace(small.node_groups[0], nodes=nodes, min_nodes=nodes),)
    )


S0, S1 = replica_id("shard", 0), replica_id("shard", 1)


def test_batch_gang_is_completed_when_all_members_are() -> None:
    world = World(sharded(2, 2)).steady()
    world.finish(member_id(S0, 1))
    assert progress(world.state) == (0, 2)
    world.finish(S0)
    assert progress(world.state) == (1, 2)
    for rank in range(2):
        world.finish(member_id(S1, rank))
    world.play()
    assert_nothing_is_left(world, Outcome.COMPLETED)
    assert len(world.decided(Launch)) == 4 + 4  # and the agents


def test_member_failure_after_another_completed_restarts_the_whole_batch_gang() -> None:
    world = World(sharded(2, 2)).steady()
    world.finish(S0)
    world.kill(member_id(S0, 1))
    world.steady()
    assert world.incarnations() == {S0: 2, member_id(S0, 1): 2, S1: 1, member_id(S1, 1): 1}
    assert progress(world.state) == (0, 2)


def test_gang_without_a_node_is_retired_whole_if_its_role_can_spare_it() -> None:
    world = World(sharded(2, 1), nodes=4).steady()
    lost = world.node_of(member_id(S1, 1))
    world.lose_node(lost)
    world.wait(2000.0)
    assert {
        replica.id: replica.status for replica in world.state.workers if gang_of(replica.id) == S1
    } == dict.fromkeys((S1, member_id(S1, 1)), Status.RETIRED)
    assert world.state.replica(S0).status is Status.JOINED
    assert "shard continues with 1 replicas" in {fence.why.expects for fence in world.decided(Fence)}
    world.arrive(1)
    world.wait(2000.0)
    assert world.state.finish is None


def test_two_members_of_a_gang_count_as_one_replica_for_min_replicas() -> None:
    """The job has three gangs and needs two of them, so that one may lose both its nodes."""
    world = World(sharded(3, 2), nodes=6).steady()
    gone = [world.node_of(member_id(replica_id("shard", 2), rank)) for rank in range(2)]
    for node in gone:
        world.lose_node(node)
    world.wait(3000.0)
    assert world.state.finish is None
    assert Rung.DEGRADED in rungs(world)


# ── commits of an incarnation ─────────────────────────────────────────────────────────────────────────────────────────
def test_failure_records_the_runs_step_and_the_incarnations_commits() -> None:
    world = World(COLD).steady()
    world.commit(1)
    world.commit(2)
    assert world.state.replica(M0).commits == 2
    world.kill(M3)
    world.steady()
    first = world.state.replica(M3).failures[-1]
    assert first.step == 2
    assert world.state.replica(M0).commits == 0
    world.commit(2)  # an earlier incarnation committed the step, and the new one only repeats its report
    assert world.state.replica(M0).commits == 0
    world.kill(M2)
    second = world.state.replica(M2).failures[-1]
    assert second.step == 2


# ── random failures ──────────────────────────────────────────────────────────────────────────────────────────────────
_MEMBERS = st.sampled_from(MEMBERS)
_ROLLOUTS = st.sampled_from(OTHERS[2:])
_BLOWS = st.one_of(
    st.tuples(st.just("kill"), _MEMBERS | _ROLLOUTS),
    st.tuples(st.just("freeze"), _MEMBERS | _ROLLOUTS),
    st.tuples(st.just("lose the node of"), _MEMBERS | _ROLLOUTS),
    st.tuples(st.just("kill the standby beside"), _MEMBERS | _ROLLOUTS),
    st.tuples(st.just("silence the standby beside"), _MEMBERS | _ROLLOUTS),
    st.tuples(st.just("commit"), st.just(M0)),
)
_PAUSES = st.sampled_from([0.0, 0.1, 0.4, 2.0, 30.0])


def strike(world: World, blow: str, target: ReplicaId) -> None:
    struck = world.state.replica(target)
    standbys = (replica for replica in world.state.replicas.values() if replica.role == STANDBY_ROLE)
    standby = next(
        (replica for replica in standbys if replica.node == struck.node and replica.step in world.steps), None
    )
    if blow == "kill":
        world.kill(target)
    elif blow == "freeze":
        world.freeze(target)
    elif blow == "lose the node of" and struck.node is not None and len(world.dead) < 4:
        world.lose_node(struck.node)
    elif blow == "kill the standby beside" and standby is not None:
        world.vanish(standby.id)
    elif blow == "silence the standby beside" and struck.node is not None:
        world.unresponsive.add(struck.node)
    elif blow == "commit" and struck.status is Status.JOINED:
        world.commit(world.state.step + 1)


def assert_one_incarnation_is_current_at_any_time(world: World) -> None:
    state = None
    for stamped in world.events:
        state = fold(state, stamped)
        members = [state.replica(id) for id in MEMBERS]
        current_numbers = {replica.incarnation_number for replica in members if replica.is_current}
        assert current_numbers <= {max(replica.incarnation_number for replica in members)}, f"after {stamped}"


@examples(20, many=400)
@given(st.lists(st.tuples(_BLOWS, _PAUSES), max_size=8), st.booleans(), st.booleans(), st.integers(0, 120))
def test_one_gang_incarnation_is_current_and_all_replicas_work_in_the_end(
    blows: list[tuple[tuple[str, ReplicaId], float]], donors: bool, shared: bool, die_before: int
) -> None:
    """World asserts that nothing is launched twice, and that repeated planning reaches a fixpoint."""
    calm = Recovery(per_node=99, per_replica=99, full_restarts=0, breaker=1.0, window=60.0)
    small = gang_job(4, 2 if shared else 1, donors=donors, steps=99, recovery=calm, limits=Limits(quiet=20.0))
    world = World(small, nodes=60)
    world.die_before = die_before
    world.play(world.works)
    world.warmed()
    for (blow, target), pause in blows:
        strike(world, blow, target)
        world.wait(pause)
    world.wait(60.0)
    world.play(lambda: world.works() and not world.state.orphan_steps.keys() & world.steps.keys())
    assert world.works(), {replica.id: replica.status for replica in world.state.workers}
    assert world.state.finish is None
    assert_one_incarnation_is_current_at_any_time(world)
    assert len({world.state.replica(id).incarnation_number for id in MEMBERS}) == 1
    assert {world.incarnations()[id] for id in (STORE, REWARD)} == {1} or die_before
    steps = {replica.step for replica in world.state.replicas.values() if replica.is_current}
    assert world.steps.keys() <= steps | world.state.orphan_steps.keys()
