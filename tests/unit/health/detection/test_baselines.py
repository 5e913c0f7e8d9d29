"""What one watch has learned, another one may begin with."""

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


def learned(passes: int = 6, tensor: float | None = 0.5) -> HealthMonitor:
    """A trainer that has trained so often, for 60 s each."""
    watch = HealthMonitor()
    watch.on_launched(TRAINER, N1, 0.0)
    watch.on_hello(TRAINER, N1, "starting", 1.0)
    for index in range(passes):
        watch.on_phase(TRAINER, "train", index, None, 100.0 * index)
        watch.on_load(TRAINER, 1.0, 0.9, 100.0 * index + 2.0, tensor)
        watch.on_phase(TRAINER, "wait_data", index + 1, None, 100.0 * index + 60.0)
    return watch


def inherited(baselines: dict[str, RoleBaseline], passed: tuple[str, ...]) -> HealthMonitor:
    """A watch that finds the trainer in a step."""
    watch = HealthMonitor()
    watch.restore_baselines(baselines)
    watch.on_launched(TRAINER, N1, 1000.0)
    watch.restore_passed_phases(TRAINER, passed)
    watch.on_hello(TRAINER, N1, "train", 1001.0)
    return watch


def test_restored_baselines_apply_from_the_first_message() -> None:
    first = learned()
    watch = inherited(first.baselines(), ("starting", "train"))
    seen = watch.replicas[TRAINER.replica]
    assert (seen.usual_duration, seen.slowest_duration) == (60.0, 60.0)
    assert seen.loads.uses_tensor_cores
    assert watch.baselines() == first.baselines(), "and hands on as much"


def test_too_few_passes_give_no_baseline() -> None:
    assert learned(passes=2, tensor=None).baselines() == {}


def test_phase_passed_under_earlier_manager_is_not_a_first_pass() -> None:
    assert not inherited({}, ("starting", "train")).replicas[TRAINER.replica].first_pass


def test_replica_still_in_its_first_step_keeps_first_pass_grace() -> None:
    seen = inherited({"trainer": BASELINE}, ("starting", "wait_data")).replicas[TRAINER.replica]
    assert seen.first_pass
    assert not seen.loads.uses_tensor_cores


def test_restored_progressing_phase_is_a_first_pass_unless_its_count_is_above_zero() -> None:
    rollout = Incarnation(ReplicaId("rollout/0"), 1)
    for done, first in ((0, True), (7, False)):
        watch = HealthMonitor()
        watch.on_launched(rollout, N1, 0.0)
        watch.restore_passed_phases(rollout, ("generate",))
        watch.on_hello(rollout, N1, "generate", 1.0)
        watch.on_heartbeat(rollout, "generate", done, None, 2.0)
        assert watch.replicas[rollout.replica].first_pass is first


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
        ({"trainer": RoleBaseline({**BASELINE.phases, "train": DurationStats(9, 62.0, 95.0)}, uses_tensor_cores=True)}, False),
        ({"trainer": RoleBaseline({**BASELINE.phases, "train": DurationStats(9, 62.0, 190.0)}, uses_tensor_cores=True)}, True),
        ({"trainer": RoleBaseline({**BASELINE.phases, "train": DurationStats(16, 60.0, 90.0)}, uses_tensor_cores=True)}, True),
        ({"trainer": RoleBaseline({**BASELINE.phases, "checkpoint": DurationStats(8, 5.9, 8.0)}, uses_tensor_cores=True)}, False),
        ({"trainer": RoleBaseline(BASELINE.phases, uses_tensor_cores=True, slowest_load=9.0)}, True),
    ],
    ids=[
        "forgotten", "the same", "another role", "no tensor cores", "a phase less", "a little slower", "far longer",
        "twice as many", "less than a second", "loads",
    ],
)  # fmt: skip
def test_baseline_change_is_recorded_when_a_deadline_moves(after: dict[str, RoleBaseline], worth: bool) -> None:
    assert changed_noticeably({"trainer": BASELINE}, after) is worth
