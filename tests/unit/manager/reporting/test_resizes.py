"""A change of a pool's size in reports: it is explained, it is no failure, and each pool has figures of its own."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rrl.api.accounts import account_of
from rrl.cli.views.explanation import explanation_view
from rrl.cli.views.report.page import page
from rrl.cli.views.report.tables import report_view
from rrl.cli.views.summary import summary_view
from rrl.core.launch import ExitReason
from rrl.core.types import Outcome, ReplicaId
from rrl.health.history.records import Failed, RecoveryDone
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Release, Resize, Why
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import State
from rrl.manager.notifications.conditions import conditions
from rrl.manager.reporting.accounting.pool_use import pool_uses
from rrl.manager.reporting.accounting.run_report import account
from rrl.manager.reporting.decisions.expectations import Arrival
from rrl.manager.reporting.decisions.explanations import Explanation, explain, subject_of, words_of
from rrl.manager.reporting.failure_timeline import FailureTimeline
from rrl.manager.reporting.history_events import HistoryEvents
from rrl.manager.reporting.metrics import Facts, RunCounters, samples
from rrl.manager.reporting.summary import summarize
from rrl.tests.support.cli.status_scenes import pools
from rrl.tests.support.cli.story import Story, pools_view
from rrl.tests.support.cli.text_snapshots import drawn

BURST_0 = ReplicaId("burst/0")


def grown() -> Story:
    """Return a run whose elastic pool has two replicas at work."""
    story = Story(job=pools_view()).works().resizes("burst", (0, 1)).wait(60)
    return story.grows("burst", 0, "b1").grows("burst", 1, "b2").wait(60)


def stopped(story: Story) -> Story:
    """Add the removal of burst/0: its step ends when it is asked to, and its node is released."""
    step = story.recorded().replica(BURST_0).step or ""
    incarnation = story.incarnation("burst/0")
    story.resizes("burst", stop=(0,), why="the rollouts wait").wait(1)
    return story.record(ev.StepEnded(incarnation, step, None, 15, ExitReason.SIGNALED))


def resizes(story: Story) -> list[Explanation]:
    return [one for one in explain(story.stamped) if isinstance(one.action, Resize)]


# ── no failure ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_stopped_replica_has_not_failed() -> None:
    story, timeline = stopped(grown()), FailureTimeline()
    for stamped in story.stamped:
        timeline.apply(stamped)
    assert not timeline.failures
    assert not timeline.outages
    report = account(story.stamped).report()
    assert not report.interruptions
    (lane,) = (one for one in report.lanes if one.replica == BURST_0)
    assert "down" not in lane.seconds
    assert summarize(story.stamped).recoveries == []
    assert conditions(story.recorded(), story.now, None) == []
    assert story.recorded().recoveries == 0


def test_removal_of_a_failed_replica_ends_its_outage_and_its_interruption() -> None:
    story = grown()
    story.loses("burst/0")
    story.fences("burst/0").wait(30).resizes("burst", stop=(0,)).wait(600)
    timeline = FailureTimeline()
    state: State | None = None
    history = HistoryEvents("small", "anna", "lab", "small", 1, 0.0, None, timeline)
    records = []
    for stamped in story.stamped:
        before, state = state, fold(state, stamped)
        records += history.apply(before, state, stamped, timeline.apply(stamped))
    assert not timeline.outages
    assert [one.ok for one in records if isinstance(one, RecoveryDone)] == [False]
    assert len([one for one in records if isinstance(one, Failed)]) == 1, "the failure before the removal is one"
    (interruption,) = account(story.stamped).interruptions.all
    assert interruption.ended_at == story.now - 600
    (lane,) = (one for one in account(story.stamped).report().lanes if one.replica == BURST_0)
    assert lane.seconds["down"] == pytest.approx(30, abs=0.1)


def test_replica_that_the_pool_gets_again_is_no_repair_of_its_last_failure() -> None:
    story = grown()
    story.loses("burst/0")
    story.fences("burst/0").resizes("burst", stop=(0,)).wait(600).resizes("burst", (0,)).grows("burst", 2, "b3")
    story.launches("burst/0", "b3").joins("burst/0", "generate")
    (recovery,) = summarize(story.stamped).recoveries
    assert (recovery.replica, recovery.start_s, recovery.total_s) == ("burst/0", None, None)


# ── explained ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_resize_is_explained_with_both_sizes_and_its_evidence() -> None:
    story = stopped(grown()).resizes("burst", (0, 2, 3), why="the trainer waited 38 % of the last 5 steps")
    assert [f"{words_of(one.action)} {subject_of(one)}" for one in resizes(story)] == [
        "resize burst 0 -> 2",
        "resize burst 2 -> 1",
        "resize burst 1 -> 4",
    ]
    shown = drawn(explanation_view(resizes(story), grouped=True), 100)
    assert "resize burst 1 -> 4" in shown
    assert "because   the trainer waited 38 % of the last 5 steps" in shown
    assert all(resizes(story)[-1].concerns(name) for name in ("burst", "burst/3"))
    assert not resizes(story)[-1].concerns("rollout")
    assert [one.about for one in account(story.stamped).report().decisions] == [
        subject_of(one) for one in resizes(story)
    ]


def test_growth_has_come_once_all_its_replicas_have_joined() -> None:
    story = Story(job=pools_view()).works().resizes("burst", (0, 1)).grows("burst", 0, "b1")
    (growth,) = resizes(story)
    assert growth.result.arrival is Arrival.OPEN
    story.wait(60).grows("burst", 1, "b2")
    (growth,) = resizes(story)
    assert (growth.result.arrival, growth.result.at) == (Arrival.CAME, story.now)


def test_growth_without_nodes_is_no_missed_expectation() -> None:
    story = Story(job=pools_view()).works().resizes("burst", (0, 1)).grows("burst", 0, "b1").wait(60)
    tag = story.requests_for("burst", 1)
    given_up = (
        story.wait(600).record(ev.Intended(Release(tag, Why(("no replica needs it",))))).resizes("burst", stop=(1,))
    )
    assert [one.result.arrival for one in resizes(given_up)] == [Arrival.OVER, Arrival.CAME]
    shown = drawn(explanation_view(resizes(given_up), grouped=True), 200)
    assert "no longer awaited: the replicas that had not joined were stopped again, after 11m00s" in shown


def test_growth_that_the_end_of_the_run_cuts_off_is_no_missed_expectation() -> None:
    story = Story(job=pools_view()).works().resizes("burst", (0, 1)).wait(60)
    story.requests_for("burst", 0)
    story.ends(Outcome.COMPLETED, "all steps are done")
    assert [one.result.arrival for one in resizes(story)] == [Arrival.OVER]


def test_start_of_a_replica_that_is_stopped_again_is_no_missed_expectation() -> None:
    story = Story(job=pools_view()).works().resizes("burst", (0,))
    story.grants(story.requests_for("burst", 0), "b1").launches("burst/0", "b1").wait(5).resizes("burst", stop=(0,))
    assert not [one for one in explain(story.stamped) if one.result.arrival is Arrival.MISSED]


# ── figures of each pool ─────────────────────────────────────────────────────────────────────────────────────────────
def generated() -> Story:
    """Return an hour of a run: rollout/0 and burst/0 generate, and burst/1 does so for half of it."""
    story = Story(job=pools_view()).works().resizes("burst", (0, 1)).grows("burst", 0, "b1").grows("burst", 1, "b2")
    story.wait(1800).clocks("burst/1", done=180_000, generate=1800).resizes("burst", stop=(1,))
    story.wait(1800).clocks("burst/0", done=360_000, generate=1700, wait_work=1900)
    return story.clocks("rollout/0", done=720_000, generate=3600)


def test_pools_have_tokens_node_hours_and_pace(root: Path) -> None:
    report = account_of(generated().written(root)).report()
    burst, h20, rollout = sorted(report.pools, key=lambda one: one.pool)
    assert (burst.pool, burst.tokens, burst.node_hours, burst.budget_node_hours) == ("burst", 540_000, 2, 200)
    assert burst.tokens_per_node_hour == 270_000
    assert burst.tokens_per_second == 100
    assert (h20.tokens, h20.node_hours, h20.tokens_per_node_hour, h20.tokens_per_second) == (0, 0, None, None)
    assert (rollout.tokens, rollout.node_hours, rollout.budget_node_hours) == (720_000, 1, None)
    assert rollout.tokens_per_second == 200
    assert summarize(generated().stamped).rollout_pools == report.pools


def test_pools_are_shown_in_report_page_and_summary(root: Path) -> None:
    report = account_of(generated().written(root)).report()
    (row,) = (line for line in drawn(report_view([report]), 100).splitlines() if line.startswith("burst"))
    assert row.split() == ["burst", "540,000", "2", "200", "270,000", "100"]
    assert "<td>burst</td>" in page([report])
    text = drawn(summary_view(msgspec.to_builtins(summarize(generated().stamped))), 100)
    assert "pools     rollout 720,000 tokens in 1 node hours, 720,000 in each" in text
    assert "burst 540,000 tokens in 2 of 200 node hours, 270,000 in each" in text


def test_single_pool_has_no_figures_of_its_own_unless_it_had_extras() -> None:
    story = Story().works().clocks("rollout/0", done=7, generate=3600)
    assert pool_uses(story.recorded(), story.now) == []
    story.resizes("rollout", (2,)).launches("rollout/2", "n5").joins("rollout/2", "generate")
    story.clocks("rollout/1", done=1, generate=3600).clocks("rollout/2", done=5, generate=3600)
    (pool,) = pool_uses(story.recorded(), story.now)
    assert (pool.tokens, pool.node_hours) == (13, 3)


def test_rollouts_that_share_a_node_count_for_their_part_of_it() -> None:
    job = pools_view()
    roles = tuple(msgspec.structs.replace(one, exclusive=one.name != "rollout") for one in job.roles)
    story = Story(job=msgspec.structs.replace(job, roles=roles)).works().clocks("rollout/0", generate=7200)
    assert pool_uses(story.recorded(), story.now)[0].node_hours == 0.5, "one of four cores for two hours"


def value(state: State, now: float, name: str, **labels: str) -> float | None:
    found = samples(state, RunCounters(FailureTimeline()), Facts(now))
    values = [one.value for family in found for one in family.samples if one.name == name and one.labels == labels]
    return values[0] if values else None


def test_metrics_have_the_figures_of_each_pool() -> None:
    story = pools()
    state, now = story.clocks("burst/0", done=42, generate=9).recorded(), story.now
    assert [value(state, now, "rrl_pool_replicas", pool="burst", what=what) for what in ("at_work", "wanted")] == [7, 9]
    assert value(state, now, "rrl_pool_replicas", pool="burst", what="queued") == 2
    assert value(state, now, "rrl_pool_tokens_total", pool="burst") == 42
    assert value(state, now, "rrl_pool_node_hours_total", pool="burst") == pytest.approx(7 * 4.4)
    assert value(state, now, "rrl_pool_node_hours_limit", pool="burst") == 200
    assert value(state, now, "rrl_pool_node_hours_limit", pool="rollout") is None
    assert value(state, now, "rrl_extras") == 2
    single = Story().works()
    assert value(single.recorded(), single.now, "rrl_extras") is None
