"""The peer directory: the processes that are announced as weight sources, and their order."""

from __future__ import annotations

from typing import Any

import msgspec

from rrl.core.types import Incarnation, ReplicaId, Version, member_id, role_of
from rrl.manager.model import events as ev
from rrl.manager.model.state import MAX_EVALUATIONS, Evaluation, State, Status
from rrl.manager.planner.peer_directory import build_directory
from rrl.tests.support.manager.jobs import TRAINER, gang_job
from rrl.tests.support.manager.world import World
from rrl.transport.messages import WeightSource

OLD, NEW = Version(6, 1), Version(7, 1)
MATE = member_id(TRAINER, 1)


def state(**holds: Version | None) -> State:
    """Return a state with a trainer gang of two and twelve rollouts, all joined and serving these versions."""
    state = World(gang_job(2, 1)).steady().state
    versions = {name.replace("_", "/"): version for name, version in holds.items()}
    replica = state.replica(ReplicaId("rollout/0"))
    rollouts = {ReplicaId(f"rollout/{index}"): replica for index in reversed(range(12))}
    replicas = {
        id: msgspec.structs.replace(replica, id=id, weight_address=f"tcp://{id}", weight_version=versions.get(id))
        if role_of(id) in ("trainer", "rollout")
        else replica
        for id, replica in {**state.replicas, **rollouts}.items()
    }
    return msgspec.structs.replace(state, replicas=replicas)


def names(holders: tuple[WeightSource, ...]) -> list[str]:
    return [holder.incarnation.replica for holder in holders]


def test_sources_list_the_publisher_first_then_receivers_in_natural_order() -> None:
    wiring = build_directory(state(trainer_0=NEW, rollout_3=OLD, rollout_11=NEW))
    assert names(wiring.sources) == ["trainer/0", *(f"rollout/{index}" for index in range(12))]
    assert wiring.newest == NEW
    assert wiring.sources[0] == WeightSource(Incarnation(TRAINER, 1), "tcp://trainer/0", NEW)
    assert [source.version for source in wiring.sources[1:]] == [
        OLD if i == 3 else NEW if i == 11 else None for i in range(12)
    ]


def test_newest_known_evaluation_is_announced_at_once() -> None:
    before = build_directory(state())
    results = tuple(Evaluation(step, {}) for step in (0, 4))
    after = build_directory(msgspec.structs.replace(state(), evaluations=results))
    assert (before.message(1, 1).evaluated, after.message(1, 1).evaluated) == (-1, 4)
    assert after.without_versions != before.without_versions


def test_evaluation_counts_once_and_the_state_keeps_the_first_and_the_newest() -> None:
    world = World(gang_job(2, 1)).steady()
    for step in (*range(MAX_EVALUATIONS + 5), 3, MAX_EVALUATIONS + 4):
        world.record(ev.Evaluated(Incarnation(ReplicaId("trajectories/0"), 1), step, {"reward": step / 10}))
    steps = [one.step for one in world.state.evaluations]
    assert steps == [0, *range(6, MAX_EVALUATIONS + 5)]


def test_version_of_a_restarted_trainer_is_newer_than_a_later_step_of_its_predecessor() -> None:
    wiring = build_directory(state(trainer_0=Version(5, 2), rollout_3=Version(8, 1)))
    assert wiring.newest == Version(5, 2)


def test_unpublished_trainer_and_other_gang_members_are_not_sources() -> None:
    wiring = build_directory(state(rollout_4=OLD))
    assert (names(wiring.sources)[0], wiring.newest) == ("rollout/0", OLD)
    assert MATE not in names(build_directory(state(trainer_0=NEW)).sources)
    assert build_directory(state()).newest is None


def test_replica_not_current_joined_or_serving_is_not_a_source() -> None:
    world = state(trainer_0=NEW, rollout_0=NEW)
    changes: list[dict[str, Any]] = [{"status": Status.LAUNCHING}, {"status": Status.WANTED}, {"weight_address": None}]
    for number, change in enumerate(changes):
        id = ReplicaId(f"rollout/{number}")
        replica = msgspec.structs.replace(world.replicas[id], **change)
        world = msgspec.structs.replace(world, replicas={**world.replicas, id: replica})
    assert names(build_directory(world).sources) == ["trainer/0", *(f"rollout/{index}" for index in range(3, 12))]


def test_only_the_versions_of_sources_may_be_sent_later() -> None:
    before = build_directory(state(trainer_0=NEW, rollout_3=OLD))
    assert build_directory(state(trainer_0=NEW, rollout_3=NEW)).without_versions == before.without_versions
    assert build_directory(state(trainer_0=Version(8, 1), rollout_3=OLD)) != before
    assert build_directory(state(trainer_0=Version(8, 1), rollout_3=OLD)).without_versions != before.without_versions, (
        "a new version of the trainer does not change the directory"
    )
    assert build_directory(state(rollout_3=OLD)).without_versions != before.without_versions, (
        "the loss of the publisher does not change the directory"
    )
