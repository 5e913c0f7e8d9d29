"""Detectors of replicas fire at their deadlines, and not where silence or standstill is normal."""

from __future__ import annotations

from math import inf, nextafter

import pytest

from rrl.core.launch import ExitReason
from rrl.core.phases import PHASES, Phase, PhaseSpec
from rrl.core.run_spec import Limits
from rrl.core.types import Cause, Flag, Incarnation, NodeName, RaisedException, Remedy, ReplicaId
from rrl.health.detection.detectors.base import SLOW_START_FACTOR
from rrl.health.detection.detectors.liveness import (
    CPU_ACTIVE_SILENCE_FACTOR,
    STOPPED_SILENCE_FACTOR,
    missing_heartbeats,
)
from rrl.health.detection.detectors.pass_deadlines import FIRST_IDLE_SHARE, MAX_BLIND_TRAINING_S
from rrl.health.detection.detectors.registry import PROGRESS_DETECTORS
from rrl.tests.support.health.traces import (
    BUSY,
    IDLE,
    LIMITS,
    NO_PROBE_HANDLER,
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
    code: int | None, signal: int | None, reason: ExitReason, detail: str, text: str
) -> None:
    trace = one_rollout()
    trace.monitor.on_step_ended(ROLLOUT, code, signal, reason, trace.now, detail=detail)
    finding = trace.only()
    assert fail("exit_record", ROLLOUT) in trace.found()
    assert (finding.proof, finding.cause, finding.remedy) == (True, Cause.PROCESS, Remedy.RESTART)
    assert finding.evidence[0].text == text


def test_foreign_signal_fails_after_the_cluster_could_report_a_preemption() -> None:
    trace = one_rollout()
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


def test_nonzero_exit_code_after_a_stop_request_is_a_warning() -> None:
    trace = one_rollout()
    trace.monitor.on_stop_requested(ROLLOUT, trace.now)
    trace.monitor.on_step_ended(ROLLOUT, 3, None, ExitReason.EXITED, trace.now)
    assert trace.found() == {warn("exit_record", ROLLOUT)}


@pytest.mark.parametrize(("code", "signal"), [(0, None), (3, None), (None, 9)])
def test_end_without_a_stop_request_fails_even_after_goodbye(code: int | None, signal: int | None) -> None:
    trace = one_rollout()
    trace.monitor.on_goodbye(ROLLOUT, trace.now)
    trace.monitor.on_step_ended(ROLLOUT, code, signal, ExitReason.EXITED, trace.now)
    trace.play(4)
    assert trace.found() == {fail("exit_record", ROLLOUT)}
    assert trace.only().proof


def test_witnessed_end_without_a_stop_request_fails_even_after_goodbye() -> None:
    trace = one_rollout()
    trace.monitor.on_goodbye(ROLLOUT, trace.now)
    trace.monitor.on_step_gone(ROLLOUT, trace.now)
    assert trace.found() == {fail("step_gone", ROLLOUT)}


def test_exit_code_0_waits_for_a_report_that_the_run_is_complete() -> None:
    trace = one_rollout()
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
    code: int | None, signal: int | None, reason: ExitReason, flags: tuple[Flag, ...]
) -> None:
    trace = one_rollout()
    trace.monitor.on_step_ended(ROLLOUT, code, signal, reason, trace.now)
    assert trace.only(trace.now + 4 * LIMITS.heartbeat).flags == flags


def test_replica_that_does_not_end_after_goodbye_fails() -> None:
    trace = one_rollout("stopping")
    trace.monitor.on_goodbye(ROLLOUT, trace.now)
    trace.monitor.on_goodbye(ROLLOUT, trace.now + 5)
    due = trace.now + PHASES["stopping"].longest
    trace.play(PHASES["stopping"].longest)
    assert trace.found(before(due)) == set()
    assert trace.found() == {fail("stop_overdue", ROLLOUT)}
    trace.monitor.on_stop_requested(ROLLOUT, trace.now)
    assert trace.found() == set(), "a replica that was asked to stop is still overdue"


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
def test_exit_record_of_a_rejected_second_step_is_ignored(reason: ExitReason) -> None:
    trace = one_rollout()
    trace.monitor.on_step_ended(ROLLOUT, 1, None, reason, trace.now)
    assert trace.found() == set()
    trace.monitor.on_step_ended(ROLLOUT, None, 9, ExitReason.SIGNALED, trace.now)
    assert trace.found() == {fail("exit_record", ROLLOUT)}


def test_witnessed_end_is_proof_and_an_exit_record_replaces_it() -> None:
    trace = one_rollout()
    trace.monitor.on_step_gone(ROLLOUT, trace.now)
    assert trace.found() == {fail("step_gone", ROLLOUT)}
    assert trace.only().proof
    trace.monitor.on_step_ended(ROLLOUT, None, 9, ExitReason.SIGNALED, trace.now)
    assert trace.found() == {fail("exit_record", ROLLOUT)}


def test_witnessed_end_after_a_stop_request_is_no_failure() -> None:
    trace = one_rollout()
    trace.monitor.on_stop_requested(ROLLOUT, trace.now)
    trace.monitor.on_step_gone(ROLLOUT, trace.now)
    assert trace.found() == set()
    trace.monitor.on_step_ended(ROLLOUT, None, None, ExitReason.LOST, trace.now)
    assert trace.found() == set()


def test_agent_exit_fails_like_that_of_any_replica() -> None:
    trace = one_rollout()
    trace.monitor.on_step_ended(agent_of("n1"), 1, None, ExitReason.EXITED, trace.now)
    assert trace.found() == {fail("exit_record", agent_of("n1"))}


# ── silence ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_silent_worker_on_a_responsive_node_fails_at_the_limit() -> None:
    trace = one_rollout()
    trace.play(5)
    last = trace.now
    trace.heartbeat_missing.add(ROLLOUT)
    trace.play(9)
    due = last + LIMITS.silence
    assert trace.found(before(due)) == set()
    assert trace.found(due) == {fail("worker_silence", ROLLOUT)}
    finding = trace.only(due)
    assert (finding.since, finding.cause, finding.proof) == (last, Cause.PROCESS, False)


def test_silent_worker_with_cpu_load_has_three_times_the_limit() -> None:
    trace = one_rollout()
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


def rollout_that_a_tracer_stops() -> Trace:
    trace = one_rollout()
    trace.loads[ROLLOUT] = (0.0, 0.0, 0.0)
    trace.play(6)
    trace.heartbeat_missing.add(ROLLOUT)
    trace.stopped.add(ROLLOUT)
    return trace


def test_worker_that_a_tracer_stops_has_three_times_the_limit() -> None:
    trace = rollout_that_a_tracer_stops()
    trace.play(STOPPED_SILENCE_FACTOR * LIMITS.silence - 1)
    assert trace.found() == set()
    trace.play(1)
    assert trace.found() == {fail("worker_silence", ROLLOUT)}
    assert trace.only().evidence[0].text.endswith("; one of its processes is stopped (SIGSTOP, or a tracer)")


def test_worker_that_a_tracer_continues_has_no_finding() -> None:
    trace = rollout_that_a_tracer_stops()
    for _ in range(11):
        trace.play(1)
        assert trace.found() == set()
    trace.heartbeat_missing.clear()
    trace.stopped.clear()
    trace.play(30)
    assert trace.found() == set()


@pytest.mark.parametrize("load", [(0.0, 1.0, 0.0), (0.0, 0.0, 0.0)])
def test_silent_worker_without_cpu_load_has_the_normal_limit(load: tuple[float, float, float]) -> None:
    trace = one_rollout()
    trace.loads[ROLLOUT] = load
    trace.play(6)
    trace.heartbeat_missing.add(ROLLOUT)
    trace.play(LIMITS.silence)
    assert trace.found() == {fail("worker_silence", ROLLOUT)}


@pytest.mark.parametrize("phase", sorted(PHASES))
def test_worker_without_heartbeats_fails_in_every_phase(phase: str) -> None:
    trace = one_rollout(phase)
    trace.heartbeat_missing.add(ROLLOUT)
    trace.play(10)
    assert fail("worker_silence", ROLLOUT) in trace.found()


def test_silence_after_goodbye_is_expected() -> None:
    trace = one_rollout()
    trace.monitor.on_goodbye(ROLLOUT, trace.now)
    trace.heartbeat_missing.add(ROLLOUT)
    trace.play(PHASES["stopping"].longest - 1)
    assert trace.found() == set()


def test_worker_that_a_command_starts_after_the_goodbye_of_another_one_must_not_be_silent() -> None:
    trace = one_rollout()
    trace.monitor.on_goodbye(ROLLOUT, trace.now)
    trace.monitor.on_hello(ROLLOUT, NodeName("n1"), "stopping", trace.now)  # the first worker connects again
    trace.heartbeat_missing.add(ROLLOUT)
    trace.play(30)
    assert trace.found() == set()
    trace.monitor.on_hello(ROLLOUT, NodeName("n1"), "starting", trace.now)
    trace.play(LIMITS.silence)
    assert trace.found() == {fail("worker_silence", ROLLOUT)}


def test_silence_after_a_stop_request_is_expected() -> None:
    trace = one_rollout()
    trace.monitor.on_stop_requested(ROLLOUT, trace.now)
    trace.heartbeat_missing.add(ROLLOUT)
    trace.play(5000)
    assert trace.found() == set()


def test_worker_silent_with_its_whole_node_is_unknown() -> None:
    trace = one_rollout()
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


def test_worker_that_sends_messages_again_has_no_finding() -> None:
    trace = one_rollout()
    trace.heartbeat_missing.add(ROLLOUT)
    trace.play(30)
    assert trace.found() == {fail("worker_silence", ROLLOUT)}
    trace.heartbeat_missing.clear()
    trace.play(1)
    assert trace.found() == set()


def test_launch_without_hello_fails_at_the_join_limit() -> None:
    trace = Trace().node("n1")
    trace.launch(ROLLOUT, "n1")
    due = trace.now + LIMITS.join
    trace.play(LIMITS.join)
    assert trace.found(before(due)) == set()
    assert trace.found(due) == {fail("never_joined", ROLLOUT)}


STANDBY_PROCESS = Incarnation(ReplicaId("standby/n1"), 3)
PROMOTE = 4 * LIMITS.heartbeat


def promoted() -> Trace:
    """Return a trace in which the standby process of n1 is promoted to the trainer."""
    trace = Trace().node("n1", STANDBY_PROCESS, phase="standby")
    trace.play(2 * PHASES["generate"].longest)
    assert trace.found() == set(), "a standby process has a finding because it does nothing"
    trace.monitor.on_launched(TRAINER, NodeName("n1"), trace.now, STANDBY_PROCESS, PROMOTE)
    return trace


def test_promoted_standby_without_hello_fails_long_before_a_launch() -> None:
    trace = promoted()
    due = trace.now + PROMOTE
    trace.play(PROMOTE)
    assert trace.found(before(due)) == set()
    assert trace.found(due) == {fail("promotion_overdue", TRAINER)}
    (finding,) = trace.findings()
    assert finding.evidence[0].text == "standby/n1#3 on n1 was promoted to it, but sent no Hello within 4 s"
    assert trace.monitor.replicas.keys() == {TRAINER.replica, agent_of("n1").replica}, (
        "the promoted standby process is still in the table"
    )


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


def test_slow_start_of_a_running_step_warns_first() -> None:
    trace = Trace().node("n1")
    trace.launch(ROLLOUT, "n1")
    due = trace.now + 5 * LIMITS.join
    alive(trace, LIMITS.join - 1)
    assert trace.found() == set()
    alive(trace, 1)
    assert trace.found() == {warn("never_joined", ROLLOUT)}
    first = trace.findings()
    alive(trace, 4 * LIMITS.join - 1)
    assert trace.findings() == first
    assert detect_fresh(trace.monitor, trace.now, LIMITS)[1] <= due
    alive(trace, 1)
    assert trace.now == due
    assert trace.found() == {fail("never_joined", ROLLOUT)}


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


def test_slow_start_is_no_witness_before_its_own_deadline() -> None:
    trace = Trace().node("n1")
    trace.launch(ROLLOUT, "n1")
    alive(trace, 150)
    trace.heartbeat_missing.add(agent_of("n1"))
    reported_at = trace.now
    assert trace.found(reported_at + 60) == {warn("never_joined", ROLLOUT), warn("node_lost", "n1")}
    assert trace.found(reported_at + LIMITS.join) == {fail("node_lost", "n1")}


def test_running_step_is_neither_joined_nor_responsive() -> None:
    trace = one_rollout()
    trace.heartbeat_missing.add(ROLLOUT)
    alive(trace, 10)
    assert trace.found() == {fail("worker_silence", ROLLOUT)}


def test_agent_that_never_joins_fails_itself() -> None:
    trace = Trace()
    trace.launch(agent_of("n1"), "n1")
    assert trace.found(trace.now + LIMITS.join) == {fail("never_joined", agent_of("n1"))}


# ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_rollout_without_tokens_hangs_after_the_adaptive_deadline() -> None:
    trace = one_rollout()
    trace.play(20)  # usual gap between tokens 1 s: the deadline is the phase's shortest one
    last = trace.now
    trace.still.add(ROLLOUT)
    trace.play(299)
    due = last + PHASES["generate"].shortest
    assert trace.found(before(due)) == {warn("suspected", ROLLOUT)}
    assert trace.found(due) == {fail("no_progress", ROLLOUT)}
    finding = trace.only(due)
    assert (finding.cause, finding.remedy, finding.since) == (Cause.HANG, Remedy.RESTART, last)
    assert finding.evidence[0].text == (
        "phase generate: no progress within 300 s (5 x usual 1 s, within 300 to 3600 s)"
    )


def test_first_pass_has_the_longest_deadline_and_grace() -> None:
    trace = one_rollout()
    trace.still.add(ROLLOUT)
    began = trace.now
    due = began + PHASES["generate"].longest + LIMITS.first_pass
    trace.play(due - began)
    assert trace.found(before(due)) == {warn("suspected", ROLLOUT)}
    assert trace.found(due) == {fail("no_progress", ROLLOUT)}


@pytest.mark.parametrize("phase", ["publish", "score", "checkpoint"])
def test_idle_first_pass_has_no_grace_for_compiling(phase: str) -> None:
    trace = one_rollout(phase)
    trace.loads[ROLLOUT], trace.answers = IDLE, {ROLLOUT: NO_PROBE_HANDLER}
    trace.still.add(ROLLOUT)
    due = FIRST_IDLE_SHARE * PHASES[phase].longest
    trace.play(due - 2)
    assert trace.found() == set()
    trace.play(4)
    assert [observed[1:] for observed in trace.found()] == [(str(ROLLOUT), "FAIL")]
    assert due <= 900


@pytest.mark.parametrize("phase", ["publish", "checkpoint"])
def test_working_first_pass_has_its_grace(phase: str) -> None:
    trace = one_rollout(phase)
    trace.loads[ROLLOUT] = (0.5, 0.0, 0.0)
    trace.play(PHASES[phase].longest + LIMITS.first_pass - 1)
    assert trace.found() == set()
    trace.play(1)
    assert trace.found() == {fail("phase_overdue", ROLLOUT)}


def test_idle_replacement_is_judged_by_the_baseline_at_once() -> None:
    trace = one_rollout("publish")
    trace.loads[ROLLOUT] = BUSY
    trace.learn(ROLLOUT, "publish", 10.0, between="train")
    second = Incarnation(ROLLOUT.replica, 2)
    trace.launch(second, "n1")
    trace.monitor.on_hello(second, NodeName("n1"), "starting", trace.now)
    trace.enter(second, "publish")
    trace.loads = {second: IDLE}
    trace.play(PHASES["publish"].shortest - 1)
    assert trace.found() == set()
    trace.play(3)
    assert trace.found() == {fail("phase_overdue", second)}


@pytest.mark.parametrize(("tensor", "hours"), [(None, 200 / 60), (0.4, 6)])
def test_busy_gpu_without_tensor_core_loads_extends_long_steps_less(tensor: float | None, hours: float) -> None:
    trace = one_rollout("train")
    trace.loads[ROLLOUT] = 1.0, 1.0, tensor
    trace.learn(ROLLOUT, "train", 2400.0)
    trace.enter(ROLLOUT, "train")
    due = trace.now + max(hours * 3600.0, MAX_BLIND_TRAINING_S)
    trace.play(due - 1 - trace.now)
    assert trace.found() == set()
    trace.play(1)
    assert trace.found() == {fail("phase_overdue", ROLLOUT)}


def test_replacement_gets_first_pass_grace_on_top_of_the_baseline() -> None:
    trace = one_rollout()
    trace.play(20)
    second = Incarnation(ROLLOUT.replica, 2)
    trace.launch(second, "n1")
    trace.monitor.on_hello(second, NodeName("n1"), "starting", trace.now)
    trace.enter(second, "generate")
    trace.still.add(second)
    due = trace.now + PHASES["generate"].shortest + LIMITS.first_pass
    trace.play(due - trace.now)
    assert trace.found(before(due)) == {warn("suspected", second)}
    assert trace.found(due) == {fail("no_progress", second)}


def test_no_progress_needs_three_heartbeats_that_show_it() -> None:
    trace = one_rollout()
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


@pytest.mark.parametrize("phase", [p.name for p in PHASES.values() if not p.progresses])
def test_temporary_standstill_is_normal_in_phases_without_progress(phase: str) -> None:
    trace = one_rollout(phase)
    trace.play(250)
    assert trace.found() == set()


def test_endless_training_step_is_overdue_at_the_adaptive_deadline() -> None:
    trace = Trace().node("n1", TRAINER, phase="publish")
    trace.learn(TRAINER, "train", 200.0, passes=5)
    trace.enter(TRAINER, "train")
    began = trace.now
    due = began + LIMITS.adaptive * 200.0
    trace.play(due - began)
    assert trace.found(before(due)) == set()
    assert trace.found(due) == {fail("phase_overdue", TRAINER)}
    assert trace.only(due).cause == Cause.HANG


@pytest.mark.parametrize(("usual", "deadline"), [(2.0, 600.0), (5000.0, 21600.0)])
def test_adaptive_deadline_stays_within_the_bounds_of_the_phase(usual: float, deadline: float) -> None:
    trace = Trace().node("n1", TRAINER, phase="publish")
    trace.learn(TRAINER, "train", usual, passes=5)
    trace.enter(TRAINER, "train")
    began = trace.now
    trace.play(deadline)
    assert trace.found(before(began + deadline)) == set()
    assert trace.found(began + deadline) == {fail("phase_overdue", TRAINER)}


def test_long_phase_with_progress_is_not_overdue() -> None:
    trace = Trace().node("n1", TRAINER, phase="train")
    for _ in range(40):
        trace.play(100)
        trace.done[TRAINER] = trace.done.get(TRAINER, 0) + 1
    assert trace.found() == set()


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


def test_overdue_undeclared_phase_only_warns() -> None:
    trace = Trace().node("n1", TRAINER, phase="my_evaluation")
    trace.play(Phase("my_evaluation").longest + LIMITS.first_pass)
    assert trace.found() == {warn("phase_overdue", TRAINER)}


@pytest.mark.parametrize(
    ("phase", "usual", "once"),
    [
        ("train", 20.0, 360.0),  # an evaluation within the phase
        ("between", 1.0, 360.0),  # an evaluation outside of every phase
        ("checkpoint", 2.0, 180.0),  # shared storage stalls
        ("publish", 2.0, 180.0),
        ("score", 1.0, 180.0),  # a backlog that is scored as a whole
        ("serve", 1.0, 180.0),  # the store's fsync stalls, and all other roles wait for it
    ],
)
def test_pass_of_minutes_that_usually_takes_seconds_is_no_hang(phase: str, usual: float, once: float) -> None:
    trace = Trace().node("n1", TRAINER, phase="wait_data")
    trace.learn(TRAINER, phase, usual, passes=6, between="wait_data")
    trace.still.add(TRAINER)
    trace.enter(TRAINER, phase)
    trace.play(once)
    assert trace.found() == set()


def test_first_training_step_of_hours_is_no_hang() -> None:
    trace = Trace().node("n1", TRAINER, phase="train")
    trace.play(6 * 3600)
    assert trace.found() == set()


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


def test_job_defined_phase_fails_at_its_declared_limit() -> None:
    own = PhaseSpec(longest=100.0, progresses=False)
    trace = Trace(Limits(first_pass=0.0, phases={"my_evaluation": own})).node("n1", TRAINER, phase="my_evaluation")
    trace.play(99)
    assert trace.found() == set()
    trace.play(1)
    assert trace.found() == {fail("phase_overdue", TRAINER)}


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


def test_replacement_has_the_full_start_time_despite_short_phases_before() -> None:
    trace = Trace().node("n1", TRAINER, phase="train")
    trace.learn(TRAINER, "starting", 1.0, passes=6, between="train")
    second = Incarnation(TRAINER.replica, 2)
    trace.launch(second, "n1")
    trace.monitor.on_hello(second, NodeName("n1"), "starting", trace.now)
    due = trace.now + PHASES["starting"].longest + LIMITS.first_pass
    trace.play(due - trace.now)
    assert trace.found(before(due)) == set()
    assert trace.found(due) == {fail("phase_overdue", second)}


def test_phase_without_a_limit_is_never_overdue() -> None:
    assert PHASES["serve"].longest == inf
    trace = Trace().node("n1", TRAINER, phase="serve")
    trace.play(5000)
    assert trace.found() == set()


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


def test_every_detector_is_in_the_ladder_by_strength_of_evidence() -> None:
    names = [detector.__name__ for detector in PROGRESS_DETECTORS]
    proofs_first = ["exit_record", "step_gone", "stop_overdue", "promotion_overdue", "never_joined", "worker_silence"]
    assert names[:6] == proofs_first
    assert names[7:9] == ["engine_dead", "no_answer"], "reports of the replica itself must come before deadlines"
    assert names[-2:] == ["suspected", "straggler"], "detectors that only warn must come last"
    assert set(names[6:]) == {
        "agent_silence",
        "engine_dead",
        "no_answer",
        "no_progress",
        "phase_overdue",
        "computes_nothing",
        "load_stalled",
        "wait_overdue",
        "wait_long",
        "idle",
        "suspected",
        "straggler",
    }


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


def test_proof_is_kept_through_a_restart() -> None:
    trace = one_rollout()
    trace.monitor.on_step_ended(ROLLOUT, 1, None, ExitReason.EXITED, trace.now)
    trace.monitor.restart(trace.now + 5)
    assert trace.found() == {fail("exit_record", ROLLOUT)}
