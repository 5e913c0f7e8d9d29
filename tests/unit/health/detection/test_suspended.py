"""Suspended jobs (by gang scheduling or an administrator) look hung or lost, but are neither."""

from __future__ import annotations

from typing import Any

import pytest

from rrl.core.launch import ExitReason
from rrl.core.types import Incarnation, NodeName, ReplicaId, Verdict
from rrl.health.detection.records import FLAP_COUNT
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
    """Return the findings other than UNKNOWN."""
    return {one for one in trace.found() if one[2] != Verdict.UNKNOWN.value}


def report_suspended(trace: Trace, node: NodeName, suspended: bool) -> None:
    trace.monitor.on_job_status(node, suspended, trace.now, trace.now)


def one_suspended() -> Trace:
    """Return a trace in which n1 sends nothing, and the cluster reports its job as suspended."""
    trace = Trace().node("n1", *ROLLOUTS[:2]).node("n2", ROLLOUTS[2])
    report_suspended(trace, N1, False)
    trace.play(5)
    trace.heartbeat_missing |= {agent_of("n1"), *ROLLOUTS[:2]}
    trace.play(1)
    report_suspended(trace, N1, True)
    return trace


def test_deadlines_start_again_after_a_suspension() -> None:
    trace = one_suspended()
    trace.play(LONG)
    report_suspended(trace, N1, False)
    trace.play(LIMITS.silence - 1.0)
    report_suspended(trace, N1, False)
    assert trace.found() == set()
    trace.play(1.0)
    assert trace.found() == {fail("node_lost", "n1")}, (
        "a node that is no longer suspended must be judged like any other"
    )


def test_message_from_a_suspended_node_ends_its_suspension() -> None:
    trace = one_suspended()
    trace.play(LONG)
    trace.heartbeat_missing.clear()
    trace.play(5)
    trace.heartbeat_missing |= {agent_of("n1"), *ROLLOUTS[:2]}
    trace.play(LIMITS.silence / 2)
    report_suspended(trace, N1, False)
    trace.play(LIMITS.silence / 2)
    assert trace.found() == {fail("node_lost", "n1")}


def test_proof_is_found_on_a_suspended_node() -> None:
    trace = one_suspended()
    trace.monitor.on_step_ended(ROLLOUT, 1, None, ExitReason.EXITED, trace.now)
    trace.monitor.on_node_status(N2, "down", "DOWN", trace.now)
    assert trace.found() == {fail("exit_record", ROLLOUT), fail("node_down", "n2")}


# ── suspensions that no poll has shown yet ───────────────────────────────────────────────────────────────────────────
def without_heartbeats(trace: Trace) -> Trace:
    report_suspended(trace, N1, False)
    trace.heartbeat_missing |= {agent_of("n1"), *ROLLOUTS[:2]}
    return trace


def test_silent_node_is_not_excluded_before_a_suspension_check() -> None:
    trace = without_heartbeats(Trace().node("n1", *ROLLOUTS[:2]).node("n2", ROLLOUTS[2]))
    assert not trace.monitor.needs_suspend_check(LIMITS, trace.now)
    trace.play(LIMITS.silence)
    assert trace.monitor.needs_suspend_check(LIMITS, trace.now)
    assert judged(trace) == {warn("node_lost", "n1")}
    report_suspended(trace, N1, True)
    assert not trace.monitor.needs_suspend_check(LIMITS, trace.now)
    trace.play(LONG)
    assert judged(trace) == set()


def test_silent_node_is_excluded_once_the_cluster_reports_it_not_suspended() -> None:
    trace = without_heartbeats(Trace().node("n1", *ROLLOUTS[:2]).node("n2", ROLLOUTS[2]))
    trace.play(LIMITS.silence / 2 + 1.0)
    assert trace.monitor.needs_suspend_check(LIMITS, trace.now), (
        "the monitor does not ask for the job's state before the deadline"
    )
    report_suspended(trace, N1, False)
    trace.play(LIMITS.silence / 2 - 1.0)
    assert judged(trace) == {fail("node_lost", "n1")}


def test_suspension_check_before_the_silence_does_not_count() -> None:
    trace = without_heartbeats(Trace().node("n1", *ROLLOUTS[:2]).node("n2", ROLLOUTS[2]))
    trace.play(2.0)
    report_suspended(trace, N1, False)
    trace.play(LIMITS.silence - 2.0)
    assert judged(trace) == {warn("node_lost", "n1")}


def test_unresponsive_cluster_delays_exclusion_by_half_a_minute_at_most() -> None:
    trace = without_heartbeats(Trace().node("n1", *ROLLOUTS[:2]).node("n2", ROLLOUTS[2]))
    trace.play(LIMITS.silence + 29.0)
    assert judged(trace) == {warn("node_lost", "n1")}
    trace.play(1.0)
    assert judged(trace) == {fail("node_lost", "n1")}


def test_cluster_that_never_reported_suspensions_causes_no_delay() -> None:
    trace = Trace().node("n1", *ROLLOUTS[:2]).node("n2", ROLLOUTS[2])
    trace.heartbeat_missing |= {agent_of("n1"), *ROLLOUTS[:2]}
    trace.play(LIMITS.silence)
    assert not trace.monitor.needs_suspend_check(LIMITS, trace.now)
    assert judged(trace) == {fail("node_lost", "n1")}


# ── replicas that wait for suspended ones ────────────────────────────────────────────────────────────────────────────
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


def test_silent_member_that_is_not_suspended_itself_fails() -> None:
    trace = gang()
    trace.heartbeat_missing.add(TRAINER)
    trace.play(LIMITS.silence)
    assert trace.found() == {fail("worker_silence", TRAINER)}


# ── nodes that come and go ───────────────────────────────────────────────────────────────────────────────────────────
def flap(trace: Trace, times: int, state: str = "unknown", every: float = 4.0, alone: bool = True) -> None:
    for _ in range(times):
        for word in ("up", state):
            trace.monitor.on_node_status(N1, word, "IDLE*", trace.now, alone)
            trace.play(every / 2)


@pytest.mark.parametrize("how", [{"alone": False}, {"state": "draining"}], ids=["most nodes", "an administrator"])
def test_most_nodes_at_once_or_a_node_drained_by_an_administrator_are_not_flapping(how: dict[str, Any]) -> None:
    trace = Trace().node("n1", ROLLOUT).node("n2", TRAINER)
    flap(trace, 3 * FLAP_COUNT, **how)
    assert trace.found() == set()
