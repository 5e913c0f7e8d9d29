"""The judges by name: rrl's detectors and the two baselines, with all their deadlines multiplied by a factor."""

from __future__ import annotations

from rrl.tests.support.scenarios.baselines import Baseline, FixedTimeout, RobustRL
from rrl.tests.support.scenarios.format import Scenario
from rrl.tests.support.scenarios.judge import Judge
from rrl.tests.support.scenarios.ours import RrlDetectors

OURS, FIXED, ROBUSTRL = "ours", "fixed_timeout", "robustrl"
METHODS = (OURS, FIXED, ROBUSTRL)


def judge_of(method: str, scenario: Scenario, factor: float = 1.0) -> Judge:
    if method == OURS:
        return RrlDetectors(scenario, factor)
    return Baseline(FixedTimeout(factor) if method == FIXED else RobustRL(factor))
