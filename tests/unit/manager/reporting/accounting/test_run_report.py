"""The report of a run: lost time by cause and stage, GPU-hours, lanes and curves."""

from __future__ import annotations

import pytest

from rrl.core.types import Outcome
from rrl.manager.model import events as ev
from rrl.manager.reporting.accounting import lanes
from rrl.manager.reporting.accounting.lanes import Activity, Use
from rrl.manager.reporting.accounting.lost_time import MANAGER, OTHER, SLOW_STEPS
from rrl.manager.reporting.accounting.run_report import NoEvents, RunReport, account
from rrl.tests.support.cli.story import Story, wide
from rrl.tests.support.manager.accounted import STAGES, STEP_S, accounted, begun, failed, trained
from rrl.tests.support.manager.jobs import commands, role


def lost(report: RunReport) -> dict[str, dict[str, float]]:
    """Return the lost seconds by cause and stage. Check that they add up to the time that does not count."""
    assert report.ettr is not None
    total = sum(one.seconds for one in report.lost)
    assert total == pytest.approx((1 - report.ettr) * report.wall_s, abs=0.01)
    return {one.cause: one.stages for one in report.lost}


def test_failure_of_the_trainer_is_lost_by_its_stages_and_the_replay() -> None:
    story = trained(failed(trained(begun(), 1, 5).wait(2), "trainer/0"), 6, 10)
    assert lost(accounted(story).report()) == {"process": pytest.approx({**STAGES, "replay": 2})}


def test_wait_for_a_failed_rollout_is_lost_by_the_rollouts_stages() -> None:
    story = trained(failed(trained(begun(), 1, 5), "rollout/0"), 6, 10)
    assert lost(accounted(story).report()) == {"process": pytest.approx(STAGES, abs=0.001)}


def test_delay_by_a_failed_rollout_is_divided_in_proportion_to_its_stages() -> None:
    story = trained(begun(), 1, 5)
    story.loses("rollout/0")
    story.wait(1).fences("rollout/0").wait(2).launches("rollout/0").wait(1)
    report = accounted(trained(story, 6, 6)).report()  # the step took 7 s instead of 3 s
    stages = {"decide": 4 / 7, "queue": 8 / 7, "start": 16 / 7}
    assert lost(report) == {"process": pytest.approx(stages, abs=0.001)}


def test_failure_that_delays_no_step_costs_no_time() -> None:
    story = trained(begun(), 1, 5)
    story.loses("rollout/0")
    trained(story.fences("rollout/0").launches("rollout/0"), 6, 9)
    assert lost(accounted(story).report()) == {}


def test_time_without_a_manager_is_not_that_of_slow_steps() -> None:
    story = trained(begun(), 1, 5).wait(20).record(ev.ManagerStarted("login2", 9))
    story = trained(trained(story, 6, 8).wait(4), 9, 12)
    assert lost(accounted(story).report()) == {
        MANAGER: pytest.approx({OTHER: 20}),
        SLOW_STEPS: pytest.approx({OTHER: 4}),
    }


def test_gpu_hours_add_up_and_nodes_count_without_gpus() -> None:
    story = trained(failed(trained(begun(), 1, 5).wait(2), "trainer/0"), 6, 10)
    hours = accounted(story).report().gpu_hours
    assert hours.unit == "node"
    assert hours.useful + hours.redone + hours.idle == pytest.approx(hours.reserved, abs=0.001)
    assert hours.redone == pytest.approx(2 / 3600, abs=0.0001)
    assert hours.reserved == pytest.approx(5 * story.at / 3600, abs=0.001), (
        "the run did not reserve five nodes from its beginning on"
    )


def test_gpu_hours_are_those_of_the_granted_nodes() -> None:
    story = Story(job=wide()).works().wait(3600)
    hours = account([*story.stamped, ev.Stamped(10**6, story.now, 1, ev.ManagerStopped("x"))]).report().gpu_hours
    assert hours.unit == "gpu"
    assert hours.reserved == pytest.approx(5 * 8 * story.at / 3600, rel=0.001)
    assert hours.useful == pytest.approx(2 * 4 * (story.at - 7) / 3600, rel=0.01), (
        "the useful GPU-hours must be those of the rollouts while the trainer waits for data"
    )


def test_report_of_a_running_run_reaches_to_its_newest_event() -> None:
    report = accounted(trained(begun(), 1, 4)).report()
    assert (report.outcome, report.steps) == ("running", 4)
    assert report.until == report.last_commit


def test_lane_has_incarnations_and_phases() -> None:
    story = failed(trained(begun(), 1, 5), "rollout/0").wait(2)
    story.record(ev.ManagerStopped("x"))
    (lane,) = [one for one in accounted(story).report().lanes if one.replica == "rollout/0"]
    assert [one.number for one in lane.incarnations] == [1, 2]
    kinds = [one.activity for one in lane.spans]
    assert kinds == [
        Activity("launching", Use.STARTS),
        Activity("generate", Use.WORKS),
        Activity("down", Use.DOWN),
        Activity("launching", Use.STARTS),
        Activity("starting", Use.LOADS),
        Activity("generate", Use.WORKS),
    ]
    assert lane.seconds["down"] == pytest.approx(STAGES["detect"] + STAGES["decide"] + STAGES["queue"], abs=0.1)
    assert sum(lane.seconds.values()) == pytest.approx(story.at - 2, abs=0.2), (
        "the lane does not reach from the first launch to the end"
    )


def test_lane_of_many_intervals_shows_the_prevailing_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_SPANS", 10)
    story = begun()
    for _ in range(100):
        story.wait(0.7).enters("rollout/0", "wait_work").wait(0.3).enters("rollout/0", "generate")
    story.wait(30).record(ev.ManagerStopped("x"))
    report = accounted(story).report()
    (lane,) = [one for one in report.lanes if one.replica == "rollout/0"]
    assert {one.activity.use for one in lane.spans} == {Use.WORKS}
    assert lane.spans[-1].until == pytest.approx(report.until)
    assert lane.seconds["wait_work"] == pytest.approx(30)


def test_curves_have_reward_throughput_and_versions() -> None:
    story = trained(begun(), 1, 5)
    story.record(ev.StepCommitted(story.incarnation("trainer/0"), 6, {"tokens": 900.0}))
    curves = accounted(story.wait(STEP_S)).report().curves
    assert [point.step for point in curves.reward] == [1, 2, 3, 4, 5]
    assert [point.value for point in curves.oldest_version] == [0, 1, 2, 3, 4, 5][1:]
    assert curves.tokens_per_second == []  # no time has passed since the previous commit


def test_throughput_of_steps_that_the_store_reports_together_is_their_mean() -> None:
    story = trained(begun(), 1, 5).wait(4 * STEP_S).record(ev.ManagerStarted("login2", 9))
    for step in range(6, 10):
        story.record(ev.StepCommitted(story.incarnation("trainer/0"), step, {"tokens": 900.0})).wait(0.001)
    (point,) = accounted(story).report().curves.tokens_per_second
    assert point.step == 9
    assert point.value == pytest.approx(900 / STEP_S, rel=0.01)


def test_report_lists_the_data_that_the_journal_lacks() -> None:
    assert accounted(begun()).report().missing == ["No step is committed: there is no time to account for."]
    story = Story().works().ends(Outcome.COMPLETED, "done")
    missing = " ".join(accounted(story).report().missing)
    assert "No phase `train` before the first commit" in missing
    assert "no `tokens`" in missing
    bare = accounted(Story(job=commands(role("command"))))
    assert "neither trainer nor rollouts" in bare.report().missing[0]
    with pytest.raises(NoEvents, match="no events"):
        account([])
