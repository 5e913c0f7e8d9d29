"""The peer directory: the processes whose addresses are announced."""

from __future__ import annotations

from typing import Any

import msgspec

from rrl.core.types import Incarnation, ReplicaId, Version
from rrl.manager.model import events as ev
from rrl.manager.model.state import MAX_EVALUATIONS, Evaluation, State, Status
from rrl.manager.peer_directory import build_directory
from rrl.tests.support.manager.jobs import ROLLOUTS, TRAINER, gang_job
from rrl.tests.support.manager.world import World


def with_replica(state: State, id: ReplicaId, **changes: Any) -> State:
    replica = msgspec.structs.replace(state.replicas[id], **changes)
    return msgspec.structs.replace(state, replicas={**state.replicas, id: replica})


def test_newest_known_evaluation_is_announced_but_no_weight_version() -> None:
    world = World(gang_job(2, 1)).steady()
    before = build_directory(world.state, 1)
    world.record(ev.VersionAvailable(Incarnation(TRAINER, 1), Version(7, 1)))
    assert build_directory(world.state, 1) == before
    after = build_directory(msgspec.structs.replace(world.state, evaluations=(Evaluation(4, {}),)), 1)
    assert (before.evaluated, after.evaluated) == (-1, 4)


def test_evaluation_counts_once_and_the_state_keeps_the_first_and_the_newest() -> None:
    world = World(gang_job(2, 1)).steady()
    for step in (*range(MAX_EVALUATIONS + 5), 3, MAX_EVALUATIONS + 4):
        world.record(ev.Evaluated(Incarnation(ReplicaId("trajectories/0"), 1), step, {"reward": step / 10}))
    steps = [one.step for one in world.state.evaluations]
    assert steps == [0, *range(6, MAX_EVALUATIONS + 5)]


def test_weights_are_pulled_only_from_joined_replicas_that_serve_them() -> None:
    rollout = ROLLOUTS[0]
    joined = with_replica(World(gang_job(2, 1)).steady().state, rollout, weight_address="tcp://r:1")
    assert build_directory(joined, 1).peers[rollout].weight_address == "tcp://r:1"
    launching = build_directory(with_replica(joined, rollout, status=Status.LAUNCHING), 1)
    assert launching.peers[rollout].weight_address is None
    assert rollout not in build_directory(with_replica(joined, rollout, status=Status.WANTED), 1).peers
