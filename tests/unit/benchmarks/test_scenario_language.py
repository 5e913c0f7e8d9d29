"""Scenarios agree with scenarios.md in draws, rounds, barriers, queues, and failures that need not be found."""

from __future__ import annotations

from pathlib import Path
from random import Random
from statistics import fmean, median

import pytest

from rrl.benchmarks.scenarios.format import Scenario
from rrl.benchmarks.scenarios.load import ScenarioError, load
from rrl.benchmarks.scenarios.methods import OURS, judge_of
from rrl.benchmarks.scenarios.play import Played, play
from rrl.benchmarks.scenarios.values import Drawn


def phase(role: str, name: str, lasts: str, more: str = "") -> str:
    return f'[[roles.{role}.rhythm]]\nphase = "{name}"\nlasts = {lasts}\n{more}\n'


def event(do: str, who: str, at: str, more: str = "") -> str:
    return f'[[event]]\nat = {at}\ndo = "{do}"\nwho = "{who}"\n{more}\n'


def scenario(tmp_path: Path, text: str) -> Scenario:
    file = tmp_path / "one.toml"
    file.write_text(f'about = "x"\nlasts = "12min"\njitter = "0s"\n{text}')
    return load(file)


# ── draws ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_pareto_draws_have_a_least_a_heavy_tail_and_may_be_cut() -> None:
    random = Random(1)
    drawn = [Drawn("pareto", 60.0, 1.5).draw(random) for _ in range(4000)]
    assert min(drawn) >= 60.0
    assert median(drawn) == pytest.approx(60.0 * 2 ** (1 / 1.5), rel=0.1)
    assert max(drawn) > 1800.0
    assert max(Drawn("pareto", 60.0, 1.5, 300.0).draw(random) for _ in range(4000)) == 300.0


def test_mixed_draws_come_from_their_parts_by_weight() -> None:
    random = Random(1)
    both = Drawn("mixed", parts=((3.0, Drawn("fixed", 60.0)), (1.0, Drawn("uniform", 600.0, 900.0))))
    drawn = [both.draw(random) for _ in range(4000)]
    assert {60.0} == {one for one in drawn if one < 600.0}
    assert fmean(one >= 600.0 for one in drawn) == pytest.approx(0.25, abs=0.03)


# ── expected findings ────────────────────────────────────────────────────────────────────────────────────────────────
def played(tmp_path: Path, text: str) -> Played:
    made = scenario(tmp_path, text)
    return play("one", made, 0, judge_of(OURS, made))


@pytest.mark.parametrize("do", ["crash", "slow"])
def test_truth_that_is_not_required_is_neither_missed_nor_a_false_alarm(tmp_path: Path, do: str) -> None:
    happens = event(do, "rollout/1", '"5min"', "factor = 0.9" if do == "slow" else "")
    truth = '[[truth]]\nwho = "rollout/1"\ncause = "process"\nrequired = false\n'
    result = played(tmp_path, happens + truth)
    assert (result.outcomes, result.false, result.broken) == ((), (), "")
    assert bool(played(tmp_path, happens).false) == (do == "crash")


# ── mistakes ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("text", "expected_text"),
    [
        (phase("rollout", "a", '{normal = ["9s", "9s"]}'), "roles.rollout.rhythm.0.lasts: there is no draw normal"),
        (phase("rollout", "a", '{uniform = ["9s", "never"]}'), 'uniform is written {uniform = ["10s", "30s"]}'),
        (phase("rollout", "a", '{lognormal = ["9s", 7]}'), "median, and sigma from 0 to 2"),
        (phase("rollout", "a", '{pareto = ["never", 7]}'), '"never" cannot be in pareto'),
        (phase("rollout", "a", '{pareto = ["9s", 1.5, "5s"]}'), "pareto is written"),
        (phase("rollout", "a", '{mixed = [["9s", 0.5]]}'), "mixed is written"),
        (phase("rollout", "a", '{mixed = [[1, "9"]]}'), "'9' is not a duration"),
        (phase("rollout", "a", '{draw = "nap"}'), "rhythm.0.lasts: there is no nap in [draws]; there are none"),
        (
            'draws = {nap = "9s"}\n'
            + phase("rollout", "a", '{draw = "nop"}')
            + event("hang", "rollout/0", '"9s"', 'for = {draw = "nap"}'),
            'there is no nop in [draws]; did you mean "nap"?',
        ),
        ('draws = {nap = "9s"}\n', 'draws.nap: nothing uses it; write {draw = "nap"}'),
        ('draws = {nap = {draw = "nap"}}\n', "draws.nap: is itself a draw"),
        (phase("rollout", "a", '"9s"', 'until = {rolout = "a"}'), 'there is no role rolout; did you mean "rollout"?'),
        (phase("rollout", "a", '"9s"', 'until = {trainer = "tran"}'), 'no phase tran; did you mean "train"?'),
        (phase("rollout", "a", '"9s"', 'until = {rollout = "a"}'), "a does not come before a, so that a never ends"),
        (phase("rollout", "a", '"9s"', "takes = {groups = 1}"), "no queue groups; there are none: write [queues.NAME]"),
        (
            "queues.groups.holds = 3\n" + phase("rollout", "a", '"9s"', "takes = {groups = 4}"),
            "rhythm.0.takes: 4 of groups are more than the queue holds: 3",
        ),
        ("queues.groups.holds = 3\n", "queues.groups: no phase of a rhythm adds units"),
        (phase("rollout", "a", '"9s"', "takes = {groups = 0.5}"), "takes.groups: must be a whole number"),
        (phase("rollout", "a", '"9s"', "every_rounds = 0"), "every_rounds: must be at least 1, not 0"),
        (phase("rollout", "a", '"9s"', "every_rounds = 2").replace("rhythm", "once"), "is a key of the rhythm"),
        (phase("rollout", "a", '"9s"', "reports_waits_for = true"), "needs waits or until"),
        (event("hang", "rollout/0", '"9s"', 'process_state = "T"'), "process_state of hang must be S or D, not T"),
        (event("crash", "rollout/0", '"9s"', 'process_state = "T"'), "crash has no process_state"),
        ('[[event]]\nat = "9s"\ndo = "clock_jumps"\n', "event.0: clock_jumps needs forward or back"),
        ('[[event]]\nat = "9s"\ndo = "clock_jumps"\nback = "-9s"\n', "event.0.back: '-9s' is not a duration"),
        (
            event("crash", "rollout/0", '"9s"') + '[[truth]]\nwho = "rollout/0"\ncause = "gpu"\nwithin = "9s"\n'
            "required = false\n",
            "truth.0: within has no meaning with required = false",
        ),
    ],
)
def test_mistake_in_a_new_key_is_one_line_with_a_correct_form(tmp_path: Path, text: str, expected_text: str) -> None:
    with pytest.raises(ScenarioError) as error:
        scenario(tmp_path, text)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{tmp_path}/one.toml")
    assert expected_text in line
