"""What the watch keeps of what it hears, and what it ignores."""

from __future__ import annotations

import pytest

from rrl.core.launch import ExitReason
from rrl.core.types import Incarnation, NodeName, ReplicaId
from rrl.health.detection.health_monitor import HealthMonitor

N1, N2 = NodeName("n1"), NodeName("n2")
ONE = Incarnation(ReplicaId("rollout/0"), 1)
TWO = Incarnation(ReplicaId("rollout/0"), 2)
TWIN = Incarnation(ReplicaId("rollout/1"), 1)


def monitor_with(*incarnations: Incarnation, phase: str = "generate") -> HealthMonitor:
    watch = HealthMonitor()
    for incarnation in incarnations:
        watch.on_launched(incarnation, N1, 0.0)
        watch.on_hello(incarnation, N1, "starting", 1.0)
        watch.on_phase(incarnation, phase, 0, None, 2.0)
    return watch


def test_a_newer_life_takes_the_place_of_an_older_one_and_the_older_one_is_not_heard_any_more() -> None:
    watch = monitor_with(ONE)
    watch.on_launched(TWO, N2, 10.0)
    watch.on_heartbeat(ONE, "generate", 99, None, 11.0)
    watch.on_hello(ONE, N1, "generate", 11.0)
    watch.on_step_ended(ONE, 1, None, ExitReason.EXITED, 11.0)
    seen = watch.replicas[ONE.replica]
    assert (seen.incarnation, seen.node, seen.status, seen.exit, seen.last_message_at) == (
        TWO,
        N2,
        "launched",
        None,
        10.0,
    )
    assert not watch.nodes[N1].residents


def test_a_forgotten_life_stays_forgotten_whatever_it_still_says() -> None:
    watch = monitor_with(TWO)
    watch.remove(TWO)
    watch.on_heartbeat(TWO, "generate", 1, None, 5.0)
    watch.on_hello(TWO, N1, "generate", 5.0)
    watch.on_launched(ONE, N1, 5.0)
    assert not watch.replicas
    watch.on_launched(Incarnation(TWO.replica, 3), N1, 6.0)
    assert watch.replicas


def test_forgetting_an_older_life_leaves_the_newer_one_alone() -> None:
    watch = monitor_with(TWO)
    watch.remove(ONE)
    assert watch.replicas[TWO.replica].incarnation == TWO


def test_nobody_is_believed_who_was_neither_launched_nor_welcomed() -> None:
    watch = HealthMonitor()
    watch.on_heartbeat(ONE, "generate", 1, None, 1.0)
    watch.on_phase(ONE, "generate", 1, None, 1.0)
    watch.on_step_gone(ONE, 1.0)
    assert not watch.replicas


def test_launched_again_for_the_same_life_changes_nothing() -> None:
    watch = monitor_with(ONE)
    watch.on_launched(ONE, N1, 50.0)
    assert (watch.replicas[ONE.replica].launched_at, watch.replicas[ONE.replica].status) == (0.0, "joined")


def test_hello_tells_where_a_life_really_runs() -> None:
    watch = HealthMonitor()
    watch.on_launched(ONE, N1, 0.0)
    watch.on_hello(ONE, N2, "starting", 1.0)
    assert watch.replicas[ONE.replica].node == N2
    assert (list(watch.nodes[N1].residents), list(watch.nodes[N2].residents)) == ([], [ONE])


def test_only_a_rise_of_done_is_progress() -> None:
    watch = monitor_with(ONE)
    watch.on_heartbeat(ONE, "generate", 5, None, 3.0)
    watch.on_heartbeat(ONE, "generate", 5, None, 4.0)
    watch.on_heartbeat(ONE, "generate", 2, None, 5.0)  # out of order, after a reconnection
    seen = watch.replicas[ONE.replica]
    assert (seen.done, seen.done_changed_at, seen.heartbeats) == (5, 3.0, 2)
    watch.on_heartbeat(ONE, "generate", 6, None, 6.0)
    assert (seen.done, seen.done_changed_at, seen.heartbeats) == (6, 6.0, 0)


def test_a_phase_whose_beginning_was_lost_begins_with_the_beat_that_tells_it() -> None:
    watch = monitor_with(ONE, phase="wait_work")
    watch.on_heartbeat(ONE, "generate", 0, None, 7.0)
    watch.on_heartbeat(ONE, "generate", 0, None, 8.0)
    assert watch.replicas[ONE.replica].phase_since == 7.0


def test_entering_the_phase_that_it_was_in_is_a_new_pass() -> None:
    watch = monitor_with(ONE, phase="train")
    watch.on_phase(ONE, "train", 1, None, 30.0)
    assert watch.replicas[ONE.replica].phase_since == 30.0


def passes(monitor: HealthMonitor, incarnation: Incarnation, phase: str, durations: list[float], now: float) -> float:
    for duration in durations:
        monitor.on_phase(incarnation, phase, 0, None, now)
        now += duration
        monitor.on_phase(incarnation, "wait_data", 0, None, now)
    return now


def test_the_usual_duration_is_the_median_without_the_first_pass_and_one_outlier_does_not_move_it() -> None:
    watch = monitor_with(ONE, phase="wait_data")
    now = passes(watch, ONE, "train", [500.0, 10.0, 11.0, 300.0, 12.0, 11.0], 2.0)
    watch.on_phase(ONE, "train", 0, None, now)
    assert watch.replicas[ONE.replica].usual_duration == pytest.approx(11.0)


def test_there_is_no_usual_duration_before_three_passes_were_seen_from_their_beginning() -> None:
    watch = monitor_with(ONE, phase="wait_data")
    now = passes(watch, ONE, "train", [10.0, 10.0, 10.0], 2.0)  # the first is not usual
    watch.on_phase(ONE, "train", 0, None, now)
    assert watch.replicas[ONE.replica].usual_duration is None
    watch.restart(now + 1)
    watch.on_phase(ONE, "wait_data", 0, None, now + 2)  # a pass cut by the restart counts for nothing
    watch.on_phase(ONE, "train", 0, None, now + 3)
    assert watch.replicas[ONE.replica].usual_duration is None


def test_a_replacement_and_its_siblings_inherit_what_is_usual_in_their_role() -> None:
    watch = monitor_with(ONE, TWIN, phase="wait_data")
    now = passes(watch, ONE, "train", [10.0] * 5, 2.0)
    watch.on_phase(TWIN, "train", 0, None, now)
    assert watch.replicas[TWIN.replica].usual_duration == pytest.approx(10.0)
    assert watch.replicas[TWIN.replica].first_pass
    watch.on_launched(TWO, N1, now)
    watch.on_hello(TWO, N1, "train", now)
    assert watch.replicas[TWO.replica].usual_duration == pytest.approx(10.0)


def test_where_progress_counts_the_gap_between_two_rises_is_what_is_usual() -> None:
    watch = monitor_with(ONE)
    for tick in range(1, 7):
        watch.on_heartbeat(ONE, "generate", tick, None, 2.0 + 3 * tick)
    assert watch.replicas[ONE.replica].usual_duration == pytest.approx(3.0)


def test_time_that_another_replica_took_does_not_count_as_usual() -> None:
    watch = monitor_with(ONE, phase="wait_data")
    now = passes(watch, ONE, "train", [10.0] * 4, 2.0)
    for _ in range(9):
        watch.on_phase(ONE, "train", 0, None, now)
        watch.on_heartbeat(ONE, "train", 0, ReplicaId("trajectories/0"), now + 1)
        now = passes(watch, ONE, "wait_work", [1.0], now + 500)
    watch.on_phase(ONE, "train", 0, None, now)
    assert watch.replicas[ONE.replica].usual_duration == pytest.approx(10.0)


def test_who_waits_anyway_goes_on_waiting_between_two_questions_to_the_store() -> None:
    watch = monitor_with(ONE, phase="wait_work")
    for at in range(10, 100, 10):
        watch.on_heartbeat(ONE, "wait_work", 0, ReplicaId("trajectories/0") if at % 20 else None, float(at))
    seen = watch.replicas[ONE.replica]
    assert (seen.last_change_at, seen.heartbeats) == (2.0, 9)


def test_an_unknown_answer_of_the_cluster_changes_nothing() -> None:
    watch = HealthMonitor()
    watch.on_node_status(N1, "down", "not responding", 5.0)
    watch.on_node_status(N1, "unknown", "timed out", 6.0)
    seen = watch.nodes[N1]
    assert (seen.state, seen.detail, seen.since, seen.observations) == ("down", "not responding", 5.0, 1)


def test_a_node_given_back_is_forgotten_with_all_that_was_on_it() -> None:
    watch = monitor_with(ONE)
    agent = Incarnation(ReplicaId("agent/n1"), 1)
    watch.on_agent_message(N1, agent, 3.0)
    watch.remove_node(N1)
    assert not watch.nodes
    assert not watch.replicas


def test_the_boot_id_of_a_hello_is_kept_through_beats_that_carry_none() -> None:
    watch = HealthMonitor()
    agent = Incarnation(ReplicaId("agent/n1"), 1)
    watch.on_agent_message(N1, agent, 1.0, "b1")
    watch.on_agent_message(N1, agent, 2.0)
    assert (watch.nodes[N1].boot_id, watch.nodes[N1].last_message_at) == ("b1", 2.0)
