"""A job that Slurm suspends (gang scheduling, an administrator) looks hung, or its node lost, and is neither."""

from __future__ import annotations

from rrl.core.launch import ExitReason
from rrl.core.types import Incarnation, NodeName, ReplicaId, Verdict
from rrl.health.detection.health_monitor import FLAP_COUNT, FLAP_WINDOW_S
from rrl.tests.support.health.traces import (
    LIMITS,
    ROLLOUT,
    ROLLOUTS,
    STORE,
    TRAINER,
    Observed,
    Trace,
    agent_of,
    fail,
    warn,
)

N1, N2 = NodeName("n1"), NodeName("n2")
SECOND = Incarnation(ReplicaId("trainer/0.1"), 1)
LONG = 10_000.0


def judged(trace: Trace) -> set[Observed]:
    """What is found of it that means something."""
    return {one for one in trace.found() if one[2] != Verdict.UNKNOWN.value}


def report_suspended(trace: Trace, node: NodeName, suspended: bool) -> None:
    trace.monitor.on_job_status(node, suspended, trace.now, trace.now)


def one_suspended() -> Trace:
    """Everything on n1 stands still; the cluster has said so."""
    trace = Trace().node("n1", *ROLLOUTS[:2]).node("n2", ROLLOUTS[2])
    report_suspended(trace, N1, False)
    trace.play(5)
    trace.heartbeat_missing |= {agent_of("n1"), *ROLLOUTS[:2]}
    trace.play(1)
    report_suspended(trace, N1, True)
    return trace


def test_nothing_on_a_suspended_node_is_overdue_however_long_it_takes() -> None:
    trace = one_suspended()
    trace.play(LONG)
    assert trace.found() == set()


def test_after_it_everything_counts_anew() -> None:
    trace = one_suspended()
    trace.play(LONG)
    report_suspended(trace, N1, False)
    trace.play(LIMITS.silence - 1.0)
    report_suspended(trace, N1, False)
    assert trace.found() == set()
    trace.play(1.0)
    assert trace.found() == {fail("node_lost", "n1")}, "and then it is judged like any other"


def test_whoever_is_heard_is_not_suspended_any_more() -> None:
    trace = one_suspended()
    trace.play(LONG)
    trace.heartbeat_missing.clear()
    trace.play(5)
    trace.heartbeat_missing |= {agent_of("n1"), *ROLLOUTS[:2]}
    trace.play(LIMITS.silence / 2)
    report_suspended(trace, N1, False)
    trace.play(LIMITS.silence / 2)
    assert trace.found() == {fail("node_lost", "n1")}


def test_what_is_proved_is_found_on_a_suspended_node_too() -> None:
    trace = one_suspended()
    trace.monitor.on_step_ended(ROLLOUT, 1, None, ExitReason.EXITED, trace.now)
    trace.monitor.on_node_status(N2, "down", "DOWN", trace.now)
    assert trace.found() == {fail("exit_record", ROLLOUT), fail("node_down", "n2")}


# ── the look that has not yet shown it ───────────────────────────────────────────────────────────────────────────────
def without_heartbeats(trace: Trace) -> Trace:
    report_suspended(trace, N1, False)
    trace.heartbeat_missing |= {agent_of("n1"), *ROLLOUTS[:2]}
    return trace


def test_a_silent_node_is_not_condemned_before_the_cluster_was_asked_whether_it_is_suspended() -> None:
    trace = without_heartbeats(Trace().node("n1", *ROLLOUTS[:2]).node("n2", ROLLOUTS[2]))
    assert not trace.monitor.needs_suspend_check(LIMITS, trace.now)
    trace.play(LIMITS.silence)
    assert trace.monitor.needs_suspend_check(LIMITS, trace.now)
    assert judged(trace) == {warn("node_lost", "n1")}
    report_suspended(trace, N1, True)
    assert not trace.monitor.needs_suspend_check(LIMITS, trace.now)
    trace.play(LONG)
    assert judged(trace) == set()


def test_it_is_condemned_at_once_when_the_cluster_says_that_it_is_not_suspended() -> None:
    trace = without_heartbeats(Trace().node("n1", *ROLLOUTS[:2]).node("n2", ROLLOUTS[2]))
    trace.play(LIMITS.silence / 2 + 1.0)
    assert trace.monitor.needs_suspend_check(LIMITS, trace.now), "it is asked before the deadline"
    report_suspended(trace, N1, False)
    trace.play(LIMITS.silence / 2 - 1.0)
    assert judged(trace) == {fail("node_lost", "n1")}


def test_what_the_cluster_said_before_the_silence_says_nothing() -> None:
    trace = without_heartbeats(Trace().node("n1", *ROLLOUTS[:2]).node("n2", ROLLOUTS[2]))
    trace.play(2.0)
    report_suspended(trace, N1, False)
    trace.play(LIMITS.silence - 2.0)
    assert judged(trace) == {warn("node_lost", "n1")}


def test_a_cluster_that_does_not_answer_delays_it_for_half_a_minute_and_no_longer() -> None:
    trace = without_heartbeats(Trace().node("n1", *ROLLOUTS[:2]).node("n2", ROLLOUTS[2]))
    trace.play(LIMITS.silence + 29.0)
    assert judged(trace) == {warn("node_lost", "n1")}
    trace.play(1.0)
    assert judged(trace) == {fail("node_lost", "n1")}


def test_where_no_cluster_ever_told_nobody_waits_for_its_word() -> None:
    trace = Trace().node("n1", *ROLLOUTS[:2]).node("n2", ROLLOUTS[2])
    trace.heartbeat_missing |= {agent_of("n1"), *ROLLOUTS[:2]}
    trace.play(LIMITS.silence)
    assert not trace.monitor.needs_suspend_check(LIMITS, trace.now)
    assert judged(trace) == {fail("node_lost", "n1")}


# ── who waits for the suspended ──────────────────────────────────────────────────────────────────────────────────────
def gang() -> Trace:
    trace = Trace().node("n1", TRAINER, phase="checkpoint").node("n2", SECOND, phase="checkpoint")
    trace.node("n3", STORE, phase="serve")
    report_suspended(trace, N2, False)
    trace.play(5)
    trace.heartbeat_missing |= {agent_of("n2"), SECOND}
    trace.still |= {TRAINER, SECOND}
    trace.play(1)
    report_suspended(trace, N2, True)
    return trace


def test_who_waits_for_a_suspended_member_of_its_gang_makes_no_progress_and_is_not_hung() -> None:
    trace = gang()
    trace.play(LONG)
    assert trace.found() == set()
    report_suspended(trace, N2, False)
    trace.heartbeat_missing.clear()
    trace.play(10.0)
    assert trace.found() == set()
    trace.play(LONG)
    assert {finding.detector for finding in trace.findings()} == {"phase_overdue"}, "judged again from when all go on"


def test_the_silence_of_one_that_is_not_suspended_itself_is_judged() -> None:
    trace = gang()
    trace.heartbeat_missing.add(TRAINER)
    trace.play(LIMITS.silence)
    assert trace.found() == {fail("worker_silence", TRAINER)}


def test_a_standstill_behind_a_suspended_replica_is_nobodys_fault() -> None:
    trace = Trace().node("n1", ROLLOUT, phase="generate").node("n2", TRAINER, phase="wait_data")
    report_suspended(trace, N1, False)
    trace.play(5)
    trace.heartbeat_missing |= {agent_of("n1"), ROLLOUT}
    trace.still.add(TRAINER)
    trace.play(1)
    report_suspended(trace, N1, True)
    trace.play(LONG)
    assert trace.found() == set()


# ── nodes that come and go ───────────────────────────────────────────────────────────────────────────────────────────
def flap(trace: Trace, times: int, state: str = "unknown", every: float = 4.0, alone: bool = True) -> None:
    for _ in range(times):
        for word in ("up", state):
            trace.monitor.on_node_status(N1, word, "IDLE*", trace.now, alone)
            trace.play(every / 2)


def test_a_node_that_ceases_to_be_up_again_and_again_is_excluded_and_one_that_does_so_now_and_then_is_not() -> None:
    trace = Trace().node("n1", ROLLOUT).node("n2", TRAINER)
    flap(trace, FLAP_COUNT - 1)
    assert trace.found() == set()
    flap(trace, 1)
    assert trace.found() == {fail("node_flaps", "n1")}
    assert not trace.only().proof
    trace.play(FLAP_WINDOW_S)
    assert trace.found() == set()
    flap(trace, 5, every=FLAP_WINDOW_S / 2)
    assert trace.found() == set()


def test_where_most_nodes_cease_to_be_up_at_once_none_of_them_flaps() -> None:
    trace = Trace().node("n1", ROLLOUT).node("n2", TRAINER)
    flap(trace, 3 * FLAP_COUNT, alone=False)
    assert trace.found() == set()


def test_an_administrator_who_drains_and_resumes_a_node_makes_it_no_flapping_one() -> None:
    trace = Trace().node("n1", ROLLOUT).node("n2", TRAINER)
    flap(trace, 3 * FLAP_COUNT, state="draining")
    assert trace.found() == set()
