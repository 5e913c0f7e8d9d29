"""The rows of committed steps, computed from a run's events alone."""

from __future__ import annotations

import math

import msgspec
import pytest

from rrl.core.run_spec import RunSpec
from rrl.core.task_spec import EvalSpec
from rrl.core.types import Incarnation, Outcome, ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.reporting.step_metrics import MarkKind, StepRow, StepRows, step_rows
from rrl.tests.support.cli.story import BEGAN, Story, job_view

TRAINER = ReplicaId("trainer/0")


@pytest.fixture
def story() -> Story:
    return commits(begun(), 1)


def commits(story: Story, step: int, after: float = 3.0, **metrics: float) -> Story:
    story.wait(after)
    return story.record(ev.StepCommitted(story.incarnation("trainer/0"), step, metrics))


def begun(job: RunSpec | None = None) -> Story:
    story = Story(job=job).requests_nodes().gets_nodes().wait(2)
    for replica in ("trajectories/0", "reward/0", "trainer/0", "rollout/0", "rollout/1"):
        story.launches(replica)
    story.wait(5).joins("trajectories/0", "serve").joins("reward/0", "wait_work", "trajectories/0")
    story.joins("trainer/0", "wait_data", "rollout/0")
    for rollout in ("rollout/0", "rollout/1"):
        story.joins(rollout, "generate").record(ev.FirstWorkDone(story.incarnation(rollout)))
    return story


def rows_of(story: Story) -> list[StepRow]:
    return list(step_rows(story.stamped))


def test_a_row_has_time_incarnation_rate_and_staleness_of_its_step() -> None:
    story = begun()
    commits(story, 1, 4.0, tokens=640.0, reward=0.5, token_age_p50=1.0, token_age_max=2.0)
    [row] = rows_of(story)
    assert (row.step, row.at, row.incarnation) == (1, BEGAN + story.at, "trainer/0#1")
    assert (row.seconds, row.tokens, row.tokens_per_second) == (4.0, 640, 160.0)
    assert (row.token_age_p50, row.token_age_max) == (1.0, 2.0)
    assert row.metrics == {"tokens": 640.0, "reward": 0.5, "token_age_p50": 1.0, "token_age_max": 2.0}


def test_rate_of_a_gpu_is_that_of_the_trainers_gpus() -> None:
    job = job_view()
    roles = [
        msgspec.structs.replace(role, per_member=msgspec.structs.replace(role.per_member, gpus=2)) for role in job.roles
    ]
    for gpus, rate in ((0, None), (2 * job.role("trainer").ranks, 40.0)):
        story = commits(begun(msgspec.structs.replace(job, roles=tuple(roles)) if gpus else None), 1, 4.0, tokens=320.0)
        [row] = rows_of(story)
        assert (row.tokens_per_second, row.tokens_per_second_gpu) == (80.0, rate)


def test_steps_of_one_commit_share_its_time_evenly() -> None:
    story = commits(begun(), 1, 4.0)
    trainer = story.wait(9.0).incarnation("trainer/0")
    story.record(*(ev.StepCommitted(trainer, step, {"loss": float(step)}, 4) for step in (2, 3, 4)))
    commits(story, 5, 2.0)
    rows = rows_of(story)
    assert [(row.step, row.seconds) for row in rows] == [(1, 4.0), (2, 3.0), (3, 3.0), (4, 3.0), (5, 2.0)]
    assert [row.metrics.get("loss") for row in rows] == [None, 2.0, 3.0, 4.0, None]


def test_tokens_of_a_step_without_a_token_count_are_those_with_a_known_age() -> None:
    story = commits(begun(), 1, 2.0, tokens_aged_0=100.0, tokens_aged_1=20.0)
    commits(story, 2, 2.0, loss=1.0)
    first, second = rows_of(story)
    assert (first.tokens, first.tokens_per_second) == (120, 60.0)
    assert (second.tokens, second.tokens_per_second) == (None, None)


def test_trainer_time_between_two_clock_readings_is_shared_by_its_steps() -> None:
    story = begun()
    story.record(ev.ClocksRecorded((story.reading("trainer/0", wait_data=1.0),)))
    commits(story, 1)
    commits(story, 2)
    story.record(ev.ClocksRecorded((story.reading("trainer/0", train=4.0, wait_data=3.0),)))
    commits(story, 3)
    story.record(ev.ClocksRecorded((story.reading("trainer/0", train=6.0, wait_data=3.5),)))
    one, two, three = (row.phase_seconds for row in rows_of(story))
    assert one == two == {"train": 2.0, "wait_data": 1.5}
    assert three == {"train": 2.0, "wait_data": 0.5}


def test_clock_reading_just_before_a_commit_counts_for_that_step() -> None:
    story = begun().wait(60)
    story.record(ev.ClocksRecorded((story.reading("trainer/0", train=50.0),)))
    commits(story, 1, 0.1)
    story.record(ev.ClocksRecorded((story.reading("rollout/0", generate=50.0),)))
    assert [row.phase_seconds for row in rows_of(story)] == [{"train": 50.0}]


def test_the_clock_of_a_new_process_of_the_trainer_begins_at_zero(story: Story) -> None:
    story.record(ev.ClocksRecorded((story.reading("trainer/0", train=3.0),)))
    story.loses("trainer/0")
    story.launches("trainer/0").joins("trainer/0", "train")
    commits(story, 2)
    story.record(ev.ClocksRecorded((story.reading("trainer/0", train=2.0),)))
    assert [row.phase_seconds for row in rows_of(story)] == [{"train": 3.0}, {"train": 2.0}]


def test_rows_are_complete_once_a_clock_reading_follows_and_then_never_change(story: Story) -> None:
    rows = StepRows()
    assert [row for stamped in story.stamped for row in rows.apply(stamped)] == []
    [pending] = rows.rest()
    assert (pending.step, pending.phase_seconds) == (1, {})
    story.record(ev.ClocksRecorded((story.reading("trainer/0", train=3.0),)))
    [complete] = rows.apply(story.stamped[-1])
    assert (complete.step, complete.phase_seconds, rows.rest()) == (1, {"train": 3.0}, [])


def test_step_that_is_reported_repeatedly_or_never_has_one_row() -> None:
    story = commits(begun(), 1, reward=0.1)
    commits(story, 1, 1.0, reward=0.1)
    commits(story, 4, 1.0, reward=0.4)
    commits(story, 41, 1.0)  # the job has 40 steps
    rows = rows_of(story)
    assert [row.step for row in rows] == [1, 2, 3, 4]
    assert [row.incarnation for row in rows] == ["trainer/0#1", "", "", "trainer/0#1"]
    assert [row.metrics for row in rows] == [{"reward": 0.1}, {}, {}, {"reward": 0.4}]


def test_steps_committed_while_the_manager_was_away_share_its_time_and_are_marked() -> None:
    story = commits(begun(), 1, tokens=100.0)
    story.record(ev.ClocksRecorded((story.reading("trainer/0", train=3.0),)))
    story.wait(57).epoch = 2
    story.record(ev.ManagerStarted("login2", 1))
    for step in (2, 3, 4):
        commits(story, step, 1.0, tokens=100.0)
    story.record(ev.ClocksRecorded((story.reading("trainer/0", train=63.0),)))
    rows = rows_of(story)
    assert [row.seconds for row in rows[1:]] == [20.0, 20.0, 20.0]
    assert [row.tokens_per_second for row in rows[1:]] == [5.0, 5.0, 5.0]
    assert [row.phase_seconds for row in rows[1:]] == [{"train": 20.0}] * 3
    assert [(mark.kind, mark.text) for mark in rows[1].marks] == [
        (MarkKind.MANAGER, "another manager started on login2")
    ]


def test_a_failure_and_the_restart_after_it_are_marks_of_the_next_step(story: Story) -> None:
    story.loses("rollout/1", "it ended by signal 9")
    story.fences("rollout/1").wait(2)
    story.launches("rollout/1").joins("rollout/1", "generate").wait(1)
    story.record(ev.FirstWorkDone(story.incarnation("rollout/1")))
    commits(story, 2)
    first, second = rows_of(story)
    assert first.marks == ()
    failure, restart = second.marks
    assert (failure.kind, failure.about, failure.cause) == (MarkKind.FAILURE, "rollout/1#1", "process")
    assert failure.rung
    assert (restart.kind, restart.about, restart.down_s) == (MarkKind.RESTART, "rollout/1#2", 3.0)


def test_events_after_the_newest_step_of_a_failed_run_are_a_row_without_a_step(story: Story) -> None:
    story.record(ev.RunEnded(Outcome.FAILED, "rollout/0 failed too often"))
    rows = rows_of(story)
    assert [row.step for row in rows] == [1, None]
    assert [(mark.kind, mark.text) for mark in rows[1].marks] == [
        (MarkKind.ENDED, "failed: rollout/0 failed too often")
    ]


def test_no_row_follows_the_last_step_of_a_completed_run(story: Story) -> None:
    story.record(ev.RunEnded(Outcome.COMPLETED, "done"))
    assert [row.step for row in rows_of(story)] == [1]


def test_the_first_step_after_a_resume_is_timed_from_the_join_of_its_trainer(story: Story) -> None:
    story.record(ev.RunEnded(Outcome.CANCELLED, "by anna"))
    story.wait(3600).record(ev.Resumed("anna", "1", story.job))
    story.launches("trainer/0").wait(10).joins("trainer/0", "train")
    commits(story, 2, 5.0)
    *_, row = rows_of(story)
    assert (row.step, row.incarnation, row.seconds) == (2, "trainer/0#2", 5.0)
    assert [mark.kind for mark in row.marks] == [MarkKind.RESUMED]


def test_next_step_has_the_newest_logged_value_of_each_name_by_replica(story: Story) -> None:
    for value in (0.25, 0.5):
        story.record(ev.ValuesLogged(story.incarnation("reward/0"), {"accuracy": value}))
    story.record(ev.ValuesLogged(story.incarnation("rollout/0"), {"cached": 7.0}))
    commits(story, 2)
    commits(story, 3)
    assert [row.logged for row in rows_of(story)] == [
        {},
        {"reward/0": {"accuracy": 0.5}, "rollout/0": {"cached": 7.0}},
        {},
    ]


def test_each_report_of_logged_values_is_a_row_in_a_run_without_a_trainer() -> None:
    story = Story()
    story.stamped = [ev.Stamped(1, BEGAN, 1, ev.RunStarted(story.run, msgspec.structs.replace(story.job, steps=0)))]
    judge = Incarnation(ReplicaId("judge/0"), 1)
    for value in (0.25, 0.5):
        story.stamped.append(ev.Stamped(len(story.stamped) + 1, BEGAN, 1, ev.ValuesLogged(judge, {"accuracy": value})))
    assert [(row.step, row.incarnation, row.logged) for row in rows_of(story)] == [
        (1, "judge/0#1", {"judge/0": {"accuracy": 0.25}}),
        (2, "judge/0#1", {"judge/0": {"accuracy": 0.5}}),
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e300])
def test_invalid_token_count_of_a_trainer_counts_as_zero(value: float) -> None:
    [row] = rows_of(commits(begun(), 1, tokens=value))
    assert row.tokens == 0
    assert row.tokens_per_second == 0.0


# ── evaluations ────────────────────────────────────────────────────────────────────────────────────────────────────
def evaluated_story(steps: int = 4, every: int = 2) -> Story:
    """Begin a run whose weights are evaluated before the first step and after every second step."""
    return begun(msgspec.structs.replace(job_view(steps), eval=EvalSpec(every=every)))


def evaluates(story: Story, step: int, reward: float = 0.5) -> Story:
    return story.record(ev.Evaluated(story.incarnation("trajectories/0"), step, {"reward": reward}))


def read_clock(story: Story) -> Story:
    return story.record(ev.ClocksRecorded((story.reading("trainer/0", wait_data=1.0),)))


def test_evaluation_is_part_of_the_row_of_its_step_and_step_0_has_a_row_of_its_own() -> None:
    story = evaluates(evaluated_story(), 0, 0.25)
    for step in range(1, 5):
        commits(story, step)
        if step % 2 == 0:
            evaluates(story, step, step / 10)
    read_clock(story)
    rows = rows_of(story)
    assert [row.step for row in rows] == [0, 1, 2, 3, 4]
    assert [row.evaluation.get("reward") for row in rows] == [0.25, None, 0.2, None, 0.4]
    assert [row.evaluation["step"] for row in rows if row.evaluation] == [0, 2, 4]


def test_row_is_complete_once_its_evaluation_is_known_whichever_comes_first() -> None:
    story = read_clock(commits(evaluated_story(), 1))
    rows = StepRows()
    assert [row.step for stamped in story.stamped for row in rows.apply(stamped)] == [], (
        "a row is complete before step 0 is evaluated"
    )
    assert [row.step for row in rows.rest()] == [1]
    done = len(story.stamped)
    evaluates(story, 0)
    read_clock(commits(commits(story, 2), 3))
    assert [row.step for stamped in story.stamped[done:] for row in rows.apply(stamped)] == [0, 1]
    done = len(story.stamped)
    evaluates(evaluates(story, 2), 2)
    released = [row for stamped in story.stamped[done:] for row in rows.apply(stamped)]
    assert [(row.step, bool(row.evaluation)) for row in released] == [(2, True), (3, False)]


def test_end_of_the_run_waits_for_no_evaluation_and_a_resumed_run_evaluates_on() -> None:
    story = commits(evaluates(evaluated_story(), 0), 1)
    commits(story, 2)
    story.ends(Outcome.CANCELLED, "cancelled by anna")
    assert [row.step for row in rows_of(story)] == [0, 1, 2, None]
    story.record(ev.Resumed("anna", "c2", story.job))
    evaluates(story, 2, 0.75)
    commits(story, 3)
    row = rows_of(story)[-1]
    assert (row.step, row.evaluation) == (3, {"step": 2.0, "reward": 0.75})


def test_run_that_ends_before_its_first_evaluation_has_no_row_of_step_0() -> None:
    story = evaluated_story()
    story.ends(Outcome.CANCELLED, "cancelled by anna")
    assert [row.step for row in rows_of(story)] == [None]
