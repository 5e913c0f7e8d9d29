"""The judges by name: rrl's detectors and the baselines, each with all its deadlines multiplied by a factor."""

from __future__ import annotations

from collections.abc import Mapping

from rrl.benchmarks.scenarios.baselines import Baseline, FixedTimeout, RobustRL, WarnsOfAll
from rrl.benchmarks.scenarios.format import Scenario
from rrl.benchmarks.scenarios.judge import Judge
from rrl.benchmarks.scenarios.ours import RrlDetectors

OURS, FIXED, WARNS_OF_ALL = "ours", "fixed_timeout", "warns_of_all"
ROBUSTRL: Mapping[str, float] = {"robustrl_5s": 5.0, "robustrl_15s": 15.0, "robustrl_30s": 30.0}
"""RobustRL's rules, by name, each with an assumed time (s) for a suspected rollout's answer; the paper publishes
none."""
METHODS = (OURS, FIXED, *ROBUSTRL, WARNS_OF_ALL)


def judge_of(method: str, scenario: Scenario, factor: float = 1.0) -> Judge:
    if method == OURS:
        return RrlDetectors(scenario, factor)
    if method == WARNS_OF_ALL:
        return WarnsOfAll()
    return Baseline(FixedTimeout(factor) if method == FIXED else RobustRL(ROBUSTRL[method], factor))
