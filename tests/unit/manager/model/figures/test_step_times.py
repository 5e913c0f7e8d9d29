"""The times of the newest commits, from which the seconds of a step follow."""

from __future__ import annotations

from rrl.core.types import Outcome
from rrl.manager.model import events as ev
from rrl.manager.model.figures.step_times import MAX_COMMITS, Commit, seconds_per_step, with_commit
from rrl.tests.support.cli.story import Story


def test_seconds_of_a_step_are_the_median_of_the_newest_steps() -> None:
    commits: tuple[Commit, ...] = ()
    assert seconds_per_step(commits) is None
    at = 0.0
    for step in range(1, 40):
        at += 2.0 if step % 10 else 100.0  # a restart every ten steps
        commits = with_commit(commits, step, at)
    assert len(commits) == MAX_COMMITS
    assert seconds_per_step(commits) == 2.0
    assert with_commit(commits, 39, at + 50) == commits, "a step that was reported again counts twice"
    reported_late = with_commit(with_commit((), 1, 10.0), 5, 18.0)
    assert seconds_per_step(reported_late) == 2.0, "steps that were committed while no manager ran do not count"


def test_pause_before_a_resume_is_part_of_no_step() -> None:
    story = Story().works().ends(Outcome.CANCELLED, "x").wait(5000)
    assert story.recorded().commits
    assert story.record(ev.Resumed("ada", "r1", story.job)).recorded().commits == ()
