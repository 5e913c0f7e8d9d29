"""Readings of the workers' clocks become few records, and change no finding."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rrl.core.phases import MAX_CLOCK_ENTRIES, ClockReading, PhaseTime
from rrl.core.run_dir import RunDir
from rrl.core.types import Incarnation, Outcome, ReplicaId
from rrl.health.detection.health_monitor import HealthMonitor
from rrl.manager.context import RunContext
from rrl.manager.intake.interval_recorders import CLOCK_RECORD_INTERVAL_S, COMMIT_RECORD_INTERVAL_S, ClockRecorder
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Finish, StopStep
from rrl.tests.support.manager.handling import HELLO, LAUNCHED, R1, R2, STEP, WANTED, WHY, Handling
from rrl.transport import messages as msg

TRAINER = Incarnation(ReplicaId("trainer/0"), 1)


def reading(ns: int, began: int = 1) -> ClockReading:
    return ClockReading(began, 0, (PhaseTime("generate", "", ns),))


class Recorder(ClockRecorder):
    """A recorder with a settable time ``now``, and its records in ``recorded``."""

    def __init__(self, path: Path) -> None:
        self.now = 1000.0
        self.recorded: list[ev.ClocksRecorded] = []

        async def send(*_: object) -> None: ...

        def unused() -> None:
            raise AssertionError

        super().__init__(
            RunContext(RunDir(path), HealthMonitor(), unused, self._keep, send, lambda: self.now)  # type: ignore[arg-type]
        )

    def _keep(self, event: ev.Event) -> None:
        assert isinstance(event, ev.ClocksRecorded)
        self.recorded.append(event)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path)


def test_reports_without_commits_are_recorded_once_a_minute(recorder: Recorder) -> None:
    for second in range(0, 601, 5):
        recorder.now = 1000.0 + second
        recorder.on_report(R1, reading(second))
    assert len(recorder.recorded) == 600 / CLOCK_RECORD_INTERVAL_S
    assert recorder.recorded[-1].readings == ((R1, reading(600)),)


def test_commits_record_reports_but_not_every_one(recorder: Recorder) -> None:
    for tenth in range(1001):
        recorder.now = 1000.0 + tenth / 10
        recorder.on_report(TRAINER, reading(tenth))
        recorder.on_commit()
    assert len(recorder.recorded) == 100 / COMMIT_RECORD_INTERVAL_S


def test_many_replicas_are_recorded_less_often_with_commits(recorder: Recorder) -> None:
    for second in range(301):
        recorder.now = 1000.0 + second
        for index in range(1000):
            recorder.on_report(Incarnation(ReplicaId(f"rollout/{index}"), 1), reading(second))
        recorder.on_commit()
    assert 5 <= len(recorder.recorded) <= 7
    assert len(msgspec.msgpack.encode(recorder.recorded)) / 300 < 3000, (
        "the records of clocks take 3000 or more bytes of the journal per second"
    )


def test_record_has_the_last_report_of_a_killed_process_beside_that_of_the_next(recorder: Recorder) -> None:
    recorder.on_report(R1, reading(5))
    recorder.on_report(R1, reading(7))
    recorder.on_report(R2, reading(1, began=9))
    recorder.record()
    recorder.record()
    assert [dict(event.readings) for event in recorder.recorded] == [{R1: reading(7), R2: reading(1, began=9)}]


def test_record_is_bounded_whatever_a_worker_reports(recorder: Recorder) -> None:
    times = tuple(PhaseTime("\x1b[2J" + "x" * 10_000, "because\n" * 99, -5) for _ in range(10 * MAX_CLOCK_ENTRIES))
    recorder.on_report(R1, ClockReading(1, -3, times))
    recorder.record()
    ((_, limited),) = recorder.recorded[0].readings
    assert (limited.done, len(limited.times)) == (0, MAX_CLOCK_ENTRIES)
    assert limited.times[0].ns == 0
    assert limited.times[0].phase.isprintable()
    assert limited.times[0].idle_cause.isprintable()
    assert len(msgspec.msgpack.encode(recorder.recorded)) < 10_000


def test_report_of_an_agent_or_standby_process_is_ignored(recorder: Recorder) -> None:
    for replica in ("agent/n1", "standby/n1"):
        recorder.on_report(Incarnation(ReplicaId(replica), 1), reading(5))
    recorder.record()
    assert recorder.recorded == []


def test_clock_report_of_a_current_worker_is_recorded_and_changes_no_observation(tmp_path: Path) -> None:
    handling = Handling(tmp_path, *LAUNCHED)
    handling.handle(WANTED, HELLO, msg.Heartbeat(R1, "generate", 3))
    before, events = repr(handling.monitor.replicas[R1.replica]), len(handling.events)
    assert handling.handle(msg.ClockReport(R1, reading(5))) == []
    assert repr(handling.monitor.replicas[R1.replica]) == before
    assert len(handling.events) == events
    handling.handler.clock_recorder.record()
    assert handling.events[events:] == [ev.ClocksRecorded(((R1, reading(5)),))]


def test_last_report_of_a_stopped_worker_is_recorded_while_the_run_ends(tmp_path: Path) -> None:
    handling = Handling(tmp_path, *LAUNCHED)
    handling.handle(WANTED, HELLO)
    handling.fold(ev.Decided(Finish(Outcome.COMPLETED, WHY)))
    handling.fold(ev.Intended(StopStep(STEP, R1, 5.0, WHY)))
    assert handling.handle(msg.ClockReport(R1, reading(9))) == []
    handling.handler.clock_recorder.record()
    assert handling.events[-1] == ev.ClocksRecorded(((R1, reading(9)),))


def test_report_of_a_fenced_worker_is_ignored(tmp_path: Path) -> None:
    handling = Handling(tmp_path, *LAUNCHED)
    (answer,) = handling.handle(msg.ClockReport(R2, reading(9)))
    assert isinstance(answer, msg.Fenced)
    handling.handler.clock_recorder.record()
    assert handling.events == []


def test_clocks_of_guests_are_recorded_and_those_of_agents_and_standby_processes_are_not(recorder: Recorder) -> None:
    guest = Incarnation(ReplicaId("guest/n1"), 1)
    for name in ("agent/n1", "standby/n1"):
        recorder.on_report(Incarnation(ReplicaId(name), 1), reading(1))
    recorder.on_report(guest, reading(2))
    recorder.record()
    assert [one.readings for one in recorder.recorded] == [((guest, reading(2)),)]
