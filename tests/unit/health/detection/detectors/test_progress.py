"""Detectors of replicas fire at their deadlines, and not where silence or standstill is normal."""

from __future__ import annotations

from math import nextafter

import pytest

from rrl.core.launch import ExitReason
from rrl.core.phases import PHASES, PhaseSpec
from rrl.core.run_spec import Limits
from rrl.core.types import Cause, Flag, Incarnation, NodeName, RaisedException, Remedy, ReplicaId
from rrl.health.detection.detectors.base import SLOW_START_FACTOR
from rrl.health.detection.detectors.liveness import CPU_ACTIVE_SILENCE_FACTOR, missing_heartbeats
from rrl.tests.support.health.traces import (
    LIMITS,
    ROLLOUT,
    ROLLOUTS,
    STORE,
    TRAINER,
    Trace,
    agent_of,
    brief,
    detect_fresh,
    fail,
    unknown,
    warn,
)


@pytest.fixture
def trace() -> Trace:
    return one_rollout()


def before(moment: float) -> float:
    return nextafter(moment, 0.0)


def one_rollout(phase: str = "generate") -> Trace:
    return Trace().node("n1", ROLLOUT, phase=phase)


# ── proof ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("code", "signal", "reason", "detail", "text"),
    [
        (1, None, ExitReason.EXITED, "", "exited with code 1"),
        (None, 9, ExitReason.SIGNALED, "", "ended by signal 9 (SIGKILL)"),
        (None, 35, ExitReason.SIGNALED, "", "ended by signal 35 (unnamed)"),
        (None, None, ExitReason.NOT_STARTED, "no such file", "not started: no such file"),
        (None, None, ExitReason.LAUNCHER_DIED, "", "launcher died"),
    ],
)
def test_exit_record_is_proof_at_once(
    code: int | None, signal: int | None, reason: ExitReason, detail: str, text: str, trace: Trace
) -> None:
    trace.monitor.on_step_ended(ROLLOUT, code, signal, reason, trace.now, detail=detail)
    finding = trace.only()
    assert fail("exit_record", ROLLOUT) in trace.found()
    assert (finding.proof, finding.cause, finding.remedy) == (True, Cause.PROCESS, Remedy.RESTART)
    assert finding.evidence[0].text == text


def test_foreign_signal_fails_after_the_cluster_could_report_a_preemption(trace: Trace) -> None:
    trace.monitor.on_step_ended(ROLLOUT, None, 15, ExitReason.STOPPED, trace.now)
    assert trace.findings() == []
    finding = trace.only(trace.now + 4 * LIMITS.heartbeat)
    assert (finding.proof, finding.evidence[0].text) == (True, "ended by signal 15 (SIGTERM); stopped on request")


def test_exit_after_a_stop_request_is_no_failure() -> None:
    for code, signal in ((0, None), (None, 15), (None, 9)):
        trace = one_rollout()
        trace.monitor.on_stop_requested(ROLLOUT, trace.now)
        trace.monitor.on_step_ended(ROLLOUT, code, signal, ExitReason.EXITED, trace.now)
        assert trace.found() == set()
        assert trace.found(trace.now + 1e4) - {warn("node_lost", "n1")} == set()


def test_nonzero_exit_code_after_a_stop_request_is_a_warning(trace: Trace) -> None:
    trace.monitor.on_stop_requested(ROLLOUT, trace.now)
    trace.monitor.on_step_ended(ROLLOUT, 3, None, ExitReason.EXITED, trace.now)
    assert trace.found() == {warn("exit_record", ROLLOUT)}


@pytest.mark.parametrize(("code", "signal"), [(0, None), (3, None), (None, 9)])
def test_end_without_a_stop_request_fails_even_after_goodbye(
    code: int | None, signal: int | None, trace: Trace
) -> None:
    trace.monitor.on_goodbye(ROLLOUT, trace.now)
    trace.monitor.on_step_ended(ROLLOUT, code, signal, ExitReason.EXITED, trace.now)
    trace.play(4)
    assert trace.found() == {fail("exit_record", ROLLOUT)}
    assert trace.only().proof


def test_witnessed_end_without_a_stop_request_fails_even_after_goodbye(trace: Trace) -> None:
    trace.monitor.on_goodbye(ROLLOUT, trace.now)
    trace.monitor.on_step_gone(ROLLOUT, trace.now)
    assert trace.found() == {fail("step_gone", ROLLOUT)}


def test_exit_code_0_waits_for_a_report_that_the_run_is_complete(trace: Trace) -> None:
    trace.monitor.on_step_ended(ROLLOUT, 0, None, ExitReason.EXITED, trace.now)
    due = trace.now + 4 * LIMITS.heartbeat
    assert trace.found(before(due)) == set()
    assert trace.found(due) == {fail("exit_record", ROLLOUT)}
    trace.monitor.on_stop_requested(ROLLOUT, trace.now + 1)
    assert trace.found(due) == set()


@pytest.mark.parametrize(
    ("code", "signal", "reason", "flags"),
    [
        (0, None, ExitReason.EXITED, (Flag.CLEAN_EXIT,)),
        (1, None, ExitReason.EXITED, ()),
        (None, 9, ExitReason.SIGNALED, ()),
        (0, None, ExitReason.STOPPED, ()),
        (0, None, ExitReason.LAUNCHER_DIED, ()),
    ],
)
def test_only_a_program_that_returns_by_itself_is_a_clean_exit(
    code: int | None, signal: int | None, reason: ExitReason, flags: tuple[Flag, ...], trace: Trace
) -> None:
    trace.monitor.on_step_ended(ROLLOUT, code, signal, reason, trace.now)
    assert trace.only(trace.now + 4 * LIMITS.heartbeat).flags == flags


def test_end_for_invalid_configuration_has_its_flag_and_only_its_message() -> None:
    trace = Trace().node("n1", ROLLOUT)
    message = "[task] has no such dataset"
    trace.monitor.on_step_ended(ROLLOUT, 2, None, ExitReason.INVALID_CONFIG, trace.now, detail=message)
    [finding] = detect_fresh(trace.monitor, trace.now)[0]
    assert (finding.flags, finding.evidence[0].text) == ((Flag.INVALID_CONFIG,), message)


def test_exception_of_an_ended_process_is_carried_and_replaces_the_last_line() -> None:
    trace = Trace().node("n1", ROLLOUT)
    exception = RaisedException("TypeError", "not a dict", "rollout.py:9", "abc")
    trace.monitor.on_step_ended(
        ROLLOUT, 1, None, ExitReason.EXITED, trace.now, "Exception ignored in", exception=exception
    )
    [finding] = detect_fresh(trace.monitor, trace.now)[0]
    assert (finding.exception, finding.flags) == (exception, ())
    assert finding.evidence[0].text == "exited with code 1: TypeError: not a dict (rollout.py:9)"


@pytest.mark.parametrize("reason", [ExitReason.FENCED, ExitReason.NOT_ADMITTED])
def test_exit_record_of_a_rejected_second_step_is_ignored(reason: ExitReason, trace: Trace) -> None:
    trace.monitor.on_step_ended(ROLLOUT, 1, None, reason, trace.now)
    assert trace.found() == set()
    trace.monitor.on_step_ended(ROLLOUT, None, 9, ExitReason.SIGNALED, trace.now)
    assert trace.found() == {fail("exit_record", ROLLOUT)}


def test_witnessed_end_is_proof_and_an_exit_record_replaces_it(trace: Trace) -> None:
    trace.monitor.on_step_gone(ROLLOUT, trace.now)
    assert trace.found() == {fail("step_gone", ROLLOUT)}
    assert trace.only().proof
    trace.monitor.on_step_ended(ROLLOUT, None, 9, ExitReason.SIGNALED, trace.now)
    assert trace.found() == {fail("exit_record", ROLLOUT)}


def test_witnessed_end_after_a_stop_request_is_no_failure(trace: Trace) -> None:
    trace.monitor.on_stop_requested(ROLLOUT, trace.now)
    trace.monitor.on_step_gone(ROLLOUT, trace.now)
    assert trace.found() == set()
    trace.monitor.on_step_ended(ROLLOUT, None, None, ExitReason.LOST, trace.now)
    assert trace.found() == set()


# ── silence ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_silent_worker_with_cpu_load_has_three_times_the_limit(trace: Trace) -> None:
    trace.loads[ROLLOUT] = (1.0, 0.0, 0.0)
    trace.play(6)
    last = trace.now
    trace.heartbeat_missing.add(ROLLOUT)
    trace.play(CPU_ACTIVE_SILENCE_FACTOR * LIMITS.silence - 1)
    assert trace.found() == set()
    trace.play(1)
    assert trace.found() == {fail("worker_silence", ROLLOUT)}
    assert trace.only().evidence[0].text == "no heartbeat for 30 s, in phase generate"
    assert trace.now == last + CPU_ACTIVE_SILENCE_FACTOR * LIMITS.silence


def test_silence_after_goodbye_is_expected(trace: Trace) -> None:
    trace.monitor.on_goodbye(ROLLOUT, trace.now)
    trace.heartbeat_missing.add(ROLLOUT)
    trace.play(PHASES["stopping"].longest - 1)
    assert trace.found() == set()


def test_worker_that_a_command_starts_after_the_goodbye_of_another_one_must_not_be_silent(trace: Trace) -> None:
    trace.monitor.on_goodbye(ROLLOUT, trace.now)
    trace.monitor.on_hello(ROLLOUT, NodeName("n1"), "stopping", trace.now)  # the first worker connects again
    trace.heartbeat_missing.add(ROLLOUT)
    trace.play(30)
    assert trace.found() == set()
    trace.monitor.on_hello(ROLLOUT, NodeName("n1"), "starting", trace.now)
    trace.play(LIMITS.silence)
    assert trace.found() == {fail("worker_silence", ROLLOUT)}


def test_silence_after_a_stop_request_is_expected(trace: Trace) -> None:
    trace.monitor.on_stop_requested(ROLLOUT, trace.now)
    trace.heartbeat_missing.add(ROLLOUT)
    trace.play(5000)
    assert trace.found() == set()


def test_worker_silent_with_its_whole_node_is_unknown(trace: Trace) -> None:
    trace.play(5.0)
    trace.monitor.on_agent_message(
        NodeName("n1"), agent_of("n1"), trace.now + 0.9
    )  # the last heartbeats may differ by up to one interval (1 s)
    assert trace.found(trace.now + LIMITS.silence) == {unknown("worker_silence", ROLLOUT)}


def test_responsive_sibling_is_a_witness_for_the_node() -> None:
    trace = Trace().node("n1", ROLLOUTS[0], ROLLOUTS[1])
    trace.heartbeat_missing |= {ROLLOUTS[0], agent_of("n1")}
    trace.play(10)
    assert trace.found() == {fail("worker_silence", ROLLOUTS[0]), warn("node_lost", "n1")}


def test_silence_limit_is_at_least_four_heartbeat_intervals() -> None:
    trace = Trace(Limits(heartbeat=5.0, silence=10.0)).node("n1", ROLLOUT)
    last = trace.now
    trace.heartbeat_missing.add(ROLLOUT)
    trace.play(20)
    assert trace.found(before(last + 20)) == set()
    assert trace.found(last + 20) == {fail("worker_silence", ROLLOUT)}


def test_missing_heartbeats_lists_other_workers_once_one_is_silent() -> None:
    trace = Trace()
    for index, incarnation in enumerate(ROLLOUTS):
        trace.node(f"n{index}", incarnation)
    trace.heartbeat_missing = {ROLLOUTS[0]}
    trace.play(4)
    began = trace.now
    trace.heartbeat_missing |= {ROLLOUTS[1], ROLLOUTS[2], agent_of("n2")}
    trace.play(6)
    assert missing_heartbeats([], trace.monitor, LIMITS, trace.now) == {}, (
        "silent replicas are listed although there is no finding about one"
    )
    silent = {ROLLOUTS[0]: (NodeName("n0"), began - 4), ROLLOUTS[1]: (NodeName("n1"), began)}
    assert missing_heartbeats(trace.findings(), trace.monitor, LIMITS, trace.now) == silent


STANDBY_PROCESS = Incarnation(ReplicaId("standby/n1"), 3)
PROMOTE = 4 * LIMITS.heartbeat


def promoted() -> Trace:
    """Return a trace in which the standby process of n1 is promoted to the trainer."""
    trace = Trace().node("n1", STANDBY_PROCESS, phase="standby")
    trace.play(2 * PHASES["generate"].longest)
    assert trace.found() == set(), "a standby process has a finding because it does nothing"
    trace.monitor.on_launched(TRAINER, NodeName("n1"), trace.now, STANDBY_PROCESS, PROMOTE)
    return trace


def test_running_step_does_not_extend_the_deadline_of_a_promotion() -> None:
    trace = promoted()
    alive(trace, 2 * PROMOTE)
    trace.monitor.on_step_alive(TRAINER, trace.now)
    assert trace.found() == {fail("promotion_overdue", TRAINER)}


def test_promoted_standby_whose_step_ends_fails_by_its_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = promoted()
    trace.monitor.on_step_ended(TRAINER, None, 9, ExitReason.SIGNALED, trace.now)
    assert trace.found() == {fail("exit_record", TRAINER)}


def test_promoted_standby_with_hello_is_judged_as_any_replica() -> None:
    trace = promoted()
    trace.play(LIMITS.heartbeat)
    trace.monitor.on_hello(TRAINER, NodeName("n1"), "starting", trace.now)
    trace.play(2 * PROMOTE)
    assert trace.found() == set()
    trace.monitor.restart(trace.now)
    trace.heartbeat_missing.add(TRAINER)
    trace.play(2 * PROMOTE)
    assert trace.found() == set(), "a promoted replica failed early after a pause of the manager"


def alive(trace: Trace, seconds: float) -> None:
    """Let the agent of n1 send heartbeats and report the rollout's step as running."""
    for _ in range(int(seconds)):
        trace.play(1)
        trace.monitor.on_step_alive(ROLLOUT, trace.now)


def test_slow_standby_process_has_no_warning_before_the_slow_start_limit() -> None:
    trace = Trace().node("n1")
    trace.launch(STANDBY_PROCESS, "n1")
    due = trace.now + SLOW_START_FACTOR * LIMITS.join
    for _ in range(int(SLOW_START_FACTOR * LIMITS.join)):
        assert trace.found() == set()
        trace.play(1)
        trace.monitor.on_step_alive(STANDBY_PROCESS, trace.now)
    assert trace.now == due
    assert trace.found() == {fail("never_joined", STANDBY_PROCESS)}
    assert trace.only().evidence[0].text.startswith("no Hello within 600 s of its launch")


def test_step_reported_running_long_ago_has_no_extra_time() -> None:
    trace = Trace().node("n1")
    trace.launch(ROLLOUT, "n1")
    alive(trace, 150)
    reported_at = trace.now
    trace.play(LIMITS.join)
    assert trace.found(before(reported_at + LIMITS.join)) == {warn("never_joined", ROLLOUT)}
    assert trace.found() == {fail("never_joined", ROLLOUT)}


def test_running_step_is_neither_joined_nor_responsive(trace: Trace) -> None:
    trace.heartbeat_missing.add(ROLLOUT)
    alive(trace, 10)
    assert trace.found() == {fail("worker_silence", ROLLOUT)}


# ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_progress_needs_three_heartbeats_that_show_it(trace: Trace) -> None:
    trace.play(20)
    trace.heartbeat_missing.add(ROLLOUT)
    trace.play(PHASES["generate"].shortest)
    trace.heartbeat_missing.clear()
    trace.still.add(ROLLOUT)
    trace.play(1)
    trace.monitor.replicas[ROLLOUT.replica].heartbeats = 2
    assert trace.found() == {warn("suspected", ROLLOUT)}
    trace.play(1)
    assert trace.found() == {fail("no_progress", ROLLOUT)}


def test_running_deadline_does_not_move_with_the_baseline() -> None:
    trace = Trace().node("n1", *ROLLOUTS[:2], phase="publish")
    for incarnation in ROLLOUTS[:2]:
        trace.learn(incarnation, "checkpoint", 100.0, between="serve")
    trace.enter(ROLLOUTS[0], "checkpoint")
    trace.play(510)
    found = trace.findings()
    assert [f.detector for f in found] == ["phase_overdue"]
    trace.learn(ROLLOUTS[1], "checkpoint", 250.0, passes=8, between="serve")
    assert trace.findings() == found


# ── bounds that the job sets ─────────────────────────────────────────────────────────────────────────────────────────
def test_job_settings_move_the_bounds_of_a_phase() -> None:
    limits = Limits(first_pass=0.0, phases={"train": PhaseSpec(shortest=30.0, longest=100.0)})
    trace = Trace(limits).node("n1", TRAINER, phase="train")
    began = trace.now
    trace.play(100)
    assert trace.found(before(began + 100)) == set()
    assert trace.found() == {fail("phase_overdue", TRAINER)}, "without a baseline, the deadline must be `longest`"
    trace.learn(TRAINER, "train", 2.0, passes=6)
    trace.enter(TRAINER, "train")
    began = trace.now
    trace.play(30)
    assert trace.found(before(began + 30)) == set()
    assert trace.found() == {fail("phase_overdue", TRAINER)}, "the deadline must be at least `shortest`"


def test_job_defined_phase_can_require_progress() -> None:
    own = PhaseSpec(shortest=60.0, longest=100.0, progresses=True)
    trace = Trace(Limits(first_pass=0.0, phases={"tools": own})).node("n1", ROLLOUT, phase="tools")
    trace.play(500)
    assert trace.found() == set()
    assert trace.monitor.replicas[ROLLOUT.replica].usual_duration == pytest.approx(1.0), (
        "the usual duration is not the time between two rises of the progress"
    )
    trace.still.add(ROLLOUT)
    trace.play(60)
    assert trace.found() == {fail("no_progress", ROLLOUT)}


def test_first_detect_gives_the_monitor_the_phases_of_the_job() -> None:
    trace = one_rollout("tools")
    limits = Limits(first_pass=0.0, phases={"tools": PhaseSpec(longest=100.0, progresses=True)})
    trace.detection.detect(limits, trace.now)
    trace.still.add(ROLLOUT)
    trace.play(100)
    assert brief(trace.detection.detect(limits, trace.now)[0]) == {fail("no_progress", ROLLOUT)}


# ── blocked by another replica ───────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(("phase", "detector"), [("checkpoint", "phase_overdue"), ("generate", "no_progress")])
def test_time_blocked_by_another_replica_does_not_count_afterwards(phase: str, detector: str) -> None:
    trace = Trace().node("n1", TRAINER, phase="publish").node("n2", STORE, phase="serve").node("n3", ROLLOUT)
    trace.learn(TRAINER, phase, 10.0, passes=6)
    trace.enter(TRAINER, phase)
    trace.play(2)
    trace.still.add(TRAINER)
    trace.waiting[TRAINER] = STORE.replica
    for _ in range(7):
        trace.play(100)
        trace.done[STORE] = trace.done.get(STORE, 0) + 1  # the store serves the rollout
    assert trace.found() == set()
    del trace.waiting[TRAINER]
    trace.play(1)
    assert trace.found() == set(), "the first heartbeat after the end of the wait caused a finding"
    assert trace.monitor.replicas[TRAINER.replica].heartbeats == 0, (
        "a heartbeat from the trainer's wait counts towards a standstill of the trainer"
    )
    freed, deadline = trace.now, PHASES[phase].shortest
    trace.done[STORE] += 1
    trace.play(deadline)
    suspected = {warn("suspected", TRAINER)} if detector == "no_progress" else set()
    assert trace.found(before(freed + deadline)) == suspected
    assert trace.found() == {fail(detector, TRAINER)}, "the trainer's deadline must run from the end of its wait"


def test_evidence_and_since_contain_no_running_seconds() -> None:
    trace = Trace().node("n1", *ROLLOUTS)
    trace.play(20)
    trace.still.add(ROLLOUTS[0])
    trace.heartbeat_missing.add(ROLLOUTS[1])
    trace.monitor.on_step_ended(ROLLOUTS[2], 1, None, ExitReason.EXITED, trace.now)
    trace.play(300)
    found = trace.findings()
    assert len(found) == 3
    trace.play(333)
    assert trace.findings() == found


# ── a new manager ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_restart_gives_full_grace_and_ignores_earlier_silence() -> None:
    trace = Trace().node("n1", *ROLLOUTS[:2]).node("n2", TRAINER, phase="train")
    trace.play(20)
    trace.heartbeat_missing |= {ROLLOUTS[0], TRAINER, agent_of("n2")}
    trace.still.add(ROLLOUTS[1])
    trace.play(300)
    trace.monitor.on_node_status(NodeName("n2"), "down", "", trace.now)
    assert trace.found() == {
        fail("worker_silence", ROLLOUTS[0]),
        fail("no_progress", ROLLOUTS[1]),
        fail("node_down", "n2"),
    }
    trace.restart()
    began = trace.now
    assert trace.found() == set()
    trace.play(LIMITS.silence)
    trace.monitor.on_job_status(NodeName("n2"), False, trace.now, trace.now)
    assert trace.found(before(began + LIMITS.silence)) == set()
    assert trace.found() == {fail("worker_silence", ROLLOUTS[0]), fail("node_lost", "n2")}
    text = next(finding.evidence[0].text for finding in trace.findings() if finding.incarnation == ROLLOUTS[0])
    assert text == "no heartbeat for 10 s since this manager's start, stall or suspension"
    trace.play(59 - LIMITS.silence)
    assert len(trace.found()) == 2, "the replica's time without progress must count from the restart"
    trace.play(1)
    assert warn("suspected", ROLLOUTS[1]) in trace.found()


def test_proof_is_kept_through_a_restart(trace: Trace) -> None:
    trace.monitor.on_step_ended(ROLLOUT, 1, None, ExitReason.EXITED, trace.now)
    trace.monitor.restart(trace.now + 5)
    assert trace.found() == {fail("exit_record", ROLLOUT)}
