"""Standby processes: the nodes on which they run, when they start and stop, and how one is promoted."""

from __future__ import annotations

import msgspec
import pytest

from rrl.cluster.base import RejectReason
from rrl.core.launch import ExitReason, tag_of
from rrl.core.run_spec import Limits, Recovery, TagsSpec
from rrl.core.types import STANDBY_ROLE, Incarnation, NodeName, Outcome, Resources, member_id, replica_id
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, Launch, Request, Rung, StopStep, Why
from rrl.manager.model.queries import owner_of
from rrl.manager.model.reduce_replicas import on_launch_intended, on_launch_rejected
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import AdmittedProcess, Status
from rrl.manager.peer_directory import build_directory
from rrl.manager.planner import plan
from rrl.manager.planner.capacity.nodes import NodeInventory
from rrl.tests.support.manager.jobs import REWARD, RUN, STORE, TRAINER, gang_job, in_node_groups
from rrl.tests.support.manager.world import World, assert_nothing_is_left, lost, requests, rungs

M0, M1 = (member_id(TRAINER, rank) for rank in range(2))
R0, R1, R2 = (replica_id("rollout", i) for i in range(3))
N1, N2, N3, N4, N5, N6, N7, N8 = (NodeName(f"n{i}") for i in range(1, 9))
"""The store and the reward role are on n1, the trainer is on n2 and n3, the rollouts are on n4 to n6.

n7 is a spare.
"""
SMALL = gang_job(2, 1, donors=True)


@pytest.fixture
def world() -> World:
    return World(SMALL).steady().warmed()


def standby(node: NodeName, incarnation: int = 1) -> Incarnation:
    return Incarnation(replica_id(STANDBY_ROLE, node), incarnation)


def launches(world: World, role: str = STANDBY_ROLE) -> list[Launch]:
    return [launch for launch in world.decided(Launch) if launch.incarnation.replica.partition("/")[0] == role]


def promotions(world: World) -> dict[str, str]:
    """Return the new incarnation of each promoted standby process."""
    return {
        str(launch.standby): str(launch.incarnation)
        for launch in launches(world, "trainer")
        if launch.standby is not None
    }


# ── placement and start ──────────────────────────────────────────────────────────────────────────────────────────────
def test_standbys_start_beside_the_trainer_on_spares_and_donors_after_a_commit() -> None:
    world = World(SMALL).steady().wait(60.0)
    assert world.ready_standbys() == {}
    world.warmed()
    assert world.ready_standbys() == {N2: 1, N3: 1, N6: 1, N7: 1}
    assert world.decided(Fence) == []
    assert sorted(world.state.nodes) == [f"n{i}" for i in range(1, 8)]


@pytest.mark.parametrize(
    ("spares", "tags", "nodes"),
    [
        (0, TagsSpec((), ()), []),
        (0, TagsSpec((), ("train",)), [N5, N6]),
        (1, TagsSpec((), ("train",)), [N5, N6]),
        (1, TagsSpec(("train",), ("train",)), [N6, N7]),
        (3, TagsSpec(("train",), ("train",)), [N7, N8]),
        (3, TagsSpec(("rollout", "train"), ()), [NodeName("n9"), NodeName("n8")]),
        (1, TagsSpec(("rollout",), ("train",)), [N6, N5]),
    ],
)
def test_trainer_keeps_standbys_on_as_many_other_nodes_as_it_has_spares_first(
    spares: int, tags: TagsSpec, nodes: list[NodeName]
) -> None:
    world = World(msgspec.structs.replace(gang_job(2, 1, spares=spares), tags=tags)).steady().warmed()
    assert world.ready_standbys().keys() == {N2, N3, *nodes}


def test_last_rollout_is_never_a_donor() -> None:
    small = gang_job(3, 1, donors=True, spares=0, recovery=Recovery(breaker=0.9))
    world = World(small).steady().warmed()
    for node in (N2, N3, N4):
        world.lose_node(node)
    world.wait(60.0)
    assert [
        fence.incarnation for fence in world.decided(Fence) if fence.rung is Rung.STANDBY and not fence.charged
    ] == [Incarnation(R2, 1), Incarnation(R1, 1)]
    assert world.state.replica(R0).status is Status.JOINED


def test_required_rollouts_are_not_donors() -> None:
    world = World(gang_job(2, 1, donors=True, min_rollouts=3, spares=0)).steady().warmed()
    assert world.ready_standbys() == {N2: 1, N3: 1}


def test_no_more_spares_are_kept_warm_than_the_trainer_has_nodes() -> None:
    world = World(gang_job(2, 1, spares=4)).steady().warmed()
    assert world.ready_standbys() == {N2: 1, N3: 1, N7: 1, N8: 1}


def test_trainer_without_warm_has_no_standby() -> None:
    world = World(gang_job(2, 1, warm=False, donors=True)).steady().warmed()
    assert world.ready_standbys() == {}


def test_no_standby_if_every_failure_restarts_the_run() -> None:
    world = World(gang_job(2, 1, donors=True, recovery=Recovery(policy="job"))).steady().warmed()
    assert world.ready_standbys() == {}


def test_node_keeps_as_many_standbys_as_members_share_it() -> None:
    world = World(gang_job(3, 2, donors=True)).steady().warmed()
    assert world.ready_standbys() == {N2: 2, N3: 1, N6: 2, N7: 2}
    assert {launch.incarnation.replica for launch in launches(world)} >= {
        "standby/n2:0",
        "standby/n2:1",
        "standby/n3:0",
    }


def test_standby_waits_for_the_agent_of_its_node() -> None:
    world = World(SMALL).steady()
    world.broken_incarnations[replica_id("agent", N7)] = "exited: OSError"
    world.kill(replica_id("agent", N7))
    world.warmed()
    assert world.ready_standbys() == {N2: 1, N3: 1, N6: 1}
    world.broken_incarnations.clear()
    world.wait(60.0)
    assert world.ready_standbys()[N7] == 1


def test_standby_is_stopped_when_a_rollout_needs_its_spare_node() -> None:
    world = World(gang_job(2, 1), nodes=7).steady().warmed()
    assert world.ready_standbys() == {N2: 1, N3: 1, N7: 1}
    world.lose_node(N4)
    world.play(lambda: world.incarnations()[R0] == 2)
    world.steady().wait(20.0)
    assert world.node_of(R0) == N7
    assert world.ready_standbys() == {N2: 1, N3: 1}
    (end,) = [stop for stop in world.decided(StopStep) if stop.incarnation == standby(N7)]
    assert end.why.evidence == ("trainer no longer needs a standby process on n7",)
    assert world.state.orphan_steps.keys() <= {tag_of(RUN, Incarnation(R0, 1)), f"{RUN}.agent-n4.1"}
    assert world.state.replica(standby(N7).replica).status is Status.RETIRED


# ── in place ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("ranks", [1, 2])
def test_restarting_gang_promotes_the_standbys_of_its_own_nodes(ranks: int) -> None:
    world = World(gang_job(ranks, 1, donors=True)).steady().warmed()
    world.kill(TRAINER)
    killed = world.now
    world.play(world.works)
    assert world.now - killed < 1.0
    members = [member_id(TRAINER, rank) for rank in range(ranks)]
    nodes = [N2, N3][:ranks]
    assert promotions(world) == {f"{standby(n)}": f"{m}#2" for n, m in zip(nodes, members, strict=True)}
    for member, node in zip(members, nodes, strict=True):
        replica = world.state.replica(member)
        assert (replica.node, replica.step, replica.promoted_from) == (node, tag_of(RUN, standby(node)), standby(node))
        assert replica.admitted_process == AdmittedProcess(node, 100)  # admitted as the standby process
        assert owner_of(world.state, replica.step or "") == replica
    assert world.state.intents == {}


def test_promoted_standby_is_replaced_only_after_the_next_commit(world: World) -> None:
    world.kill(M1)
    world.steady().wait(100.0)
    assert world.ready_standbys() == {N6: 1, N7: 1}
    assert world.state.replica(standby(N2).replica).status is Status.WANTED
    world.warmed()
    assert world.ready_standbys() == {N2: 1, N3: 1, N6: 1, N7: 1}
    assert [str(launch.incarnation) for launch in launches(world)][-2:] == [str(standby(N2, 2)), str(standby(N3, 2))]


def test_promoted_member_is_treated_like_any_other(world: World) -> None:
    """The member is fenced with its step, which is stopped as an orphan step.

    Reports of the step count as reports of the member.
    """
    world.kill(M1)
    world.steady().warmed()
    step = world.state.replica(M0).step
    world.freeze(M0)
    world.steady()
    assert [stop.incarnation for stop in world.decided(StopStep) if stop.step == step] == [Incarnation(M0, 2)]
    assert world.state.orphan_steps == {}
    assert {world.incarnations()[id] for id in (M0, M1)} == {3}
    end = ev.StepEnded(standby(N2, 2), world.state.replica(M0).step or "", None, 9, ExitReason.SIGNALED)
    world.record(end)  # the exit record names the standby process
    assert (world.state.replica(M0).step, world.state.replica(M0).status) == (None, Status.JOINED)


# ── failed promotions ────────────────────────────────────────────────────────────────────────────────────────────────
def test_standby_dead_at_promotion_restarts_the_gang(world: World) -> None:
    world.vanish(standby(N3).replica)
    world.kill(M0)
    world.steady()
    assert {world.incarnations()[id] for id in (M0, M1)} == {3}
    assert [world.node_of(id) for id in (M0, M1)] == [N2, N3]
    assert world.state.replica(M1).promoted_from is None  # n3 had no standby process any more
    assert world.state.replica(M0).promoted_from is None  # the standby process of n2 was promoted before
    assert world.state.orphan_steps == {}
    assert world.state.intents == {}


def test_standby_that_never_answers_its_promotion_is_given_up_and_stopped(world: World) -> None:
    world.unresponsive = {N3}
    world.kill(M0)
    killed = world.now
    world.steady()
    assert world.now - killed > world.state.job.recovery.promote
    assert {world.incarnations()[id] for id in (M0, M1)} == {3}
    assert [stop.incarnation for stop in world.decided(StopStep) if stop.step == tag_of(RUN, standby(N3))] == [
        Incarnation(M1, 2)
    ]
    assert world.state.orphan_steps == {}
    assert world.state.intents == {}


def test_rejected_promotion_leaves_the_members_orphan_and_the_member_wanted(world: World) -> None:
    world.vanish(standby(N3).replica)
    world.kill(M0)
    world.play(lambda: any(isinstance(s.event, ev.IntentSettled) and not s.event.ok for s in world.events))
    state = None
    for stamped in world.events:
        state = fold(state, stamped)
        if isinstance(stamped.event, ev.IntentSettled) and not stamped.event.ok:
            break
    assert state is not None
    step = tag_of(RUN, standby(N3))
    assert (state.orphan_steps[step].incarnation, state.replica(M1).status) == (Incarnation(M1, 2), Status.WANTED)
    assert state.replica(M1).failures[-1].refused
    assert step not in state.intents


def test_outdated_standby_is_stopped_and_the_member_starts_uncharged(world: World) -> None:
    before, waiting = world.state.replica(M1), standby(N3)
    launch = Launch(
        Incarnation(M1, 2), tag_of(RUN, waiting), before.allocation or "", N3, Why(("trainer/0.1 is wanted",)), waiting
    )
    settled = ev.IntentSettled(launch.tag, False, "other PATH", reason=RejectReason.STANDBY_OUTDATED)
    after = on_launch_rejected(on_launch_intended(world.state, world.now, launch), world.now, launch, settled)
    member = after.replica(M1)
    assert (member.status, member.preferred_node, member.failures) == (Status.WANTED, N3, before.failures)
    assert member.not_before <= world.now
    assert launch.tag in after.orphan_steps


def test_node_lost_during_a_promotion_leaves_no_open_intent(world: World) -> None:
    world.unresponsive = {N3}
    world.kill(M0)
    world.wait(0.5)
    assert tag_of(RUN, standby(N3)) in world.state.intents
    world.lose_node(N3)
    world.wait(40.0).steady()
    assert world.node_of(M1) == N7
    assert not any(isinstance(intent.action, Launch) for intent in world.state.intents.values())


# ── promotion on other nodes ─────────────────────────────────────────────────────────────────────────────────────────
def test_member_of_a_lost_node_is_promoted_on_a_spare(world: World) -> None:
    world.lose_node(N3)
    world.play(lambda: world.incarnations()[M1] == 2)
    world.steady()
    assert promotions(world) == {str(standby(N2)): f"{M0}#2", str(standby(N7)): f"{M1}#2"}
    assert [rung for rung in rungs(world) if rung is not Rung.DEGRADED] == [Rung.STANDBY, Rung.IN_PLACE]
    assert requests(world) == [f"{RUN}.pool"]


def test_without_a_spare_the_member_takes_a_donors_node() -> None:
    world = World(gang_job(2, 1, donors=True, spares=0), nodes=8).steady().warmed()
    world.lose_node(N3)
    world.play(lambda: world.incarnations()[M1] == 2)
    member_back = world.now
    world.steady()
    assert promotions(world) == {str(standby(N2)): f"{M0}#2", str(standby(N6)): f"{M1}#2"}
    assert Rung.STANDBY in rungs(world)
    assert (world.node_of(R2), world.incarnations()[R2]) == (N7, 2)
    assert world.state.replica(R2).failures == ()  # it has not failed
    assert {world.incarnations()[id] for id in (STORE, REWARD, R0, R1)} == {1}
    joined = next(
        s.at for s in world.events if isinstance(s.event, ev.Joined) and s.event.incarnation == Incarnation(M1, 2)
    )
    assert joined - member_back < 2.0
    assert [request.request.count for request in world.decided(Request)] == [6, 1]


def test_preempted_rollouts_do_not_return_to_their_nodes_in_any_role_order() -> None:
    small = gang_job(2, 1, donors=True, spares=0, recovery=Recovery(breaker=0.5))
    world = World(msgspec.structs.replace(small, roles=small.roles[::-1]), nodes=9).steady().warmed()
    before = [world.node_of(M0), world.node_of(M1)]
    stands = world.ready_standbys().keys() - set(before)
    for node in before:
        world.lose_node(node)
    world.play(lambda: world.incarnations()[M1] == 2)
    world.steady()
    assert {world.node_of(M0), world.node_of(M1)} == stands
    assert {world.incarnations()[id] for id in (R1, R2)} == {2}


def test_members_of_two_lost_nodes_are_both_promoted() -> None:
    limits = Limits(silence=10.0)
    world = World(gang_job(2, 1, donors=True, limits=limits, recovery=Recovery(breaker=0.5)), nodes=9).steady().warmed()
    world.lose_node(N2)
    world.lose_node(N3)
    world.play(lambda: world.incarnations()[M1] == 2)
    world.steady()
    assert {launch.standby for launch in launches(world, "trainer") if launch.incarnation.number == 2} == {
        standby(N6),
        standby(N7),
    }
    assert world.incarnations()[R2] == 2


def test_members_that_shared_a_lost_node_share_the_next_one() -> None:
    world = World(gang_job(4, 2, donors=True, spares=0), nodes=8).steady().warmed()
    world.lose_node(N3)
    world.play(lambda: world.incarnations()[TRAINER] == 2)
    world.steady()
    assert [world.node_of(member_id(TRAINER, rank)) for rank in range(4)] == [N2, N2, N6, N6]
    assert all(launch.standby for launch in launches(world, "trainer") if launch.incarnation.number == 2)


def test_rollout_node_that_is_its_own_job_can_host_the_trainer() -> None:
    small = in_node_groups(rollouts=3)
    roles = tuple(
        msgspec.structs.replace(role, ranks=2, warm=True) if role.name == "trainer" else role for role in small.roles
    )
    parts = tuple(
        msgspec.structs.replace(part, nodes=2, min_nodes=2) if part.name == "trainer" else part
        for part in small.node_groups
    )
    world = World(msgspec.structs.replace(small, roles=roles, node_groups=parts), nodes=12).steady().warmed()
    assert world.ready_standbys().keys() == {world.node_of(id) for id in (M0, M1, R1, R2)}
    spare = world.node_of(R2)
    world.lose_node(world.node_of(M1))
    world.play(lambda: world.incarnations()[M1] == 2)
    world.steady()
    assert (world.node_of(M1), world.incarnations()[R2]) == (spare, 2)
    assert world.state.nodes[spare].node_group == "rollout"
    world.wait(1000.0)
    assert world.works()


def test_node_too_small_for_the_trainer_keeps_no_standby() -> None:
    small = in_node_groups(rollouts=3)
    roles = tuple(
        msgspec.structs.replace(role, warm=True, per_member=Resources(cpus=64)) if role.name == "trainer" else role
        for role in small.roles
    )
    world = World(msgspec.structs.replace(small, roles=roles), nodes=12).steady().warmed()
    assert list(world.ready_standbys()) == [world.node_of(TRAINER)]


# ── standby processes are not replicas ───────────────────────────────────────────────────────────────────────────────
def test_standbys_occupy_no_node_and_do_not_count_as_replicas(world: World) -> None:
    assert not any(replica.role == STANDBY_ROLE for replica in world.state.workers)
    inventory = NodeInventory(world.state, world.now)
    assert all(id.role != STANDBY_ROLE for occupants in inventory.occupancy().values() for id in occupants)
    assert N7 not in inventory.occupancy()
    assert not any(id.startswith(STANDBY_ROLE) for id in build_directory(world.state, 1).peers)


@pytest.mark.parametrize("broken", ["exited: MemoryError", "not started: no such command"])
def test_standbys_that_never_start_stop_being_tried_and_the_run_continues(broken: str) -> None:
    world = World(gang_job(2, 1, donors=True, recovery=Recovery(per_replica=3)), nodes=9).steady()
    world.broken[STANDBY_ROLE] = broken
    world.warmed().wait(400.0)
    assert world.ready_standbys() == {}
    tried = [launch for launch in launches(world) if launch.incarnation.replica == standby(N2).replica]
    assert len(tried) == 4
    assert {world.state.replica(launch.incarnation.replica).status for launch in launches(world)} == {Status.RETIRED}
    assert (world.state.finish, set(world.incarnations().values())) == (None, {1})
    world.broken.clear()
    world.wait(700.0)
    assert world.ready_standbys() == {N2: 1, N3: 1, N6: 1, N7: 1}  # the failures are older than the window


def test_failed_standby_affects_no_replica(world: World) -> None:
    world.kill(standby(N2).replica)
    world.wait(20.0)
    assert world.ready_standbys()[N2] == 1
    assert set(world.incarnations().values()) == {1}
    assert rungs(world) == [Rung.IN_PLACE]


def test_lost_spare_takes_its_standby_with_it(world: World) -> None:
    world.lose_node(N7)
    world.wait(60.0)
    assert world.ready_standbys() == {N2: 1, N3: 1, N5: 1, N6: 1}  # another rollout's node takes its place
    assert world.state.replica(standby(N7).replica).status is Status.RETIRED
    assert set(world.incarnations().values()) == {1}


def test_standbys_do_not_delay_the_end_and_leave_nothing(world: World) -> None:
    world.commit(9)
    world.play()
    assert_nothing_is_left(world, Outcome.COMPLETED)
    stops = [stop.incarnation.replica.partition("/")[0] for stop in world.decided(StopStep)]
    assert stops.index("agent") > max(index for index, role in enumerate(stops) if role == STANDBY_ROLE)


# ── snapshot servers and large plans ─────────────────────────────────────────────────────────────────────────────────
def test_snapshot_servers_are_on_the_trainers_and_standby_nodes_while_it_is_down() -> None:
    world = World(gang_job(2, 1, donors=True, rollouts=2, min_rollouts=1, spares=0)).steady().warmed()
    for node in world.state.nodes:
        incarnation = world.state.replica(replica_id("agent", node)).incarnation
        world.record(ev.AgentJoined(incarnation, node, node, 100, snapshot_address=f"tcp://{node}:1"))
    expected = {node: f"tcp://{node}:1" for node in (N2, N3, N4, N5)}
    assert build_directory(world.state, 1).snapshot_servers == expected
    world.slow_to_stop = 5.0
    world.kill(M0)
    assert world.state.replica(M0).status is Status.WANTED
    assert build_directory(world.state, 1).snapshot_servers == expected
    world.vanish(standby(N5).replica)
    world.kill(R0)
    world.happen(lost(N3, world.now))
    assert world.state.replica(M1).node == N3  # there is no other yet
    assert N3 not in build_directory(world.state, 1).snapshot_servers


# ── the plan ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_plan_for_many_rollouts_with_standbys_reaches_its_fixpoint() -> None:
    world = World(gang_job(8, 4, donors=True, rollouts=60, spares=2)).steady().warmed()
    assert sum(world.ready_standbys().values()) == 8 + 2 * 4
    assert plan(world.state, world.now).actions == ()
