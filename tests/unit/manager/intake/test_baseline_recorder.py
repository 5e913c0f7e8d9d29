"""Baselines are recorded in the journal, and the next manager's health monitor starts with them."""

from __future__ import annotations

import msgspec
import pytest

from rrl.core.launch import tag_of
from rrl.core.types import Incarnation, NodeName, Outcome, Verdict
from rrl.health.detection.baselines import DurationStats, RoleBaseline
from rrl.health.detection.detect import Detection
from rrl.health.detection.health_monitor import HealthMonitor
from rrl.manager.intake import finding_gate as of_managers
from rrl.manager.intake.finding_gate import BASELINE_CHECK_INTERVAL_S, BaselineRecorder, restore_monitor
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Launch, Why
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import State
from rrl.tests.support.manager.jobs import RUN, TRAINER, job
from rrl.tests.support.manager.scripted_runs import LIMITS, Script, run_to_end

N1 = NodeName("n1")
INCARNATION = Incarnation(TRAINER, 1)
BASELINE = {
    "trainer": RoleBaseline(
        {"checkpoint": DurationStats(8, 5.0, 8.0), "train": DurationStats(8, 60.0, 80.0)}, uses_tensor_cores=True
    )
}


def learned(*events: ev.Event) -> State:
    state = fold(None, ev.Stamped(1, 0.0, 1, ev.RunStarted(RUN, job())))
    launch = Launch(INCARNATION, tag_of(RUN, INCARNATION), "pool", N1, Why(("it is wanted",)))
    for event in (ev.Intended(launch), ev.Joined(INCARNATION, N1, "n1", 7), *events):
        state = fold(state, ev.Stamped(state.seq + 1, 10.0, 1, event))
    return state


def phases(*names: str) -> list[ev.Event]:
    return [ev.PhaseEntered(INCARNATION, name) for name in names]


def time_until_hang_found(state: State, phase: str) -> float:
    """Return the seconds until a new manager finds the hang of a trainer that only sends heartbeats."""
    monitor, began = HealthMonitor(), 1000.0
    restore_monitor(monitor, state, began)
    monitor.on_hello(INCARNATION, N1, phase, began)
    limits, heartbeat = state.job.limits, 10.0
    limits = msgspec.structs.replace(limits, heartbeat=heartbeat, silence=60.0)
    for tick in range(1, 1500):
        now = began + tick * heartbeat
        monitor.on_heartbeat(INCARNATION, phase, 3, None, now)
        found, _ = Detection(monitor).detect(limits, now)
        if any(finding.verdict is Verdict.FAIL and finding.incarnation == INCARNATION for finding in found):
            return now - began
    return float("inf")


def test_hang_is_detected_by_baselines_of_an_earlier_manager() -> None:
    went = phases("starting", "train", "checkpoint", "publish", "wait_data", "train", "checkpoint")
    assert time_until_hang_found(learned(*went, ev.BaselinesLearned(BASELINE)), "checkpoint") < 400.0
    assert time_until_hang_found(learned(*went), "checkpoint") > 3000.0, (
        "the hang was found early without baselines in the journal"
    )


def test_first_pass_of_a_phase_remains_one_under_a_new_manager() -> None:
    went = phases("starting", "train", "checkpoint")
    assert time_until_hang_found(learned(*went, ev.BaselinesLearned(BASELINE)), "checkpoint") > 1800.0


def test_state_has_the_passed_phases_of_each_incarnation() -> None:
    state = learned(*phases("starting", "train", "publish", "train"))
    assert state.replicas[TRAINER].past_phases == ("starting", "train", "publish")
    again = Launch(Incarnation(TRAINER, 2), tag_of(RUN, Incarnation(TRAINER, 2)), "pool", N1, Why(("it is wanted",)))
    assert fold(state, ev.Stamped(state.seq + 1, 11.0, 1, ev.Intended(again))).replicas[TRAINER].past_phases == ()


def test_baselines_are_checked_once_a_minute_and_recorded_when_changed() -> None:
    monitor, recorded = HealthMonitor(), list[ev.BaselinesLearned]()
    recorder = BaselineRecorder(monitor, {}, recorded.append)
    recorder.record_if_due(0.0)
    monitor.restore_baselines(BASELINE)
    recorder.record_if_due(BASELINE_CHECK_INTERVAL_S - 1.0)
    assert recorded == [], "baselines were recorded before their check was due"
    recorder.record_if_due(BASELINE_CHECK_INTERVAL_S)
    assert recorded == [ev.BaselinesLearned(BASELINE)]
    for minute in range(2, 10):
        recorder.record_if_due(minute * BASELINE_CHECK_INTERVAL_S)
    assert len(recorded) == 1


def test_restored_baselines_are_not_recorded_again() -> None:
    state, recorded = learned(ev.BaselinesLearned(BASELINE)), list[ev.BaselinesLearned]()
    monitor = HealthMonitor()
    restore_monitor(monitor, state, 1000.0)
    BaselineRecorder(monitor, state.baselines, recorded.append).record_if_due(1000.0)
    assert recorded == []


def test_run_resumed_with_another_job_starts_without_baselines() -> None:
    state = learned(ev.BaselinesLearned(BASELINE), ev.RunEnded(Outcome.CANCELLED, "ada wanted it"))
    resumed = fold(state, ev.Stamped(state.seq + 1, 20.0, 2, ev.Resumed("ada", "c1", job())))
    assert resumed.baselines == {}


def test_baselines_are_restored_by_the_next_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[dict[str, RoleBaseline]] = []
    restore = HealthMonitor.restore_baselines

    def noted(monitor: HealthMonitor, known: dict[str, RoleBaseline]) -> None:
        restored.append(dict(known))
        restore(monitor, known)

    monkeypatch.setattr(of_managers, "BASELINE_CHECK_INTERVAL_S", 0.5)  # the whole run takes less than a minute
    monkeypatch.setattr(HealthMonitor, "restore_baselines", noted)
    script = Script(Outcome.COMPLETED, granted=1, job=job(spares=0, limits=LIMITS, steps=12))
    _, _, state = run_to_end(script, lambda site: setattr(site, "kill_every", 60))
    assert restored[0] == {}
    assert restored[-1].keys() == state.baselines.keys() == {"reward", "rollout"}
