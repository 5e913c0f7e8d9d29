"""The detectors of replicas: each fires, not a moment before, and not where silence or standing still is normal."""

from __future__ import annotations

from math import inf, nextafter

import pytest

from rrl.core.launch import ExitReason
from rrl.core.phases import PHASES, Phase
from rrl.core.run_spec import Limits, PhaseSpec
from rrl.core.types import Cause, Incarnation, NodeName, Remedy, ReplicaId
from rrl.health.detection.detect import detect
from rrl.health.detection.detectors.liveness import CPU_ACTIVE_SILENCE_FACTOR, missing_heartbeats
from rrl.health.detection.detectors.progress import FIRST_PASS_IDLE_SHARE, MAX_BLIND_TRAINING_S
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
)  # fmt: skip


def before(moment: float) -> float:
    return nextafter(moment, 0.0)


def one_rollout(phase: str = "generate") -> Trace:
    return Trace().node("n1", ROLLOUT, phase=phase)


# ── proof ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("code", "signal", "reason", "detail", "text"),
    [
        (1, None, ExitReason.EXITED, "", "exited with code 1; exited"),
        (None, 9, ExitReason.SIGNALED, "", "ended by signal 9 (SIGKILL); signalled"),
        (None, 35, ExitReason.SIGNALED, "", "ended by signal 35 (unnamed); signalled"),
        (None, None, ExitReason.NOT_STARTED, "no such file", "not started: no such file"),
        (None, None, ExitReason.LAUNCHER_DIED, "", "launcher died"),
    ],
)
def test_an_exit_record_is_proof_at_once(
    code: int | None, signal: int | None, reason: ExitReason, detail: str, text: str
) -> None:
    trace = one_rollout()
    trace.monitor.on_step_ended(ROLLOUT, code, signal, reason, trace.now, detail=detail)
    finding = trace.only()
    assert fail("exit_record", ROLLOUT) in trace.found()
    assert (finding.proof, finding.cause, finding.remedy) == (True, Cause.PROCESS, Remedy.RESTART)
    assert finding.evidence[0].text == text


def test_a_signal_that_is_not_ours_is_a_failure_once_the_cluster_has_had_time_to_say_that_it_preempts() -> None:
    trace = one_rollout()
    trace.monitor.on_step_ended(ROLLOUT, None, 15, ExitReason.STOPPED, trace.now)
    assert trace.findings() == []
    finding = trace.only(trace.now + 4 * LIMITS.heartbeat)
    assert (finding.proof, finding.evidence[0].text) == (True, "ended by signal 15 (SIGTERM); stopped on request")


def test_an_exit_of_who_was_asked_to_stop_is_no_failure() -> None:
    for code, signal in ((0, None), (None, 15), (None, 9)):
        trace = one_rollout()
        trace.monitor.on_stop_requested(ROLLOUT, trace.now)
        trace.monitor.on_step_ended(ROLLOUT, code, signal, ExitReason.EXITED, trace.now)
        assert trace.found() == set()
        assert trace.found(trace.now + 1e4) - {warn("node_lost", "n1")} == set()


def test_a_code_of_its_own_of_who_was_asked_to_stop_is_a_warning() -> None:
    trace = one_rollout()
    trace.monitor.on_stop_requested(ROLLOUT, trace.now)
    trace.monitor.on_step_ended(ROLLOUT, 3, None, ExitReason.EXITED, trace.now)
    assert trace.found() == {warn("exit_record", ROLLOUT)}


@pytest.mark.parametrize(("code", "signal"), [(0, None), (3, None), (None, 9)])
def test_an_end_that_nobody_asked_for_is_a_failure_even_after_goodbye(code: int | None, signal: int | None) -> None:
    trace = one_rollout()
    trace.monitor.on_goodbye(ROLLOUT, trace.now)
    trace.monitor.on_step_ended(ROLLOUT, code, signal, ExitReason.EXITED, trace.now)
    trace.play(4)
    assert trace.found() == {fail("exit_record", ROLLOUT)}
    assert trace.only().proof


def test_a_witnessed_end_that_nobody_asked_for_is_a_failure_even_after_goodbye() -> None:
    trace = one_rollout()
    trace.monitor.on_goodbye(ROLLOUT, trace.now)
    trace.monitor.on_step_gone(ROLLOUT, trace.now)
    assert trace.found() == {fail("step_gone", ROLLOUT)}


def test_code_0_waits_for_the_word_that_the_run_is_complete() -> None:
    trace = one_rollout()
    trace.monitor.on_step_ended(ROLLOUT, 0, None, ExitReason.EXITED, trace.now)
    due = trace.now + 4 * LIMITS.heartbeat
    assert trace.found(before(due)) == set()
    assert trace.found(due) == {fail("exit_record", ROLLOUT)}
    trace.monitor.on_stop_requested(ROLLOUT, trace.now + 1)
    assert trace.found(due) == set()


def test_who_said_goodbye_and_stays_has_failed_in_the_end() -> None:
    trace = one_rollout("stopping")
    trace.monitor.on_goodbye(ROLLOUT, trace.now)
    trace.monitor.on_goodbye(ROLLOUT, trace.now + 5)
    due = trace.now + PHASES["stopping"].longest
    trace.play(PHASES["stopping"].longest)
    assert trace.found(before(due)) == set()
    assert trace.found() == {fail("stop_overdue", ROLLOUT)}
    trace.monitor.on_stop_requested(ROLLOUT, trace.now)
    assert trace.found() == set(), "asked to stop: the manager sees to its end"


@pytest.mark.parametrize("reason", [ExitReason.FENCED, ExitReason.NOT_ADMITTED])
def test_a_second_step_that_was_sent_away_says_nothing_about_the_first(reason: ExitReason) -> None:
    trace = one_rollout()
    trace.monitor.on_step_ended(ROLLOUT, 1, None, reason, trace.now)
    assert trace.found() == set()
    trace.monitor.on_step_ended(ROLLOUT, None, 9, ExitReason.SIGNALED, trace.now)
    assert trace.found() == {fail("exit_record", ROLLOUT)}


def test_the_agent_s_witness_is_proof_and_an_exit_record_says_more() -> None:
    trace = one_rollout()
    trace.monitor.on_step_gone(ROLLOUT, trace.now)
    assert trace.found() == {fail("step_gone", ROLLOUT)}
    assert trace.only().proof
    trace.monitor.on_step_ended(ROLLOUT, None, 9, ExitReason.SIGNALED, trace.now)
    assert trace.found() == {fail("exit_record", ROLLOUT)}


def test_a_witnessed_end_of_who_was_asked_to_stop_is_no_failure() -> None:
    trace = one_rollout()
    trace.monitor.on_stop_requested(ROLLOUT, trace.now)
    trace.monitor.on_step_gone(ROLLOUT, trace.now)
    assert trace.found() == set()
    trace.monitor.on_step_ended(ROLLOUT, None, None, ExitReason.LOST, trace.now)
    assert trace.found() == set()


def test_an_agent_that_exits_is_found_like_any_replica() -> None:
    trace = one_rollout()
    trace.monitor.on_step_ended(agent_of("n1"), 1, None, ExitReason.EXITED, trace.now)
    assert trace.found() == {fail("exit_record", agent_of("n1"))}


# ── silence ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_silent_worker_on_a_living_node_has_failed_after_the_limit_and_not_before() -> None:
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


def test_a_silent_worker_whose_cpu_is_seen_at_work_has_three_times_as_long() -> None:
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


@pytest.mark.parametrize("load", [(0.0, 1.0, 0.0), (0.0, 0.0, 0.0)])
def test_a_stopped_one_takes_no_cpu_whatever_keeps_its_gpu(load: tuple[float, float, float]) -> None:
    trace = one_rollout()
    trace.loads[ROLLOUT] = load
    trace.play(6)
    trace.heartbeat_missing.add(ROLLOUT)
    trace.play(LIMITS.silence)
    assert trace.found() == {fail("worker_silence", ROLLOUT)}


@pytest.mark.parametrize("phase", sorted(PHASES))
def test_a_worker_must_beat_in_every_phase(phase: str) -> None:
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


def test_silence_of_who_was_asked_to_stop_is_expected() -> None:
    trace = one_rollout()
    trace.monitor.on_stop_requested(ROLLOUT, trace.now)
    trace.heartbeat_missing.add(ROLLOUT)
    trace.play(5000)
    assert trace.found() == set()


def test_a_worker_that_falls_silent_with_its_whole_node_is_unknown_and_not_charged() -> None:
    trace = one_rollout()
    trace.play(5.0)
    trace.monitor.on_agent_message(
        NodeName("n1"), agent_of("n1"), trace.now + 0.9
    )  # the last beats differ by up to one
    assert trace.found(trace.now + LIMITS.silence) == {unknown("worker_silence", ROLLOUT)}


def test_a_living_sibling_witnesses_for_the_node_too() -> None:
    trace = Trace().node("n1", ROLLOUTS[0], ROLLOUTS[1])
    trace.heartbeat_missing |= {ROLLOUTS[0], agent_of("n1")}
    trace.play(10)
    assert trace.found() == {fail("worker_silence", ROLLOUTS[0]), warn("node_lost", "n1")}


def test_with_slow_beats_silence_takes_three_missed_ones_and_time_for_the_last() -> None:
    trace = Trace(Limits(heartbeat=5.0, silence=10.0)).node("n1", ROLLOUT)
    last = trace.now
    trace.heartbeat_missing.add(ROLLOUT)
    trace.play(20)
    assert trace.found(before(last + 20)) == set()
    assert trace.found(last + 20) == {fail("worker_silence", ROLLOUT)}


def test_once_one_is_found_to_be_silent_those_who_have_missed_some_beats_on_living_nodes_are_told_too() -> None:
    trace = Trace()
    for index, incarnation in enumerate(ROLLOUTS):
        trace.node(f"n{index}", incarnation)
    trace.heartbeat_missing = {ROLLOUTS[0]}
    trace.play(4)
    began = trace.now
    trace.heartbeat_missing |= {ROLLOUTS[1], ROLLOUTS[2], agent_of("n2")}
    trace.play(6)
    assert missing_heartbeats([], trace.monitor, LIMITS, trace.now) == {}, "nobody asks before"
    silent = {ROLLOUTS[0]: (NodeName("n0"), began - 4), ROLLOUTS[1]: (NodeName("n1"), began)}
    assert missing_heartbeats(trace.findings(), trace.monitor, LIMITS, trace.now) == silent


def test_who_is_heard_again_is_found_no_more() -> None:
    trace = one_rollout()
    trace.heartbeat_missing.add(ROLLOUT)
    trace.play(30)
    assert trace.found() == {fail("worker_silence", ROLLOUT)}
    trace.heartbeat_missing.clear()
    trace.play(1)
    assert trace.found() == set()


def test_a_launch_without_hello_fails_after_the_join_limit_and_not_before() -> None:
    trace = Trace().node("n1")
    trace.launch(ROLLOUT, "n1")
    due = trace.now + LIMITS.join
    trace.play(LIMITS.join)
    assert trace.found(before(due)) == set()
    assert trace.found(due) == {fail("never_joined", ROLLOUT)}


STANDBY_PROCESS = Incarnation(ReplicaId("standby/n1"), 3)
PROMOTE = 4 * LIMITS.heartbeat


def promoted() -> Trace:
    """A shadow of n1, which stood by, was told to become the trainer."""
    trace = Trace().node("n1", STANDBY_PROCESS, phase="standby")
    trace.play(2 * PHASES["generate"].longest)
    assert trace.found() == set(), "it may do nothing for ever"
    trace.monitor.on_launched(TRAINER, NodeName("n1"), trace.now, STANDBY_PROCESS, PROMOTE)
    return trace


def test_a_shadow_that_is_not_heard_as_what_it_became_fails_long_before_a_launch_would() -> None:
    trace = promoted()
    due = trace.now + PROMOTE
    trace.play(PROMOTE)
    assert trace.found(before(due)) == set()
    assert trace.found(due) == {fail("promotion_overdue", TRAINER)}
    (finding,) = trace.findings()
    assert finding.evidence[0].text == "standby/n1#3 on n1 was promoted to it, but sent no Hello within 4 s"
    assert trace.monitor.replicas.keys() == {TRAINER.replica, agent_of("n1").replica}, "the shadow is no more"


def test_nobody_is_told_to_wait_longer_for_it_because_its_step_lives() -> None:
    trace = promoted()
    alive(trace, 2 * PROMOTE)
    trace.monitor.on_step_alive(TRAINER, trace.now)
    assert trace.found() == {fail("promotion_overdue", TRAINER)}


def test_a_shadow_whose_step_ends_before_it_was_heard_fails_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = promoted()
    trace.monitor.on_step_ended(TRAINER, None, 9, ExitReason.SIGNALED, trace.now)
    assert trace.found() == {fail("exit_record", TRAINER)}


def test_heard_as_what_it_became_it_is_judged_as_any_other() -> None:
    trace = promoted()
    trace.play(LIMITS.heartbeat)
    trace.monitor.on_hello(TRAINER, NodeName("n1"), "starting", trace.now)
    trace.play(2 * PROMOTE)
    assert trace.found() == set()
    trace.monitor.restart(trace.now)
    trace.heartbeat_missing.add(TRAINER)
    trace.play(2 * PROMOTE)
    assert trace.found() == set(), "after a manager's pause it has as long to be heard as any"


def alive(trace: Trace, seconds: float) -> None:
    """The agent of n1 beats, and says that the rollout's step lives."""
    for _ in range(int(seconds)):
        trace.play(1)
        trace.monitor.on_step_alive(ROLLOUT, trace.now)


def test_a_slow_start_of_a_step_that_lives_is_a_warning_first() -> None:
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


def test_a_step_that_the_agent_saw_long_ago_has_no_more_time_than_a_launched_one() -> None:
    trace = Trace().node("n1")
    trace.launch(ROLLOUT, "n1")
    alive(trace, 150)
    seen = trace.now
    trace.play(LIMITS.join)
    assert trace.found(before(seen + LIMITS.join)) == {warn("never_joined", ROLLOUT)}
    assert trace.found() == {fail("never_joined", ROLLOUT)}


def test_a_slow_start_does_not_witness_against_its_node_before_its_own_time_is_up() -> None:
    trace = Trace().node("n1")
    trace.launch(ROLLOUT, "n1")
    alive(trace, 150)
    trace.heartbeat_missing.add(agent_of("n1"))
    seen = trace.now
    assert trace.found(seen + 60) == {warn("never_joined", ROLLOUT), warn("node_lost", "n1")}
    assert trace.found(seen + LIMITS.join) == {fail("node_lost", "n1")}


def test_a_step_that_lives_is_not_thereby_joined_nor_heard() -> None:
    trace = one_rollout()
    trace.heartbeat_missing.add(ROLLOUT)
    alive(trace, 10)
    assert trace.found() == {fail("worker_silence", ROLLOUT)}


def test_an_agent_that_never_joins_fails_by_itself() -> None:
    trace = Trace()
    trace.launch(agent_of("n1"), "n1")
    assert trace.found(trace.now + LIMITS.join) == {fail("never_joined", agent_of("n1"))}


# ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_rollout_that_beats_but_makes_no_tokens_hangs_after_the_adaptive_deadline() -> None:
    trace = one_rollout()
    trace.play(20)  # usual gap 1 s: the deadline is the phase's shortest
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


def test_the_first_pass_gets_the_longest_deadline_and_grace() -> None:
    trace = one_rollout()
    trace.still.add(ROLLOUT)
    began = trace.now
    due = began + PHASES["generate"].longest + LIMITS.first_pass
    trace.play(due - began)
    assert trace.found(before(due)) == {warn("suspected", ROLLOUT)}
    assert trace.found(due) == {fail("no_progress", ROLLOUT)}


@pytest.mark.parametrize("phase", ["publish", "score"])
def test_who_idles_in_its_first_pass_has_no_grace_for_compiling(phase: str) -> None:
    trace = one_rollout(phase)
    trace.loads[ROLLOUT], trace.answers = IDLE, {ROLLOUT: NO_PROBE_HANDLER}
    trace.still.add(ROLLOUT)
    due = FIRST_PASS_IDLE_SHARE * PHASES[phase].longest
    trace.play(due - 2)
    assert trace.found() == set()
    trace.play(4)
    assert [seen[1:] for seen in trace.found()] == [(str(ROLLOUT), "FAIL")]
    assert due <= 900


@pytest.mark.parametrize(("phase", "load"), [("publish", (0.5, 0.0, 0.0)), ("checkpoint", IDLE)])
def test_a_first_pass_at_work_or_one_that_may_wait_for_storage_has_its_grace(
    phase: str, load: tuple[float, float, float]
) -> None:
    trace = one_rollout(phase)
    trace.loads[ROLLOUT] = load
    trace.play(PHASES[phase].longest + LIMITS.first_pass - 1)
    assert trace.found() == set()
    trace.play(1)
    assert trace.found() == {fail("phase_overdue", ROLLOUT)}


def test_in_a_later_life_what_is_usual_counts_at_once_for_who_idles() -> None:
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
def test_a_gpu_at_work_earns_less_in_long_steps_where_nobody_sees_its_tensor_cores(
    tensor: float | None, hours: float
) -> None:
    trace = one_rollout("train")
    trace.loads[ROLLOUT] = 1.0, 1.0, tensor
    trace.learn(ROLLOUT, "train", 2400.0)
    trace.enter(ROLLOUT, "train")
    due = trace.now + max(hours * 3600.0, MAX_BLIND_TRAINING_S)
    trace.play(due - 1 - trace.now)
    assert trace.found() == set()
    trace.play(1)
    assert trace.found() == {fail("phase_overdue", ROLLOUT)}


def test_a_replacement_gets_first_pass_grace_on_top_of_what_is_usual_in_its_role() -> None:
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


def test_no_progress_needs_three_beats_that_show_it() -> None:
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
def test_standing_still_for_a_while_is_normal_in_phases_that_need_no_progress(phase: str) -> None:
    trace = one_rollout(phase)
    trace.play(250)
    assert trace.found() == set()


def test_a_training_step_that_does_not_end_is_overdue_by_the_adaptive_deadline() -> None:
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
def test_the_adaptive_deadline_stays_within_the_bounds_of_the_phase(usual: float, deadline: float) -> None:
    trace = Trace().node("n1", TRAINER, phase="publish")
    trace.learn(TRAINER, "train", usual, passes=5)
    trace.enter(TRAINER, "train")
    began = trace.now
    trace.play(deadline)
    assert trace.found(before(began + deadline)) == set()
    assert trace.found(began + deadline) == {fail("phase_overdue", TRAINER)}


def test_a_long_phase_that_shows_progress_is_not_overdue() -> None:
    trace = Trace().node("n1", TRAINER, phase="train")
    for _ in range(40):
        trace.play(100)
        trace.done[TRAINER] = trace.done.get(TRAINER, 0) + 1
    assert trace.found() == set()


def test_a_running_deadline_does_not_move_when_others_change_what_is_usual() -> None:
    trace = Trace().node("n1", *ROLLOUTS[:2], phase="publish")
    for incarnation in ROLLOUTS[:2]:
        trace.learn(incarnation, "checkpoint", 100.0, between="serve")
    trace.enter(ROLLOUTS[0], "checkpoint")
    trace.play(510)
    found = trace.findings()
    assert [f.detector for f in found] == ["phase_overdue"]
    trace.learn(ROLLOUTS[1], "checkpoint", 250.0, passes=8, between="serve")
    assert trace.findings() == found


def test_nobody_knows_how_long_an_undeclared_phase_may_last_so_it_only_warns() -> None:
    trace = Trace().node("n1", TRAINER, phase="my_evaluation")
    trace.play(Phase("my_evaluation").longest + LIMITS.first_pass)
    assert trace.found() == {warn("phase_overdue", TRAINER)}


@pytest.mark.parametrize(
    ("phase", "usual", "once"),
    [
        ("train", 20.0, 360.0),  # an evaluation in it
        ("between", 1.0, 360.0),  # or outside of every phase
        ("checkpoint", 2.0, 180.0),  # shared storage stalls
        ("publish", 2.0, 180.0),
        ("score", 1.0, 180.0),  # a backlog, scored as a whole
        ("serve", 1.0, 180.0),  # the store's fsync stalls, and everybody with it
    ],
)
def test_one_pass_that_takes_minutes_though_it_usually_takes_seconds_is_no_hang(
    phase: str, usual: float, once: float
) -> None:
    trace = Trace().node("n1", TRAINER, phase="wait_data")
    trace.learn(TRAINER, phase, usual, passes=6, between="wait_data")
    trace.still.add(TRAINER)
    trace.enter(TRAINER, phase)
    trace.play(once)
    assert trace.found() == set()


def test_a_first_training_step_of_hours_is_no_hang() -> None:
    trace = Trace().node("n1", TRAINER, phase="train")
    trace.play(6 * 3600)
    assert trace.found() == set()


# ── bounds of the job's own ──────────────────────────────────────────────────────────────────────────────────────────
def test_the_job_moves_the_bounds_of_a_phase() -> None:
    limits = Limits(first_pass=0.0, phases={"train": PhaseSpec(shortest=30.0, longest=100.0)})
    trace = Trace(limits).node("n1", TRAINER, phase="train")
    began = trace.now
    trace.play(100)
    assert trace.found(before(began + 100)) == set()
    assert trace.found() == {fail("phase_overdue", TRAINER)}, "nothing usual yet: the longest"
    trace.learn(TRAINER, "train", 2.0, passes=6)
    trace.enter(TRAINER, "train")
    began = trace.now
    trace.play(30)
    assert trace.found(before(began + 30)) == set()
    assert trace.found() == {fail("phase_overdue", TRAINER)}, "five times the usual is shorter than the shortest"


def test_a_phase_of_the_job_s_own_that_lasts_longer_than_it_says_has_failed() -> None:
    own = PhaseSpec(longest=100.0, progresses=False)
    trace = Trace(Limits(first_pass=0.0, phases={"my_evaluation": own})).node("n1", TRAINER, phase="my_evaluation")
    trace.play(99)
    assert trace.found() == set()
    trace.play(1)
    assert trace.found() == {fail("phase_overdue", TRAINER)}


def test_a_phase_of_the_job_s_own_can_demand_progress() -> None:
    own = PhaseSpec(shortest=60.0, longest=100.0, progresses=True)
    trace = Trace(Limits(first_pass=0.0, phases={"tools": own})).node("n1", ROLLOUT, phase="tools")
    trace.play(500)
    assert trace.found() == set()
    assert trace.monitor.replicas[ROLLOUT.replica].usual_duration == pytest.approx(1.0), (
        "the gap between two rises is usual"
    )
    trace.still.add(ROLLOUT)
    trace.play(60)
    assert trace.found() == {fail("no_progress", ROLLOUT)}


def test_the_first_look_tells_the_watch_of_the_job_s_phases() -> None:
    trace = one_rollout("tools")
    limits = Limits(first_pass=0.0, phases={"tools": PhaseSpec(longest=100.0, progresses=True)})
    detect(trace.monitor, limits, trace.now)
    trace.still.add(ROLLOUT)
    trace.play(100)
    assert brief(detect(trace.monitor, limits, trace.now)[0]) == {fail("no_progress", ROLLOUT)}


# ── blocked by another replica ───────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(("phase", "detector"), [("checkpoint", "phase_overdue"), ("generate", "no_progress")])
def test_time_that_another_replica_took_is_not_charged_when_it_is_over(phase: str, detector: str) -> None:
    trace = Trace().node("n1", TRAINER, phase="publish").node("n2", STORE, phase="serve").node("n3", ROLLOUT)
    trace.learn(TRAINER, phase, 10.0, passes=6)
    trace.enter(TRAINER, phase)
    trace.play(2)
    trace.still.add(TRAINER)
    trace.waiting[TRAINER] = STORE.replica
    for _ in range(7):
        trace.play(100)
        trace.done[STORE] = trace.done.get(STORE, 0) + 1  # it serves the rollout
    assert trace.found() == set()
    del trace.waiting[TRAINER]
    trace.play(1)
    assert trace.found() == set(), "the first beat after the store is back"
    assert trace.monitor.replicas[TRAINER.replica].heartbeats == 0, "no beat has shown it standing still by itself"
    freed, deadline = trace.now, PHASES[phase].shortest
    trace.done[STORE] += 1
    trace.play(deadline)
    suspected = {warn("suspected", TRAINER)} if detector == "no_progress" else set()
    assert trace.found(before(freed + deadline)) == suspected
    assert trace.found() == {fail(detector, TRAINER)}, "from then on its time is its own"


def test_a_replacement_has_all_the_time_to_start_however_short_the_code_between_phases_was() -> None:
    trace = Trace().node("n1", TRAINER, phase="train")
    trace.learn(TRAINER, "starting", 1.0, passes=6, between="train")
    second = Incarnation(TRAINER.replica, 2)
    trace.launch(second, "n1")
    trace.monitor.on_hello(second, NodeName("n1"), "starting", trace.now)
    due = trace.now + PHASES["starting"].longest + LIMITS.first_pass
    trace.play(due - trace.now)
    assert trace.found(before(due)) == set()
    assert trace.found(due) == {fail("phase_overdue", second)}


def test_a_phase_that_may_last_for_ever_is_never_overdue() -> None:
    assert PHASES["serve"].longest == inf
    trace = Trace().node("n1", TRAINER, phase="serve")
    trace.play(5000)
    assert trace.found() == set()


def test_evidence_and_since_carry_no_running_seconds() -> None:
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


def test_every_detector_is_in_the_ladder_best_evidence_first() -> None:
    names = [detector.__name__ for detector in PROGRESS_DETECTORS]
    proofs_first = ["exit_record", "step_gone", "stop_overdue", "promotion_overdue", "never_joined", "worker_silence"]
    assert names[:6] == proofs_first
    assert names[7:9] == ["engine_dead", "no_answer"], "what it says of itself comes before what time says"
    assert names[-2:] == ["suspected", "straggler"], "warnings come last"
    assert set(names[6:]) == {
        "agent_silence", "engine_dead", "no_answer", "no_progress", "phase_overdue", "computes_nothing", "load_stalled",
        "wait_overdue", "wait_long", "idle", "suspected", "straggler",
    }  # fmt: skip


# ── a new manager ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_restart_gives_full_grace_and_judges_nothing_from_before() -> None:
    trace = Trace().node("n1", *ROLLOUTS[:2]).node("n2", TRAINER, phase="train")
    trace.play(20)
    trace.heartbeat_missing |= {ROLLOUTS[0], TRAINER, agent_of("n2")}
    trace.still.add(ROLLOUTS[1])
    trace.play(300)
    trace.monitor.on_node_status(NodeName("n2"), "down", "", trace.now)
    assert trace.found() == {
        fail("worker_silence", ROLLOUTS[0]), fail("no_progress", ROLLOUTS[1]), fail("node_down", "n2")
    }  # fmt: skip
    trace.restart()
    began = trace.now
    assert trace.found() == set()
    trace.play(59)
    assert trace.found() == set()
    trace.play(LIMITS.join - 59)
    assert trace.found(before(began + LIMITS.join)) == {warn("suspected", ROLLOUTS[1])}, "seen since the restart"
    assert trace.found() == {
        fail("never_joined", ROLLOUTS[0]), warn("suspected", ROLLOUTS[1]), fail("node_lost", "n2"),
    }  # fmt: skip


def test_proof_outlives_a_restart() -> None:
    trace = one_rollout()
    trace.monitor.on_step_ended(ROLLOUT, 1, None, ExitReason.EXITED, trace.now)
    trace.monitor.restart(trace.now + 5)
    assert trace.found() == {fail("exit_record", ROLLOUT)}
