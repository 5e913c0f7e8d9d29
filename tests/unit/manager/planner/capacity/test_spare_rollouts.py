"""Extras: rollouts on spare nodes, when they start and stop, and who gets their nodes."""

from __future__ import annotations

import msgspec
import pytest

from rrl.config.job.resolve import pool_nodes
from rrl.core.run_spec import HealthSpec, NodeGroup, Recovery, RunSpec, TagsSpec
from rrl.core.types import (
    Cause,
    Evidence,
    Finding,
    Incarnation,
    NodeName,
    Outcome,
    Remedy,
    ReplicaId,
    Verdict,
    gang_of,
    replica_id,
)
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Exclude, Fence, Launch, Request, Resize, Rung, StopStep, Why
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import Status
from rrl.manager.planner import plan
from rrl.manager.planner.capacity.nodes import NodeInventory
from rrl.tests.support.manager.jobs import NODE, REWARD, STORE, TRAINER, gang_job
from rrl.tests.support.manager.world import World, assert_nothing_is_left, charged, fences, lost, requests

R0, R1, R2, R3, R4 = (replica_id("rollout", i) for i in range(5))
N1, N2, N3, N4, N5, N6, N7 = (NodeName(f"n{i}") for i in range(1, 8))
"""The store and the reward role are on n1, the trainer is on n2, the rollouts are on n3 and n4.

n5 and all later nodes are spares.
"""
CALM = Recovery(breaker=0.9)


def small(**more: object) -> RunSpec:
    given = {"rollouts": 2, "extras": True, "recovery": CALM, "steps": 99, **more}
    return gang_job(1, 1, **given)  # type: ignore[arg-type]


@pytest.fixture
def world() -> World:
    """Return a run with one spare, on which rollout/2 generates beside a standby process of the trainer."""
    return World(small()).steady().warmed()


def rollouts(world: World) -> dict[ReplicaId, NodeName]:
    """Return the node of each rollout that works."""
    joined = (r for r in world.state.workers if r.role == "rollout" and r.status is Status.JOINED)
    return {replica.id: replica.node for replica in joined if replica.node is not None}


def resizes(world: World) -> list[tuple[tuple[ReplicaId, ...], tuple[ReplicaId, ...]]]:
    return [(resize.start, resize.stop) for resize in world.decided(Resize)]


def changed(world: World, *but: ReplicaId) -> dict[ReplicaId, int]:
    """Return the number of incarnations of each replica that had more than one, except for the replicas ``but``."""
    return {id: number for id, number in world.incarnations().items() if number > 1 and id not in but}


def lose(world: World, node: NodeName) -> None:
    world.lose_node(node)
    world.wait(30.0).steady()


# ── start ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_each_spare_generates_once_every_role_works_and_no_node_is_requested() -> None:
    world = World(small(spares=2)).steady()
    assert rollouts(world) == {R0: N3, R1: N4, R2: N5, R3: N6}
    assert resizes(world) == [((R2, R3), ())]
    assert world.decided(Resize)[0].why.evidence == ("2 spare nodes are free: n5, n6",)
    begun = next(s.at for s in world.events if isinstance(s.event, ev.Decided))
    before = [s.event.incarnation.replica for s in world.events if isinstance(s.event, ev.Joined) and s.at <= begun]
    assert {STORE, REWARD, TRAINER, R0, R1} <= set(before), "extras were started before the run's own roles worked"
    world.warmed()
    assert len(requests(world)) == 1
    assert plan(world.state, world.now).actions == ()


@pytest.mark.parametrize(
    "spec",
    [
        msgspec.structs.replace(small(spares=2), tags=TagsSpec(("train",))),
        small(spares=2, recovery=Recovery(policy="job")),
        small(spares=0),
    ],
    ids=["tag", "policy", "spares"],
)
def test_spares_stay_idle(spec: RunSpec) -> None:
    world = World(spec).steady().warmed()
    assert (rollouts(world), resizes(world)) == ({R0: N3, R1: N4}, [])


def test_no_extra_starts_while_a_role_recovers() -> None:
    world = World(small(warm=False)).steady().warmed()
    world.happen(ev.CommandReceived("drain", "me", "d1", N5))
    world.wait(10.0)
    assert rollouts(world) == {R0: N3, R1: N4}
    world.slow_to_join = 100.0
    world.kill(TRAINER)
    world.happen(ev.CommandReceived("undrain", "me", "d2", N5))
    world.wait(50.0)
    assert (world.state.replica(TRAINER).status is Status.JOINED, R2 in world.state.replicas) == (False, False)
    world.steady()
    assert rollouts(world) == {R0: N3, R1: N4, R2: N5}


def test_as_many_extras_share_a_spare_as_fit() -> None:
    job = small(rollouts=3)
    half = msgspec.structs.replace(NODE, cpus=2, mem=NODE.mem // 2)
    roles = tuple(
        msgspec.structs.replace(role, exclusive=False, per_member=half) if role.name == "rollout" else role
        for role in job.roles
    )
    nodes = pool_nodes(roles, NODE) + job.spares
    pool = msgspec.structs.replace(job.node_groups[0], nodes=nodes, min_nodes=nodes)
    world = World(msgspec.structs.replace(job, roles=roles, node_groups=(pool,))).steady().warmed()
    assert resizes(world) == [((R3, R4), ())]
    spare = rollouts(world)[R3]
    assert rollouts(world)[R4] == spare
    lose(world, N2)
    assert (world.node_of(TRAINER), resizes(world)[1:]) == (spare, [((), (R4, R3))])
    assert changed(world, TRAINER) == {}


# ── the trainer takes a node ─────────────────────────────────────────────────────────────────────────────────────────
def test_trainer_takes_an_extras_node_by_promotion_and_only_the_extra_leaves(world: World) -> None:
    assert world.ready_standbys() == {N2: 1, N5: 1}
    lose(world, N2)
    (launch,) = [launch for launch in world.decided(Launch) if launch.incarnation == Incarnation(TRAINER, 2)]
    assert (launch.node, str(launch.standby)) == (N5, "standby/n5#1")
    assert [(fence.rung, fence.target_node) for fence in fences(world)] == [(Rung.STANDBY, N5)]
    resize = world.decided(Resize)[-1]
    assert (resize.start, resize.stop) == ((), (R2,))
    assert resize.why.evidence == ("trainer/0 is wanted on n5, where a standby process can be promoted to it",)
    stops = [
        action for action in world.actions if isinstance(action, StopStep) and gang_of(action.incarnation.replica) == R2
    ]
    assert [stop.grace for stop in stops] == [0.0]
    assert world.actions.index(stops[0]) < world.actions.index(launch)
    assert (changed(world, TRAINER), charged(world)) == ({}, [("trainer/0#1", Rung.STANDBY)])
    assert (len(requests(world)), R2 in world.state.replicas) == (1, False)


def test_trainer_prefers_an_empty_spare_to_an_extras_node_and_this_to_a_rollouts() -> None:
    world = World(small(spares=2, donors=True)).steady()
    world.broken_incarnations[R3] = "exited: RuntimeError"  # its spare stays empty
    world.kill(R3)
    world.wait(60.0)
    assert world.state.replica(R3).status is Status.RETIRED
    taken = []
    for number in range(2, 5):
        world.warmed()
        world.lose_node(world.node_of(TRAINER))
        world.play(lambda number=number: world.incarnations()[TRAINER] == number)  # type: ignore[misc]
        world.wait(10.0)
        taken.append(world.node_of(TRAINER))
    assert taken == [N6, N5, N4]
    assert {rung for id, rung in charged(world) if id.startswith("trainer")} == {Rung.STANDBY}
    assert resizes(world)[1:] == [((), (R2,))]
    assert changed(world, TRAINER, R1, R3) == {}
    assert world.state.replica(R1).status is Status.WANTED


def test_rollouts_nodes_are_not_taken_without_their_tag() -> None:
    world = World(small(), nodes=9).steady().warmed()
    lose(world, N2)
    world.warmed()
    lose(world, N5)
    assert charged(world)[-1] == ("trainer/0#2", Rung.REPLACEMENT)
    assert changed(world, TRAINER) == {}


def test_extra_that_has_not_started_yet_leaves_for_the_trainer() -> None:
    world = World(msgspec.structs.replace(small(), tags=TagsSpec(("rollout",), ()))).steady().warmed()
    assert N5 not in world.ready_standbys()
    world.slow_to_join = 30.0
    world.kill(R2)
    world.wait(2.0)
    assert world.state.replica(R2).status is not Status.JOINED
    lose(world, N2)
    assert (world.node_of(TRAINER), R2 in world.state.replicas) == (N5, False)


# ── other roles take a node ──────────────────────────────────────────────────────────────────────────────────────────
def test_store_and_reward_take_an_extras_node_once_it_has_released_its_memory(world: World) -> None:
    world.slow_to_stop = 3.0
    world.lose_node(N1)
    world.play(lambda: world.incarnations()[STORE] == 2)
    stops = [stop for stop in world.decided(StopStep) if stop.incarnation == Incarnation(R2, 1)]
    assert [stop.grace for stop in stops] == [0.0]
    assert not any(incarnation.replica == R2 for incarnation, _ in world.steps.values())
    world.steady()
    assert (world.node_of(STORE), world.node_of(REWARD)) == (N5, N5)
    assert {rung for _, rung in charged(world)} == {Rung.SPARE}
    assert world.decided(Resize)[-1].why.evidence == (
        "no free node for trajectories/0, and rollout/2 on n5 can be spared",
    )
    assert (len(requests(world)), changed(world, STORE, REWARD)) == (1, {})


def test_extra_that_does_not_end_delays_the_store_only_for_a_time(world: World) -> None:
    world.slow_to_stop = float("inf")
    world.lose_node(N1)
    world.play(lambda: R2 not in world.state.replicas)
    begun = world.now
    world.play(lambda: world.incarnations()[STORE] == 2)
    assert world.now - begun == pytest.approx(4 * world.state.job.limits.step_grace)


def test_cold_trainer_takes_an_extras_node() -> None:
    world = World(small(warm=False)).steady().warmed()
    lose(world, N2)
    assert (world.node_of(TRAINER), resizes(world)[1:]) == (N5, [((), (R2,))])
    assert len(requests(world)) == 1


def test_cold_gang_displaces_as_many_extras_as_it_lacks_nodes() -> None:
    world = World(gang_job(4, 2, warm=False, rollouts=2, spares=3, extras=True, recovery=CALM)).steady()
    nodes = {world.node_of(replica.id) for replica in world.state.workers if replica.role == "trainer"}
    assert len(nodes) == 2
    lose(world, min(nodes))
    assert resizes(world)[1:] == [((), (R4,))]
    assert len(requests(world)) == 1


def test_role_on_a_drained_node_moves_to_an_extras_node(world: World) -> None:
    world.happen(ev.CommandReceived("drain", "me", "d1", N1))
    world.wait(60.0).steady()
    assert {world.node_of(STORE), world.node_of(REWARD)} == {N5}
    assert (len(requests(world)), resizes(world)[1:]) == (1, [((), (R2,))])
    assert world.state.nodes[N1].excluded is not None


# ── rollouts that lose their node ────────────────────────────────────────────────────────────────────────────────────
def test_extra_counts_in_the_place_of_a_rollout_that_lost_its_node(world: World) -> None:
    lose(world, N3)
    assert rollouts(world) == {R1: N4, R2: N5}
    assert resizes(world)[1:] == [((), (R0,))]
    assert (len(requests(world)), changed(world)) == (1, {})


def test_missing_rollout_returns_under_its_number_when_a_node_is_free() -> None:
    world = World(small(), nodes=9).steady().warmed()
    world.happen(ev.CommandReceived("drain", "me", "d1", N3))
    world.wait(30.0)
    assert rollouts(world) == {R1: N4, R2: N5}
    world.happen(ev.CommandReceived("undrain", "me", "d2", N3))
    world.wait(30.0).steady()
    assert rollouts(world) == {R0: N3, R1: N4, R2: N5}
    assert world.incarnations()[R0] == 2, "an incarnation number was used twice"
    assert resizes(world)[1:] == [((), (R0,)), ((R0,), ())]


def test_extra_on_a_lost_spare_leaves_and_the_spare_is_replaced_for_its_hardware(world: World) -> None:
    broken = Exclude(N5, Why(("GPU lost",)), Cause.GPU, proof=True)
    world = World(small(), nodes=9).steady().warmed()
    world.record(ev.Decided(broken))
    assert world.state.nodes[N5].lost_spare
    world.wait(30.0).steady()
    assert [request.request.count for request in world.decided(Request)][1:] == [1]
    assert world.decided(Request)[-1].why.evidence == ("spare nodes are excluded: n5",)
    assert len(rollouts(world)) == 3
    assert changed(world, R2) == {}


def test_node_of_a_rollout_is_no_lost_spare(world: World) -> None:
    world.record(ev.Decided(Exclude(N3, Why(("GPU lost",)), Cause.GPU, proof=True)))
    assert not world.state.nodes[N3].lost_spare


def test_failing_extra_is_repaired_like_any_rollout_and_starts_no_others() -> None:
    world = World(small(recovery=Recovery(breaker=0.9, window=300.0)), nodes=9).steady()
    world.broken_incarnations[R2] = "exited: RuntimeError: CUDA error"
    world.kill(R2)
    world.wait(200.0)
    assert world.state.replica(R2).status is Status.RETIRED
    launched = [launch for launch in world.decided(Launch) if launch.incarnation.replica == R2]
    assert (len(resizes(world)), len(requests(world))) == (1, 1)
    assert len(launched) < 12
    assert (world.state.finish, changed(world, R2)) == (None, {})
    world.broken_incarnations.clear()
    world.wait(600.0).steady()
    assert rollouts(world) == {R0: N3, R1: N4, R2: N5}


@pytest.mark.parametrize("index", [0, 1])
def test_spare_on_which_every_rollout_fails_does_not_start_extras_again_and_again(index: int) -> None:
    world = World(small(spares=1 + index), nodes=9).steady()
    world.broken_nodes[N5] = "exited: RuntimeError: CUDA error"
    world.kill(R2)
    world.wait(500.0)
    assert len([launch for launch in world.decided(Launch) if launch.node == N5 and "rollout" in launch.step]) < 8
    assert (world.state.finish, changed(world, R2)) == (None, {})
    assert len(requests(world)) == 1


# ── allocations ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_extras_end_with_their_allocation_and_start_again_on_the_spares_of_the_next() -> None:
    job = small(spares=1)
    (pool,) = job.node_groups
    job = msgspec.structs.replace(job, node_groups=(msgspec.structs.replace(pool, walltime=7200.0),))
    world = World(job, nodes=20).steady().warmed()
    world.play(lambda: len(requests(world)) > 1 and len(world.state.allocations) == 1, 9000.0)
    world.wait(60.0).steady()
    assert len(rollouts(world)) == 3
    assert [request.request.count for request in world.decided(Request)] == [5, 5]


def test_end_of_the_run_stops_extras_too(world: World) -> None:
    world.commit(99)
    world.play()
    assert_nothing_is_left(world, Outcome.COMPLETED)


def test_journal_alone_gives_the_extras(world: World) -> None:
    lose(world, N3)
    state = None
    for stamped in world.events:
        state = fold(state, stamped)
    assert state == world.state


# ── nodes of a further pool ──────────────────────────────────────────────────────────────────────────────────────────
def further(job: RunSpec, replicas: int = 2) -> RunSpec:
    """Return the job with a further rollout pool, whose nodes are large enough for every role."""
    (rollout,) = job.kind("rollout")
    burst = msgspec.structs.replace(rollout, name="burst", replicas=replicas, min_replicas=0)
    node = msgspec.structs.replace(NODE, cpus=64, mem=2**40)
    group = NodeGroup("burst", ("burst",), replicas, node, separate_jobs=True, dedicated=True)
    return msgspec.structs.replace(job, roles=(*job.roles, burst), node_groups=(*job.node_groups, group))


def test_nodes_of_a_further_pool_host_nothing_else() -> None:
    world = World(further(small(spares=0, donors=True)), nodes=20).steady().warmed()
    own = {world.node_of(replica.id) for replica in world.state.workers if replica.role == "burst"}
    assert len(own) == 2
    assert not own & world.ready_standbys().keys()
    inventory = NodeInventory(world.state, world.now)
    for role in world.state.job.roles:
        hosts = {node for node in own if inventory.can_host(role, node)}
        assert hosts == (own if role.name == "burst" else set()), role.name
    for victim in (TRAINER, STORE):
        lose(world, world.node_of(victim))
    others = {world.node_of(replica.id) for replica in world.state.workers if replica.role != "burst"}
    assert not own & others
    assert {world.incarnations()[replica_id("burst", index)] for index in range(2)} == {1}


# ── a manager that dies ──────────────────────────────────────────────────────────────────────────────────────────────
def _hurt(die_before: int = 0) -> World:
    """Lose the nodes of the trainer, the store and a rollout one after the other.

    The manager fails before the decision or intent number ``die_before``, counted from here; with 0 it does not fail.
    """
    world = World(small(spares=3), nodes=12).steady().warmed()
    world.die_before = world.planned + die_before if die_before else 0
    for victim in (TRAINER, STORE, R0):
        world.lose_node(world.node_of(victim))
        world.play(lambda: world.works() and not world.state.intents, timeout_s=200.0)
        world.wait(60.0)
    return world.wait(60.0)


def test_manager_failure_before_any_decision_does_not_change_the_end() -> None:
    unharmed = _hurt()
    before = World(small(spares=3), nodes=12).steady().warmed().planned
    assert len(rollouts(unharmed)) == 2
    for number in range(1, unharmed.planned - before + 1):
        world = _hurt(number)
        assert world.works(), number
        assert changed(world, TRAINER, STORE, REWARD) == {}, number
        assert world.incarnations().keys() == unharmed.incarnations().keys(), number
        assert len(requests(world)) == 1, number


# ── the plan ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_plan_with_many_extras_reaches_its_fixpoint() -> None:
    world = World(gang_job(8, 4, donors=True, rollouts=40, spares=6, extras=True)).steady().warmed()
    assert len(rollouts(world)) == 46
    assert plan(world.state, world.now).actions == ()


def test_lost_nodes_of_trainer_and_rollout_at_once_take_an_extras_node_each() -> None:
    world = World(small(spares=2)).steady().warmed()
    for node in (N2, N4):
        world.record(lost(node, world.now))
        world.dead.add(node)
        world.steps = {tag: step for tag, step in world.steps.items() if step[1] != node}
    world.play(world.works)
    world.wait(30.0).steady()
    assert world.node_of(TRAINER) in (N5, N6)
    assert len(rollouts(world)) == 2
    assert len(requests(world)) == 1
    assert [fence.rung for fence in world.decided(Fence) if fence.incarnation.replica == TRAINER] == [Rung.STANDBY]


def test_node_of_a_straggling_rollout_is_excluded_if_an_extra_takes_its_place() -> None:
    health = HealthSpec(stragglers="exclude")
    world = World(msgspec.structs.replace(small(), health=health)).steady().warmed()
    slow = Incarnation(R0, 1)
    evidence = (Evidence("manager", "3 times slower than the others", world.now),)
    finding = Finding("straggler", Verdict.WARN, Cause.NODE, Remedy.EXCLUDE, world.now, evidence, slow)
    world.happen(ev.FindingChanged(finding))
    world.wait(30.0).steady()
    assert world.state.nodes[N3].excluded is not None
    assert rollouts(world) == {R1: N4, R2: N5}
