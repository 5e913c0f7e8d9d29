"""Probing: the effect of an answer, of a missing answer and of loads."""

from __future__ import annotations

import pytest

from rrl.core.phases import PHASES
from rrl.core.run_spec import Limits
from rrl.core.types import Incarnation, ProbeResult, ReplicaId
from rrl.health.detection.detectors.pass_deadlines import BUSY_DEADLINE_FACTOR as LATEST
from rrl.health.detection.detectors.pass_deadlines import MIN_SERVICE_WAIT_S
from rrl.health.detection.detectors.probing import (
    BUSY_ANSWER_FACTOR,
    EARLY_PROBE_S,
    FIRST_TOKEN_FACTOR,
    IDLE_ANSWER_SHARE,
    MAX_PROBE_INTERVAL_S,
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


@pytest.fixture
def trace() -> Trace:
    return generating()


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


# ── replicas that do not fail ────────────────────────────────────────────────────────────────────────────────────────
def test_replica_waiting_for_a_tool_answers_probes_and_has_no_finding(trace: Trace) -> None:
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


def test_loads_that_show_spinning_may_arrive_after_the_probe(trace: Trace) -> None:
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


def test_replica_without_probe_handler_is_probed_once_and_judged_by_time(trace: Trace) -> None:
    trace.answers = {ROLLOUT: NO_PROBE_HANDLER}
    stop_heartbeats(trace, IDLE)
    last = trace.now
    trace.play(LATEST * PHASES["generate"].shortest - 1)
    assert trace.found() == set()
    trace.play(1)
    assert trace.found() == {fail("no_progress", ROLLOUT)}
    assert trace.now - last == LATEST * PHASES["generate"].shortest
    assert [incarnation for _, incarnation in trace.probed_at] == [ROLLOUT]


def test_phase_limit_applies_even_if_probes_are_answered(trace: Trace) -> None:
    stop_heartbeats(trace, IDLE)
    last = trace.now
    trace.play(PHASES["generate"].longest - 1)
    assert trace.found() == set()
    trace.play(1)
    assert trace.found() == {fail("no_progress", ROLLOUT)}
    assert trace.now - last == PHASES["generate"].longest


def test_replica_with_a_late_probe_handler_is_probed_in_its_next_phase(trace: Trace) -> None:
    trace.answers = {ROLLOUT: NO_PROBE_HANDLER}
    stop_heartbeats(trace, IDLE)
    trace.play(60)
    trace.enter(ROLLOUT, "loading_weights")
    trace.play(1)
    trace.enter(ROLLOUT, "generate")
    trace.answers = {ROLLOUT: None}
    assert until_found(trace, 100) <= EARLY_PROBE_S + IDLE_ANSWER_SHARE * LIMITS.probe + 4


def test_busy_replica_without_answer_fails_after_the_longest_prefill(trace: Trace) -> None:
    trace.answers = {ROLLOUT: None}
    stop_heartbeats(trace, BUSY)
    assert until_found(trace, 500) == LIMITS.suspect + BUSY_ANSWER_FACTOR * LIMITS.probe
    assert trace.found() == {fail("no_answer", ROLLOUT)}


def test_idle_replica_without_a_first_token_fails_before_its_grace_ends() -> None:
    trace = Trace().node("n1", ROLLOUT)
    trace.answers, trace.loads = {ROLLOUT: None}, {ROLLOUT: IDLE}
    trace.still.add(ROLLOUT)
    assert (
        FIRST_TOKEN_FACTOR * EARLY_PROBE_S
        < until_found(trace, 400)
        <= FIRST_TOKEN_FACTOR * EARLY_PROBE_S + LIMITS.probe + 4
    )


# ── waiting replicas ─────────────────────────────────────────────────────────────────────────────────────────────────
def waiting_rollouts(answer: tuple[ProbeResult, str] | None = WORKS) -> Trace:
    """Return a trace of two idle, healthy rollouts without work, which answer each probe with ``answer``."""
    trace = Trace().node("n1", *ROLLOUTS[:2], phase="wait_work")
    trace.answers = dict.fromkeys(ROLLOUTS[:2], answer)
    trace.loads = dict.fromkeys(ROLLOUTS[:2], IDLE)
    trace.play(300)
    assert trace.found() == set()
    return trace


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


def test_network_loss_of_5_s_causes_no_failure_by_a_late_answer(trace: Trace) -> None:
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


def test_unanswered_probe_is_sent_again(trace: Trace) -> None:
    trace.answers = {ROLLOUT: None}
    stop_heartbeats(trace, IDLE)
    trace.play(EARLY_PROBE_S + 3)
    trace.answers = {}
    trace.play(LIMITS.probe / 4)
    assert len(trace.probed_at) == 2
    trace.play(60)
    assert trace.found() == set()


def test_replica_without_heartbeats_does_not_fail_by_a_missing_answer(trace: Trace) -> None:
    trace.answers = {ROLLOUT: None}
    stop_heartbeats(trace, IDLE)
    trace.play(EARLY_PROBE_S + 4)
    trace.heartbeat_missing.add(ROLLOUT)
    trace.play(5)
    assert trace.found() <= {warn("suspected", ROLLOUT)}
    trace.play(6)
    assert trace.found() == {fail("worker_silence", ROLLOUT)}


def test_silent_agent_is_no_evidence_that_its_rollouts_are_idle(trace: Trace) -> None:
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


def test_probe_answered_after_new_tokens_is_ignored(trace: Trace) -> None:
    trace.answers = {ROLLOUT: None}
    stop_heartbeats(trace, IDLE)
    trace.play(EARLY_PROBE_S + 4)
    trace.still.clear()
    trace.loads[ROLLOUT] = BUSY
    trace.play(4)
    trace.monitor.on_probe_answered(ROLLOUT, *DEAD, trace.now)
    assert trace.found() == set()


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


def test_replica_blocked_by_the_store_is_not_probed(trace: Trace) -> None:
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


def test_restarted_manager_probes_again_and_ignores_earlier_probes(trace: Trace) -> None:
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


def test_fenced_incarnation_is_not_probed_and_its_answers_are_ignored(trace: Trace) -> None:
    second = Incarnation(ReplicaId(ROLLOUT.replica), 2)
    stop_heartbeats(trace, IDLE)
    trace.play(EARLY_PROBE_S + 2)
    trace.launch(second, "n1")
    trace.monitor.on_probe_sent(ROLLOUT, trace.now)
    trace.monitor.on_probe_answered(ROLLOUT, *DEAD, trace.now)
    assert ROLLOUT not in due_probes(trace.monitor, LIMITS, trace.now + 500)
    assert trace.found() == set()
