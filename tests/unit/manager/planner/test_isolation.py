"""Failures of single replicas and nodes leave the incarnations of all other replicas unchanged."""

from __future__ import annotations

from typing import Literal

from hypothesis import example, given
from hypothesis import strategies as st

from rrl.core.run_spec import Recovery
from rrl.core.types import AGENT, ReplicaId, role_of
from rrl.manager.model.actions import Fence
from rrl.manager.model.state import Replica, Status
from rrl.tests.support.examples import examples
from rrl.tests.support.manager.jobs import REWARD, STORE, TRAINER, job
from rrl.tests.support.manager.world import World

REPLICAS = (STORE, REWARD, TRAINER, *(ReplicaId(f"rollout/{i}") for i in range(3)))
Blow = tuple[Literal["kill", "freeze", "lose node", "kill agent", "refuse launches"], ReplicaId, float]
"""(failure, replica that fails or whose node fails, time until the next failure in s)."""
_blows = st.tuples(
    st.sampled_from(["kill", "kill", "freeze", "lose node", "kill agent", "refuse launches"]),
    st.sampled_from(REPLICAS),
    st.sampled_from([0.0, 0.4, 3.0, 15.0, 120.0]),
)


def strike(world: World, kind: str, replica: ReplicaId) -> set[ReplicaId]:
    """Let a failure happen, and return the replicas whose incarnations it may change."""
    node = world.state.replica(replica).node
    ids = {r.id for r in world.state.workers if r.node == node or r.preferred_node == node}
    if node is None or kind == "kill":
        world.kill(replica)
    elif kind == "freeze":
        world.freeze(replica)
    elif kind == "lose node":
        world.lose_node(node)
        return ids
    elif kind == "kill agent":
        world.kill(ReplicaId(f"{AGENT}/{node}"))
        return set()
    else:  # every later launch on this node is refused
        world.refuse_launch.add(node)
        return set()
    return {replica}


def restless(world: World) -> list[Replica]:
    """Return the replicas that do not work, except for retired rollouts."""
    return [
        replica
        for replica in world.state.workers
        if not (replica.status is Status.JOINED and replica.step in world.steps)
        and not (replica.status is Status.RETIRED and role_of(replica.id) == "rollout")
    ]


@examples(20, many=400)
@given(st.lists(_blows, min_size=1, max_size=8), st.integers(0, 2))
def test_single_failures_change_no_other_replicas_incarnation(blows: list[Blow], spares: int) -> None:
    recovery = Recovery(
        per_node=2, per_replica=50, breaker=1.0, full_restarts=0
    )  # otherwise the ladder may restart all replicas
    world = World(job(rollouts=3, spares=spares, recovery=recovery), nodes=20).steady()
    hit: set[ReplicaId] = set()
    for kind, replica, pause in blows:
        hit |= strike(world, kind, replica)
        world.play(timeout_s=pause)
        changed = {id for id, incarnation in world.incarnations().items() if incarnation != 1}
        assert changed <= hit, f"{kind} {replica}"
    world.play(timeout_s=3000.0)
    assert {id for id, incarnation in world.incarnations().items() if incarnation != 1} <= hit
    assert world.works(), {r.id: r.status for r in world.state.workers if r.status is not Status.JOINED}


@examples(12, many=300)
@given(st.lists(_blows, min_size=1, max_size=10), st.integers(0, 2), st.booleans())
# a replica without a node is retried once per window on a node that refuses launches, and still lacks a node
@example(
    [
        ("lose node", STORE, 0.0),
        ("refuse launches", REPLICAS[3], 15.0),
        ("kill", REPLICAS[3], 0.0),
        ("lose node", STORE, 0.0),
        ("lose node", TRAINER, 0.0),
    ],
    0,
    False,
)
@example(  # two rollouts have no node: the retry of one must not delay the other
    [
        ("lose node", REPLICAS[3], 15.0),
        ("lose node", REPLICAS[5], 0.0),
        ("lose node", STORE, 0.0),
        ("lose node", TRAINER, 0.0),
        ("lose node", REPLICAS[4], 0.0),
    ],
    0,
    False,
)
def test_every_failure_sequence_ends_working_degraded_or_over(blows: list[Blow], spares: int, refuse: bool) -> None:
    world = World(job(rollouts=3, spares=spares, recovery=Recovery(per_replica=3)), nodes=8).steady()
    world.refuse = "no" if refuse else ""
    for kind, replica, pause in blows:
        strike(world, kind, replica)
        world.play(timeout_s=pause)
    world.play(timeout_s=20_000.0)
    world.play(lambda: not restless(world), timeout_s=2000.0)  # a retired rollout is being tried once more
    if world.over:
        assert (world.steps, world.held) == ({}, {})
        return
    assert not restless(world)
    for fence in world.decided(Fence):
        assert not world.state.is_current(fence.incarnation)
