"""``HealthMonitor``: the observations that it keeps, and those that it ignores."""

from __future__ import annotations

import pytest

from rrl.core.launch import ExitReason
from rrl.core.types import Incarnation, NodeName, ReplicaId
from rrl.health.detection.health_monitor import HealthMonitor

N1, N2 = NodeName("n1"), NodeName("n2")
ONE = Incarnation(ReplicaId("rollout/0"), 1)
TWO = Incarnation(ReplicaId("rollout/0"), 2)
TWIN = Incarnation(ReplicaId("rollout/1"), 1)


@pytest.fixture
def monitor() -> HealthMonitor:
    return monitor_with(ONE)


def monitor_with(*incarnations: Incarnation, phase: str = "generate") -> HealthMonitor:
    monitor = HealthMonitor()
    for incarnation in incarnations:
        monitor.on_launched(incarnation, N1, 0.0)
        monitor.on_hello(incarnation, N1, "starting", 1.0)
        monitor.on_phase(incarnation, phase, 0, None, 2.0)
    return monitor


def test_newer_incarnation_replaces_older_one_whose_messages_are_then_ignored(monitor: HealthMonitor) -> None:
    monitor.on_launched(TWO, N2, 10.0)
    monitor.on_heartbeat(ONE, "generate", 99, None, 11.0)
    monitor.on_hello(ONE, N1, "generate", 11.0)
    monitor.on_step_ended(ONE, 1, None, ExitReason.EXITED, 11.0)
    view = monitor.replicas[ONE.replica]
    assert (view.incarnation, view.node, view.status, view.exit, view.last_message_at) == (
        TWO,
        N2,
        "launched",
        None,
        10.0,
    )
    assert not monitor.nodes[N1].residents


def test_messages_of_a_removed_incarnation_are_ignored() -> None:
    monitor = monitor_with(TWO)
    monitor.remove(TWO)
    monitor.on_heartbeat(TWO, "generate", 1, None, 5.0)
    monitor.on_hello(TWO, N1, "generate", 5.0)
    monitor.on_launched(ONE, N1, 5.0)
    assert not monitor.replicas
    monitor.on_launched(Incarnation(TWO.replica, 3), N1, 6.0)
    assert monitor.replicas


def test_removing_an_older_incarnation_keeps_the_newer_one() -> None:
    monitor = monitor_with(TWO)
    monitor.remove(ONE)
    assert monitor.replicas[TWO.replica].incarnation == TWO


def test_incarnation_neither_launched_nor_admitted_is_ignored() -> None:
    monitor = HealthMonitor()
    monitor.on_heartbeat(ONE, "generate", 1, None, 1.0)
    monitor.on_phase(ONE, "generate", 1, None, 1.0)
    monitor.on_step_gone(ONE, 1.0)
    assert not monitor.replicas


def test_second_launch_of_the_same_incarnation_changes_nothing(monitor: HealthMonitor) -> None:
    monitor.on_launched(ONE, N1, 50.0)
    assert (monitor.replicas[ONE.replica].launched_at, monitor.replicas[ONE.replica].status) == (0.0, "joined")


def test_hello_moves_incarnation_to_the_node_it_names() -> None:
    monitor = HealthMonitor()
    monitor.on_launched(ONE, N1, 0.0)
    monitor.on_hello(ONE, N2, "starting", 1.0)
    assert monitor.replicas[ONE.replica].node == N2
    assert (list(monitor.nodes[N1].residents), list(monitor.nodes[N2].residents)) == ([], [ONE])


def test_only_a_rise_of_done_is_progress(monitor: HealthMonitor) -> None:
    monitor.on_heartbeat(ONE, "generate", 5, None, 3.0)
    monitor.on_heartbeat(ONE, "generate", 5, None, 4.0)
    monitor.on_heartbeat(ONE, "generate", 2, None, 5.0)  # a late heartbeat, after a reconnection
    view = monitor.replicas[ONE.replica]
    assert (view.done, view.done_changed_at, view.heartbeats) == (5, 3.0, 2)
    monitor.on_heartbeat(ONE, "generate", 6, None, 6.0)
    assert (view.done, view.done_changed_at, view.heartbeats) == (6, 6.0, 0)


def test_phase_whose_message_was_lost_begins_with_the_next_heartbeat() -> None:
    monitor = monitor_with(ONE, phase="wait_work")
    monitor.on_heartbeat(ONE, "generate", 0, None, 7.0)
    monitor.on_heartbeat(ONE, "generate", 0, None, 8.0)
    assert monitor.replicas[ONE.replica].phase_since == 7.0


def test_entering_the_same_phase_again_begins_a_new_pass() -> None:
    monitor = monitor_with(ONE, phase="train")
    monitor.on_phase(ONE, "train", 1, None, 30.0)
    assert monitor.replicas[ONE.replica].phase_since == 30.0


def passes(monitor: HealthMonitor, incarnation: Incarnation, phase: str, durations: list[float], now: float) -> float:
    for duration in durations:
        monitor.on_phase(incarnation, phase, 0, None, now)
        now += duration
        monitor.on_phase(incarnation, "wait_data", 0, None, now)
    return now


def test_usual_duration_is_the_median_without_the_first_pass() -> None:
    monitor = monitor_with(ONE, phase="wait_data")
    now = passes(monitor, ONE, "train", [500.0, 10.0, 11.0, 300.0, 12.0, 11.0], 2.0)
    monitor.on_phase(ONE, "train", 0, None, now)
    assert monitor.replicas[ONE.replica].usual_duration == pytest.approx(11.0)


def test_usual_duration_needs_three_passes_observed_from_their_start() -> None:
    monitor = monitor_with(ONE, phase="wait_data")
    now = passes(monitor, ONE, "train", [10.0, 10.0, 10.0], 2.0)  # the first is not usual
    monitor.on_phase(ONE, "train", 0, None, now)
    assert monitor.replicas[ONE.replica].usual_duration is None
    monitor.restart(now + 1)
    monitor.on_phase(ONE, "wait_data", 0, None, now + 2)  # a pass that spans a restart has no known duration
    monitor.on_phase(ONE, "train", 0, None, now + 3)
    assert monitor.replicas[ONE.replica].usual_duration is None


def test_replacement_and_siblings_share_the_usual_duration_of_their_role() -> None:
    monitor = monitor_with(ONE, TWIN, phase="wait_data")
    now = passes(monitor, ONE, "train", [10.0] * 5, 2.0)
    monitor.on_phase(TWIN, "train", 0, None, now)
    assert monitor.replicas[TWIN.replica].usual_duration == pytest.approx(10.0)
    assert monitor.replicas[TWIN.replica].first_pass
    monitor.on_launched(TWO, N1, now)
    monitor.on_hello(TWO, N1, "train", now)
    assert monitor.replicas[TWO.replica].usual_duration == pytest.approx(10.0)


def test_usual_duration_of_progressing_phase_is_the_time_between_rises(monitor: HealthMonitor) -> None:
    for tick in range(1, 7):
        monitor.on_heartbeat(ONE, "generate", tick, None, 2.0 + 3 * tick)
    assert monitor.replicas[ONE.replica].usual_duration == pytest.approx(3.0)


def test_time_blocked_by_another_replica_is_not_learned() -> None:
    monitor = monitor_with(ONE, phase="wait_data")
    now = passes(monitor, ONE, "train", [10.0] * 4, 2.0)
    for _ in range(9):
        monitor.on_phase(ONE, "train", 0, None, now)
        monitor.on_heartbeat(ONE, "train", 0, ReplicaId("trajectories/0"), now + 1)
        now = passes(monitor, ONE, "wait_work", [1.0], now + 500)
    monitor.on_phase(ONE, "train", 0, None, now)
    assert monitor.replicas[ONE.replica].usual_duration == pytest.approx(10.0)


def test_wait_continues_between_two_requests_to_the_store() -> None:
    monitor = monitor_with(ONE, phase="wait_work")
    for at in range(10, 100, 10):
        monitor.on_heartbeat(ONE, "wait_work", 0, ReplicaId("trajectories/0") if at % 20 else None, float(at))
    view = monitor.replicas[ONE.replica]
    assert (view.last_change_at, view.heartbeats) == (2.0, 9)


def test_unknown_node_state_changes_nothing() -> None:
    monitor = HealthMonitor()
    monitor.on_node_status(N1, "down", "not responding", 5.0)
    monitor.on_node_status(N1, "unknown", "timed out", 6.0)
    view = monitor.nodes[N1]
    assert (view.state, view.detail, view.since, view.observations) == ("down", "not responding", 5.0, 1)


def test_released_node_is_removed_with_its_incarnations(monitor: HealthMonitor) -> None:
    agent = Incarnation(ReplicaId("agent/n1"), 1)
    monitor.on_agent_message(N1, agent, 3.0)
    monitor.remove_node(N1)
    assert not monitor.nodes
    assert not monitor.replicas


def test_boot_id_of_hello_is_kept_through_heartbeats() -> None:
    monitor = HealthMonitor()
    agent = Incarnation(ReplicaId("agent/n1"), 1)
    monitor.on_agent_message(N1, agent, 1.0, "b1")
    monitor.on_agent_message(N1, agent, 2.0)
    assert (monitor.nodes[N1].boot_id, monitor.nodes[N1].last_message_at) == ("b1", 2.0)
