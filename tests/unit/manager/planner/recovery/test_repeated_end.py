"""A role whose own code raises or returns in each start ends the run within three starts, with the reason."""

from __future__ import annotations

import msgspec
import pytest

from rrl.core.faults import Fault, FaultKind
from rrl.core.launch import ExitReason
from rrl.core.run_spec import Recovery
from rrl.core.types import Flag, Incarnation, NodeName, Outcome, RaisedException, ReplicaId, member_id
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, Finish, InjectFault, RestartAll, Rung, Why
from rrl.manager.model.state import Status
from rrl.tests.support.manager.jobs import REWARD, ROLLOUTS, STORE, TRAINER, command, commands, gang_job, job
from rrl.tests.support.manager.world import World, assert_nothing_is_left, fences, found

R0, R1 = ROLLOUTS
N3, N4, N5 = (NodeName(f"n{number}") for number in (3, 4, 5))
MISTAKE = RaisedException("TypeError", "Expected state_dict to be dict-like", "rollout.py:21", "abc")
TEXT = "TypeError: Expected state_dict to be dict-like (rollout.py:21)"


def end(world: World) -> Finish:
    (finish,) = world.decided(Finish)
    return finish


def raise_in(world: World, replica: ReplicaId, exception: RaisedException = MISTAKE) -> None:
    """Record that the exception ended the replica, and let the planner decide."""
    incarnation = world.state.replica(replica).incarnation
    world.happen(found(incarnation, "exit_record", world.now, proof=True, exception=exception))


def work(world: World, replica: ReplicaId) -> None:
    world.happen(ev.FirstWorkDone(world.state.replica(replica).incarnation))


# ── the run ends ─────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("role", ["rollout", "trainer", "reward"])
def test_exception_at_every_start_ends_the_run_within_three_starts(role: str, spares: int) -> None:
    world = World(job(spares=spares))
    world.raises[role] = MISTAKE
    world.play()
    first, second, *_ = end(world).why.evidence
    assert first.partition(": ")[2] == TEXT
    assert second == f"this exception ended 3 starts in a row, and no replica of {role} has done any work"
    assert max(world.incarnations().values()) == 3
    assert world.decided(RestartAll) == []
    assert world.now < 1030.0
    assert_nothing_is_left(world, Outcome.FAILED)


@pytest.mark.parametrize("returns", [False, True])
def test_ends_in_turn_of_two_members_of_a_gang_count_for_the_gang(returns: bool) -> None:
    world = World(gang_job(2, 1, rollouts=1, spares=0)).steady()
    for rank in (1, 0, 1):
        assert world.decided(Finish) == []
        (leave if returns else raise_in)(world, member_id(TRAINER, rank))
        world.play(lambda: world.works() or world.over)
    text = "trainer/0.1 exited with code 0 in 3 starts in a row" if returns else f"trainer/0.1: {TEXT}"
    assert end(world).why.evidence[0].startswith(text)


def test_starts_that_take_longer_than_the_window_count_too() -> None:
    world = World(job(rollouts=1, recovery=Recovery(window=60.0))).steady()
    for starts in (1, 2, 3):
        assert world.state.replica(R0).incarnation_number == starts
        world.wait(100.0)
        raise_in(world, R0)
        world.play(lambda: world.works() or world.over)
    assert end(world).why.evidence[0] == f"rollout/0: {TEXT}"


def test_budget_of_differing_exceptions_is_never_reported_as_refused_launches() -> None:
    world = World(job(rollouts=1, recovery=Recovery(per_replica=4, per_node=99)))
    world.play(lambda: world.works())
    for number in range(12):
        if not world.over:
            raise_in(world, R0, msgspec.structs.replace(MISTAKE, fingerprint=str(number)))
            world.play(lambda: world.works() or world.over)
    reasons = [line for action in world.actions for line in action.why.evidence]
    assert "refused" not in " ".join(reasons)
    assert "rollout/0#6 failed" in end(world).why.evidence
    assert_nothing_is_left(world, Outcome.FAILED)


def test_role_with_a_spent_budget_is_started_again_by_the_restart_of_the_run() -> None:
    """An older planner ended the run at once after this restart, and gave refused launches as the reason."""
    world = World(job(rollouts=1, recovery=Recovery(per_replica=2, per_node=99))).steady()
    world.commit(1)
    for _ in range(3):
        world.kill(R0)
        world.play(lambda: world.works() or world.over)
    assert len(world.decided(RestartAll)) == 1
    assert (world.works(), world.decided(Finish)) == (True, [])


@pytest.mark.parametrize("replica", [REWARD, TRAINER])
def test_exception_that_no_start_repairs_ends_the_run_at_once_although_its_role_has_worked(replica: ReplicaId) -> None:
    world = World(job()).steady()
    work(world, replica)
    world.commit(1)
    raise_in(world, replica, msgspec.structs.replace(MISTAKE, unrepairable="the rate is too high", environmental=True))
    assert end(world).why.evidence[:2] == (f"{replica}: {TEXT}", "the rate is too high")
    world.play()
    assert max(world.incarnations().values()) == 1
    assert_nothing_is_left(world, Outcome.FAILED)


def test_broken_rule_of_the_worker_api_ends_the_run_within_three_starts_of_a_role_that_has_worked() -> None:
    world = World(job(rollouts=1, recovery=Recovery(per_node=99))).steady()
    work(world, R0)
    for _ in range(3):
        assert world.decided(Finish) == []
        raise_in(world, R0, msgspec.structs.replace(MISTAKE, counts_always=True))
        world.play(lambda: world.works() or world.over)
    first, second, _ = end(world).why.evidence
    assert (first, second) == (f"rollout/0: {TEXT}", "this exception ended 3 starts in a row, each before any work")
    assert_nothing_is_left(world, Outcome.FAILED)


# ── the run goes on ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_third_start_is_on_another_node_where_the_replica_may_work() -> None:
    world = World(job(recovery=Recovery(per_node=9)))
    world.raises_on[N3] = MISTAKE
    world.play(lambda: world.state.replica(R0).incarnation_number == 3)
    world.steady()
    assert (world.node_of(R0), world.decided(Finish)) == (N5, [])


def test_replica_that_its_role_can_spare_is_retired_while_the_other_may_work() -> None:
    world = World(job(spares=0))
    world.raises_on[N3] = MISTAKE
    world.play(lambda: world.state.replica(R0).status is Status.RETIRED, timeout_s=60.0)
    world.play(timeout_s=60.0)
    assert (world.state.replica(R1).status, world.decided(Finish)) == (Status.JOINED, [])
    assert fences(world)[-1].why.evidence[0] == f"rollout/0: {TEXT}"
    assert world.state.replica(R0).incarnation_number == 3


@pytest.mark.parametrize("worker", [R0, R1])
def test_exceptions_after_the_role_has_worked_climb_the_ladder(worker: ReplicaId) -> None:
    world = World(job(spares=2, recovery=Recovery(per_node=2))).steady()
    work(world, worker)
    for _ in range(4):
        raise_in(world, R0)
        world.play(lambda: world.works() or world.over)
    taken = [fence.rung for fence in fences(world)]
    assert taken == [Rung.IN_PLACE, Rung.IN_PLACE, Rung.SPARE, Rung.IN_PLACE]
    assert world.decided(Finish) == []


def test_exception_after_progress_of_the_trainer_still_restarts_the_run() -> None:
    world = World(job()).steady()
    work(world, TRAINER)
    for _ in range(2):
        raise_in(world, TRAINER)
        world.play(lambda: world.works() or world.over)
    assert (len(world.decided(RestartAll)), world.decided(Finish)) == (1, [])


@pytest.mark.parametrize("change", [{"environmental": True}, {"fingerprint": "another"}])
def test_environmental_or_other_exception_does_not_count_as_the_same(change: dict[str, object]) -> None:
    world = World(job(recovery=Recovery(per_node=99))).steady()
    other = msgspec.structs.replace(MISTAKE, **change)
    for exception in (other, MISTAKE, other, MISTAKE, other):
        raise_in(world, R0, exception)
        world.play(lambda: world.works() or world.over)
    assert (world.works(), world.decided(Finish)) == (True, [])


@pytest.mark.parametrize("kind", [FaultKind.EXCEPTION, FaultKind.EXIT])
def test_ends_by_injected_faults_do_not_end_the_run(kind: FaultKind) -> None:
    world = World(job(rollouts=1, spares=0, recovery=Recovery(per_node=99))).steady()
    for number in range(4):
        replica = world.state.replica(R0)
        fault = Fault(str(number), kind, target=R0)
        inject = InjectFault(fault, replica.step or "", replica.node or N3, Why(("a test",)), replica.incarnation)
        world.record(ev.Intended(inject))
        world.record(ev.FaultInjected(fault.id, replica.incarnation, True))
        (leave if kind is FaultKind.EXIT else raise_in)(world, R0)
        world.play(lambda: world.works() or world.over)
    assert (world.works(), world.decided(Finish)) == (True, [])


def test_exception_on_a_node_with_a_failure_of_its_own_is_the_nodes() -> None:
    world = World(job(spares=0, rollouts=1)).steady()
    for _ in range(2):
        raise_in(world, R0)
        world.play(lambda: world.works() or world.over)
    finding = found(world.state.replica(R0).incarnation, "xid", world.now).finding
    on_node = msgspec.structs.replace(finding, incarnation=None, node=N3, flags=(Flag.OBSERVED,))
    world.record(ev.FindingChanged(on_node))
    raise_in(world, R0)
    assert world.decided(Finish) == []


def test_gradient_that_is_not_finite_is_repaired_if_the_node_of_any_member_has_failed() -> None:
    """Every member reports such a gradient; a GPU of one of them may have computed it."""
    world = World(gang_job(2, 1, rollouts=1, spares=1)).steady()
    failing, reporting = member_id(TRAINER, 1), member_id(TRAINER, 0)
    finding = found(world.state.replica(failing).incarnation, "xid", world.now).finding
    on_node = msgspec.structs.replace(finding, incarnation=None, node=world.node_of(failing), flags=(Flag.OBSERVED,))
    world.record(ev.FindingChanged(on_node))
    raise_in(world, reporting, msgspec.structs.replace(MISTAKE, unrepairable="the rate is too high"))
    assert world.decided(Finish) == []
    world.steady()


def test_exceptions_of_the_role_before_a_resume_do_not_count() -> None:
    world = World(job(rollouts=1, spares=0)).steady()
    for _ in range(2):
        raise_in(world, R0)
        world.play(lambda: world.works())
    world.cancel()
    world.play()
    world.record(ev.RunEnded(Outcome.CANCELLED, "asked"))
    world.over = False
    world.happen(ev.Resumed("me", "r1", world.state.job))
    world.steady()
    raise_in(world, R0)
    world.steady()
    assert world.state.replica(R0).exception_starts == 1


def test_exception_of_the_store_is_named_by_the_end_of_the_run() -> None:
    world = World(job(spares=0)).steady()
    for _ in range(3):
        raise_in(world, STORE)
        world.play(lambda: world.works() or world.over)
    assert end(world).why.evidence[0] == f"trajectories/0: {TEXT}"


def test_fence_of_another_incarnation_leaves_the_count_alone() -> None:
    world = World(job()).steady()
    raise_in(world, R0)
    world.steady()
    why = Why(("a test",))
    world.happen(ev.Decided(Fence(Incarnation(R0, 1), Rung.IN_PLACE, why)))
    assert world.state.replica(R0).exception_starts == 1


# ── programs that return ─────────────────────────────────────────────────────────────────────────────────────────────
def leave(world: World, replica: ReplicaId) -> None:
    """Record that the replica's program returned with exit code 0, and let the planner decide."""
    incarnation = world.state.replica(replica).incarnation
    world.happen(found(incarnation, "exit_record", world.now, proof=True, reason=ExitReason.EXITED, code=0))


@pytest.mark.parametrize("replica", [R0, STORE, REWARD, TRAINER])
def test_program_that_returns_after_a_little_work_ends_the_run_at_the_third_time(replica: ReplicaId) -> None:
    world = World(job(rollouts=1, spares=0, steps=9)).steady()
    for step in (1, 2, 3):
        assert world.decided(Finish) == []
        work(world, replica)
        world.commit(step)
        leave(world, replica)
        world.play(lambda: world.works() or world.over)
    returned, advice, where = end(world).why.evidence
    assert returned == f"{replica} exited with code 0 in 3 starts in a row before the run was complete"
    assert advice == "its program returned: let it loop until me.stopping is set"
    assert where.endswith(" --failed shows its last lines")
    assert world.decided(RestartAll) == []
    assert_nothing_is_left(world, Outcome.FAILED)


def test_scorer_that_ends_its_process_is_named() -> None:
    world = World(job(rollouts=1, spares=0, steps=9)).steady()
    for _ in range(3):
        world.happen(ev.PhaseEntered(world.state.replica(REWARD).incarnation, "score"))
        leave(world, REWARD)
        world.play(lambda: world.works() or world.over)
    assert end(world).why.evidence[1].startswith("it ended while it scored an answer: the scorer ends its process")


def test_trainer_that_returns_without_a_commit_ends_the_run_without_a_restart_of_it() -> None:
    world = World(job(spares=0)).steady()
    world.commit(1)
    for _ in range(3):
        leave(world, TRAINER)
        world.play(lambda: world.works() or world.over)
    assert end(world).why.evidence[0].startswith("trainer/0 exited with code 0 in 3 starts in a row")
    assert world.decided(RestartAll) == []


def test_every_rollout_returns_and_the_last_one_ends_the_run() -> None:
    world = World(job(rollouts=2, spares=0)).steady()
    for replica in (R0, R1, R0, R1, R0):
        leave(world, replica)
        assert world.decided(Finish) == []
        world.play(lambda: world.works() or world.state.replica(R0).status is Status.RETIRED)
    assert world.state.replica(R0).status is Status.RETIRED
    leave(world, R1)
    assert end(world).why.evidence[0].startswith("rollout/1 exited with code 0 in 3 starts in a row")


def test_rollout_that_returns_after_hours_is_only_restarted() -> None:
    world = World(job(rollouts=1, spares=0)).steady()
    for number in range(1, 6):
        assert world.state.replica(R0).incarnation_number == number
        world.wait(world.state.job.recovery.window + 1.0)
        leave(world, R0)
        world.steady()
    assert [fence.rung for fence in fences(world)] == [Rung.IN_PLACE] * 5
    assert world.decided(Finish) == []


@pytest.mark.parametrize("between", ["failure", "long work"])
def test_another_end_between_two_returns_restarts_the_count(between: str) -> None:
    world = World(job(rollouts=1, spares=0, recovery=Recovery(per_node=99))).steady()
    for number in range(5):
        if number == 2 and between == "long work":
            world.wait(world.state.job.recovery.window + 1.0)
        if number == 2 and between == "failure":
            world.kill(R0)
        else:
            leave(world, R0)
        world.play(lambda: world.works() or world.over)
    assert (world.works(), world.decided(Finish)) == (True, [])
    assert world.state.replica(R0).clean_exits == 2


def test_resumed_run_counts_clean_exits_from_zero() -> None:
    world = World(job(rollouts=1, spares=0)).steady()
    for _ in range(3):
        leave(world, R0)
        world.play(lambda: world.works() or world.over)
    assert end(world)
    world.play()
    world.record(ev.RunEnded(Outcome.FAILED, "it returned"))
    world.over = False
    world.happen(ev.Resumed("me", "r1", world.state.job))
    world.steady()
    leave(world, R0)
    world.steady()
    assert world.state.replica(R0).clean_exits == 1


def test_service_that_returns_ends_the_run_with_advice_for_commands() -> None:
    world = World(commands(command("shard"), command("cache", service=True))).steady()
    for _ in range(3):
        leave(world, ReplicaId("cache/0"))
        world.play(lambda: world.works() or world.over)
    returned, advice, _ = end(world).why.evidence
    assert returned == "cache/0 exited with code 0 in 3 starts in a row before the run was complete"
    assert advice == "its command returned, but a service runs until SIGTERM; without `service`, code 0 means done"
