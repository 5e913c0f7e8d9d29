"""Who is told to whom as a source of weights."""

from __future__ import annotations

from typing import Any

import msgspec

from rrl.core.types import Incarnation, ReplicaId, Version, member_id, role_of
from rrl.manager.model.state import State, Status
from rrl.manager.planner.peer_directory import build_directory
from rrl.tests.support.manager.jobs import TRAINER, gang_job
from rrl.tests.support.manager.world import World
from rrl.transport.messages import WeightSource

OLD, NEW = Version(6, 1), Version(7, 1)
MATE = member_id(TRAINER, 1)


def state(**holds: Version | None) -> State:
    """A gang of two as the trainer, and twelve rollouts, all joined and serving; who holds something is said."""
    state = World(gang_job(2, 1)).steady().state
    told = {name.replace("_", "/"): version for name, version in holds.items()}
    one = state.replica(ReplicaId("rollout/0"))
    rollouts = {ReplicaId(f"rollout/{index}"): one for index in reversed(range(12))}
    replicas = {
        id: msgspec.structs.replace(one, id=id, weight_address=f"tcp://{id}", weight_version=told.get(id))
        if role_of(id) in ("trainer", "rollout") else one
        for id, one in (state.replicas | rollouts).items()
    }  # fmt: skip
    return msgspec.structs.replace(state, replicas=replicas)


def names(holders: tuple[WeightSource, ...]) -> list[str]:
    return [holder.incarnation.replica for holder in holders]


def test_all_who_serve_weights_are_told_the_publisher_first_then_receivers_as_people_count() -> None:
    wiring = build_directory(state(trainer_0=NEW, rollout_3=OLD, rollout_11=NEW))
    assert names(wiring.sources) == ["trainer/0", *(f"rollout/{index}" for index in range(12))]
    assert wiring.newest == NEW
    assert wiring.sources[0] == WeightSource(Incarnation(TRAINER, 1), "tcp://trainer/0", NEW)
    assert [one.version for one in wiring.sources[1:]] == [
        OLD if i == 3 else NEW if i == 11 else None for i in range(12)
    ]


def test_a_trainer_that_has_published_nothing_is_not_among_them_and_of_a_gang_only_who_publishes() -> None:
    wiring = build_directory(state(rollout_4=OLD))
    assert (names(wiring.sources)[0], wiring.newest) == ("rollout/0", OLD)
    assert MATE not in names(build_directory(state(trainer_0=NEW)).sources)
    assert build_directory(state()).newest is None


def test_who_is_not_believed_or_has_not_joined_or_serves_nothing_is_not_told() -> None:
    world = state(trainer_0=NEW, rollout_0=NEW)
    changes: list[dict[str, Any]] = [{"status": Status.LAUNCHING}, {"status": Status.WANTED}, {"weight_address": None}]
    for number, change in enumerate(changes):
        id = ReplicaId(f"rollout/{number}")
        one = msgspec.structs.replace(world.replicas[id], **change)
        world = msgspec.structs.replace(world, replicas={**world.replicas, id: one})
    assert names(build_directory(world).sources) == ["trainer/0", *(f"rollout/{index}" for index in range(3, 12))]


def test_only_which_version_a_receiver_holds_can_wait() -> None:
    before = build_directory(state(trainer_0=NEW, rollout_3=OLD))
    assert build_directory(state(trainer_0=NEW, rollout_3=NEW)).without_versions == before.without_versions
    assert build_directory(state(trainer_0=Version(8, 1), rollout_3=OLD)) != before
    assert build_directory(state(trainer_0=Version(8, 1), rollout_3=OLD)).without_versions != before.without_versions, (
        "a new version is out"
    )
    assert build_directory(state(rollout_3=OLD)).without_versions != before.without_versions, "its publisher is gone"
