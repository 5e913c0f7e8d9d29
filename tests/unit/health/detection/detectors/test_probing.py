"""Probing: the effect of an answer, of a missing answer and of loads."""

from __future__ import annotations

import pytest

from rrl.core.phases import PHASES
from rrl.core.run_spec import Limits
from rrl.core.types import Cause, Incarnation, ProbeResult, Remedy, ReplicaId
from rrl.health.detection.detectors.pass_deadlines import BUSY_DEADLINE_FACTOR as LATEST
from rrl.health.detection.detectors.pass_deadlines import MIN_SERVICE_WAIT_S
from rrl.health.detection.detectors.probing import (
    BUSY_ANSWER_FACTOR,
    EARLY_PROBE_S,
    FIRST_PASS_SPINNING_FACTOR,
    FIRST_TOKEN_FACTOR,
    IDLE_ANSWER_SHARE,
    MAX_PROBE_INTERVAL_S,
    PROMPT_ANSWER_S,
    due_probes,
)
from rrl.health.detection.records import MAX_WAIT_PROBES
from rrl.tests.support.health.traces import (
    BUSY,
    DEAD,
    IDLE,
    LIMITS,
    NO_PROBE_HANDLER,
    REWARD,
    ROLLOUT,
    ROLLOUTS,
    SPINNING,
    STORE,
    WORKS,
    Trace,
    agent_of,
    fail,
    until_found,
    warn,
)

ROBUSTRL = 60.0
"""Time (s) without tokens after which RobustRL sends its heartbeat (docs/sources.md)."""


def generating(probes: bool = True, load: tuple[float, float | None, float | None] | None = BUSY) -> Trace:
    """Return a trace of two rollouts that generate tokens, with a baseline of one token per second.

    With ``probes``, the rollouts can be probed. ``load`` has the values of :data:`BUSY`; None reports no load.
    """
    trace = Trace().node("n1", *ROLLOUTS[:2])
    if probes:
        trace.answers = {}
    if load is not None:
        trace.loads = dict.fromkeys(ROLLOUTS[:2], load)
    trace.play(60)
    assert trace.found() == set()
    assert trace.probed_at == []
    return trace


def stop_heartbeats(trace: Trace, load: tuple[float, float | None, float | None] | None) -> None:
    trace.still.add(ROLLOUT)
    if load is None:
        trace.loads.pop(ROLLOUT, None)
    else:
        trace.loads[ROLLOUT] = load


# ── replicas that fail ───────────────────────────────────────────────────────────────────────────────────────────────
def test_dead_engine_in_a_live_idle_process_fails_within_half_a_minute() -> None:
    trace = generating()
    trace.answers = {ROLLOUT: None}
    stop_heartbeats(trace, IDLE)
    delay = until_found(trace, 40)
    assert trace.found() == {fail("no_answer", ROLLOUT)}
    assert delay <= EARLY_PROBE_S + IDLE_ANSWER_SHARE * LIMITS.probe + 4, (
        "the delay is longer than the probe limit and the 4 s until loads show idleness"
    )
    assert delay <= (ROBUSTRL + LIMITS.probe) / 3
    finding = trace.only()
    assert (finding.cause, finding.remedy, finding.proof) == (Cause.HANG, Remedy.RESTART, False)
    assert finding.evidence[0].text == (
        "phase generate: it sends heartbeats but has not answered a probe within 15 s while its CPU and GPU are idle"
    )


@pytest.mark.parametrize("load", [None, (1.0, 0.0, 0.0)])
def test_replica_without_useful_loads_is_probed_early_with_the_full_limit(
    load: tuple[float, float | None, float | None] | None,
) -> None:
    trace = generating(load=load or BUSY)
    trace.answers = {ROLLOUT: None}
    trace.loads.pop(ROLLOUT)
    trace.play(16)
    stop_heartbeats(trace, load)
    assert until_found(trace, 200) == EARLY_PROBE_S + LIMITS.probe
    assert trace.found() == {fail("no_answer", ROLLOUT)}


def test_long_prefill_without_loads_has_as_long_as_with_robustrl() -> None:
    trace = generating(load=None)
    trace.answers = {ROLLOUT: None}
    stop_heartbeats(trace, None)
    assert until_found(trace, 200) >= ROBUSTRL + LIMITS.probe
    assert trace.found() == {fail("no_answer", ROLLOUT)}


def test_engine_that_answers_a_probe_with_a_failure_fails_at_once() -> None:
    trace = generating()
    trace.answers = {ROLLOUT: DEAD}
    stop_heartbeats(trace, IDLE)
    assert until_found(trace, 40) <= EARLY_PROBE_S + 4
    assert trace.found() == {fail("engine_dead", ROLLOUT)}
    assert trace.only().evidence[0].text.endswith("it answered a probe with a failure: EngineDeadError")


def test_busy_replica_without_answer_fails_after_the_longest_prefill() -> None:
    trace = generating()
    trace.answers = {ROLLOUT: None}
    stop_heartbeats(trace, BUSY)
    assert until_found(trace, 500) == LIMITS.suspect + BUSY_ANSWER_FACTOR * LIMITS.probe
    assert trace.found() == {fail("no_answer", ROLLOUT)}


def test_spinning_replica_is_probed_early_and_gets_no_prefill_time() -> None:
    trace = generating()
    trace.answers = {ROLLOUT: None}
    stop_heartbeats(trace, SPINNING)
    assert until_found(trace, 100) <= 2 * EARLY_PROBE_S + LIMITS.probe + 4
    assert trace.found() == {fail("no_answer", ROLLOUT)}


def test_phase_limit_applies_even_if_probes_are_answered() -> None:
    trace = generating()
    stop_heartbeats(trace, IDLE)
    last = trace.now
    trace.play(PHASES["generate"].longest - 1)
    assert trace.found() == set()
    trace.play(1)
    assert trace.found() == {fail("no_progress", ROLLOUT)}
    assert trace.now - last == PHASES["generate"].longest


def test_engine_that_dies_during_a_tool_call_fails_at_the_next_probe() -> None:
    trace = generating()
    stop_heartbeats(trace, IDLE)
    trace.play(600)
    trace.answers = {ROLLOUT: None}
    assert until_found(trace, 300) <= MAX_PROBE_INTERVAL_S + IDLE_ANSWER_SHARE * LIMITS.probe
    assert trace.found() == {fail("no_answer", ROLLOUT)}


def test_false_progress_warns_and_fails_without_an_answer() -> None:
    trace = generating()
    trace.answers = {ROLLOUT: None}
    trace.loads[ROLLOUT] = IDLE
    trace.play(LIMITS.idle - 4)
    assert trace.found() == set()
    trace.play(8)
    assert trace.found() == {warn("suspected", ROLLOUT)}
    assert "it reports progress, but no GPU kernel runs" in trace.only().evidence[0].text
    assert until_found(trace, 40) <= IDLE_ANSWER_SHARE * LIMITS.probe
    assert trace.found() == {fail("no_answer", ROLLOUT)}


# ── replicas that do not fail ────────────────────────────────────────────────────────────────────────────────────────
def test_replica_waiting_for_a_tool_answers_probes_and_has_no_finding() -> None:
    trace = generating()
    stop_heartbeats(trace, IDLE)
    for _ in range(1800):
        trace.play(1)
        assert trace.found() == set()
    gaps = [later - at for (at, _), (later, _) in zip(trace.probed_at, trace.probed_at[1:], strict=False)]
    assert gaps[0] == LIMITS.probe / 2
    assert gaps[:4] == sorted(gaps[:4]), "the time between two probes does not grow"
    assert max(gaps) == MAX_PROBE_INTERVAL_S
    trace.still.clear()
    trace.loads[ROLLOUT] = BUSY
    count = len(trace.probed_at)
    trace.play(300)
    assert len(trace.probed_at) == count, "a replica that generates tokens was probed"


def test_long_prefill_that_delays_the_answer_is_no_hang() -> None:
    trace = generating()
    trace.answers = {ROLLOUT: None}
    stop_heartbeats(trace, BUSY)
    trace.play(240)
    assert trace.found() == {warn("suspected", ROLLOUT)}
    trace.still.clear()
    trace.play(2)
    assert trace.found() == set()


def test_compiling_in_the_first_pass_is_no_hang() -> None:
    trace = Trace().node("n1", ROLLOUT)
    trace.answers, trace.loads = {ROLLOUT: None}, {ROLLOUT: (1.0, 0.0, 0.0)}
    trace.still.add(ROLLOUT)
    trace.play(1800)
    assert trace.found() <= {warn("suspected", ROLLOUT)}


def test_probe_of_a_first_pass_is_not_overdue_when_the_first_tokens_come() -> None:
    trace = Trace().node("n1", ROLLOUT)
    trace.answers, trace.loads = {ROLLOUT: None}, {ROLLOUT: (1.0, 0.0, 0.0)}
    trace.still.add(ROLLOUT)
    trace.play(600)
    assert trace.probed_at != []
    trace.still.clear()
    trace.play(1)
    assert trace.found() <= {warn("suspected", ROLLOUT)}, (
        "a replica failed by a load that is older than its first token"
    )
    trace.answers, trace.loads = {}, {ROLLOUT: BUSY}
    trace.play(60)
    assert trace.found() == set()


def test_replica_that_reports_tokens_on_an_idle_gpu_after_its_first_pass_is_probed_again() -> None:
    trace = Trace().node("n1", ROLLOUT)
    trace.answers, trace.loads = {ROLLOUT: None}, {ROLLOUT: (1.0, 0.0, 0.0)}
    trace.still.add(ROLLOUT)
    trace.play(600)
    trace.still.clear()
    assert until_found(trace, 100) <= LIMITS.probe + 4


def test_idle_replica_without_a_first_token_fails_before_its_grace_ends() -> None:
    trace = Trace().node("n1", ROLLOUT)
    trace.answers, trace.loads = {ROLLOUT: None}, {ROLLOUT: IDLE}
    trace.still.add(ROLLOUT)
    assert (
        FIRST_TOKEN_FACTOR * EARLY_PROBE_S
        < until_found(trace, 400)
        <= FIRST_TOKEN_FACTOR * EARLY_PROBE_S + LIMITS.probe + 4
        < ROBUSTRL + LIMITS.probe
    )


def test_spinning_replica_without_a_first_token_fails_if_its_role_uses_tensor_cores() -> None:
    trace = generating()
    trace.answers = {ROLLOUTS[2]: None}
    trace.node("n2", ROLLOUTS[2])
    trace.loads[ROLLOUTS[2]] = SPINNING
    trace.still.add(ROLLOUTS[2])
    delay = until_found(trace, 500)
    assert trace.found() == {fail("no_answer", ROLLOUTS[2])}
    assert (
        FIRST_PASS_SPINNING_FACTOR * LIMITS.probe
        < delay
        <= FIRST_TOKEN_FACTOR * EARLY_PROBE_S + FIRST_PASS_SPINNING_FACTOR * LIMITS.probe + 4
    )


def test_loads_that_show_spinning_may_arrive_after_the_probe() -> None:
    trace = generating()
    trace.answers = {ROLLOUT: None}
    stop_heartbeats(trace, BUSY)
    trace.play(14)
    assert trace.probed_at != []
    trace.loads[ROLLOUT] = SPINNING
    assert until_found(trace, 100) <= LIMITS.probe + 4


def test_replica_with_tokens_under_an_earlier_manager_has_no_first_pass() -> None:
    trace = Trace()
    trace.done[ROLLOUT] = 700
    trace.node("n1", ROLLOUT)
    trace.answers, trace.loads = {ROLLOUT: None}, {ROLLOUT: IDLE}
    trace.still.add(ROLLOUT)
    assert until_found(trace, 400) <= EARLY_PROBE_S + IDLE_ANSWER_SHARE * LIMITS.probe + 4


def test_replica_without_probe_handler_is_probed_once_and_judged_by_time() -> None:
    trace = generating()
    trace.answers = {ROLLOUT: NO_PROBE_HANDLER}
    stop_heartbeats(trace, IDLE)
    last = trace.now
    trace.play(LATEST * PHASES["generate"].shortest - 1)
    assert trace.found() == set()
    trace.play(1)
    assert trace.found() == {fail("no_progress", ROLLOUT)}
    assert trace.now - last == LATEST * PHASES["generate"].shortest
    assert [incarnation for _, incarnation in trace.probed_at] == [ROLLOUT]


def test_replica_with_a_late_probe_handler_is_probed_in_its_next_phase() -> None:
    trace = generating()
    trace.answers = {ROLLOUT: NO_PROBE_HANDLER}
    stop_heartbeats(trace, IDLE)
    trace.play(60)
    trace.enter(ROLLOUT, "loading_weights")
    trace.play(1)
    trace.enter(ROLLOUT, "generate")
    trace.answers = {ROLLOUT: None}
    assert until_found(trace, 100) <= EARLY_PROBE_S + IDLE_ANSWER_SHARE * LIMITS.probe + 4


# ── waiting replicas ─────────────────────────────────────────────────────────────────────────────────────────────────
def waiting_rollouts(answer: tuple[ProbeResult, str] | None = WORKS) -> Trace:
    """Return a trace of two idle, healthy rollouts without work, which answer each probe with ``answer``."""
    trace = Trace().node("n1", *ROLLOUTS[:2], phase="wait_work")
    trace.answers = dict.fromkeys(ROLLOUTS[:2], answer)
    trace.loads = dict.fromkeys(ROLLOUTS[:2], IDLE)
    trace.play(300)
    assert trace.found() == set()
    return trace


def test_hung_waiting_replica_fails_if_its_role_answers_while_waiting() -> None:
    trace = waiting_rollouts()
    for incarnation in ROLLOUTS[:2]:
        trace.enter(incarnation, "generate")
        trace.play(3)
        trace.enter(incarnation, "wait_work")
    assert trace.answers is not None
    trace.answers[ROLLOUT] = None
    assert until_found(trace, 100) <= EARLY_PROBE_S + LIMITS.probe
    assert trace.found() == {fail("no_answer", ROLLOUT)}


def test_waiting_replica_that_works_may_answer_late() -> None:
    trace = waiting_rollouts()
    assert trace.answers is not None
    trace.answers[ROLLOUT] = None
    trace.loads[ROLLOUT] = (1.0, 0.0, 0.0)
    trace.play(BUSY_ANSWER_FACTOR * LIMITS.probe - 5)
    assert all(observed[2] != "FAIL" for observed in trace.found())
    assert until_found(trace, 200) <= MAX_PROBE_INTERVAL_S + 5, (
        "a waiting replica whose CPU is busy is accepted without end"
    )
    assert trace.found() == {fail("no_answer", ROLLOUT)}


def test_waiting_replica_has_the_probe_limit_from_the_end_of_its_work() -> None:
    trace = waiting_rollouts()
    assert trace.answers is not None
    trace.answers[ROLLOUT] = None
    trace.loads[ROLLOUT] = (1.0, 0.0, 0.0)
    trace.play(MAX_PROBE_INTERVAL_S + LIMITS.probe + 5)  # long enough for a probe and for its limit to pass
    trace.loads[ROLLOUT] = IDLE
    trace.play(LIMITS.probe - 5)
    assert all(observed[2] != "FAIL" for observed in trace.found())
    trace.play(10)
    assert trace.found() == {fail("no_answer", ROLLOUT)}


def test_replica_that_hangs_during_a_long_wait_fails() -> None:
    trace = waiting_rollouts()
    assert trace.answers is not None
    trace.answers[ROLLOUT] = None
    assert until_found(trace, 300) <= MAX_PROBE_INTERVAL_S + LIMITS.probe
    assert trace.found() == {fail("no_answer", ROLLOUT)}


@pytest.mark.parametrize("answer", [None, NO_PROBE_HANDLER])
def test_replica_waiting_in_a_thread_without_probe_handler_does_not_fail(
    answer: tuple[ProbeResult, str] | None,
) -> None:
    trace = waiting_rollouts(answer)
    trace.play(PHASES["wait_work"].longest)
    assert trace.found() == set()
    for _ in range(50):
        trace.enter(ROLLOUT, "generate")
        trace.enter(ROLLOUT, "wait_work")
        trace.play(2)
    assert len(trace.probed_at) <= MAX_WAIT_PROBES + 1, "a waiting replica is probed without end"


def test_working_replica_without_probe_handler_has_a_longer_deadline() -> None:
    trace = generating()
    trace.answers = {ROLLOUT: NO_PROBE_HANDLER}
    stop_heartbeats(trace, BUSY)
    trace.play(5.9 * PHASES["generate"].shortest)
    assert trace.found() == set()
    trace.play(0.2 * PHASES["generate"].shortest)
    assert trace.found() == {fail("no_progress", ROLLOUT)}


def test_network_loss_of_5_s_causes_no_failure_by_a_late_answer() -> None:
    trace = generating()
    trace.answers = {ROLLOUT: None}
    stop_heartbeats(trace, IDLE)
    trace.play(EARLY_PROBE_S + 3)
    assert len(trace.probed_at) == 1
    trace.heartbeat_missing |= {ROLLOUT, agent_of("n1")}
    trace.play(5)
    trace.heartbeat_missing.clear()
    trace.play(1)
    trace.monitor.on_probe_answered(ROLLOUT, *WORKS, trace.now)
    assert trace.found() == set()
    trace.answers = {}
    trace.play(60)
    assert trace.found() == set()


def test_unanswered_probe_is_sent_again() -> None:
    trace = generating()
    trace.answers = {ROLLOUT: None}
    stop_heartbeats(trace, IDLE)
    trace.play(EARLY_PROBE_S + 3)
    trace.answers = {}
    trace.play(LIMITS.probe / 4)
    assert len(trace.probed_at) == 2
    trace.play(60)
    assert trace.found() == set()


def test_replica_without_heartbeats_does_not_fail_by_a_missing_answer() -> None:
    trace = generating()
    trace.answers = {ROLLOUT: None}
    stop_heartbeats(trace, IDLE)
    trace.play(EARLY_PROBE_S + 4)
    trace.heartbeat_missing.add(ROLLOUT)
    trace.play(5)
    assert trace.found() <= {warn("suspected", ROLLOUT)}
    trace.play(6)
    assert trace.found() == {fail("worker_silence", ROLLOUT)}


def test_silent_agent_is_no_evidence_that_its_rollouts_are_idle() -> None:
    trace = generating()
    stop_heartbeats(trace, None)
    trace.heartbeat_missing.add(agent_of("n1"))
    trace.answers = {ROLLOUT: None}
    trace.play(EARLY_PROBE_S + LIMITS.probe - 1)
    assert fail("no_answer", ROLLOUT) not in trace.found()
    trace.play(1)
    assert fail("no_answer", ROLLOUT) in trace.found(), (
        "a replica with unknown load must fail after the whole probe limit"
    )


def test_restarted_agent_leaves_a_gap_without_idleness() -> None:
    trace = Trace().node("n1", *ROLLOUTS[:2])
    trace.answers = {}
    trace.play(1)  # too short for a baseline of the time between tokens
    stop_heartbeats(trace, IDLE)
    trace.play(6)
    trace.heartbeat_missing.add(agent_of("n1"))
    trace.play(20)
    trace.heartbeat_missing.clear()
    trace.play(6)
    assert trace.probed_at == [], "idle times before and after the gap were added up"


def test_probe_answered_after_new_tokens_is_ignored() -> None:
    trace = generating()
    trace.answers = {ROLLOUT: None}
    stop_heartbeats(trace, IDLE)
    trace.play(EARLY_PROBE_S + 4)
    trace.still.clear()
    trace.loads[ROLLOUT] = BUSY
    trace.play(4)
    trace.monitor.on_probe_answered(ROLLOUT, *DEAD, trace.now)
    assert trace.found() == set()


def test_quick_answer_gives_no_finding() -> None:
    trace = generating()
    trace.answers = {ROLLOUT: None}
    stop_heartbeats(trace, IDLE)
    while not trace.probed_at:
        trace.play(1)
    asked_at = trace.now
    assert trace.found(asked_at + PROMPT_ANSWER_S - 0.1) == set()
    assert trace.found(asked_at + PROMPT_ANSWER_S) == {warn("suspected", ROLLOUT)}


def test_long_usual_time_between_tokens_delays_the_probe() -> None:
    trace = Trace().node("n1", ROLLOUT)
    trace.still.add(ROLLOUT)
    for _ in range(8):
        trace.play(30)
        trace.done[ROLLOUT] = trace.done.get(ROLLOUT, 0) + 1
    trace.play(1)
    trace.answers = {}
    last = trace.now
    trace.play(5 * 30 - 1)
    assert trace.probed_at == []
    trace.play(2)
    assert [at - last for at, _ in trace.probed_at] == [150.0]


@pytest.mark.parametrize(
    "phase",
    [
        p.name
        for p in PHASES.values()
        if p.calls_services or (not p.progresses and p.name != "serve" and (p.waits_for is None or p.own_work))
    ],
)
def test_phases_with_users_code_or_without_progress_are_not_probed(phase: str) -> None:
    trace = Trace().node("n1", ROLLOUT, phase=phase)
    trace.answers, trace.loads = {}, {ROLLOUT: IDLE}
    trace.play(1000)
    assert trace.probed_at == []


def test_replica_blocked_by_the_store_is_not_probed() -> None:
    trace = generating()
    trace.node("n3", STORE, phase="serve")
    stop_heartbeats(trace, IDLE)
    trace.waiting[ROLLOUT] = STORE.replica
    trace.play(120)
    assert {incarnation for _, incarnation in trace.probed_at} == {STORE}
    assert trace.found() == set()


def test_reward_role_waiting_for_a_slow_remote_judge_is_healthy() -> None:
    trace = Trace().node("n4", REWARD, phase="score")
    trace.answers, trace.loads = {REWARD: NO_PROBE_HANDLER}, {REWARD: IDLE}
    trace.play(30)
    trace.still.add(REWARD)
    trace.play(MIN_SERVICE_WAIT_S - 1)
    assert trace.found() == set()
    trace.play(1)
    assert trace.found() == {fail("no_progress", REWARD)}


def test_reward_role_without_loads_may_be_waiting_for_a_judge() -> None:
    trace = Trace().node("n4", REWARD, phase="score")
    trace.answers = {REWARD: NO_PROBE_HANDLER}
    trace.play(30)
    trace.still.add(REWARD)
    trace.play(MIN_SERVICE_WAIT_S - 1)
    assert trace.found() == set()
    trace.play(1)
    assert trace.found() == {fail("no_progress", REWARD)}


def test_looping_reward_role_does_not_count_as_waiting_for_a_judge() -> None:
    trace = Trace().node("n4", REWARD, phase="score")
    trace.answers, trace.loads = {REWARD: NO_PROBE_HANDLER}, {REWARD: (1.0, None, None)}
    trace.play(30)
    trace.still.add(REWARD)
    trace.play(PHASES["score"].shortest - 1)
    assert trace.found() == set()
    trace.play(1)
    assert trace.found() == {fail("no_progress", REWARD)}


def test_wait_for_a_judge_counts_from_the_last_work_of_the_cpu() -> None:
    trace = Trace().node("n4", REWARD, phase="score")
    trace.answers, trace.loads = {REWARD: NO_PROBE_HANDLER}, {REWARD: (1.0, None, None)}
    trace.play(30)
    trace.still.add(REWARD)
    trace.play(PHASES["score"].shortest - 20)
    trace.loads = {REWARD: IDLE}
    trace.play(MIN_SERVICE_WAIT_S - 10)
    assert trace.found() == set()
    trace.play(20)
    assert trace.found() == {fail("no_progress", REWARD)}


def test_restarted_manager_probes_again_and_ignores_earlier_probes() -> None:
    trace = generating()
    trace.answers = {ROLLOUT: None}
    stop_heartbeats(trace, IDLE)
    trace.play(EARLY_PROBE_S + 10)
    trace.restart()
    asked = len(trace.probed_at)
    trace.answers = {}
    trace.play(100)
    assert trace.found() == set()
    assert len(trace.probed_at) > asked


def test_time_of_the_next_probe_is_a_time_of_evaluation() -> None:
    trace = generating(probes=False)
    stop_heartbeats(trace, BUSY)
    trace.play(5)
    for incarnation in (*ROLLOUTS[:2], agent_of("n1")):
        if incarnation != agent_of("n1"):
            trace.monitor.on_heartbeat(incarnation, "generate", trace.done[incarnation], None, trace.now)
    last = trace.monitor.replicas[ROLLOUT.replica].last_change_at
    limits = Limits(silence=1000.0)
    now, again = trace.now, 0.0
    while again < last + EARLY_PROBE_S:
        _, again = trace.detection.detect(limits, now)
        assert due_probes(trace.monitor, limits, now) == []
        now = again
    assert again == last + EARLY_PROBE_S
    assert due_probes(trace.monitor, limits, again) == [ROLLOUT]
    trace.monitor.on_probe_sent(ROLLOUT, again)
    assert due_probes(trace.monitor, limits, again) == []


def test_fenced_incarnation_is_not_probed_and_its_answers_are_ignored() -> None:
    trace = generating()
    second = Incarnation(ReplicaId(ROLLOUT.replica), 2)
    stop_heartbeats(trace, IDLE)
    trace.play(EARLY_PROBE_S + 2)
    trace.launch(second, "n1")
    trace.monitor.on_probe_sent(ROLLOUT, trace.now)
    trace.monitor.on_probe_answered(ROLLOUT, *DEAD, trace.now)
    assert ROLLOUT not in due_probes(trace.monitor, LIMITS, trace.now + 500)
    assert trace.found() == set()


def test_tokens_reported_without_a_gpu_kernel_are_false_despite_cpu_work() -> None:
    trace = generating()
    trace.answers = {ROLLOUT: None}
    trace.loads[ROLLOUT] = (0.1, 0.0, 0.0)
    assert until_found(trace, 200) <= LIMITS.idle + LIMITS.probe + 4
    assert trace.found() == {fail("no_answer", ROLLOUT)}
