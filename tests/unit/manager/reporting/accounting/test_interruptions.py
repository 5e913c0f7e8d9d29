"""Interruptions: the times of their stages, their causes, and which failures belong to one interruption."""

from __future__ import annotations

import pytest

from rrl.core.types import Outcome
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, RestartAll, Rung, Why
from rrl.manager.reporting.accounting.interruptions import PLANNED, RUN_ENDED
from rrl.tests.support.manager.accounted import OUTAGE_S, STAGES, accounted, begun, failed, trained


@pytest.mark.parametrize("replica", ["trainer/0", "rollout/1"])
def test_every_stage_has_its_time(replica: str) -> None:
    story = failed(trained(begun(), 1, 5), replica)
    (one,) = accounted(story).interruptions.all
    assert one.seconds(story.now) == pytest.approx(STAGES)
    assert (one.replica, one.number, one.cause, one.charged) == (replica, 1, "process", True)
    assert one.evidence == ("killed by signal 9",)


def test_role_without_weights_is_back_when_it_has_joined() -> None:
    story = trained(begun(), 1, 5)
    story.loses("reward/0")
    story.wait(1).fences("reward/0").wait(2).launches("reward/0").wait(3).joins("reward/0", "score").wait(9)
    (one,) = accounted(story).interruptions.all
    assert one.seconds(story.now) == pytest.approx({"decide": 1, "queue": 2, "start": 3})


def test_interruption_that_lasts_ends_with_the_stage_that_it_is_in() -> None:
    story = trained(begun(), 1, 5)
    story.loses("rollout/0")
    story.wait(1).fences("rollout/0").wait(2).launches("rollout/0").wait(30)
    account = accounted(story)
    (one,) = account.interruptions.all
    assert one.worked_at is None
    assert one.seconds(story.now) == pytest.approx({"decide": 1, "queue": 2, "start": 30})
    assert account.report().interruptions[0].until is None


def test_incarnation_that_never_joined_continues_the_interruption() -> None:
    story = trained(begun(), 1, 5)
    story.loses("rollout/0")
    story.fences("rollout/0").launches("rollout/0").wait(20)
    story.loses("rollout/0")
    failed(story.fences("rollout/0").launches("rollout/0").wait(3).joins("rollout/0", "starting"), "rollout/1")
    interruptions = accounted(story).interruptions.all
    assert [(one.replica, one.number) for one in interruptions] == [("rollout/0", 1), ("rollout/1", 1)]
    assert interruptions[0].seconds(story.now)["start"] == pytest.approx(23)


def test_drain_is_planned_and_no_failure() -> None:
    story = trained(begun(), 1, 5).drains("rollout/0").launches("rollout/0", "n5")
    (one,) = accounted(story).interruptions.all
    assert (one.cause, one.charged, one.node, one.node_after) == (PLANNED, False, "n3", "n5")


def test_restart_of_the_whole_run_has_the_cause_of_the_failed_replica() -> None:
    story = trained(begun(), 1, 5)
    story.loses("rollout/0")
    why = Why(("too many failures",), Rung.FULL_RESTART)
    fences = tuple(
        Fence(story.incarnation(id), Rung.FULL_RESTART, why, charged=id == "rollout/0")
        for id in ("trainer/0", "rollout/0", "rollout/1")
    )
    story.wait(1).record(ev.Decided(RestartAll(why, fences)))
    found = accounted(story).interruptions.all
    assert {one.replica for one in found} == {"trainer/0", "rollout/0", "rollout/1"}
    assert {one.cause for one in found} == {"process"}
    assert all(one.seconds(story.now) == pytest.approx({"decide": 1}) for one in found)


def test_end_of_a_run_that_is_resumed_interrupts_the_trainer() -> None:
    story = trained(begun(), 1, 5).ends(Outcome.CANCELLED, "asked").wait(100)
    story.record(ev.ManagerStarted("login2", 9), ev.Resumed("ada", "c1", story.job)).wait(2)
    story.launches("trainer/0").wait(5).joins("trainer/0", "starting").wait(1).enters("trainer/0", "train")
    (one,) = accounted(trained(story, 6, 8)).interruptions.all
    assert (one.replica, one.cause, one.evidence) == ("trainer/0", RUN_ENDED, ("asked",))
    assert one.seconds(story.now) == pytest.approx({"queue": 103, "start": 5, "load": 1})


def test_each_failure_after_a_recovery_is_an_interruption_of_its_own() -> None:
    story = failed(failed(trained(begun(), 1, 5), "trainer/0").wait(9), "trainer/0")
    found = [one.number for one in accounted(story).interruptions.all]
    assert found == [1, 2]
    assert all(one.ended_at - one.failed_at == pytest.approx(OUTAGE_S) for one in accounted(story).interruptions.all)  # type: ignore[operator]
