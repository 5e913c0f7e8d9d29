"""A completed command stays completed, leaves its node to others, and lets the run complete."""

from __future__ import annotations

import msgspec

from rrl.core.run_spec import Recovery
from rrl.core.types import Outcome, ReplicaId
from rrl.manager.model.actions import Finish
from rrl.manager.model.state import Status
from rrl.tests.support.manager.jobs import RUN, command, commands, job
from rrl.tests.support.manager.world import World, assert_nothing_is_left, found, requests

A0, A1, A2 = (ReplicaId(f"shard/{i}") for i in range(3))


def why(world: World) -> tuple[str, ...]:
    (end,) = world.decided(Finish)
    return end.why.evidence


def test_run_of_commands_is_complete_when_every_command_is() -> None:
    world = World(commands(command("shard", 3))).steady()
    world.finish(A0)
    world.play(timeout_s=100.0)
    assert (world.state.replica(A0).status, world.state.finish) == (Status.COMPLETED, None)
    assert world.incarnations() == {A0: 1, A1: 1, A2: 1}
    world.finish(A1)
    world.finish(A2)
    world.play()
    assert why(world) == ("3 of 3 commands are done",)
    assert_nothing_is_left(world, Outcome.COMPLETED)


def test_completed_command_leaves_its_node_to_others() -> None:
    world = World(commands(command("shard", 3), recovery=Recovery(per_node=1))).steady()
    done = world.node_of(A0)
    world.finish(A0)
    for _ in range(2):
        world.kill(A1)
        world.steady()
    assert (world.node_of(A1), world.incarnations()[A0]) == (done, 1)


def test_any_other_exit_of_a_command_is_a_failure_and_restarted() -> None:
    world = World(commands(command("shard", 2))).steady()
    world.kill(A0)
    world.steady()
    assert world.incarnations() == {A0: 2, A1: 1}


def test_service_that_exits_has_failed_whatever_its_code() -> None:
    world = World(commands(command("shard"), command("cache", service=True))).steady()
    cache = ReplicaId("cache/0")
    replica = world.state.replica(cache)
    world.finish(cache)
    assert world.state.replica(cache).status is not Status.COMPLETED
    world.happen(found(replica.incarnation, "exit_record", world.now, proof=True))
    world.steady()
    assert world.incarnations() == {A0: 1, cache: 2}
    world.finish(A0)
    world.play()
    assert_nothing_is_left(world, Outcome.COMPLETED)


def test_completed_command_beside_a_trainer_stays_completed() -> None:
    small = job(spares=0)
    done = command("shard")
    part = msgspec.structs.replace(small.node_groups[0], roles=(*small.node_groups[0].roles, "shard"), nodes=5)
    world = World(msgspec.structs.replace(small, roles=(*small.roles, done), node_groups=(part,))).steady()
    world.finish(A0)
    world.play(timeout_s=1000.0)
    assert (world.state.finish, world.state.replica(A0).status) == (None, Status.COMPLETED)
    world.commit(3)
    world.play()
    assert_nothing_is_left(world, Outcome.COMPLETED)


def test_failed_command_does_not_block_a_run_that_can_spare_it() -> None:
    world = World(commands(command("shard", 3, least=2), recovery=Recovery(per_replica=3, per_node=9))).steady()
    for _ in range(4):
        world.kill(A2)
        world.play(timeout_s=30.0)
    assert world.state.replica(A2).status is Status.RETIRED
    world.finish(A0)
    assert world.state.finish is None
    world.finish(A1)
    world.play()
    assert why(world)[:1] == ("2 of 3 commands are done",)
    assert_nothing_is_left(world, Outcome.COMPLETED)


def test_run_without_a_completed_command_is_not_complete() -> None:
    world = World(commands(command("shard", 2, least=0), recovery=Recovery(per_replica=3, per_node=9))).steady()
    for replica in (A0, A1) * 4:
        world.kill(replica)
        world.play(timeout_s=30.0)
    assert {world.state.replica(id).status for id in (A0, A1)} == {Status.RETIRED}
    assert world.state.finish is None
    world.play(lambda: world.state.replica(A1).status is Status.JOINED, timeout_s=900.0)
    world.finish(A1)
    world.finish(A0)
    world.play()
    assert_nothing_is_left(world, Outcome.COMPLETED)


def test_failed_gang_does_not_block_a_run_that_can_spare_it() -> None:
    crew = msgspec.structs.replace(command("crew", 3, least=1), ranks=2, per_node=1)
    recovery = Recovery(per_node=9, per_replica=1, first_start=1)
    world = World(commands(crew, recovery=recovery, spares=3)).steady()
    for gang in ("crew/1", "crew/2"):
        for _ in range(2):
            world.kill(ReplicaId(f"{gang}.1"))
            world.play(timeout_s=30.0)
    assert world.state.finish is None
    for member in ("crew/0", "crew/0.1"):
        world.finish(ReplicaId(member))
    world.play()
    assert_nothing_is_left(world, Outcome.COMPLETED)
    assert world.decided(Finish)[0].why.evidence[0] == "1 of 3 commands are done"


def test_failed_command_below_the_minimum_ends_the_run() -> None:
    world = World(commands(command("shard", 2), recovery=Recovery(per_replica=3, per_node=9))).steady()
    world.finish(A1)
    for _ in range(4):
        world.kill(A0)
        world.play(timeout_s=30.0)
    world.play()
    assert_nothing_is_left(world, Outcome.FAILED)


def test_node_of_a_completed_command_is_released_if_it_was_an_own_request() -> None:
    world = World(commands(command("shard", 2), form="replica")).steady()
    world.finish(A0)
    world.play(timeout_s=60.0)
    assert list(world.state.allocations) == [f"{RUN}.shard-1"]
    assert world.incarnations() == {A0: 1, A1: 1}


def test_freed_node_is_used_by_another_command_whose_request_is_then_released() -> None:
    world = World(commands(command("shard", 2), form="replica")).steady()
    world.closed["shard"] = "Priority"
    world.drop(f"{RUN}.shard-0")
    world.play(timeout_s=30.0)
    world.finish(A1)
    world.play(lambda: world.state.replica(A0).status is Status.JOINED, timeout_s=30.0)
    world.play(timeout_s=30.0)
    assert list(world.state.allocations) == [f"{RUN}.shard-1"]
    assert (len(requests(world)), world.incarnations()) == (3, {A0: 2, A1: 1})


def test_run_of_commands_out_of_walltime_reports_how_many_completed() -> None:
    world = World(msgspec.structs.replace(commands(command("shard", 2)), walltime=3600.0)).steady()
    world.finish(A0)
    world.play()
    assert why(world)[0] == "the walltime of 3600 s ends; 1 of 2 commands are done"
    assert_nothing_is_left(world, Outcome.FAILED)
