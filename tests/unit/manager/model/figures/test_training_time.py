"""Effective training time: computed by hand, in the summary, over the last hour, and after a resume."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rrl.core.types import Outcome, Resources
from rrl.manager.model import events as ev
from rrl.manager.model.figures.training_time import (
    MAX_COMMITS,
    POINT_INTERVAL_S,
    RECENT_S,
    TrainingTime,
    begun,
    effective_share,
    member_weights,
    with_commit,
    with_work,
)
from rrl.manager.reporting.summary import summarize
from rrl.tests.support.cli.story import BEGAN, Story, wide
from rrl.tests.support.manager.jobs import gang_job, job


def test_seconds_count_by_their_share() -> None:
    time = with_work(begun(100.0), {"trainer": 1}, 1.0, 110.0)
    time = with_work(time, {}, 0.5, 150.0)
    time = with_work(time, {}, 0.0, 190.0)
    assert [time.seconds(at) for at in (100.0, 110.0, 130.0, 150.0, 170.0, 190.0, 500.0)] == [0, 0, 20, 40, 50, 60, 60]


def test_work_that_ended_in_the_past_is_subtracted_back_to_the_last_change() -> None:
    time = with_work(begun(0.0), {"trainer": 1}, 1.0, 50.0)
    hung = with_work(time, {}, 0.0, 80.0)
    assert hung.seconds(200.0) == 30
    assert with_work(time, {}, 0.0, 20.0).seconds(200.0) == 0


def test_recent_share_is_known_after_an_hour_and_forgets_older_time() -> None:
    time = with_work(begun(0.0), {}, 1.0, 0.0)
    time = with_work(time, {}, 0.0, 1000.0)
    time = with_work(time, {}, 1.0, 2000.0)
    assert time.recent_share(RECENT_S - 1) is None
    assert time.recent_share(RECENT_S) == pytest.approx(1 - 1000 / RECENT_S)
    assert time.recent_share(RECENT_S + 1500) == pytest.approx(1 - 500 / RECENT_S)
    assert time.recent_share(RECENT_S + 2500) == 1.0


def test_points_are_few_however_often_the_share_changes() -> None:
    time, effective = begun(0.0), 0.0
    for second in range(1, 8001):
        time = with_work(time, {}, float(second % 2), float(second))
        effective += second % 2
    assert len(time.points) <= 1.1 * RECENT_S / POINT_INTERVAL_S
    assert time.seconds(8001.0) == effective
    assert time.recent_share(8001.0) == pytest.approx(0.5, abs=0.01)


def test_seconds_of_a_step_are_the_median_of_the_newest_steps() -> None:
    time = begun(0.0)
    assert time.seconds_per_step is None
    at = 0.0
    for step in range(1, 40):
        at += 2.0 if step % 10 else 100.0  # a restart every ten steps
        time = with_commit(time, step, at)
    assert len(time.commits) == MAX_COMMITS
    assert time.seconds_per_step == 2.0
    assert with_commit(time, 39, at + 50) == time, "a step that was reported again counts twice"
    reported_late = with_commit(with_commit(TrainingTime(), 1, 10.0), 5, 18.0)
    assert reported_late.seconds_per_step == 2.0, "steps that were committed while no manager ran do not count"


def test_sixteen_rollouts_of_eight_gpus_weigh_as_much_as_a_trainer_of_128_gpus() -> None:
    gang = gang_job(ranks=128, per_node=8, rollouts=16)
    gpus = {"trainer": Resources(1, 1), "rollout": Resources(8, 8)}
    roles = tuple(replace(role, per_member=gpus.get(role.name, role.per_member)) for role in gang.roles)
    machines = replace(gang, roles=roles)
    assert member_weights(machines) == ("gpu", {"trainer": 1.0, "rollout": 8.0})
    assert effective_share(machines, {"rollout": 16}, committed=True) == 0.5
    assert effective_share(machines, {"rollout": 12, "trainer": 127}, committed=True) == 12 / 32
    assert effective_share(machines, {"trainer": 128}, committed=True) == 1.0
    assert effective_share(machines, {"rollout": 16}, committed=False) == 0.0


def test_members_without_gpus_are_weighted_by_their_nodes() -> None:
    gang = gang_job(ranks=4, per_node=2, rollouts=3)
    assert member_weights(gang) == ("node", {"trainer": 0.5, "rollout": 1.0})
    assert effective_share(gang, {"rollout": 3}, committed=True) == 3 / 5
    assert effective_share(job(rollouts=2), {"rollout": 1}, committed=True) == 1 / 3
    assert effective_share(wide(), {"rollout": 2}, committed=True) == 8 / 16, (
        "the share must be that of the rollouts: 2 x 4 of 16 GPUs"
    )


@pytest.mark.parametrize("replica", ["rollout/0", "trainer/0", "trajectories/0"])
def test_state_has_the_effective_time_of_the_summary(replica: str) -> None:
    story = Story().works().wait(20)
    story.loses(replica)
    story.wait(7).fences(replica).wait(3).launches(replica).wait(4).joins(replica, "starting").wait(5)
    story.enters(replica, "generate" if "rollout" in replica else "train" if "trainer" in replica else "serve")
    story.commits(13).wait(30).ends(Outcome.CANCELLED, "asked")
    state = story.recorded()
    ratio = state.training_time.seconds(story.now) / state.run_seconds(story.now)
    assert ratio == pytest.approx(summarize(story.stamped).ettr, abs=1e-4)
    assert ratio < 1


def test_time_between_the_symptom_and_the_fence_does_not_count() -> None:
    story = Story().works()
    before = story.recorded().training_time.seconds(story.now)
    finding = story.loses("trainer/0")
    assert finding.since == story.now
    story.wait(50).fences("trainer/0")
    rollouts_alone = 50 * 2 / 3
    assert story.recorded().training_time.seconds(story.now) == pytest.approx(before + rollouts_alone)


def test_pause_before_a_resume_is_part_of_no_figure() -> None:
    story = Story().works().ends(Outcome.FAILED, "no time left")
    ended = story.recorded().training_time
    story.wait(5000).record(ev.Resumed("ada", "c1", story.job)).wait(10)
    time = story.recorded().training_time
    assert time.seconds(story.now) == ended.seconds(story.now)
    assert (time.at_work, time.commits, time.recent_share(story.now)) == ({}, (), None)


def test_journal_of_an_older_rrl_shows_no_figure_instead_of_a_wrong_one() -> None:
    time = with_work(TrainingTime(), {"trainer": 1}, 1.0, BEGAN)
    assert time.began is None
    assert time.seconds(BEGAN + 100) == 0
    assert time.recent_share(BEGAN + 2 * RECENT_S) is None
