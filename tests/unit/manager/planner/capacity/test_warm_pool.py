"""Standby processes of rollouts on spare nodes: when they start and stop, and which of them are promoted.

Other tests are about which replica gets a spare node.
"""

from __future__ import annotations

import msgspec
import pytest

from rrl.config.job.resolve import pool_nodes
from rrl.core.launch import tag_of
from rrl.core.run_spec import Recovery, RunSpec
from rrl.core.types import Incarnation, NodeName, Outcome, ReplicaId, replica_id, standby_id, standby_role_of
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, Launch, Request, Rung, StopStep
from rrl.manager.model.queries import owner_of
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import Status
from rrl.manager.planner import plan
from rrl.manager.planner.peer_directory import build_directory
from rrl.tests.support.manager.jobs import NODE, RUN, TRAINER, gang_job
from rrl.tests.support.manager.world import World, assert_nothing_is_left, lost, requests, rungs

R0, R1, R2, R3 = (replica_id("rollout", i) for i in range(4))
N1, N2, N3, N4, N5, N6, N7, N8 = (NodeName(f"n{i}") for i in range(1, 9))
"""The store and the reward role are on n1, the trainer is on n2, the rollouts are on n3 to n5.

n6 and all later nodes are spares.
"""
CALM = Recovery(breaker=0.9)


@pytest.fixture
def world() -> World:
    return World(small()).steady().warmed()


def small(**more: object) -> RunSpec:
    return gang_job(1, 1, **{"engines": True, "recovery": CALM, **more})  # type: ignore[arg-type]


def engine(node: NodeName, incarnation: int = 1) -> Incarnation:
    return Incarnation(standby_id("rollout", node), incarnation)


def launched(world: World, replica: ReplicaId) -> list[Launch]:
    return [launch for launch in world.decided(Launch) if launch.incarnation.replica == replica]


def promotions(world: World, role: str = "rollout") -> dict[str, str]:
    """Return the new incarnation of each promoted standby process."""
    return {
        str(launch.standby): str(launch.incarnation)
        for launch in world.decided(Launch)
        if launch.standby is not None and launch.incarnation.replica.startswith(role)
    }


def touched(world: World, *but: ReplicaId) -> dict[ReplicaId, int]:
    """Return the number of incarnations of each replica that had more than one, except for the replicas ``but``."""
    return {id: number for id, number in world.incarnations().items() if number > 1 and id not in but}


def lose_at_once(world: World, *nodes: NodeName) -> None:
    """Lose several nodes before the planner decides anything, then play until all replicas work."""
    for node in nodes:
        world.record(lost(node, world.now))
        world.dead.add(node)
        world.steps = {tag: step for tag, step in world.steps.items() if step[1] != node}
    world.play(world.works)


def assert_no_orphan_steps(world: World) -> None:
    """Assert that orphan steps remain only on lost nodes."""
    assert world.state.intents == {}
    assert {orphan.node for orphan in world.state.orphan_steps.values()} <= world.dead


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("role", "slot", "id"),
    [
        ("trainer", None, "standby/n7"),
        ("trainer", 1, "standby/n7:1"),
        ("rollout", None, "standby/n7:rollout"),
        ("rollout", 1, "standby/n7:rollout.1"),
    ],
)
def test_standby_id_names_the_role_it_can_be_promoted_to(role: str, slot: int | None, id: str) -> None:
    assert standby_id(role, N7, slot) == id
    assert standby_role_of(ReplicaId(id)) == role


# ── placement and start ──────────────────────────────────────────────────────────────────────────────────────────────
def test_standby_engine_starts_on_each_spare_after_a_commit_beside_the_trainers() -> None:
    world = World(small(spares=2)).steady().wait(60.0)
    assert world.engines() == []
    world.warmed()
    assert world.engines() == [N6, N7]
    # the trainer has a standby process on one spare, because it has one node
    assert world.ready_standbys() == {N2: 1, N6: 2, N7: 1}
    assert set(world.incarnations().values()) == {1}
    assert world.decided(Fence) == []
    assert len(requests(world)) == 1


@pytest.mark.parametrize("standby", [False, True])
def test_no_standby_without_the_setting(standby: bool) -> None:
    world = World(small(engines=False, standbys=int(standby))).steady().warmed()
    assert world.engines() == []


def test_no_standby_if_every_failure_restarts_the_run() -> None:
    assert World(small(recovery=Recovery(policy="job"))).steady().warmed().engines() == []


def test_no_standby_is_started_while_a_rollout_restarts() -> None:
    world = World(small(spares=2)).steady()
    world.slow_to_join = 50.0
    world.kill(R0)
    world.wait(1.0)
    world.commit(1)
    world.wait(20.0)
    assert world.state.replica(R0).status is Status.STARTING
    assert not any(launch.incarnation.replica.startswith("standby/n6:") for launch in world.decided(Launch))
    world.play(world.works)
    world.wait(60.0)
    assert world.engines() == [N6, N7]


def test_no_standby_is_started_before_the_restarted_trainer_commits() -> None:
    world = World(small(spares=2)).steady().warmed()
    world.kill(TRAINER)
    world.kill(engine(N6).replica)
    world.steady().wait(100.0)
    assert world.engines() == [N7]
    world.warmed()
    assert world.engines() == [N6, N7]


def test_no_standby_is_started_where_a_step_is_still_ending() -> None:
    world = World(small(recovery=Recovery(breaker=0.9, per_node=1))).steady().warmed()
    world.slow_to_stop = 9.0
    for incarnation in (2, 3):
        world.freeze(R1)
        world.play(lambda n=incarnation: world.incarnations()[R1] == n and world.works())  # type: ignore[misc]
    assert (world.node_of(R1), world.engines()) == (N6, [])
    assert tag_of(RUN, Incarnation(R1, 2)) in world.state.orphan_steps
    world.wait(30.0)  # World asserts that launched steps have the memory that they need
    assert world.engines() == [N4]


def test_no_more_standby_nodes_than_rollouts() -> None:
    world = World(small(rollouts=1, spares=3)).steady().warmed()
    assert world.engines() == [N4]


def shared(rollouts: int = 4) -> RunSpec:
    """Return a job with one spare, in which two rollouts share each node.

    One rollout shares the node of the store and the reward role.
    """
    job = small(rollouts=rollouts)
    half_node = msgspec.structs.replace(NODE, cpus=2, mem=NODE.mem // 2)
    roles = tuple(
        msgspec.structs.replace(role, exclusive=False, per_member=half_node) if role.name == "rollout" else role
        for role in job.roles
    )
    nodes = pool_nodes(roles, NODE) + job.spares
    pool = msgspec.structs.replace(job.node_groups[0], nodes=nodes, min_nodes=nodes)
    return msgspec.structs.replace(job, roles=roles, node_groups=(pool,))


def test_shared_node_keeps_as_many_standbys_as_fit_and_all_are_promoted() -> None:
    world = World(shared()).steady().warmed()
    node = world.node_of(R1)
    (spare,) = set(world.engines())
    assert world.engines() == [spare, spare]
    mates = [id for id in (R0, R1, R2, R3) if world.node_of(id) == node]
    assert len(mates) == 2
    world.lose_node(node)
    world.play(lambda: all(world.incarnations()[id] == 2 for id in mates))
    world.steady()
    assert promotions(world) == {f"standby/{spare}:rollout.{slot}#1": f"{id}#2" for slot, id in enumerate(mates)}
    assert touched(world, *mates) == {}


def test_remaining_standby_is_stopped_when_its_node_is_no_longer_a_spare() -> None:
    world = World(shared()).steady().warmed()
    (spare,) = set(world.engines())
    lonely = world.node_of(R0)
    world.happen(ev.CommandReceived("drain", "me", "d1", lonely))
    world.wait(60.0).steady()
    moved = [id for id in (R0, R1, R2, R3) if world.node_of(id) == spare]
    assert len(moved) == len(promotions(world)) > 0
    assert world.engines() == []


def test_role_placed_beside_promoted_standbys_uses_the_capacity_of_the_others() -> None:
    world = World(shared(rollouts=5)).steady().warmed()  # no other node has room
    (spare,) = set(world.engines())
    moved = [id for id in world.incarnations() if world.node_of(id) == N1]
    assert {id.partition("/")[0] for id in moved} == {"trajectories", "reward", "rollout"}
    world.lose_node(N1)
    world.play(lambda: all(world.incarnations()[id] > 1 for id in moved))
    world.steady()
    assert promotions(world) == {f"standby/{spare}:rollout.0#1": "rollout/0#2"}
    assert {world.node_of(id) for id in moved} == {spare}
    assert touched(world, *moved) == {}


def test_replica_without_a_free_standby_is_not_announced_as_promoted() -> None:
    world = World(shared()).steady()
    world.broken_incarnations[ReplicaId("standby/n5:rollout.1")] = "exited: RuntimeError"
    world.warmed()
    assert world.engines() == [N5]
    node = world.node_of(R1)
    mates = [id for id in (R0, R1, R2, R3) if world.node_of(id) == node]
    lose_at_once(world, node)
    assert {
        fence.incarnation.replica: fence.why.expects
        for fence in world.decided(Fence)
        if fence.incarnation.replica in mates
    } == {
        mates[0]: f"the standby process on the spare node n5 is promoted to {mates[0]}",
        mates[1]: "joins again on a spare node",
    }


def test_standby_on_an_expiring_allocation_is_stopped() -> None:
    job = small()
    (pool,) = job.node_groups
    world = World(msgspec.structs.replace(job, node_groups=(msgspec.structs.replace(pool, walltime=7200.0),)), nodes=20)
    world.steady().warmed()
    world.play(
        lambda: any(isinstance(action, StopStep) and action.incarnation == engine(N6) for action in world.actions),
        7200.0,
    )
    (end,) = [stop for stop in world.decided(StopStep) if stop.incarnation == engine(N6)]
    assert end.why.evidence == ("n6 is no longer a spare node",)


# ── promotion ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_rollout_of_a_lost_node_is_promoted_on_the_spare_at_once(world: World) -> None:
    world.lose_node(N4)
    world.play(lambda: world.incarnations()[R1] == 2)
    begun = world.now
    world.play(world.works)
    assert world.now - begun < 1.0 < world.slow_to_join + 0.4
    replica, step = world.state.replica(R1), tag_of(RUN, engine(N6))
    assert (replica.node, replica.step, replica.promoted_from, replica.status) == (N6, step, engine(N6), Status.JOINED)
    assert owner_of(world.state, step) == replica
    (fence,) = [fence for fence in world.decided(Fence) if fence.incarnation == Incarnation(R1, 1)]
    limits, recovery = world.state.job.limits, world.state.job.recovery
    assert (fence.rung, fence.target_node, fence.why.expects) == (
        Rung.SPARE,
        N6,
        "the standby process on the spare node n6 is promoted to rollout/1",
    )
    assert fence.why.evidence == ("n4 is excluded: node lost: manager: agent of n4 is silent",)
    (launch,) = [launch for launch in launched(world, R1) if launch.incarnation.number == 2]
    assert launch.why.evidence == ("rollout/1 is wanted and n6 has a standby process",)
    assert launch.why.expects == "standby/n6:rollout#1 is promoted to rollout/1#2"
    assert fence.why.deadline is not None
    assert launch.why.deadline is not None
    assert fence.why.deadline - begun <= limits.step_grace + recovery.promote
    assert (touched(world, R1), world.state.intents) == ({}, {})


def test_two_lost_rollouts_get_a_standby_each() -> None:
    world = World(small(spares=2)).steady().warmed()
    world.happen(lost(N4, world.now))  # one poll finds both losses
    world.lose_node(N4)
    world.lose_node(N5)
    world.play(lambda: world.incarnations()[R2] == 2 and world.works())
    assert promotions(world) == {"standby/n6:rollout#1": "rollout/1#2", "standby/n7:rollout#1": "rollout/2#2"}
    assert len(requests(world)) == 1


def test_two_rollouts_in_one_plan_are_not_sent_to_the_same_node() -> None:
    world = World(small(spares=2)).steady().warmed()
    lose_at_once(world, N4, N5)
    fences = [fence for fence in world.decided(Fence) if fence.incarnation.replica in (R1, R2)]
    assert {fence.incarnation.replica: fence.target_node for fence in fences} == {R1: N6, R2: N7}
    assert len(promotions(world)) == 2
    assert len(requests(world)) == 1


def test_second_of_two_lost_rollouts_waits_for_a_new_node() -> None:
    world = World(small(spares=1), nodes=8).steady().warmed()
    lose_at_once(world, N4, N5)
    assert promotions(world) == {"standby/n6:rollout#1": "rollout/1#2"}
    assert world.node_of(R2) == N7
    assert [request.request.count for request in world.decided(Request)][1:] == [1]


def test_failing_rollout_restarts_in_place_within_its_budget_then_is_promoted(world: World) -> None:
    for failures in (1, 2):
        world.kill(R1)
        world.steady().wait(30.0)
        assert (world.node_of(R1), world.incarnations()[R1]) == (N4, failures + 1)
    assert promotions(world) == {}
    world.kill(R1)
    world.steady()
    assert promotions(world) == {"standby/n6:rollout#1": "rollout/1#4"}
    assert rungs(world) == [Rung.IN_PLACE, Rung.IN_PLACE, Rung.SPARE]
    world.wait(60.0)
    assert world.engines() == [N4]  # which is a spare now


def test_restart_in_place_waits_for_nothing_and_the_old_step_has_its_grace(world: World) -> None:
    world.slow_to_stop = 8.0
    world.freeze(R1)
    begun = world.now
    world.play(lambda: world.incarnations()[R1] == 2)
    assert world.now == begun
    world.play(lambda: any(stop.incarnation == Incarnation(R1, 1) for stop in world.decided(StopStep)))
    (stop,) = [stop for stop in world.decided(StopStep) if stop.incarnation == Incarnation(R1, 1)]
    assert stop.grace == world.state.job.limits.step_grace


def test_trainers_standby_on_the_node_does_not_affect_a_rollout() -> None:
    world = World(small(standbys=1)).steady().warmed()
    assert world.ready_standbys()[N5] == 1
    world.kill(R2)
    world.steady()
    (fence,) = world.decided(Fence)
    assert (fence.rung, fence.why.expects) == (Rung.IN_PLACE, "joins again on n5")


def test_used_spare_is_replaced_by_the_next_one_with_a_standby() -> None:
    world = World(small(spares=1), nodes=8).steady().warmed()
    world.lose_node(N4)
    world.wait(60.0).steady()
    assert (world.node_of(R1), world.engines()) == (N6, [])
    assert world.state.replica(engine(N6).replica).status is Status.WANTED


# ── failed promotions ────────────────────────────────────────────────────────────────────────────────────────────────
def test_standby_that_is_not_ready_is_stopped_and_the_rollout_starts_cold() -> None:
    world = World(small()).steady()
    world.slow_to_join = 100.0
    world.warmed()
    assert world.state.replica(engine(N6).replica).status is Status.STARTING
    world.lose_node(N4)
    world.slow_to_join = 0.7
    world.play(lambda: world.incarnations()[R1] == 2)
    world.play(world.works)
    assert (world.node_of(R1), promotions(world)) == (N6, {})
    (stop,) = [stop for stop in world.decided(StopStep) if stop.incarnation == engine(N6)]
    assert (stop.grace, stop.why.evidence) == (0.0, ("n6 is needed for rollout/1",))


def test_standby_dead_at_promotion_leads_to_a_cold_start(world: World) -> None:
    world.vanish(engine(N6).replica)
    world.lose_node(N4)
    world.play(lambda: world.incarnations()[R1] == 3)
    world.steady()
    assert (world.node_of(R1), world.state.replica(R1).promoted_from) == (N6, None)
    assert touched(world, R1) == {}
    assert_no_orphan_steps(world)


def test_standby_that_never_answers_its_promotion_is_given_up_and_stopped(world: World) -> None:
    world.unresponsive = {N6}
    world.lose_node(N4)
    world.play(lambda: world.incarnations()[R1] == 3)
    world.steady().wait(1.0)
    assert [stop.incarnation for stop in world.decided(StopStep) if stop.step == tag_of(RUN, engine(N6))] == [
        Incarnation(R1, 2)
    ]
    assert touched(world, R1) == {}
    assert_no_orphan_steps(world)


def test_standbys_that_never_start_stop_being_tried_and_the_run_continues() -> None:
    world = World(small(recovery=Recovery(per_replica=3))).steady()
    world.broken_incarnations[engine(N6).replica] = "exited: RuntimeError: CUDA out of memory"
    world.warmed().wait(400.0)
    assert world.engines() == []
    assert len(launched(world, engine(N6).replica)) == 4
    assert (world.state.finish, touched(world)) == (None, {})


# ── access to spare nodes ────────────────────────────────────────────────────────────────────────────────────────────
def test_trainer_gets_the_spare_once_its_standby_engine_has_ended(world: World) -> None:
    world.slow_to_stop = 3.0
    world.lose_node(N2)
    world.play(lambda: world.incarnations()[TRAINER] == 2)
    world.steady()
    assert promotions(world, "trainer") == {"standby/n6#1": "trainer/0#2"}
    order = [
        action
        for action in world.actions
        if (isinstance(action, Launch) and action.incarnation == Incarnation(TRAINER, 2))
        or (isinstance(action, StopStep) and action.incarnation == engine(N6))
    ]
    assert [type(action) for action in order] == [StopStep, Launch]
    assert order[0].why.evidence == ("n6 is needed for trainer/0",)
    assert touched(world, TRAINER) == {}
    assert world.engines() == []


def test_store_on_a_lost_node_moves_to_the_spare_of_the_standby_engine(world: World) -> None:
    world.lose_node(N1)
    world.play(lambda: all(world.incarnations()[replica_id(role, 0)] == 2 for role in ("trajectories", "reward")))
    world.steady()
    assert world.node_of(replica_id("trajectories", 0)) == N6
    assert world.engines() == []


def test_trainer_and_rollout_lost_at_once_get_a_spare_each() -> None:
    world = World(small(spares=2)).steady().warmed()
    lose_at_once(world, N2, N4)
    assert {world.node_of(TRAINER), world.node_of(R1)} == {N6, N7}
    assert len(promotions(world, "trainer")) + len(promotions(world)) == 2
    assert len(requests(world)) == 1


def test_standby_that_does_not_end_blocks_its_node_only_for_a_time(world: World) -> None:
    world.slow_to_stop = float("inf")
    world.lose_node(N2)
    world.play(lambda: world.incarnations()[TRAINER] == 2)
    waited = next(
        s.at
        for s in world.events
        if isinstance(s.event, ev.Intended)
        and isinstance(s.event.action, StopStep)
        and s.event.action.incarnation == engine(N6)
    )
    assert world.now - waited == pytest.approx(4 * world.state.job.limits.step_grace)


def test_standby_on_a_node_to_be_drained_is_stopped(world: World) -> None:
    world.happen(ev.CommandReceived("drain", "me", "d1", N6))
    world.wait(10.0)
    assert world.engines() == []
    assert touched(world) == {}


def test_restart_of_the_whole_run_promotes_no_standby(world: World) -> None:
    world.kill(TRAINER)
    world.play(world.works)
    world.kill(TRAINER)  # before the new incarnation has trained a step
    world.play(lambda: bool(world.state.full_restarts))
    world.play(world.works)
    assert set(world.incarnations().values()) == {2, 3}
    assert promotions(world) == {}
    world.warmed()
    assert [str(launch.incarnation) for launch in launched(world, engine(N6).replica)] == [
        str(engine(N6, n)) for n in (1, 2)
    ]


# ── standby processes are not replicas ───────────────────────────────────────────────────────────────────────────────
def test_standbys_do_not_count_as_replicas_and_store_no_snapshots() -> None:
    world = World(small(spares=2)).steady().warmed()
    for node in world.state.nodes:
        incarnation = world.state.replica(replica_id("agent", node)).incarnation
        world.record(ev.AgentJoined(incarnation, node, node, 100, snapshot_address=f"tcp://{node}:1"))
    assert set(build_directory(world.state).snapshot_servers) == {N2, N6}
    assert not any("standby" in id for id in build_directory(world.state).peers)


def test_failed_standby_affects_no_replica_and_is_replaced(world: World) -> None:
    world.kill(engine(N6).replica)
    world.wait(20.0)
    assert world.engines() == [N6]
    assert (touched(world), rungs(world)) == ({}, [Rung.IN_PLACE])


def test_standbys_do_not_delay_the_end_and_leave_nothing() -> None:
    world = World(small(spares=2)).steady().warmed()
    world.commit(9)
    world.play()
    assert_nothing_is_left(world, Outcome.COMPLETED)


# ── a manager that dies ──────────────────────────────────────────────────────────────────────────────────────────────
def _hurt(die_before: int = 0) -> World:
    """Lose three nodes one after the other: the nodes of a rollout, the trainer, and another rollout.

    The manager fails before the decision or intent number ``die_before``, counted from here; with 0 it does not fail.
    """
    world = World(small(spares=3), nodes=12).steady().warmed()
    world.die_before = world.planned + die_before if die_before else 0
    for node in (N4, N2, N5):
        world.lose_node(node)
        world.play(lambda: world.works() and not world.state.intents, timeout_s=200.0)
        world.wait(60.0)
    world.commit(world.state.step + 1)
    return world.wait(60.0)


def test_manager_failure_before_any_decision_does_not_change_the_end() -> None:
    unharmed = _hurt()
    before = World(small(spares=3), nodes=12).steady().warmed().planned
    assert len(promotions(unharmed)) == 2
    for number in range(1, unharmed.planned - before + 1):
        world = _hurt(number)
        assert world.works(), number
        assert touched(world, TRAINER, R1, R2) == {}, number
        assert {world.node_of(id) for id in world.incarnations()} <= world.state.nodes.keys() - {N2, N4, N5}
        assert_no_orphan_steps(world)


def test_journal_alone_gives_the_role_of_each_standby(world: World) -> None:
    state = None
    for stamped in world.events:
        state = fold(state, stamped)
    assert state == world.state
    waiting = {
        replica.id: standby_role_of(replica.id) for replica in state.replicas.values() if replica.role == "standby"
    }
    assert waiting == {"standby/n2": "trainer", "standby/n6": "trainer", "standby/n6:rollout": "rollout"}


# ── the plan ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_plan_with_many_standbys_reaches_its_fixpoint() -> None:
    world = World(gang_job(8, 4, standbys=2, rollouts=40, spares=6, engines=True)).steady().warmed()
    assert len(world.engines()) == 6
    assert plan(world.state, world.now).actions == ()
