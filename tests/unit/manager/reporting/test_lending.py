"""Lent time and guests' tokens in status, report, summary, metrics and explain."""

from __future__ import annotations

import msgspec
import pytest

from rrl.cli.views.explanation import explanation_view
from rrl.cli.views.report.tables import figures
from rrl.cli.views.status import status_view
from rrl.cli.views.summary import summary_view
from rrl.core.types import Outcome
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Why, WithdrawGuests
from rrl.manager.model.pools import LendingFigures, lending_figures
from rrl.manager.reporting.accounting.pool_use import pool_uses
from rrl.manager.reporting.accounting.run_report import account
from rrl.manager.reporting.decisions.explanations import explain
from rrl.manager.reporting.failure_timeline import FailureTimeline
from rrl.manager.reporting.metrics import Facts, RunCounters, samples
from rrl.manager.reporting.summary import summarize
from rrl.tests.support.cli.status_scenes import lending, paced
from rrl.tests.support.cli.story import Story
from rrl.tests.support.cli.text_snapshots import drawn


@pytest.fixture
def story() -> Story:
    return lending()


def shown(story: Story) -> str:
    return drawn(status_view(story.recorded(), story.now, 120), 120)


def test_status_shows_lent_time_and_the_guests_share_of_the_tokens(story: Story) -> None:
    view = shown(story)
    assert "trainer 3 % idle (waits for rollouts), 34 % lent (2.1 s a hand-over)" in view
    assert "guests 1 of 1, 31 % of the tokens" in view
    assert "guests 629/s" in view
    (row,) = (line for line in view.splitlines() if line.startswith("guest/n2"))
    assert row.split()[:4] == ["guest/n2", "#1", "n2", "generate"]


def test_run_that_does_not_lend_shows_nothing_of_it() -> None:
    story = paced()
    assert lending_figures(story.recorded()) is None
    assert "lent" not in shown(story)
    assert account(story.stamped).report().trainer_hours is None
    assert not [name for name in metrics_of(story) if "lent" in name or "guest" in name]


def test_dead_guest_is_no_guest_at_work_and_costs_no_recovery(story: Story) -> None:
    story.loses("guest/n2")
    story.fences("guest/n2")
    found = lending_figures(story.recorded())
    assert found is not None
    assert (found.guests_at_work, found.guests) == (0, 1)
    assert summarize(story.stamped).recoveries == []


def test_report_splits_the_gpu_hours_of_the_trainer_in_train_lent_and_idle(story: Story) -> None:
    story.enters("trainer/0", "train").wait(40).enters("trainer/0", "lend", "trajectories/0").wait(30)
    story.enters("trainer/0", "wait_data").wait(30).commits(23)
    report = account(story.stamped).report()
    assert report.trainer_hours is not None
    hours = msgspec.structs.asdict(report.trainer_hours)
    assert hours["train"] == pytest.approx(40 / 3600, abs=1e-4)
    assert hours["lent"] == pytest.approx(30 / 3600, abs=1e-4)
    launched = next(lane for lane in report.lanes if lane.replica == "trainer/0").incarnations[0].launched_at
    assert sum(hours.values()) == pytest.approx((story.now - launched) / 3600, abs=2e-4)
    row = dict(figures(report))["node-hours of the trainer"]
    assert [part.split()[0] for part in row.split(", ")] == ["train", "lent", "idle"]


def test_tokens_of_guests_are_those_of_a_pool_without_nodes(story: Story) -> None:
    uses = {one.pool: one for one in pool_uses(story.recorded(), story.now)}
    assert list(uses) == ["rollout", "guest"]
    guest = uses["guest"]
    assert (guest.tokens, guest.node_hours, guest.tokens_per_node_hour) == (377_420, 0.0, None)
    assert guest.tokens_per_second == pytest.approx(377_420 / 204, abs=0.001), "the guest slept for the other time"


def test_summary_has_the_figures_of_the_whole_run(story: Story) -> None:
    story.ends(Outcome.COMPLETED, "all steps are done")
    summary = summarize(story.stamped)
    assert summary.lending == LendingFigures(0.34, 2.124, 1, 1, 0.31)
    view = drawn(summary_view(msgspec.to_builtins(summary)), 120)
    assert "34 % lent (2.1 s a hand-over)" in view
    assert "31 % of the tokens" in view


def metrics_of(story: Story) -> dict[str, float]:
    found = samples(story.recorded(), RunCounters(FailureTimeline()), Facts(story.now))
    return {
        ",".join((one.name, *one.labels.values())): one.value
        for family in found
        for one in family.samples
        if "lent" in one.name or "hand_over" in one.name or "guest" in f"{one.name}{one.labels}"
    }


def test_metrics_have_lent_share_hand_over_guests_and_their_tokens(story: Story) -> None:
    found = metrics_of(story)
    assert found["rrl_trainer_lent_ratio"] == pytest.approx(0.34)
    assert found["rrl_hand_over_seconds"] == pytest.approx(2.124)
    assert (found["rrl_guests,at_work"], found["rrl_guests,wanted"]) == (1, 1)
    assert found["rrl_pool_tokens_total,guest"] == 377_420


def test_launch_of_a_guest_is_explained_by_its_name(story: Story) -> None:
    about = [one for one in explain(story.stamped) if one.concerns("guest/n2")]
    assert "start guest/n2#1 on n2" in drawn(explanation_view(about, grouped=False), 120)


def test_run_that_goes_on_without_guests_says_why(story: Story) -> None:
    why = Why(("the trainer ran out of GPU memory twice beside guests",), expects="the trainer has the memory")
    story.record(ev.Decided(WithdrawGuests(why)))
    assert "goes on without guests (rrl explain)" in shown(story)
    view = drawn(explanation_view(explain(story.stamped)[-1:], grouped=False), 120)
    assert "go on without guests" in view
    assert "because   the trainer ran out of GPU memory twice beside guests" in view


def test_note_of_a_guest_is_shown(story: Story) -> None:
    story.record(ev.NoteChanged(story.incarnation("guest/n2"), "it keeps 3 GiB of a GPU"))
    assert "guest/n2: it keeps 3 GiB of a GPU" in shown(story)
