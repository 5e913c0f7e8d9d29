"""Messages are checked against the current incarnations, and become events only if they change something."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from rrl.cluster.base import RejectReason
from rrl.core.launch import ExitReason, ExitRecord, tag_of
from rrl.core.run_spec import Limits
from rrl.core.types import (
    STORE,
    DataReport,
    Incarnation,
    NodeName,
    Outcome,
    OutsideKind,
    OutsideWait,
    ProbeResult,
    RaisedException,
    ReplicaId,
    Version,
    WeightTraffic,
)
from rrl.health.detection.detect import Detection
from rrl.manager.intake.message_handler import HANDLERS, OUTSIDE_SHOWN_AFTER_S
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Finish, Launch, StopStep
from rrl.manager.model.state import State, Status
from rrl.tests.support.manager.handling import HELLO, LAUNCHED, N1, R1, R2, STEP, WANTED, WHY, Handling
from rrl.tests.support.manager.jobs import RUN, job
from rrl.transport import messages as msg


@pytest.fixture
def hearing(tmp_path: Path) -> Handling:
    return Handling(tmp_path, *LAUNCHED)


def test_every_message_to_the_manager_has_a_handler() -> None:
    assert set(HANDLERS) == set(get_args(msg.ToManager))


def test_note_of_a_replica_is_recorded_on_change_with_escaped_control_characters(tmp_path: Path) -> None:
    hearing = Handling(tmp_path, *LAUNCHED)
    hearing.handle(WANTED, HELLO)
    for note in ("waits for \x1b[2Jgroup 3\n", "waits for \x1b[2Jgroup 3\n", ""):
        hearing.handle(msg.Heartbeat(R1, "generate", 1, note=note))
    noted = [event for event in hearing.events if isinstance(event, ev.NoteChanged)]
    assert noted == [ev.NoteChanged(R1, r"waits for \x1b[2Jgroup 3\n"), ev.NoteChanged(R1, "")]


def test_wait_for_somebody_outside_is_recorded_once_it_has_lasted_and_when_it_ends(tmp_path: Path) -> None:
    store = Incarnation(STORE, 1)
    tag = tag_of(RUN, store)
    hearing = Handling(tmp_path, *LAUNCHED, ev.Intended(Launch(store, tag, "pool", N1, WHY)))
    hearing.handle(
        msg.AdmissionRequest(store, tag, N1, 43),
        msg.Hello(store, tag, N1, "host", 44, "serve", weight_address="tcp://127.0.0.1:2"),
    )

    def reports(*waits: OutsideWait | None) -> list[OutsideWait | None]:
        before = len(hearing.events)
        for wait in waits:
            hearing.handle(msg.Heartbeat(store, "serve", 1, data=DataReport(outside=wait)))
        return [event.wait for event in hearing.events[before:] if isinstance(event, ev.OutsideWaitChanged)]

    first, later = OutsideWait(OutsideKind.AGENT, 3, 40.0), OutsideWait(OutsideKind.AGENT, 4, 1.0)
    assert reports(None, first, None, first, first) == [], "short waits are normal in every step"
    hearing.monitor.run.outside_since -= OUTSIDE_SHOWN_AFTER_S
    assert reports(first, first) == [first]
    assert hearing.state is not None
    assert hearing.state.replica(STORE).outside_since == 100.0 - 40.0
    assert reports(later) == [], "waits for one episode after the other are records of their own only at intervals"
    assert reports(None, None) == [None]


def test_a_launched_process_is_admitted_once_and_its_launch_is_settled(hearing: Handling) -> None:
    assert hearing.handle(WANTED) == [msg.Admitted(STEP, True)]
    assert hearing.events == [ev.Admitted(R1, STEP, N1, 41)]
    assert hearing.handle(WANTED) == [msg.Admitted(STEP, True)], "a repeated request for admission was not admitted"
    assert len(hearing.events) == 1


@pytest.mark.parametrize(
    "wanted",
    [msg.AdmissionRequest(R2, tag_of(RUN, R2), N1, 41), msg.AdmissionRequest(R1, "another.tag", N1, 41)],
    ids=["incarnation", "tag"],
)
def test_process_that_is_not_wanted_is_not_admitted(hearing: Handling, wanted: msg.AdmissionRequest) -> None:
    (answer,) = hearing.handle(wanted)
    assert (answer.ok, bool(answer.reason)) == (False, True)
    assert hearing.events == []


def test_process_on_another_node_is_not_admitted_and_its_launch_is_refused(hearing: Handling) -> None:
    why = f"{STEP} runs on n9, and was launched on n1"
    assert hearing.handle(msgspec.structs.replace(WANTED, node=NodeName("n9"))) == [msg.Admitted(STEP, False, why)]
    assert hearing.events == [ev.IntentSettled(STEP, False, why, reason=RejectReason.REFUSED)]
    held = hearing.state.replica(R1.replica) if hearing.state else None
    assert held is not None
    assert (held.status, held.failures[-1].refused, held.admitted_process) == (Status.WANTED, True, None)
    assert STEP not in hearing.context.connections.steps


def test_admitted_process_that_reconnects_to_an_ending_run_is_stopped(tmp_path: Path) -> None:
    over = ev.Decided(Finish(Outcome.COMPLETED, WHY))
    hearing = Handling(tmp_path, *LAUNCHED, ev.Admitted(R1, STEP, N1, 41), over)
    admitted, stop = hearing.handle(WANTED)
    assert admitted.ok
    assert (stop.incarnation, stop.grace) == (R1, job().limits.step_grace)
    assert hearing.context.connections.steps == {STEP: b"peer"}


def test_process_is_not_admitted_once_the_run_is_ending(tmp_path: Path) -> None:
    hearing = Handling(tmp_path, *LAUNCHED, ev.Decided(Finish(Outcome.COMPLETED, WHY)))
    (answer,) = hearing.handle(WANTED)
    assert not answer.ok


def test_ending_run_takes_a_last_commit_of_the_newest_incarnation_and_no_other_change(hearing: Handling) -> None:
    hearing.handle(WANTED, HELLO)
    hearing.fold(ev.Decided(Finish(Outcome.COMPLETED, WHY)))
    hearing.fold(ev.Intended(StopStep(STEP, R1, 5.0, WHY)))
    before = len(hearing.events)
    last = msg.StepCommitted(R1, 7, {"reward": 0.5})
    assert (
        hearing.handle(msg.PhaseEntered(R1, "save", 1), msg.FirstWorkDone(R1), msg.StepCommitted(R2, 8, {}), last) == []
    )
    assert hearing.events[before:] == [ev.StepCommitted(R1, 7, last.metrics, last.commit)]


def test_heartbeat_causes_no_event_but_a_new_phase_does(hearing: Handling) -> None:
    hearing.handle(WANTED, HELLO)
    before = len(hearing.events)
    assert hearing.handle(msg.Heartbeat(R1, "starting", 0), msg.Heartbeat(R1, "starting", 5)) == []
    assert len(hearing.events) == before
    hearing.handle(msg.Heartbeat(R1, "generate", 6), msg.Heartbeat(R1, "generate", 7))
    assert hearing.events[before:] == [ev.PhaseEntered(R1, "generate")]


def test_hello_records_phase_and_weight_version_for_a_new_manager(hearing: Handling) -> None:
    hello = msgspec.structs.replace(HELLO, phase="generate", weight_version=Version(3, 1))
    (welcome,) = hearing.handle(WANTED, hello)[1:]
    assert isinstance(welcome, msg.Welcome)
    assert hearing.events[1:] == [
        ev.Joined(R1, N1, "host", 42, None, "tcp://127.0.0.1:1"),
        ev.PhaseEntered(R1, "generate"),
        ev.VersionAvailable(R1, Version(3, 1)),
    ]
    hearing.handle(hello)
    assert len(hearing.events) == 4, "a repeated Hello was recorded again"


def test_later_weights_of_a_rollout_come_by_heartbeat_and_are_recorded_at_intervals(hearing: Handling) -> None:
    first, second, third = (Version(step, 1) for step in (3, 4, 5))
    hearing.handle(WANTED, msgspec.structs.replace(HELLO, phase="generate", weight_version=first))
    before = len(hearing.events)
    for weights in (first, second, second, third):
        hearing.handle(msg.Heartbeat(R1, "generate", 1, weights=weights))
    hearing.handle(msgspec.structs.replace(HELLO, phase="generate", weight_version=third))
    assert hearing.events[before:] == [ev.WeightsRecorded(((R1, second),), (WeightTraffic(),))], (
        "the time of the next record has not come"
    )


def test_received_weights_are_recorded_with_versions_and_once_for_the_first_one(hearing: Handling) -> None:
    first, second = Version(3, 1), Version(4, 1)
    hearing.handle(WANTED, msgspec.structs.replace(HELLO, phase="generate", weight_version=first))
    before = len(hearing.events)
    reports = [(first, WeightTraffic()), *[(first, WeightTraffic(100, 100))] * 2, (first, WeightTraffic(110, 150))]
    for weights, traffic in reports:
        hearing.handle(msg.Heartbeat(R1, "generate", 1, weights=weights, traffic=traffic))
    assert hearing.events[before:] == [ev.WeightsRecorded(((R1, first),), (WeightTraffic(100, 100),))]
    hearing.next_manager()
    hearing.handle(msgspec.structs.replace(HELLO, phase="generate"))
    before = len(hearing.events)
    hearing.handle(msg.Heartbeat(R1, "generate", 1, weights=second, traffic=WeightTraffic(102, 200, 1)))
    assert hearing.events[before:] == [ev.WeightsRecorded(((R1, second),), (WeightTraffic(102, 200, 1),))]
    replica = hearing.state.replica(R1.replica) if hearing.state else None
    assert replica is not None
    assert replica.traffic.since(replica.traffic_before) == WeightTraffic(2, 100, 1)


def test_impossible_counters_of_received_weights_are_limited(hearing: Handling) -> None:
    hearing.handle(WANTED, HELLO)
    before = len(hearing.events)
    wrong = WeightTraffic(-5, 2**64 - 1, -1)
    hearing.handle(msg.Heartbeat(R1, "generate", 1, weights=Version(3, 1), traffic=wrong))
    assert hearing.events[before:] == [
        ev.PhaseEntered(R1, "generate"),
        ev.WeightsRecorded(((R1, Version(3, 1)),), (WeightTraffic(0, 2**53, 0),)),
    ]


STRANGERS = (
    msgspec.structs.replace(HELLO, incarnation=R2),
    msg.Heartbeat(R2, "generate", 1),
    msg.VersionAvailable(R2, Version(9, 9)),
    msg.StepCommitted(R2, 9, {}),
)


@pytest.mark.parametrize("expected_text", STRANGERS, ids=lambda message: type(message).__name__)
def test_message_of_a_fenced_incarnation_is_ignored_and_answered_with_fenced(
    hearing: Handling, expected_text: Any
) -> None:
    (answer,) = hearing.handle(expected_text)
    assert isinstance(answer, msg.Fenced)
    assert hearing.events == []


def test_end_of_a_step_counts_once_and_only_for_its_incarnation(hearing: Handling) -> None:
    hearing.handle(ExitRecord("another.tag", R1, N1, 0, None, ExitReason.EXITED, 0.0))
    hearing.handle(ExitRecord(STEP, R2, N1, 0, None, ExitReason.EXITED, 0.0))
    assert hearing.events == []
    ended = ExitRecord(STEP, R1, N1, None, 9, ExitReason.SIGNALED, 0.0)
    hearing.handle(ended, ended)
    assert hearing.events == [ev.StepEnded(R1, STEP, None, 9, ExitReason.SIGNALED)]


def test_witnessed_end_is_recorded_from_its_exit_record_if_there_is_one(hearing: Handling) -> None:
    record = ExitRecord(STEP, R1, N1, 3, None, ExitReason.EXITED, 0.0)
    hearing.run.exit_file(STEP).write_bytes(msgspec.json.encode(record))
    hearing.handle(msg.StepVanished(R1, STEP, N1))
    assert hearing.events == [ev.StepEnded(R1, STEP, 3, None, ExitReason.EXITED)]


def test_unreported_end_is_read_from_its_exit_record(hearing: Handling) -> None:
    asyncio.run(hearing.handler.read_exit_records())
    assert hearing.events == []
    hearing.run.exit_file(STEP).write_bytes(b"")  # being written, or torn
    asyncio.run(hearing.handler.read_exit_records())
    assert hearing.events == []
    record = ExitRecord(STEP, R1, N1, None, 9, ExitReason.SIGNALED, 0.0)
    hearing.run.exit_file(STEP).write_bytes(msgspec.json.encode(record))
    asyncio.run(hearing.handler.read_exit_records())
    assert hearing.events == [ev.StepEnded(R1, STEP, None, 9, ExitReason.SIGNALED)]


def test_exception_of_an_ended_process_reaches_its_finding_on_every_way(hearing: Handling) -> None:
    exception = RaisedException("TypeError", "not a dict", "rollout.py:9", "abc")
    record = ExitRecord(STEP, R1, N1, 1, None, ExitReason.EXITED, 0.0, exception=exception)
    hearing.run.exit_file(STEP).write_bytes(msgspec.json.encode(record))

    def restored() -> None:
        hearing.handler.restore_step_end(R1)

    before, ended = hearing.state, ev.StepEnded(R1, STEP, 1, None, ExitReason.EXITED, exception=exception)
    for deliver in (lambda: hearing.handle(record), lambda: asyncio.run(hearing.handler.read_exit_records()), restored):
        hearing.events.clear()
        hearing.state = before
        hearing.next_manager()
        deliver()
        assert hearing.events == ([] if deliver is restored else [ended])
        [finding] = Detection(hearing.monitor).detect(Limits(), 100.0)[0]
        assert finding.exception == exception


# ── one process for each incarnation ───────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("managers", [1, 2])
@pytest.mark.parametrize(("node", "pid"), [(N1, 77), (NodeName("n2"), 41)], ids=["same node", "same pid"])
def test_second_process_of_an_admitted_tag_is_rejected_as_a_duplicate(
    hearing: Handling, node: NodeName, pid: int, managers: int
) -> None:
    hearing.handle(WANTED, HELLO)
    if managers == 2:
        hearing.next_manager()
    before = len(hearing.events)
    (answer,) = hearing.handle(msg.AdmissionRequest(R1, STEP, node, pid), peer=b"second")
    assert (answer.ok, answer.duplicate) == (False, True)
    assert answer.reason == f"{STEP} is process 41 on n1, not {pid} on {node}"
    assert hearing.context.connections.steps.get(STEP) != b"second", "a stop request would go to the second process"
    assert hearing.handle(WANTED, peer=b"again") == [msg.Admitted(STEP, True)], (
        "the first process was not admitted again"
    )
    assert len(hearing.events) == before


@pytest.mark.parametrize("managers", [1, 2])
@pytest.mark.parametrize(("host", "pid"), [("host", 43), ("elsewhere", 42)], ids=["same host", "same pid"])
def test_second_worker_of_an_incarnation_is_fenced_and_ignored(
    hearing: Handling, host: str, pid: int, managers: int
) -> None:
    hearing.handle(WANTED, HELLO)
    if managers == 2:
        hearing.next_manager()
    before = len(hearing.events)
    second = msgspec.structs.replace(HELLO, host=host, pid=pid, weight_address="tcp://127.0.0.1:2", phase="generate")
    answers = hearing.handle(
        second, msg.Heartbeat(R1, "generate", 9), msg.VersionAvailable(R1, Version(9, 1)), peer=b"second"
    )
    assert answers == [msg.Fenced(R1, f"{R1} is process 42 on host, not {pid} on {host}")]
    assert len(hearing.events) == before
    assert hearing.context.connections.workers.get(R1) != b"second"
    (welcome,) = hearing.handle(HELLO, peer=b"again")
    assert isinstance(welcome, msg.Welcome), "the first process was not welcomed again"


def test_message_on_a_processs_previous_connection_still_counts(hearing: Handling) -> None:
    hearing.handle(WANTED, HELLO, peer=b"first")
    hearing.handle(HELLO, peer=b"second")
    hearing.handle(msg.StepCommitted(R1, 1, {"reward": 0.5}), peer=b"first")
    assert hearing.events[-1] == ev.StepCommitted(R1, 1, {"reward": 0.5})
    hearing.handle(HELLO, peer=b"third")
    before = len(hearing.events)
    hearing.handle(msg.StepCommitted(R1, 2, {}), peer=b"never greeted")
    assert len(hearing.events) == before


def test_probe_reply_counts_only_from_the_suspect_itself(hearing: Handling, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    monkeypatch.setattr(hearing.handler.hang_investigator, "on_reply", heard.append)
    hearing.handle(WANTED, HELLO)
    hearing.events.clear()
    mine = msg.ProbeReply(R1, 7, ProbeResult.WORKS, "a token")
    hearing.handle(msg.ProbeReply(R1, 7, ProbeResult.WORKS, "from an unknown connection"), peer=b"stranger")
    hearing.handle(msg.ProbeReply(R2, 7, ProbeResult.WORKS, "from an incarnation that is not current"))
    hearing.handle(mine)
    assert (heard, hearing.events) == ([mine], [])


@pytest.mark.parametrize("managers", [1, 2])
def test_command_may_continue_with_another_worker_after_a_goodbye(hearing: Handling, managers: int) -> None:
    hearing.handle(WANTED, HELLO, msg.Goodbye(R1))
    if managers == 2:
        hearing.next_manager()
        assert Detection(hearing.monitor).detect(hearing.context.state().job.limits, 200.0)[0] == []
    (welcome,) = hearing.handle(msgspec.structs.replace(HELLO, pid=43), peer=b"second")
    assert isinstance(welcome, msg.Welcome)
    (refused,) = hearing.handle(msgspec.structs.replace(HELLO, pid=44), peer=b"third")
    assert isinstance(refused, msg.Fenced)


def test_agent_is_a_witness_for_steps_that_start_on_its_node(tmp_path: Path) -> None:
    agent = Incarnation(ReplicaId("agent/n1"), 1)
    tag = tag_of(RUN, agent)
    hearing = Handling(tmp_path, *LAUNCHED, ev.Intended(Launch(agent, tag, "pool", N1, WHY)))
    hearing.handle(msg.AdmissionRequest(agent, tag, N1, 7), msg.AgentHello(agent, tag, N1, "host", 7, "boot"))
    heartbeat = msg.AgentHeartbeat(agent, N1, alive=(STEP,))
    hearing.handle(heartbeat)
    assert hearing.monitor.replicas[R1.replica].step_alive_at is None, (
        "a step counts as running although no process was admitted there"
    )
    hearing.handle(WANTED, heartbeat)
    assert hearing.monitor.replicas[R1.replica].step_alive_at == 100.0


def test_second_agent_of_an_incarnation_is_fenced(tmp_path: Path) -> None:
    agent = Incarnation(ReplicaId("agent/n1"), 1)
    tag = tag_of(RUN, agent)
    hearing = Handling(tmp_path, *LAUNCHED, ev.Intended(Launch(agent, tag, "pool", N1, WHY)))
    hello = msg.AgentHello(agent, tag, N1, "host", 7, "boot")
    assert hearing.handle(msg.AdmissionRequest(agent, tag, N1, 7), hello, msg.AgentHeartbeat(agent, N1)) == [
        msg.Admitted(tag, True)
    ]
    (fenced,) = hearing.handle(msgspec.structs.replace(hello, pid=8), peer=b"second")
    assert isinstance(fenced, msg.Fenced)


HELLO_MESSAGES = (
    WANTED,
    HELLO,
    msg.Heartbeat(R1, "generate", 1),
    msg.PhaseEntered(R1, "generate", 2),
    msg.FirstWorkDone(R1),
    msg.VersionAvailable(R1, Version(1, 1)),
    msg.StepCommitted(R1, 1, {"reward": 0.5}),
    msg.StepCommitted(R1, 2, {"reward": 0.7}),
    msg.Goodbye(R1),
    ExitRecord(STEP, R1, N1, None, 9, ExitReason.SIGNALED, 0.0),
    msg.StepVanished(R1, STEP, N1),
)


@pytest.mark.parametrize("again", range(len(HELLO_MESSAGES)), ids=lambda n: type(HELLO_MESSAGES[n]).__name__)
def test_message_repeated_within_a_session_changes_nothing(tmp_path: Path, again: int) -> None:
    def heard(folder: str, *messages: Any) -> State:
        hearing = Handling(tmp_path / folder, *LAUNCHED)
        hearing.handle(*messages)
        assert hearing.state is not None
        return msgspec.structs.replace(hearing.state, seq=0)

    once, twice = HELLO_MESSAGES[: again + 1], (*HELLO_MESSAGES[: again + 1], HELLO_MESSAGES[again])
    assert heard("twice", *twice) == heard("once", *once)


def test_logged_values_are_recorded_with_bounded_names(tmp_path: Path) -> None:
    hearing = Handling(tmp_path, *LAUNCHED)
    hearing.handle(WANTED, HELLO)
    values = {f"\x1b[2J{number}{'x' * 200}": float(number) for number in range(100)}
    hearing.handle(msg.ValuesLogged(R1, {"accuracy": 0.5}), msg.ValuesLogged(R1, values), msg.ValuesLogged(R2, values))
    first, second = (event for event in hearing.events if isinstance(event, ev.ValuesLogged))
    assert first == ev.ValuesLogged(R1, {"accuracy": 0.5})
    assert (second.incarnation, len(second.values)) == (R1, 64), (
        "values of R2, which is not current, or more than 64 values were recorded"
    )
    assert all(len(name) <= 103 and "\x1b" not in name for name in second.values)
