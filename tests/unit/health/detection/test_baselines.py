"""Baselines that one health monitor has learned are restored in the next one."""

from __future__ import annotations

import pytest

from rrl.core.types import Incarnation, NodeName, ReplicaId
from rrl.health.detection.baselines import DurationStats, PhaseDurations, RoleBaseline, changed_noticeably
from rrl.health.detection.health_monitor import HealthMonitor

N1 = NodeName("n1")
TRAINER = Incarnation(ReplicaId("trainer/0"), 1)
BASELINE = RoleBaseline(
    {"train": DurationStats(8, 60.0, 90.0), "checkpoint": DurationStats(8, 5.0, 8.0)}, uses_tensor_cores=True
)


def with_phase(name: str, stats: DurationStats) -> RoleBaseline:
    return RoleBaseline({**BASELINE.phases, name: stats}, uses_tensor_cores=True)


def learned(passes: int = 6, tensor: float | None = 0.5) -> HealthMonitor:
    """Return a monitor that observed a trainer in ``passes`` training passes of 60 s."""
    monitor = HealthMonitor()
    monitor.on_launched(TRAINER, N1, 0.0)
    monitor.on_hello(TRAINER, N1, "starting", 1.0)
    for index in range(passes):
        monitor.on_phase(TRAINER, "train", index, None, 100.0 * index)
        monitor.on_load(TRAINER, 1.0, 0.9, 100.0 * index + 2.0, tensor)
        monitor.on_phase(TRAINER, "wait_data", index + 1, None, 100.0 * index + 60.0)
    return monitor


def inherited(baselines: dict[str, RoleBaseline], passed: tuple[str, ...]) -> HealthMonitor:
    """Return a monitor that has restored baselines and got the Hello of a trainer in a training step."""
    monitor = HealthMonitor()
    monitor.restore_baselines(baselines)
    monitor.on_launched(TRAINER, N1, 1000.0)
    monitor.restore_joined(TRAINER, passed)
    monitor.on_hello(TRAINER, N1, "train", 1001.0)
    return monitor


def test_restored_baselines_apply_from_the_first_message() -> None:
    first = learned()
    monitor = inherited(first.baselines(), ("starting", "train"))
    view = monitor.replicas[TRAINER.replica]
    assert (view.usual_duration, view.slowest_duration) == (60.0, 60.0)
    assert view.loads.uses_tensor_cores
    assert monitor.baselines() == first.baselines(), "the second monitor lacks baselines that it has restored"


def test_first_passes_are_handed_on_before_a_usual_duration_is_known() -> None:
    first = learned(passes=2)
    stats = DurationStats(count=1, median=60.0, longest=60.0, longest_first_pass=60.0)
    assert first.baselines()["trainer"].phases["train"] == stats
    monitor = inherited(first.baselines(), ("starting", "train"))
    view = monitor.replicas[TRAINER.replica]
    assert (view.usual_duration, view.longest_pass) == (None, 60.0)
    assert monitor.baselines() == first.baselines()


def test_nothing_observed_gives_no_baseline() -> None:
    assert HealthMonitor().baselines() == {}


def test_phase_passed_under_earlier_manager_is_not_a_first_pass() -> None:
    assert not inherited({}, ("starting", "train")).replicas[TRAINER.replica].first_pass


def test_replica_still_in_its_first_step_keeps_first_pass_grace() -> None:
    view = inherited({"trainer": BASELINE}, ("starting", "wait_data")).replicas[TRAINER.replica]
    assert view.first_pass
    assert not view.loads.uses_tensor_cores


def test_restored_progressing_phase_is_a_first_pass_unless_its_count_is_above_zero() -> None:
    rollout = Incarnation(ReplicaId("rollout/0"), 1)
    for done, first in ((0, True), (7, False)):
        monitor = HealthMonitor()
        monitor.on_launched(rollout, N1, 0.0)
        monitor.restore_joined(rollout, ("generate",))
        monitor.on_hello(rollout, N1, "generate", 1.0)
        monitor.on_heartbeat(rollout, "generate", done, None, 2.0)
        assert monitor.replicas[rollout.replica].first_pass is first


def test_restored_durations_are_replaced_by_new_ones_and_the_longest_goes_last() -> None:
    usual = PhaseDurations()
    usual.restore("trainer", "train", DurationStats(32, 60.0, 300.0))
    for _ in range(31):
        usual.add("trainer", "train", 20.0)
    assert usual.typical("trainer", "train").median == 20.0
    assert usual.typical("trainer", "train").longest == 300.0
    usual.add("trainer", "train", 20.0)
    assert usual.typical("trainer", "train").longest == 20.0


@pytest.mark.parametrize(
    ("after", "worth"),
    [
        ({}, True),
        ({"trainer": BASELINE}, False),
        ({"trainer": BASELINE, "reward": RoleBaseline(answers_probes=True)}, True),
        ({"trainer": RoleBaseline(BASELINE.phases)}, True),
        ({"trainer": RoleBaseline({"train": DurationStats(8, 60.0, 90.0)}, uses_tensor_cores=True)}, True),
        ({"trainer": with_phase("train", DurationStats(9, 62.0, 95.0))}, False),
        ({"trainer": with_phase("train", DurationStats(9, 62.0, 190.0))}, True),
        ({"trainer": with_phase("train", DurationStats(16, 60.0, 90.0))}, True),
        ({"trainer": with_phase("checkpoint", DurationStats(8, 5.9, 8.0))}, False),
        ({"trainer": RoleBaseline(BASELINE.phases, uses_tensor_cores=True, slowest_load=9.0)}, True),
    ],
    ids=[
        "forgotten",
        "the same",
        "another role",
        "no tensor cores",
        "a phase less",
        "a little slower",
        "far longer",
        "twice as many",
        "less than a second",
        "loads",
    ],
)
def test_baseline_change_is_recorded_when_a_deadline_moves(after: dict[str, RoleBaseline], worth: bool) -> None:
    assert changed_noticeably({"trainer": BASELINE}, after) is worth
