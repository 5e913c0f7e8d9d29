"""The time of committed steps: which attempt at a step counts, and with which duration at most.

The ETTR is compared with the duration of a run without failures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rrl.core.types import Outcome, ReplicaId, Version
from rrl.manager.model import events as ev
from rrl.manager.reporting.accounting.committed_steps import StepMedians
from rrl.manager.reporting.accounting.run_report import Account, account
from rrl.tests.support.cli.story import Story
from rrl.tests.support.manager.accounted import OUTAGE_S, STEP_S, accounted, begun, failed, trained
from rrl.tests.support.manager.jobs import ROLLOUTS, TRAINER, job
from rrl.tests.support.manager.scripted_runs import LIMITS, Script, run_to_end
from rrl.tests.support.manager.site import Site


def test_without_a_failure_all_time_counts() -> None:
    steps = accounted(trained(begun(), 1, 10)).steps
    assert (steps.wall_s, steps.step_s, steps.ettr) == (10 * STEP_S, STEP_S, 1.0)


def test_slow_first_step_counts_in_full_as_in_a_clean_run() -> None:
    steps = accounted(trained(begun().wait(2), 1, 10)).steps
    assert (steps.wall_s, steps.step_s, steps.ettr) == (10 * STEP_S + 2, STEP_S, 1.0)


@pytest.mark.parametrize("replica", ["rollout/0", "trainer/0"])
def test_first_step_in_which_a_replica_fails_counts_at_most_as_the_median_step(replica: str) -> None:
    steps = accounted(trained(failed(begun(), replica).wait(2), 1, 10)).steps
    assert steps.wall_s == pytest.approx(10 * STEP_S + OUTAGE_S + 2)
    assert steps.ettr == pytest.approx(10 * STEP_S / steps.wall_s)


def test_discarded_training_and_the_outage_are_lost() -> None:
    story = trained(begun(), 1, 5).wait(2)
    steps = accounted(trained(failed(story, "trainer/0"), 6, 10)).steps
    assert steps.wall_s == pytest.approx(10 * STEP_S + 2 + OUTAGE_S)
    assert steps.ettr == pytest.approx(10 * STEP_S / steps.wall_s)
    (discarded,) = steps.steps[5].discarded
    assert discarded.until - discarded.since == pytest.approx(2)


def test_work_that_a_snapshot_kept_counts_as_the_predecessors_attempt() -> None:
    story = failed(trained(begun(), 1, 5).wait(2.5), "trainer/0")
    kept = story.stamped.pop()  # the successor commits step 6 before it trains
    assert kept.event == ev.PhaseEntered(story.incarnation("trainer/0"), "train")
    story.record(ev.StepCommitted(story.incarnation("trainer/0"), 6, {})).enters("trainer/0", "train")
    steps = accounted(trained(story, 7, 10)).steps
    assert steps.steps[5].useful_s(StepMedians(STEP_S, STEP_S)) == pytest.approx(2.5)
    assert steps.steps[5].discarded == ()
    assert steps.ettr == pytest.approx((9 * STEP_S + 2.5) / (9 * STEP_S + 2.5 + OUTAGE_S))


def trained_in_threes(story: Story, first: int, last: int) -> Story:
    """Add steps whose commits cover three steps each. The weights of a step are published once it is trained."""
    trainer = story.incarnation("trainer/0")
    for step in range(first, last + 1):
        story.wait(STEP_S).record(ev.VersionAvailable(trainer, Version(step, trainer.number)))
        if step % 3 == 0:
            story.record(*(ev.StepCommitted(trainer, step - back, {}, step) for back in (2, 1, 0)))
    return story


def test_steps_of_one_commit_share_its_time() -> None:
    steps = accounted(trained_in_threes(begun(), 1, 12)).steps
    assert [(step.step, step.count) for step in steps.steps] == [(3, 3), (6, 3), (9, 3), (12, 3)]
    assert (steps.wall_s, steps.step_s, steps.ettr) == (12 * STEP_S, STEP_S, 1.0)


@pytest.mark.parametrize(("restored", "again_s"), [(8, 0.5 * STEP_S), (7, 1.5 * STEP_S), (6, 2.5 * STEP_S)])
def test_steps_since_the_snapshot_of_a_step_between_two_commits_are_training_done_again(
    restored: int, again_s: float
) -> None:
    story = failed(trained_in_threes(begun(), 1, 8).wait(0.5 * STEP_S), "trainer/0")
    restart = story.stamped.pop()  # the successor publishes the restored weights before it trains
    trainer = story.incarnation("trainer/0")
    story.record(ev.VersionAvailable(trainer, Version(restored, trainer.number)), restart.event)
    steps = accounted(trained_in_threes(story, restored + 1, 12)).steps
    assert sum(one.until - one.since for one in steps.steps[2].discarded) == pytest.approx(again_s)
    assert steps.wall_s == pytest.approx(12 * STEP_S + OUTAGE_S + again_s)
    assert steps.ettr == pytest.approx(12 * STEP_S / steps.wall_s)


def test_kept_work_is_lost_if_the_snapshot_is_lost_in_the_next_failure() -> None:
    story = failed(trained_in_threes(begun(), 1, 8), "trainer/0")
    restart = story.stamped.pop()
    second = story.incarnation("trainer/0")
    story.record(ev.VersionAvailable(second, Version(8, second.number)), restart.event)
    # the next successor restores the commit of step 6, and publishes its weights
    story = failed(story.wait(0.5 * STEP_S), "trainer/0")
    restart = story.stamped.pop()
    third = story.incarnation("trainer/0")
    story.record(ev.VersionAvailable(third, Version(6, third.number)), restart.event)
    steps = accounted(trained_in_threes(story, 7, 12)).steps
    assert sum(one.until - one.since for one in steps.steps[2].discarded) == pytest.approx(2.5 * STEP_S)
    assert steps.ettr == pytest.approx(12 * STEP_S / steps.wall_s)


def test_a_wait_for_data_counts_at_most_as_the_median_step() -> None:
    story = failed(trained(begun(), 1, 5), "rollout/0")  # nothing is committed meanwhile
    steps = accounted(trained(story, 6, 10)).steps
    assert steps.steps[5].disturbed
    assert steps.ettr == pytest.approx(10 * STEP_S / (10 * STEP_S + OUTAGE_S))


def test_time_of_evaluations_counts_as_in_a_run_without_failures() -> None:
    story = begun()
    for step in range(1, 13):
        story.commits(step)
        if step % 4 == 0:
            story.record(ev.Evaluated(story.incarnation("trajectories/0"), step, {"reward": 0.5})).wait(10 * STEP_S)
    steps = accounted(trained(story, 13, 14)).steps
    assert steps.step_s == STEP_S
    assert steps.ettr == 1.0


def test_step_in_which_a_long_failure_ends_is_disturbed() -> None:
    story = trained(begun(), 1, 5)
    story.fences("rollout/0").wait(STEP_S)
    trained(story, 6, 7)
    story.launches("rollout/0").joins("rollout/0", "generate").wait(STEP_S)
    story.record(ev.FirstWorkDone(story.incarnation("rollout/0")))
    steps = accounted(trained(story, 8, 10)).steps
    assert [step.disturbed for step in steps.steps[5:]] == [True, True, True, False, False]


def test_steps_that_were_committed_without_a_manager_share_their_time() -> None:
    story = trained(begun(), 1, 5).wait(4 * STEP_S)
    story.record(ev.ManagerStarted("login2", 9), ev.StepCommitted(story.incarnation("trainer/0"), 9, {}))
    steps = accounted(trained(story, 10, 12)).steps
    assert (steps.steps[5].count, steps.steps[5].disturbed) == (4, True)
    assert steps.ettr == pytest.approx(1.0)


def test_steps_that_the_store_reports_one_by_one_to_the_next_manager_share_their_time() -> None:
    story = trained(begun(), 1, 5).wait(4 * STEP_S).record(ev.ManagerStarted("login2", 9))
    for step in range(6, 10):
        story.record(ev.StepCommitted(story.incarnation("trainer/0"), step, {})).wait(0.001)
    steps = accounted(trained(story, 10, 12)).steps
    assert [step.count for step in steps.steps[5:]] == [4, 1, 1, 1]
    assert (steps.steps[5].disturbed, steps.steps[6].disturbed) == (True, False)
    assert steps.ettr == pytest.approx(1.0, abs=0.001)


def test_evaluation_that_is_reported_between_such_steps_belongs_to_them() -> None:
    story = trained(begun(), 1, 5).wait(4 * STEP_S).record(ev.ManagerStarted("login2", 9))
    trainer, store = story.incarnation("trainer/0"), story.incarnation("trajectories/0")
    story.record(ev.StepCommitted(trainer, 6, {}), ev.Evaluated(store, 6, {"reward": 0.5}))
    story.record(ev.StepCommitted(trainer, 7, {}))
    steps = accounted(trained(story, 8, 10)).steps
    assert [(step.count, step.evaluated) for step in steps.steps[5:]] == [(2, True), (1, False), (1, False), (1, False)]


def test_time_after_the_end_of_a_run_that_was_resumed_is_lost() -> None:
    story = trained(begun(), 1, 5).ends(Outcome.FAILED, "no time left").wait(100)
    story.record(ev.ManagerStarted("login2", 9), ev.Resumed("ada", "c1", story.job))
    story.launches("trainer/0").wait(5).joins("trainer/0", "train")
    steps = accounted(trained(story, 6, 10)).steps
    assert steps.wall_s == pytest.approx(10 * STEP_S + 106)
    assert steps.ettr == pytest.approx(10 * STEP_S / steps.wall_s)


def test_without_an_undisturbed_step_there_is_no_ettr() -> None:
    assert accounted(begun()).steps.ettr is None
    assert accounted(trained(begun(), 1, 1)).steps.ettr is None


def killing(replica: ReplicaId, after_s: float) -> Callable[[Site], None]:
    """Return a function that kills the current process of a replica ``after_s`` seconds after a commit."""

    async def kill(site: Site) -> None:
        await asyncio.sleep(after_s)
        site.working()[replica][-1].die()

    def begin(site: Site) -> None:
        site.spawn(kill(site))

    return begin


def played(at_step: dict[int, Callable[[Site], None]]) -> Account:
    """Play a run of the real manager in virtual time, with steps of 2 s."""
    script = Script(Outcome.COMPLETED, 1, job=job(spares=0, steps=40, limits=LIMITS), at_step=at_step)
    site, outcome, _ = run_to_end(script)
    assert outcome is Outcome.COMPLETED
    found = account(site.records)
    recorded = [one.event.ettr for one in site.records if isinstance(one.event, ev.EttrEstimated)]
    assert recorded[-1:] == [found.report().ettr], "the manager has not recorded the ETTR of the last step"
    return found


def test_ettr_of_a_run_of_the_real_manager_is_within_3_percent_of_a_comparison_with_a_clean_run() -> None:
    clean = played({})
    kills = {8: killing(TRAINER, 1.3), 18: killing(ROLLOUTS[0], 0.7), 29: killing(TRAINER, 0.4)}
    run = played(kills)
    assert [one.replica for one in run.interruptions.all] == [TRAINER, ROLLOUTS[0], TRAINER]
    compared = clean.steps.wall_s / run.steps.wall_s
    assert compared < 0.95, "the failures cost less than 5 % of the time"
    assert run.steps.ettr == pytest.approx(compared, abs=0.03)
