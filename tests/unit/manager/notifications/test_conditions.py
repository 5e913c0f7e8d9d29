"""The conditions that cause notifications, in the states of virtual runs."""

from __future__ import annotations

import msgspec
import pytest

from rrl.cluster.base import NodeState, NodeStatus
from rrl.core.run_spec import Recovery
from rrl.core.types import NodeName, Outcome, ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Drain, Exclude, Why
from rrl.manager.model.state import State
from rrl.manager.notifications.conditions import LIMIT_S, STALLED_AFTER_S, Condition, StallClock, conditions
from rrl.tests.support.cli.story import Story
from rrl.tests.support.manager.jobs import ROLLOUTS, command, commands, gang_job, job
from rrl.tests.support.manager.world import World

R0, R1 = ROLLOUTS
N3 = NodeName("n3")


def held(world: World, stalled_s: float | None = None) -> list[Condition]:
    return conditions(world.state, world.now, stalled_s)


def test_a_run_in_which_everything_works_has_no_condition() -> None:
    assert held(World(job()).steady()) == []


# ── degraded runs ────────────────────────────────────────────────────────────────────────────────────────────────────
def _lose_for_good(world: World, replica: ReplicaId, times: int) -> None:
    for _ in range(times):
        world.kill(replica)
        world.play(world.works, timeout_s=100.0)


def test_lost_replica_that_the_run_can_spare_is_a_condition_of_its_last_incarnation() -> None:
    world = World(job(recovery=Recovery(per_node=9, per_replica=1))).steady()
    _lose_for_good(world, R0, 2)
    (degraded,) = held(world)
    assert (degraded.kind, degraded.key) == ("degraded", "rollout/0#2")
    assert degraded.text.startswith("the run continues without rollout/0: rollout/0#2 failed")
    world.wait(700.0)
    assert world.works(), "the replica was not started again after the window"
    assert held(world) == []


def test_lost_gang_is_one_condition() -> None:
    crew = msgspec.structs.replace(command("crew", 2, least=1), ranks=2, per_node=1)
    world = World(commands(crew, recovery=Recovery(per_node=9, per_replica=1), spares=2)).steady()
    _lose_for_good(world, ReplicaId("crew/1.1"), 2)
    assert [(one.kind, one.key) for one in held(world)] == [("degraded", "crew/1#2")]


def test_replicas_that_stop_with_the_run_are_no_condition() -> None:
    world = World(job()).steady()
    world.cancel()
    assert [one.kind for one in held(world)] == []


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("outcome", "kinds"),
    [
        (Outcome.COMPLETED, ["completed"]),
        (Outcome.FAILED, ["failed"]),
        (Outcome.REJECTED, ["failed"]),
        (Outcome.CANCELLED, []),
    ],
)
def test_end_of_a_run_is_a_condition_unless_a_user_cancelled_it(outcome: Outcome, kinds: list[str]) -> None:
    story = Story().works().ends(outcome, "because")
    assert [one.kind for one in conditions(story.recorded(), story.now, None)] == kinds
    assert [one.text for one in conditions(story.recorded(), story.now, None)] == ["because"] * len(kinds)


def test_end_of_a_run_long_ago_is_no_condition() -> None:
    story = Story().works().ends(Outcome.FAILED, "because")
    assert conditions(story.recorded(), story.now + LIMIT_S, None) == []


def test_each_end_of_a_resumed_run_has_its_own_notification_key() -> None:
    story = Story().works().ends(Outcome.FAILED, "because")
    (first,) = conditions(story.recorded(), story.now, None)
    story.wait(60).record(ev.Resumed("ada", "r1", story.job)).ends(Outcome.FAILED, "because")
    (second,) = conditions(story.recorded(), story.now, None)
    assert first.key != second.key


# ── drains ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _drained(ok: bool) -> State:
    story = Story().works()
    drain = Drain(N3, "rrl:small:gpu: Xid 79", Why(("xid: Xid 79",)))
    story.record(ev.Decided(Exclude(N3, Why(("xid: Xid 79",)))), ev.Intended(drain))
    return story.record(ev.IntentSettled(drain.tag, ok, "" if ok else "Invalid user id")).recorded()


def test_a_drain_is_a_condition_whether_slurm_allowed_it_or_not() -> None:
    done, refused = _drained(True), _drained(False)
    assert [one.text for one in conditions(done, done.at, None)] == ["n3 is drained: xid: Xid 79"]
    assert [one.text for one in conditions(refused, refused.at, None)] == [
        "n3 should be drained by an administrator, since rrl may not drain it (Invalid user id): xid: Xid 79"
    ]


# ── stalls ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class Shown:
    """A stall clock that gets the state of a run as time passes."""

    def __init__(self, story: Story) -> None:
        self.story, self.clock = story, StallClock()

    def after(self, seconds: float) -> float | None:
        return self.clock.stalled_s(self.story.wait(seconds).recorded(), self.story.now)

    def steps(self, first: int, count: int, seconds: float) -> None:
        for step in range(first, first + count):
            self.story.wait(seconds).record(ev.StepCommitted(self.story.incarnation("trainer/0"), step))
            assert self.after(0) is None


def test_a_run_without_a_step_for_half_an_hour_stalls_once_its_usual_steps_are_known() -> None:
    shown = Shown(Story().works())
    assert shown.after(0) is None
    shown.steps(13, 3, 10.0)
    assert shown.after(STALLED_AFTER_S - 1) is None
    assert shown.after(1) == STALLED_AFTER_S
    shown.story.commits(16)
    assert shown.after(0) is None, "the run counts as stalled after a new commit"


def test_stall_limit_grows_with_the_usual_duration_of_steps() -> None:
    shown = Shown(Story().works())
    assert shown.after(0) is None
    shown.steps(13, 3, 1200.0)
    assert shown.after(5 * 1200.0 - 1) is None
    assert shown.after(1) == 5 * 1200.0


def test_the_first_steps_have_time_for_compilation() -> None:
    shown = Shown(Story().works())
    assert shown.after(0) is None
    assert shown.after(STALLED_AFTER_S + 1799) is None
    assert shown.after(1) == STALLED_AFTER_S + 1800


def test_a_run_that_waits_for_its_first_nodes_or_ends_does_not_stall() -> None:
    waiting = Shown(Story().requests_nodes())
    assert (waiting.after(0), waiting.after(1e6)) == (None, None)
    story = Story().works()
    ending = Shown(story)
    assert ending.after(0) is None
    story.stops(Outcome.FAILED, "because")
    assert ending.after(1e6) is None


def test_stall_limit_restarts_with_a_resume() -> None:
    story = Story().works()
    shown = Shown(story)
    assert shown.after(0) is None
    assert shown.after(1e5) is not None
    story.ends(Outcome.CANCELLED, "c").record(ev.Resumed("ada", "r1", story.job))
    assert shown.after(0) is None


def test_a_stall_is_one_condition_for_each_step_and_resume() -> None:
    story = Story().works()
    (stalled,) = conditions(story.recorded(), story.now, 1860.0)
    assert (stalled.kind, stalled.key) == ("stalled", "step 12, 0 s paused")
    assert stalled.text.startswith("no training step for 31 min; 12 of 40 steps are committed; to see")


def test_a_gang_trainer_that_works_is_no_condition() -> None:
    world = World(gang_job(2, 1)).steady()
    world.happen(ev.NodeChanged(N3, NodeStatus(NodeState.UP)))
    assert held(world) == []
