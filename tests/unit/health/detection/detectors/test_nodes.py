"""Detectors of nodes: what fails a node, what only warns, and which findings a failed node suppresses."""

from __future__ import annotations

from math import nextafter

import pytest

from rrl.core.launch import ExitReason
from rrl.core.types import Incarnation, NodeName, Remedy
from rrl.tests.support.health.traces import LIMITS, ROLLOUT, ROLLOUTS, TRAINER, Trace, agent_of, fail, unknown, warn

N1 = NodeName("n1")


@pytest.fixture
def trace() -> Trace:
    return two_nodes()


def two_nodes() -> Trace:
    return Trace().node("n1", *ROLLOUTS[:2]).node("n2", ROLLOUTS[2])


def test_further_readings_do_not_change_the_finding(trace: Trace) -> None:
    trace.monitor.on_node_status(N1, "down", "first words", trace.now)
    found = trace.findings()
    trace.monitor.on_node_status(N1, "down", "other words", trace.now + 3)
    assert trace.findings(trace.now + 3) == found


def test_draining_and_unknown_nodes_have_no_finding() -> None:
    for state in ("up", "draining", "unknown"):
        trace = two_nodes()
        trace.monitor.on_node_status(N1, state, "", trace.now)
        assert trace.found() == set()


def test_node_is_trusted_again_after_two_good_readings(trace: Trace) -> None:
    for state, expected in (("down", 1), ("up", 1), ("down", 1), ("up", 1), ("unknown", 1), ("up", 0)):
        trace.monitor.on_node_status(N1, state, "", trace.now)
        assert len(trace.findings()) == expected, state


def test_silent_agent_does_not_fail_if_its_whole_node_is_silent(trace: Trace) -> None:
    trace.heartbeat_missing.add(agent_of("n1"))
    trace.play(1.5 * LIMITS.silence)
    trace.heartbeat_missing |= set(ROLLOUTS[:2])
    trace.play(LIMITS.silence)
    assert trace.found() == {fail("node_lost", "n1")}


def test_replicas_that_ended_or_left_are_no_witnesses(trace: Trace) -> None:
    trace.monitor.on_step_ended(ROLLOUTS[0], 1, None, ExitReason.EXITED, trace.now)
    trace.monitor.on_stop_requested(ROLLOUTS[1], trace.now)
    trace.heartbeat_missing |= {agent_of("n1"), *ROLLOUTS[:2]}
    trace.play(1000)
    assert trace.found() == {warn("node_lost", "n1"), fail("exit_record", ROLLOUTS[0])}


def test_agent_that_exited_is_no_witness_of_a_lost_node(trace: Trace) -> None:
    trace.monitor.on_step_ended(agent_of("n1"), 1, None, ExitReason.EXITED, trace.now)
    trace.heartbeat_missing |= {agent_of("n1"), *ROLLOUTS[:2]}
    trace.play(15)
    assert trace.found() == {
        fail("exit_record", agent_of("n1")),
        *(unknown("worker_silence", incarnation) for incarnation in ROLLOUTS[:2]),
    }


def test_overdue_launch_on_a_silent_node_is_the_second_witness() -> None:
    trace = Trace().node("n1")
    trace.launch(ROLLOUT, "n1")
    launched = trace.now
    trace.heartbeat_missing.add(agent_of("n1"))
    assert trace.found(launched + 60) == {warn("node_lost", "n1")}
    assert trace.found(nextafter(launched + LIMITS.join, 0)) == {warn("node_lost", "n1")}
    assert trace.found(launched + LIMITS.join) == {fail("node_lost", "n1")}


def test_starting_replica_does_not_prevent_the_loss_of_its_node() -> None:
    trace = Trace().node("n1", TRAINER, phase="train")
    trace.play(10)
    trace.launch(ROLLOUT, "n1")
    trace.heartbeat_missing |= {agent_of("n1"), TRAINER}
    trace.play(10)
    assert trace.found() == {fail("node_lost", "n1")}


def test_node_stays_lost_after_its_replicas_and_agent_are_replaced(trace: Trace) -> None:
    trace.heartbeat_missing |= {agent_of("n1"), *ROLLOUTS[:2]}
    trace.play(20)
    found = trace.findings()
    assert [f.key for f in found] == ["node_lost:n1"]
    for incarnation in ROLLOUTS[:2]:
        second = Incarnation(incarnation.replica, 2)
        trace.launch(second, "n2")
        trace.monitor.on_hello(second, NodeName("n2"), "generate", trace.now)
        trace.monitor.on_stop_requested(incarnation, trace.now)
    trace.monitor.on_stop_requested(agent_of("n1"), trace.now)
    trace.monitor.remove(agent_of("n1"))
    trace.play(50)
    assert trace.findings() == found


def test_replica_removed_before_a_node_falls_silent_is_no_witness() -> None:
    trace = Trace().node("n1", ROLLOUT)
    trace.heartbeat_missing.add(ROLLOUT)
    trace.play(20)
    trace.monitor.remove(ROLLOUT)
    trace.play(5)
    trace.heartbeat_missing.add(agent_of("n1"))
    trace.play(100)
    assert trace.found() == {warn("node_lost", "n1"), fail("agent_silence", agent_of("n1"))}


def test_removed_agent_is_ignored_once_its_node_sends_a_message(trace: Trace) -> None:
    trace.heartbeat_missing |= {agent_of("n1"), *ROLLOUTS[:2]}
    trace.play(20)
    trace.monitor.remove(agent_of("n1"))
    assert trace.found() == {fail("node_lost", "n1")}
    trace.heartbeat_missing -= set(ROLLOUTS[:2])
    trace.play(1)
    assert trace.found() == set()


def test_node_with_stopped_replicas_and_a_silent_agent_only_warns(trace: Trace) -> None:
    for incarnation in ROLLOUTS[:2]:
        trace.monitor.on_stop_requested(incarnation, trace.now)
        trace.monitor.remove(incarnation)
    trace.heartbeat_missing.add(agent_of("n1"))
    trace.play(300)
    assert trace.found() == {warn("node_lost", "n1")}


def test_proof_about_a_replica_is_kept_on_a_failed_node(trace: Trace) -> None:
    trace.monitor.on_step_ended(ROLLOUTS[0], None, 9, ExitReason.SIGNALED, trace.now)
    trace.monitor.on_node_status(N1, "down", "", trace.now)
    trace.heartbeat_missing |= {agent_of("n1"), ROLLOUTS[1]}
    trace.play(100)
    assert trace.found() == {fail("node_down", "n1"), fail("exit_record", ROLLOUTS[0])}


# ── spares ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_next_agent_of_a_spare_that_does_not_join_fails_too() -> None:
    trace = Trace().node("n1", ROLLOUT).node("n9")
    trace.play(10)
    trace.monitor.remove(agent_of("n9"))
    heir = Incarnation(agent_of("n9").replica, 2)
    trace.heartbeat_missing.add(heir)
    trace.monitor.on_launched(heir, NodeName("n9"), trace.now)
    trace.play(LIMITS.join)
    assert trace.found() == {fail("never_joined", heir)}


# ── the cluster as the witness of a step's end ───────────────────────────────────────────────────────────────────────
def lost_with_unlisted_step() -> Trace:
    """Return a trace in which n1 sends nothing, and the cluster no longer lists the step of its rollout."""
    trace = Trace().node("n1", ROLLOUT).node("n2", ROLLOUTS[2])
    trace.heartbeat_missing |= {agent_of("n1"), ROLLOUT}
    trace.play(2 * LIMITS.silence)
    trace.monitor.on_step_unlisted(ROLLOUT, trace.now)
    return trace


def test_unlisted_step_on_a_lost_node_is_proof_and_dates_from_its_last_message() -> None:
    trace = Trace().node("n1", ROLLOUT).node("n2", ROLLOUTS[2])
    last = trace.now
    trace = lost_with_unlisted_step()
    assert trace.found() == {fail("node_lost", "n1"), fail("step_gone", ROLLOUT)}
    finding = next(one for one in trace.findings() if one.detector == "step_gone")
    assert (finding.proof, finding.remedy, finding.since) == (True, Remedy.RESTART, last)
    assert [(one.source, one.at) for one in finding.evidence] == [("cluster", last)]


def test_node_stays_lost_after_its_unlisted_replica_was_fenced() -> None:
    trace = lost_with_unlisted_step()
    trace.monitor.remove(ROLLOUT)
    trace.monitor.on_launched(Incarnation(ROLLOUT.replica, 2), NodeName("n2"), trace.now)
    trace.play(LIMITS.silence)
    assert trace.found() == {fail("node_lost", "n1")}


def test_message_of_an_unlisted_replica_shows_that_it_runs() -> None:
    trace = lost_with_unlisted_step()
    trace.heartbeat_missing.clear()
    trace.monitor.on_heartbeat(ROLLOUT, "generate", 1, None, trace.now)
    trace.play(LIMITS.heartbeat)
    assert trace.found() == set()


def test_unlisted_step_that_was_to_stop_or_left_an_exit_record_is_not_gone() -> None:
    trace = lost_with_unlisted_step()
    trace.monitor.on_stop_requested(ROLLOUT, trace.now)
    assert "step_gone" not in {finding.detector for finding in trace.findings()}
    trace = lost_with_unlisted_step()
    trace.monitor.on_step_ended(ROLLOUT, 1, None, ExitReason.EXITED, trace.now)
    assert fail("exit_record", ROLLOUT) in trace.found()
    assert fail("step_gone", ROLLOUT) not in trace.found()
