"""The timeline of failures; summary, history, metrics and ``rrl logs --failed`` agree about each failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from rrl.cli.logs.failures import failures
from rrl.core.faults import Fault, FaultKind
from rrl.core.launch import ExitReason
from rrl.core.types import Cause, Evidence, Finding, Incarnation, NodeName, Outcome, Remedy, ReplicaId, Verdict, role_of
from rrl.health.history.records import Failed, RecoveryDone
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, InjectFault, Readmit, Rung, Why
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import State
from rrl.manager.reporting.failure_timeline import FailureTimeline
from rrl.manager.reporting.history_events import HistoryEvents
from rrl.manager.reporting.metrics import RunCounters
from rrl.manager.reporting.summary import Summary, summarize
from rrl.tests.support.cli.story import Story, wide
from rrl.tests.support.manager.jobs import ROLLOUTS, TRAINER, gang_job, job
from rrl.tests.support.manager.world import World

N3 = NodeName("n3")


class Views(NamedTuple):
    """What the summary, history, metrics and log report about the failures of roles, in the order of their fences."""

    summary: Summary
    failed: list[Failed]
    outages: list[RecoveryDone]
    counters: RunCounters
    logged: dict[str, tuple[bool, str, float | None]]
    """(injected, rung, time of the recovery in s), by incarnation."""


def views(events: Sequence[ev.Stamped]) -> Views:
    timeline = FailureTimeline()
    state: State | None = None
    history = HistoryEvents("small", "anna", "lab", "small", 1, events[0].at, None, timeline)
    counters = RunCounters(timeline)
    records = []
    for stamped in events:
        before, state = state, fold(state, stamped)
        changes = timeline.apply(stamped)
        records += history.apply(before, state, stamped, changes)
        counters.apply(before, state, stamped, changes)
    logged = {
        str(failure.incarnation): (failure.injected, failure.rung.value, failure.recovered_at)
        for failure, _ in failures(events)
        if failure.incarnation is not None and failure.rung is not None and failure.continues is None
    }
    return Views(
        summarize(events),
        [record for record in records if isinstance(record, Failed) and record.incarnation],
        [record for record in records if isinstance(record, RecoveryDone)],
        counters,
        {name: logged[name] for name in logged if role_of(name.partition("#")[0]) not in ("agent", "standby")},
    )


def killed() -> list[ev.Stamped]:
    world = World(job()).steady()
    world.kill(ROLLOUTS[0])
    world.play(timeout_s=30)
    world.kill(TRAINER)
    return world.play(timeout_s=60).events


def gang_member_killed() -> list[ev.Stamped]:
    world = World(gang_job(rollouts=2)).steady()
    world.kill(next(id for id in world.state.replicas if id.endswith(".2")))
    return world.play(timeout_s=60).events


def node_lost() -> list[ev.Stamped]:
    world = World(job(), nodes=7).steady()
    world.lose_node(world.node_of(ROLLOUTS[1]))
    return world.play(timeout_s=60).events


def fails_until_it_starts() -> list[ev.Stamped]:
    world = World(job()).steady()
    world.broken_incarnations[ROLLOUTS[0]] = "exit code 1"
    world.kill(ROLLOUTS[0])
    world.play(lambda: world.incarnations()[ROLLOUTS[0]] >= 3, timeout_s=600)
    del world.broken_incarnations[ROLLOUTS[0]]
    return world.play(timeout_s=600).events


def launch_rejected() -> list[ev.Stamped]:
    story = Story("small", wide()).works()
    story.loses("rollout/0")
    story.fences("rollout/0").wait(1).launches("rollout/0")
    rejected, step = story.incarnation("rollout/0"), story.recorded().replica(ROLLOUTS[0]).step
    assert step
    story.record(ev.IntentSettled(step, False, "srun: refused")).wait(1)
    why = Why(("its launches were refused",))
    story.record(ev.Decided(Fence(rejected, Rung.DEGRADED, why))).wait(100).launches("rollout/0")
    return story.wait(3).joins("rollout/0", "generate").stamped


def injected_and_resumed() -> list[ev.Stamped]:
    story = Story("small", wide()).works()
    incarnation = story.incarnation("rollout/0")
    fault = InjectFault(Fault("f0", FaultKind.KILL, "rollout/0"), "x", N3, Why(()), incarnation)
    story.wait(1).record(ev.Intended(fault), ev.FaultInjected("f0", incarnation, True))
    story.wait(1).recovers("rollout/0").wait(5)
    story.loses("rollout/1")
    story.fences("rollout/1").wait(10).ends(Outcome.CANCELLED, "cancelled by ada")
    story.wait(600).record(ev.Resumed("ada", "c1", story.job)).launches("rollout/1", "n4")
    return story.wait(3).joins("rollout/1", "generate").stamped


RUNS: list[Callable[[], list[ev.Stamped]]] = [
    killed,
    gang_member_killed,
    node_lost,
    fails_until_it_starts,
    launch_rejected,
    injected_and_resumed,
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_all_views_agree_about_each_failure(run: Callable[[], list[ev.Stamped]]) -> None:
    events = run()
    observed = views(events)
    recoveries = observed.summary.recoveries
    assert recoveries
    assert [one.incarnation.partition("#")[0] for one in observed.failed] == [one.replica for one in recoveries]
    assert list(observed.logged) == [one.incarnation for one in observed.failed]
    assert [one.injected for one in observed.failed] == [one.injected for one in recoveries]
    assert observed.summary.unprovoked == sum(not one.injected for one in recoveries)
    for failed, recovery, (injected, rung, recovered_at) in zip(
        observed.failed, recoveries, observed.logged.values(), strict=True
    ):
        assert (injected, rung) == (recovery.injected, recovery.rung)
        assert recovery.start_s is not None or recovered_at is None
        assert recovery.failed == int(failed.incarnation.partition("#")[2])
        if recovery.total_s is None and role_of(recovery.replica) in ("trainer", "rollout"):
            assert recovered_at is None
        if recovery.total_s is not None and not injected:
            assert recovered_at == pytest.approx(failed.since + recovery.total_s, abs=0.002)
    assert sum(observed.counters.restarts.values()) >= len({one.replica for one in recoveries})
    assert {one.since for one in observed.outages} <= {one.since for one in observed.failed}
    lost = sum(one.gpu_hours for one in observed.outages) * 3600
    assert observed.counters.timeline.lost_gpu_seconds == pytest.approx(lost, abs=0.01 * len(observed.outages))


def node_finding(at: float) -> ev.FindingChanged:
    evidence = (Evidence("kernel", "Xid 48", at),)
    return ev.FindingChanged(Finding("xid", Verdict.FAIL, Cause.GPU, Remedy.RESET_GPU, at, evidence, node=N3))


def test_work_before_an_incarnations_own_failure_counts_on_a_node_with_findings() -> None:
    story = Story("small", wide()).works()
    story.record(node_finding(story.now)).wait(3600)
    observed = views(story.recovers("rollout/0").wait(1).ends(Outcome.COMPLETED, "done").stamped)
    (recovery,), (failed,) = observed.summary.recoveries, observed.failed
    assert (recovery.detect_s, recovery.total_s) == (0.0, 4.8)
    assert failed.cause == "gpu"  # the cause is still that of the finding about the node
    assert recovery.total_s == pytest.approx(failed.at - failed.since + 4.7)


def test_findings_about_a_node_are_no_symptoms_after_its_readmission() -> None:
    story = Story("small", wide()).works()
    story.record(node_finding(story.now)).wait(100).record(ev.Decided(Readmit(N3, Why(("undrain",))))).wait(100)
    at = story.now
    story.record(ev.Decided(Fence(story.incarnation("rollout/0"), Rung.IN_PLACE, Why(("it ended",)))))
    (failed,) = views(story.stamped).failed
    assert failed.since == at


def test_member_promoted_from_a_standby_process_owns_the_end_of_its_step() -> None:
    story = Story("small", wide()).works()
    story.loses("rollout/0")
    story.fences("rollout/0").launches("rollout/0")
    promoted, standby = story.incarnation("rollout/0"), Incarnation(ReplicaId("standby/n3:rollout"), 9)
    step = story.recorded().replica(promoted.replica).step
    assert step
    story.record(ev.StepEnded(standby, step, 1, None, ExitReason.EXITED))
    assert [failure.incarnation for failure, _ in failures(story.stamped)][-1] == promoted


def test_new_manager_continues_outages_findings_and_faults() -> None:
    story = Story("small", wide()).works()
    frozen = story.incarnation("rollout/1")
    fault = InjectFault(Fault("f0", FaultKind.KILL, "rollout/1"), "x", NodeName("n4"), Why(()), frozen)
    story.record(node_finding(story.now), ev.Intended(fault)).wait(5)
    story.loses("rollout/0")
    story.fences("rollout/0").wait(5)
    old = FailureTimeline()
    for stamped in story.stamped:
        old.apply(stamped)
    state = story.recorded()
    new = FailureTimeline(state)
    assert set(new.outages) == set(old.outages)
    assert new.diagnose_node(N3, story.now).finding == old.diagnose_node(N3, story.now).finding
    for timeline in (old, new):
        changes = timeline.apply(
            ev.Stamped(state.seq + 1, story.now, 2, ev.Decided(Fence(frozen, Rung.IN_PLACE, Why(("it ended",)))))
        )
        assert [failure.injected for failure in changes.failures] == [True]
