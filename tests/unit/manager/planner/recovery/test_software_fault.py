"""Failures that suggest a fault of the trainer's software restart the whole run.

Failures with another cause do not restart it.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rrl.core.faults import Fault, FaultKind
from rrl.core.run_spec import Recovery, TrainerSettings
from rrl.core.types import Incarnation, NodeName, Outcome, ReplicaId, Version, member_id
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Finish, RestartAll, Rung
from rrl.manager.model.reduce_replicas import MAX_RESTART_BACKOFF_S
from rrl.manager.planner.shutdown import final_reason
from rrl.tests.support.manager.jobs import REWARD, ROLLOUTS, RUN, STORE, TRAINER, gang_job, job
from rrl.tests.support.manager.world import World, assert_nothing_is_left, at_step, charged, fail, found, lost

R0, R1 = ROLLOUTS
T0, T1, T2, T3 = (member_id(TRAINER, rank) for rank in range(4))
N2, N5 = NodeName("n2"), NodeName("n5")
_AWAY = "{} failed"


def test_first_step_of_the_first_incarnation_has_a_second_try_before_a_full_restart() -> None:
    world = World(job(recovery=Recovery(per_replica=99))).steady()
    began = world.now
    world.kill(TRAINER)
    world.steady()
    assert charged(world) == [("trainer/0#1", Rung.IN_PLACE)]
    fail(world, TRAINER)
    (restart,) = world.decided(RestartAll)
    assert restart.failed == Incarnation(TRAINER, 2)
    second = "second failure in the same training step, the step after the start"
    assert restart.why.evidence == (_AWAY.format("trainer/0#2"), second)
    assert (restart.why.rung, restart.why.expects) == (
        Rung.FULL_RESTART,
        "every role joins again, and a step is committed",
    )
    assert restart.why.deadline == world.now + MAX_RESTART_BACKOFF_S + world.state.job.limits.join
    world.steady()
    world.kill(TRAINER)
    world.play()
    assert world.now > began + MAX_RESTART_BACKOFF_S
    (end,) = world.decided(Finish)
    assert end.why.evidence[1:] == (
        "it failed in its first training step, the step after the start: earlier starts reached this step",
        "it failed again after a restart of the whole run, and no step was finished since step 0",
        f"rrl logs {RUN} --failed shows its last lines",
    )
    assert final_reason(world.state).endswith(f"rrl resume {RUN} goes on from step 0")
    assert_nothing_is_left(world, Outcome.FAILED)


def test_first_step_failing_after_a_node_caused_restart_restarts_the_run() -> None:
    world = at_step(World(job(), nodes=9).steady(), 1)
    world.lose_node(world.node_of(TRAINER))
    world.steady()
    fail(world, TRAINER)
    (restart,) = world.decided(RestartAll)
    assert restart.why.evidence[1:] == (
        "it failed in its first training step, the step after step 1: earlier starts reached this step",
    )


def test_step_committed_before_a_failure_is_not_held_against_the_restart() -> None:
    world = World(job(steps=99, recovery=Recovery(per_replica=99, per_node=99))).steady()
    for step in range(1, 6):
        world.kill(TRAINER)
        world.steady()
        world.commit(step)
    assert world.decided(RestartAll) == []


def _publishes(world: World, step: int) -> None:
    """Publish the weights of a step that has not been committed yet."""
    incarnation = world.state.replica(TRAINER).incarnation
    world.record(ev.VersionAvailable(incarnation, Version(step, incarnation.number)))


def _with_large_commits() -> World:
    made = job(recovery=Recovery(per_replica=99, per_node=99), steps=99)
    return World(replace(made, trainer=TrainerSettings(checkpoint_every=20))).steady()


def test_failures_in_different_steps_between_two_commits_are_no_software_fault() -> None:
    world = _with_large_commits()
    for step in (3, 5, 4):
        for published in range(1, step + 1):
            _publishes(world, published)
        world.kill(TRAINER)
        world.steady()
    assert world.decided(RestartAll) == []


def test_second_failure_in_the_same_uncommitted_step_restarts_the_run() -> None:
    world = _with_large_commits()
    for kill in (world.kill, lambda id: fail(world, id)):
        for published in (1, 2, 3):
            _publishes(world, published)
        kill(TRAINER)
        world.steady()
    (restart,) = world.decided(RestartAll)
    assert restart.why.evidence[-1] == "second failure in the same training step, the step after step 3"


def test_second_failure_of_any_member_in_a_step_restarts_the_run() -> None:
    world = at_step(World(gang_job(warm=False)).steady(), 1)
    world.kill(T1)
    world.steady()
    assert charged(world) == [("trainer/0.1#1", Rung.IN_PLACE)]
    world.record(ev.StepCommitted(world.state.replica(T0).incarnation, 2))
    world.kill(T3)
    world.steady()
    assert world.decided(RestartAll) == []  # a step later
    fail(world, T2)
    (restart,) = world.decided(RestartAll)
    assert restart.failed == Incarnation(T2, 3)


def test_second_failed_restart_in_a_row_restarts_the_run() -> None:
    world = at_step(World(job(recovery=Recovery(per_node=9))).steady(), 1)
    world.broken["trainer"] = "ImportError"
    world.kill(TRAINER)
    world.play(lambda: bool(world.decided(RestartAll)), timeout_s=100.0)
    assert charged(world)[:2] == [("trainer/0#1", Rung.IN_PLACE), ("trainer/0#2", Rung.IN_PLACE)]
    (restart,) = world.decided(RestartAll)
    assert restart.failed == Incarnation(TRAINER, 3)
    assert restart.why.evidence[-1] == "two restarts in a row failed after step 1"
    world.broken.clear()
    assert world.steady().state.finish is None


def test_failed_restarts_with_work_in_between_are_not_in_a_row() -> None:
    world = at_step(World(job(recovery=Recovery(per_node=9), steps=99)).steady(), 1)
    for step in (2, 3):
        world.broken["trainer"] = "ImportError"
        world.kill(TRAINER)
        world.play(lambda: not world.state.replica(TRAINER).failures[-1].joined)
        world.broken.clear()
        world.steady()
        world.commit(step)
    assert [start.joined for start in world.state.replica(TRAINER).failures] == [True, False, True, False]
    assert world.decided(RestartAll) == []


def test_injected_failures_do_not_count_against_the_step() -> None:
    world = at_step(World(job(recovery=Recovery(per_node=9))).steady(), 1)
    for n in range(4):
        world.happen(ev.FaultRequested(Fault(f"i{n}", FaultKind.KILL, TRAINER, by="ada"), "ada", f"c{n}"))
        world.wait(30.0)
    assert len(world.state.replica(TRAINER).failures) == 4
    assert all(start.injected for start in world.state.replica(TRAINER).failures)
    assert world.decided(RestartAll) == []


def test_failures_that_a_node_explains_do_not_count_against_the_step() -> None:
    world = at_step(World(job(recovery=Recovery(breaker=1.0)), nodes=20).steady(), 1)
    for _ in range(3):
        node = world.node_of(TRAINER)
        world.record(found(world.state.replica(TRAINER).incarnation, "exit_record", world.now))
        world.lose_node(node)
        world.record(lost(node, world.now))
        world.steady()
    assert len(world.state.replica(TRAINER).failures) == 3
    assert world.decided(RestartAll) == []


def test_launches_that_the_cluster_refuses_do_not_count_against_the_software() -> None:
    world = at_step(World(job(recovery=Recovery(per_node=9))).steady(), 1)
    world.refuse_launch = {N2, N5}
    world.kill(TRAINER)
    world.play(timeout_s=20.0)
    assert len([start for start in world.state.replica(TRAINER).failures if start.refused]) > 2
    world.refuse_launch = set()
    world.broken["trainer"] = "ImportError"
    world.play(lambda: not world.state.replica(TRAINER).failures[-1].refused)
    world.broken.clear()
    world.steady()
    assert world.decided(RestartAll) == []


@pytest.mark.parametrize("order", [(R0, STORE, R1, TRAINER, REWARD), (TRAINER, STORE, R0, REWARD, R1)])
def test_trainer_failing_together_with_others_is_not_blamed(order: tuple[ReplicaId, ...]) -> None:
    world = at_step(World(job(recovery=Recovery(per_node=99))).steady(), 1)
    for _ in range(4 if order[0] == R0 else 3):
        for replica in order:
            world.kill(replica)
        world.steady()
        world.wait(20.0)
    assert len(world.state.replica(TRAINER).failures) >= 3
    assert (world.decided(RestartAll), world.state.finish) == ([], None)


def test_second_failure_together_with_others_is_not_blamed_either() -> None:
    world = at_step(World(job(recovery=Recovery(per_node=99))).steady(), 1)
    world.kill(TRAINER)
    world.steady()
    world.wait(20.0)
    for replica in (R0, STORE, R1, REWARD, TRAINER):
        world.kill(replica)
    world.steady()
    assert world.decided(RestartAll) == []


def test_single_rollout_failure_among_many_explains_nothing() -> None:
    world = at_step(World(job(rollouts=30, recovery=Recovery(per_node=99))).steady(), 1)
    for _ in range(2):
        world.kill(R0)
        world.kill(TRAINER)
        world.play(lambda: world.works() or bool(world.decided(RestartAll)))
    assert len(world.decided(RestartAll)) == 1
