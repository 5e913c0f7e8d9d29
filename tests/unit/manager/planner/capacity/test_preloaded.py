"""Preloaded processes beside rollouts: when they start and stop, and when a rollout continues in one of them."""

from __future__ import annotations

import msgspec
import pytest

from rrl.cluster.base import RejectReason
from rrl.config.job.resolve import pool_nodes
from rrl.core.launch import tag_of
from rrl.core.run_spec import Recovery, RunSpec
from rrl.core.types import (
    Incarnation,
    NodeName,
    ReplicaId,
    Resources,
    is_preloaded,
    preloaded_id,
    replica_id,
    standby_role_of,
)
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, Launch, Rung, StopStep, Why
from rrl.manager.model.reduce_replicas import on_launch_intended, on_launch_rejected
from rrl.manager.model.state import Status
from rrl.manager.planner.capacity.nodes import NodeInventory
from rrl.manager.planner.capacity.standbys import SHARED_STANDBY_BYTES, _unneeded_preloaded
from rrl.tests.support.manager.jobs import NODE, RUN, STORE, TRAINER, job
from rrl.tests.support.manager.world import World, rungs

R0, R1, R2 = (replica_id("rollout", i) for i in range(3))
N3, N4, N5, N6 = (NodeName(f"n{i}") for i in range(3, 7))
"""The rollouts are on n3 to n5, and n6 is a spare."""


def small(per_node: Resources = NODE, policy: str = "role", warm: bool = False, gpus: int = 0) -> RunSpec:
    """Return a job with three preloaded rollouts and a spare node. ``per_node`` are the resources of each node."""
    base = job(rollouts=3, spares=1, steps=9, recovery=Recovery(policy=policy, breaker=0.9))
    roles = tuple(
        msgspec.structs.replace(
            role, preload=True, warm=warm, per_member=msgspec.structs.replace(role.per_member, gpus=gpus)
        )
        if role.name == "rollout"
        else role
        for role in base.roles
    )
    group = msgspec.structs.replace(base.node_groups[0], node=per_node)
    return msgspec.structs.replace(base, roles=roles, node_groups=(group,))


def preloaded(world: World) -> list[NodeName]:
    """Return the nodes with a ready preloaded process."""
    ready = (r for r in world.state.replicas.values() if is_preloaded(r.id) and r.status is Status.JOINED)
    return sorted(replica.node for replica in ready if replica.step in world.steps and replica.node)


def promotions(world: World) -> dict[str, str]:
    return {
        str(launch.standby): str(launch.incarnation) for launch in world.decided(Launch) if launch.standby is not None
    }


def test_preloaded_id_names_its_role_and_is_no_other_standby() -> None:
    id = preloaded_id("rollout", N4)
    assert (id, standby_role_of(id), is_preloaded(id)) == ("standby/n4:rollout.preloaded", "rollout", True)
    others = ("standby/n4:rollout", "standby/n4:rollout.1", "standby/n4", "rollout/1", "agent/n.preloaded")
    assert not any(map(is_preloaded, map(ReplicaId, others)))


# ── placement and start ──────────────────────────────────────────────────────────────────────────────────────────────
def test_each_node_of_a_rollout_gets_a_preloaded_process_after_a_commit() -> None:
    world = World(small()).steady().wait(60.0)
    assert preloaded(world) == []
    world.warmed()
    assert preloaded(world) == [N3, N4, N5]
    assert world.decided(Fence) == []
    assert set(world.incarnations().values()) == {1}


@pytest.mark.parametrize("policy", ["job", "requeue"])
def test_no_preloaded_process_is_started_if_every_failure_restarts_the_run(policy: str) -> None:
    assert preloaded(World(small(policy=policy)).steady().warmed()) == []


def test_no_preloaded_process_is_started_while_a_rollout_restarts() -> None:
    world = World(small()).steady()
    world.slow_to_join = 50.0
    world.kill(R0)
    world.commit(1)
    world.wait(20.0)
    assert not any(is_preloaded(launch.incarnation.replica) for launch in world.decided(Launch))
    world.play(world.works)
    world.slow_to_join = 0.7
    world.wait(100.0)
    assert preloaded(world) == [N3, N4, N5]


def test_used_preloaded_process_is_replaced_while_another_rollout_waits_for_a_node() -> None:
    world = World(small()).steady().warmed()
    world.lose_node(N6)
    world.lose_node(N4)  # rollout/1 has no node until another one is granted
    world.wait(60.0)
    assert world.state.replica(R1).status is Status.WANTED
    world.kill(R0)
    world.wait(20.0)
    assert promotions(world) == {"standby/n3:rollout.preloaded#1": "rollout/0#2"}
    assert (preloaded(world), world.state.replica(R1).status) == ([N3, N5], Status.WANTED)


def test_no_preloaded_process_is_started_before_the_restarted_trainer_commits() -> None:
    world = World(small()).steady().warmed()
    world.kill(TRAINER)
    world.kill(preloaded_id("rollout", N4))
    world.steady().wait(100.0)
    assert preloaded(world) == [N3, N5]
    assert preloaded(world.warmed()) == [N3, N4, N5]


@pytest.mark.parametrize("missing_bytes", [0, 1])
def test_node_without_memory_beside_its_rollout_gets_no_preloaded_process(missing_bytes: int) -> None:
    member = job().role("rollout").per_member
    node = Resources(cpus=4, mem=member.mem + SHARED_STANDBY_BYTES - missing_bytes)
    spec = small(node)
    roles = tuple(msgspec.structs.replace(role, exclusive=True) for role in spec.roles)
    nodes = pool_nodes(roles, node) + spec.spares
    group = msgspec.structs.replace(spec.node_groups[0], nodes=nodes, min_nodes=nodes)
    world = World(msgspec.structs.replace(spec, roles=roles, node_groups=(group,))).steady().warmed()
    assert preloaded(world) == ([] if missing_bytes else [world.node_of(id) for id in (R0, R1, R2)])


def test_rollouts_with_gpus_that_share_nodes_get_no_preloaded_process() -> None:
    shared = small(msgspec.structs.replace(NODE, gpus=4), gpus=1)
    roles = tuple(msgspec.structs.replace(role, exclusive=role.name == "trainer") for role in shared.roles)
    assert preloaded(World(msgspec.structs.replace(shared, roles=roles)).steady().warmed()) == []


def test_preloaded_process_of_a_drained_node_ends_and_the_new_node_gets_one() -> None:
    world = World(small()).steady().warmed()
    world.happen(ev.CommandReceived("drain", "me", "d1", N4))
    world.wait(60.0).steady()
    assert (world.node_of(R1), preloaded(world)) == (N6, [N3, N5, N6])


def test_rollout_that_moves_to_the_spare_leaves_no_preloaded_process_behind() -> None:
    world = World(small()).steady().warmed()
    for _ in range(3):  # a third failure on the node moves the rollout
        world.kill(R1)
        world.steady().wait(30.0)
        world.warmed()
    assert world.node_of(R1) == N6
    assert preloaded(world) == [N3, N5, N6]
    (stop,) = [stop for stop in world.decided(StopStep) if is_preloaded(stop.incarnation.replica)]
    assert stop.why.evidence == ("rollout no longer needs a preloaded process on n4",)
    assert stop.grace == 0.0


def test_preloaded_process_that_is_being_promoted_is_not_stopped() -> None:
    world = World(small()).steady().warmed()
    inventory, role = NodeInventory(world.state, world.now), world.state.job.role("rollout")
    waiting = world.state.replica(preloaded_id("rollout", N4))
    promotion = Launch(Incarnation(R1, 2), waiting.step or "", "pool", N4, Why(("wanted",)), waiting.incarnation)
    stopped = {stop.incarnation for stop in _unneeded_preloaded(inventory, [promotion], role, {})}
    assert stopped == {Incarnation(preloaded_id("rollout", node), 1) for node in (N3, N5)}


def test_preloaded_process_on_another_node_does_not_make_a_rollout_move_there() -> None:
    spec = small()
    half_node = msgspec.structs.replace(NODE, cpus=2, mem=NODE.mem // 4)
    roles = tuple(
        msgspec.structs.replace(role, exclusive=False, replicas=4, per_member=half_node) if role.preload else role
        for role in spec.roles
    )
    nodes = pool_nodes(roles, NODE) + spec.spares
    group = msgspec.structs.replace(spec.node_groups[0], nodes=nodes, min_nodes=nodes)
    world = World(msgspec.structs.replace(spec, roles=roles, node_groups=(group,))).steady().warmed()
    homes = [world.node_of(replica_id("rollout", index)) for index in range(4)]
    assert preloaded(world) == sorted(set(homes))
    lonely = next(home for home in homes if homes.count(home) == 1 and home != world.node_of(STORE))
    other = next(index for index in range(4) if homes[index] != lonely)
    inventory, member = NodeInventory(world.state, world.now), world.state.replica(replica_id("rollout", other))
    assert inventory.can_place(member)
    assert inventory.spare_with_standby(member) is None


# ── promotion ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_killed_rollout_is_promoted_from_its_preloaded_process_and_another_is_started() -> None:
    world = World(small()).steady().warmed()
    begun = world.now
    world.kill(R1)
    world.play(world.works)
    assert world.now - begun < world.slow_to_join
    assert promotions(world) == {"standby/n4:rollout.preloaded#1": "rollout/1#2"}
    replica = world.state.replica(R1)
    assert (replica.node, replica.step) == (N4, tag_of(RUN, Incarnation(preloaded_id("rollout", N4), 1)))
    (fence,) = world.decided(Fence)
    assert (fence.rung, fence.why.expects) == (Rung.IN_PLACE, "its standby process on n4 is promoted to rollout/1")
    world.wait(10.0)
    assert preloaded(world) == [N3, N4, N5]
    assert world.state.replica(preloaded_id("rollout", N4)).incarnation_number == 2


def test_rollout_whose_preloaded_process_is_gone_starts_cold() -> None:
    world = World(small()).steady().warmed()
    world.kill(preloaded_id("rollout", N4))
    world.kill(R1)
    world.steady()
    assert promotions(world) == {}
    assert (world.node_of(R1), world.incarnations()[R1]) == (N4, 2)
    assert [rung for rung in rungs(world) if rung is not Rung.IN_PLACE] == []


def test_rollout_of_a_lost_node_takes_the_engine_of_the_spare() -> None:
    world = World(small(warm=True)).steady().warmed()
    assert (preloaded(world), world.engines()) == ([N3, N4, N5], [N6])
    world.lose_node(N4)
    world.play(lambda: world.incarnations()[R1] == 2 and world.works())
    assert promotions(world) == {"standby/n6:rollout#1": "rollout/1#2"}


def test_hung_rollout_with_gpus_has_released_them_before_its_promotion() -> None:
    world = World(small(Resources(cpus=4, gpus=1, mem=NODE.mem), gpus=1)).steady().warmed()
    world.slow_to_stop = 3.0
    world.freeze(R1)
    world.play(lambda: world.incarnations()[R1] == 2)
    assert tag_of(RUN, Incarnation(R1, 1)) not in world.steps
    (stop,) = [stop for stop in world.decided(StopStep) if stop.incarnation == Incarnation(R1, 1)]
    assert stop.grace == 0.0
    assert promotions(world.steady()) == {"standby/n4:rollout.preloaded#1": "rollout/1#2"}


def test_restart_of_the_whole_run_uses_no_preloaded_process() -> None:
    world = World(small()).steady().warmed()
    for _ in range(2):
        world.kill(TRAINER)
        world.steady()
    assert Rung.FULL_RESTART in {action.why.rung for action in world.actions}
    assert promotions(world) == {}


def test_outdated_preloaded_process_is_stopped_and_the_rollout_starts_uncharged() -> None:
    world = World(small()).steady().warmed()
    standby = world.state.replica(preloaded_id("rollout", N4))
    before = world.state.replica(R1)
    assert standby.step is not None
    why = Why(("rollout/1 is wanted",))
    launch = Launch(Incarnation(R1, 2), standby.step, before.allocation or "", N4, why, standby.incarnation)
    state = on_launch_intended(world.state, world.now, launch)
    settled = ev.IntentSettled(launch.tag, False, "other PATH", reason=RejectReason.STANDBY_OUTDATED)
    after = on_launch_rejected(state, world.now, launch, settled)
    replica = after.replica(R1)
    assert (replica.status, replica.preferred_node, replica.failures) == (Status.WANTED, N4, before.failures)
    assert replica.not_before <= world.now
    assert standby.step in after.orphan_steps
