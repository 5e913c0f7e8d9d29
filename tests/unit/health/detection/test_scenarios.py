"""Detectors on scripted scenarios in virtual time (tests/data/scenarios).

Other tests here are about the player of scenarios and its scores.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.benchmarks._detection_curve import match_delay
from rrl.benchmarks.scenarios.decisions import RecordingDetectors, decided_about
from rrl.benchmarks.scenarios.format import Scenario
from rrl.benchmarks.scenarios.load import ScenarioError, load, load_all
from rrl.benchmarks.scenarios.methods import FIXED, OURS, ROBUSTRL, WARNS_OF_ALL, judge_of
from rrl.benchmarks.scenarios.ours import RrlDetectors
from rrl.benchmarks.scenarios.play import Alarm, Outcome, Played, play
from rrl.benchmarks.scenarios.rhythms import roles_of
from rrl.benchmarks.scenarios.score import confusion, ratio, score, warnings_of
from rrl.core.types import Finding, Incarnation

FOLDER = Path(__file__).parents[3] / "data" / "scenarios"
SCENARIOS = load_all(FOLDER)
SEEDS = 20
LIGHTEST = 2
"""Number of scenarios of each kind (folder) that ``make test`` plays besides ``RULES``: those with the least weight."""
LIGHT = 7000.0
"""Weight (seconds x processes) above which only ``make test-long`` plays a scenario that is not in ``RULES``."""
RULES = frozenset(
    {
        "faults/gpu/straggler-rollout",
        "faults/hang/goodbye-and-stays",
        "faults/hang/hang-checkpoint",
        "faults/hang/hang-first-collective-blind",
        "faults/hang/hang-first-load",
        "faults/hang/hang-first-publish",
        "faults/hang/hang-first-step",
        "faults/hang/hang-score",
        "faults/hang/hang-store",
        "faults/hang/hang-train-deadlock",
        "faults/hang/hang-wait-work",
        "faults/hang/lie-rollout",
        "faults/hang/lie-trainer",
        "faults/hang/wedge-first-spins",
        "faults/hang/wedge-silent",
        "faults/manager_restart/stopped-rollout-two-takeovers",
        "faults/node/node-flaps",
        "faults/process/crash-rollout",
        "faults/process/freeze-rollout",
        "faults/process/never-joins",
        "faults/process/promoted-standby-never-joins",
        "no_fault/hang/endpoint-no-outside-agent-40min",
        "no_fault/hang/evaluation-between",
        "no_fault/hang/long-prefill",
        "no_fault/hang/network-retry-rank-0",
        "no_fault/hang/store-idle-all-wait",
        "no_fault/hang/tool-call-half-an-hour",
        "no_fault/network/switch-reboots-everywhere",
        "no_fault/process/log-flood-12s",
        "no_fault/process/py-spy-stops-trainer",
        "no_fault/process/spare-agent-pauses",
        "no_fault/scheduler/suspended",
        "no_fault/scheduler/suspended-trainer-node",
        "no_fault/storage/slow-start",
    }
)
"""Scenarios that ``make test`` plays because they fail without the central rule of a detector or an attribution."""
HANG = """
about = "A rollout hangs while it generates"
lasts = "12min"
[[event]]
at = "8min"
do = "hang"
who = "rollout/0"
phase = "generate"
[[truth]]
who = "rollout/0"
cause = "hang"
within = "3min"
"""


def weight(scenario: Scenario) -> float:
    return scenario.lasts * sum(table.replicas * table.ranks for table in roles_of(scenario).values())


def lightest(scenarios: dict[str, Scenario]) -> list[str]:
    """Return the names of the scenarios that ``make test`` plays."""
    by_kind: dict[str, list[str]] = {}
    for name in sorted(scenarios, key=lambda name: weight(scenarios[name])):
        by_kind.setdefault(name.rpartition("/")[0], []).append(name)
    return [name for names in by_kind.values() for name in names[:LIGHTEST] if weight(scenarios[name]) <= LIGHT]


def mistakes(played: Played) -> list[str]:
    late = [f"{one.who} not found in time ({one.found_at})" for one in played.outcomes if not one.in_time]
    return [*late, *(f"false: {one}" for one in played.false), *([played.broken] if played.broken else [])]


def scenario(tmp_path: Path, text: str) -> Scenario:
    file = tmp_path / "one.toml"
    file.write_text(text)
    return load(file)


PLAYED = RULES | set(lightest(SCENARIOS))


# ── shipped scenarios ────────────────────────────────────────────────────────────────────────────────────────────────
def test_at_least_a_hundred_scenarios_half_of_them_harmless_are_shipped() -> None:
    failures = sum(bool(one.truth) for one in SCENARIOS.values())
    assert len(SCENARIOS) >= 100
    assert abs(2 * failures - len(SCENARIOS)) <= len(SCENARIOS) / 5


@pytest.mark.parametrize(
    "name", [name if name in PLAYED else pytest.param(name, marks=pytest.mark.long) for name in SCENARIOS]
)
def test_a_scenario_gives_the_expected_findings_and_explained_decisions(name: str) -> None:
    detectors = RecordingDetectors(SCENARIOS[name])
    assert mistakes(play(name, SCENARIOS[name], 0, detectors)) == []
    assert bool(detectors.failures) or not any(one.required and one.verdict == "FAIL" for one in SCENARIOS[name].truth)
    for failure in detectors.failures.values():
        for explanation in decided_about(failure):
            assert explanation.action.why.evidence


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_gives_the_expected_findings_for_all_seeds(name: str) -> None:
    for seed in range(SEEDS):
        assert mistakes(play(name, SCENARIOS[name], seed, judge_of(OURS, SCENARIOS[name]))) == []


# ── the player ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_fixed_timeout_and_robustrl_find_a_hang_after_their_own_timeouts(tmp_path: Path) -> None:
    hang = scenario(tmp_path, HANG.replace('"12min"', '"25min"').replace('"3min"', '"15min"'))
    found = {method: play("hang", hang, 0, judge_of(method, hang)).outcomes[0] for method in (OURS, FIXED, *ROBUSTRL)}
    delays = {method: (one.found_at or 0.0) - one.since for method, one in found.items()}
    assert 595.0 <= delays[FIXED] <= 605.0
    for method, answer_timeout in ROBUSTRL.items():
        assert abs(delays[method] - 60.0 - answer_timeout) <= 5.0
    assert delays[OURS] <= min(delays[method] for method in ROBUSTRL)


def test_robustrl_misses_a_dead_engine_in_a_process_that_answers(tmp_path: Path) -> None:
    wedge = scenario(tmp_path, HANG.replace('do = "hang"', 'do = "wedge"'))
    assert play("wedge", wedge, 0, judge_of("robustrl_30s", wedge)).outcomes[0].found_at is None


def test_judge_that_warns_of_everybody_finds_each_warning_and_is_charged_for_the_others(tmp_path: Path) -> None:
    warned = scenario(tmp_path, HANG.replace('cause = "hang"', 'cause = "hang"\nverdict = "WARN"'))
    plays = {method: play("warned", warned, 0, judge_of(method, warned)) for method in (OURS, WARNS_OF_ALL)}
    (outcome,) = plays[WARNS_OF_ALL].outcomes
    assert (outcome.in_time, outcome.found_at) == (True, outcome.since)
    everybody = len(plays[WARNS_OF_ALL].warnings)
    assert everybody > 6
    (about,) = {one.who for one in plays[WARNS_OF_ALL].warnings} - {one.who for one in plays[WARNS_OF_ALL].unexplained}
    assert about == "rollout/0"
    charged, ours = (warnings_of([plays[method]]) for method in (WARNS_OF_ALL, OURS))
    assert charged.hours == pytest.approx(0.2)
    assert charged.per_hour()["unexplained_standing"] == pytest.approx(everybody - 1, abs=0.5)
    assert ours.unexplained == 0


# ── the scoring ──────────────────────────────────────────────────────────────────────────────────────────────────────
class Deaf(RrlDetectors):
    """Detectors that find nothing."""

    def findings(self, now: float) -> list[Finding]:
        return []


class Nervous(RrlDetectors):
    """Detectors with a finding for every replica that sends a Hello."""

    def hello(self, incarnation: Incarnation, node: object, phase: str, now: float) -> None:
        super().hello(incarnation, node, phase, now)  # type: ignore[arg-type]
        if incarnation.replica == "rollout/1":
            self.exited(incarnation, 1, None, "a planted mistake", "", now)


def test_planted_miss_is_counted_as_a_miss(tmp_path: Path) -> None:
    hang = scenario(tmp_path, HANG)
    counted = score([play("hang", hang, 0, Deaf(hang))])
    assert (counted.found, counted.missed, counted.recall, counted.precision) == (0, 1, 0.0, 1.0)


def test_planted_false_alarm_is_counted_as_one(tmp_path: Path) -> None:
    calm = scenario(tmp_path, 'about = "Nothing happens"\nlasts = "90s"')
    played = play("calm", calm, 0, Nervous(calm))
    assert [(one.who, one.detector) for one in played.false] == [("rollout/1", "exit_record")]
    assert score([played]).precision == 0.0


def test_failure_found_too_late_counts_as_missed(tmp_path: Path) -> None:
    hang = scenario(tmp_path, HANG.replace('"3min"', '"1s"'))
    counted = score([play("hang", hang, 0, judge_of(OURS, hang))])
    assert (counted.found, counted.late, counted.false) == (0, 1, 0)


def test_alarm_before_the_failure_counts_as_false(tmp_path: Path) -> None:
    early = scenario(tmp_path, HANG.replace('within = "3min"', 'within = "1min"\nat = "10min"').replace("8min", "4min"))
    played = play("early", early, 0, judge_of(OURS, early))
    assert [one.who for one in played.false] == ["rollout/0"]


def _plays(delay: float, false: int) -> list[Played]:
    alarm = Alarm(1.0, "FAIL", "silent", "hang", "trainer/0", 1)
    found = Outcome("rollout/0", "hang", "FAIL", 100.0, 100.0 + delay, True, "hang")
    return [Played("one", 0, (found,), (alarm,) * false)]


def test_delays_are_compared_at_equal_false_alarm_rates() -> None:
    ours = {0.5: _plays(10.0, 3), 1.0: _plays(30.0, 0), 2.0: _plays(60.0, 0)}
    found = match_delay(ours, _plays(90.0, 1))
    assert found.factor == pytest.approx(5 / 6)
    assert found.reached
    assert found.ratio == pytest.approx((30.0 - 20.0 / 3.0) / 90.0)


def test_method_with_more_false_alarms_is_loosened_or_reported_as_unmatched() -> None:
    ours = {0.5: _plays(10.0, 9), 1.0: _plays(30.0, 4), 2.0: _plays(60.0, 2)}
    assert match_delay(ours, _plays(90.0, 2)).ratio == pytest.approx(60.0 / 90.0)
    assert not match_delay(ours, _plays(90.0, 1)).reached


def test_delays_without_a_curve_are_compared_as_published() -> None:
    assert match_delay({1.0: _plays(30.0, 0)}, _plays(90.0, 2)).ratio == pytest.approx(1.0 / 3.0)


def test_confusion_counts_misses_false_alarms_and_correct_silence() -> None:
    quiet = Played("quiet", 0, (), ())
    counts = confusion([quiet, *_plays(30.0, 1)])
    assert counts == {("nothing wrong", "nothing wrong"): 1, ("hang", "hang"): 1, ("nothing wrong", "hang"): 1}


def test_each_hang_is_compared_with_itself() -> None:
    """The result is the median of the ratios of the three hangs, not the ratio of the two median delays."""

    def plays(*delays: float) -> list[Played]:
        found = [Outcome("x", "hang", "FAIL", 0.0, delay, True, "hang") for delay in delays]
        return [Played("three", 0, tuple(found), ())]

    assert ratio(plays(30.0, 100.0, 100.0), plays(90.0, 300.0, 300.0)) == pytest.approx(1.0 / 3.0)
    assert ratio(plays(30.0, 100.0, 45.0), plays(90.0, 300.0, 90.0)) == pytest.approx(1.0 / 3.0)


def test_delay_ratio_needs_hangs_that_both_methods_find() -> None:
    assert ratio(_plays(30.0, 0), [Played("one", 0, (), ())]) is None


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("change", "expected_text"),
    [
        (("lasts =", "last ="), 'one.toml:3: last: unknown key; did you mean "lasts"?'),
        (('do = "hang"', 'do = "hnag"'), 'did you mean "hang"?'),
        (('at = "8min"', "at = 8"), "one.toml:5: event.0.at: a duration needs a unit"),
        (('at = "8min"', 'at = {uniform = ["9s", "3s"]}'), "the first value of uniform must be the smaller one"),
        (('do = "hang"', 'do = "hang"\nsignal = 9'), "hang has no signal; it has phase, for"),
        (('cause = "hang"', 'cause = "hang"\nof = "crash"'), "there is no event crash; there are hang"),
        (('do = "hang"', 'do = "manager_restart"'), "manager_restart needs no who"),
        (("[[truth]]", "[[truth"), "not valid TOML"),
        (('who = "rollout/0"', 'who = "rollout/9"'), "one.toml:7: event.0.who: there is no process rollout/9"),
        (('phase = "generate"', 'phase = "genrate"'), 'did you mean "generate"?'),
        (('cause = "hang"', 'cause = "hang"\nor = "rolout/1"'), 'there is no rolout/1; did you mean "rollout/1"?'),
        (('at = "8min"', 'at = "80min"'), "the scenario has ended by then"),
        (('at = "8min"', 'at = "8min"\nafter = "crash"'), "there is no other event crash"),
        (('do = "hang"', 'do = "slow"'), "slow needs factor"),
        (('do = "hang"', 'do = "slow"\ngpu = 0.9'), "slow has no gpu; it has phase, factor, for"),
        (
            ('do = "hang"\nwho = "rollout/0"', 'do = "port"\nport = "mlx5_9/1"\nset = {state = "DOWN"}\nwho = "n3"'),
            "port has no phase",
        ),
    ],
)
def test_mistake_in_a_scenario_file_gives_one_line(tmp_path: Path, change: tuple[str, str], expected_text: str) -> None:
    with pytest.raises(ScenarioError) as error:
        scenario(tmp_path, HANG.replace(*change, 1))
    (line,) = str(error.value).splitlines()
    assert expected_text in line


def test_folder_without_scenarios_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"there is no file \*\.toml in this folder"):
        load_all(tmp_path)
