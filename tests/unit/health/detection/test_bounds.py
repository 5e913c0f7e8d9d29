"""The bounds that ``rrl check --detection`` prints are those of the detectors."""

from __future__ import annotations

from msgspec.structs import replace

from rrl.core.phases import PHASES, PhaseSpec
from rrl.core.run_spec import Limits, RunSpec
from rrl.health.detection.bounds import Bound, bounds
from rrl.tests.support.health.traces import IDLE, ROLLOUT, TRAINER, Trace, until_found
from rrl.tests.support.manager.jobs import job


def spec(**changed: object) -> RunSpec:
    return replace(job(), limits=Limits(**changed))  # type: ignore[arg-type]


def bound(spec: RunSpec, role: str, phase: str, condition: str) -> Bound:
    found = bounds(spec)
    return next(one for one in found if (one.role, one.phase, one.condition) == (role, phase, condition))


def test_bound_of_a_first_pass_is_that_of_the_detectors() -> None:
    trace = Trace().node("n1", TRAINER, phase="train")
    trace.loads[TRAINER] = IDLE
    first_s = bound(spec(), "trainer", "train", "idle").first_s
    assert first_s is not None
    assert first_s <= until_found(trace, 300.0) <= first_s + 4.0, "loads come every 2 s, and show the time before them"


def test_bound_of_a_later_pass_is_that_of_the_detectors() -> None:
    trace = Trace().node("n1", TRAINER, phase="train")
    trace.learn(TRAINER, "publish", 2.0, between="train")
    trace.enter(TRAINER, "publish")
    later = bound(spec(), "trainer", "publish", "no loads").later_s
    assert later == until_found(trace, 2 * PHASES["publish"].shortest)


def test_bounds_follow_the_limits_of_the_job_and_name_the_rule() -> None:
    changed = spec(phases={"publish": PhaseSpec(shortest=400.0, longest=500.0)})
    found = bound(changed, "trainer", "publish", "no loads")
    assert (found.first_s, found.later_s) == (500.0 + Limits().first_pass, 400.0)
    assert found.rule == "does not end within 5 x usual, 6m40s to 8m20s"


def test_phase_whose_only_bound_is_longest_is_left_alone_until_then() -> None:
    limits = Limits(first_pass=0.0, phases={"simulate": PhaseSpec(longest=3600.0, progresses=False)})
    trace = Trace(limits).node("n1", ROLLOUT, phase="simulate")
    trace.learn(ROLLOUT, "simulate", 60.0, between="wait_work")
    trace.enter(ROLLOUT, "simulate")
    assert until_found(trace, 3700.0) == 3600.0


def test_no_phase_of_a_role_is_missing_and_a_wait_never_fails_alone() -> None:
    phases = {(one.role, one.phase): one for one in bounds(spec())}
    assert {role for role, _ in phases} == {role.name for role in spec().roles}
    assert phases["trainer", "wait_data"].later_s is None
    assert "18m45s" in phases["trainer", "wait_data"].rule
