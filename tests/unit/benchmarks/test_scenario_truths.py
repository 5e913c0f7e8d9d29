"""What counts as found, missed or a false alarm in a scenario, and the draws of durations."""

from __future__ import annotations

from pathlib import Path
from random import Random
from statistics import fmean, median

import pytest

from rrl.benchmarks.scenarios.format import Scenario
from rrl.benchmarks.scenarios.load import load
from rrl.benchmarks.scenarios.methods import OURS, judge_of
from rrl.benchmarks.scenarios.play import Played, play
from rrl.benchmarks.scenarios.values import Drawn


def scenario(tmp_path: Path, text: str) -> Scenario:
    file = tmp_path / "one.toml"
    file.write_text(f'about = "x"\nlasts = "12min"\njitter = "0s"\n{text}')
    return load(file)


def event(do: str, more: str = "", at: str = "5min", who: str = "n4") -> str:
    return f'[[event]]\nat = "{at}"\ndo = "{do}"\nwho = "{who}"\n{more}\n'


def played(tmp_path: Path, text: str) -> Played:
    reported = scenario(tmp_path, text)
    return play("one", reported, 0, judge_of(OURS, reported))


DISK = event("mount", 'path = "/scratch"\nset = {used = 0.9}')


def test_warning_that_exists_when_its_truth_begins_counts_as_found(tmp_path: Path) -> None:
    truth = '[[truth]]\nwho = "n4"\ncause = "storage"\nverdict = "WARN"\nat = "8min"\nwithin = "10s"\n'
    (one,) = played(tmp_path, DISK + truth).outcomes
    assert (one.in_time, one.found_at) == (True, one.since)


def test_failing_a_node_where_a_warning_suffices_is_a_false_alarm(tmp_path: Path) -> None:
    lost = event("gpu_lost", "gpu = 1")
    truth = '[[truth]]\nwho = "n4"\ncause = "gpu"\nverdict = "WARN"\nwithin = "3min"\n'
    assert played(tmp_path, lost + truth).false == ()
    assert [one.who for one in played(tmp_path, lost + truth + 'never = "fail"\n').false] == ["n4"]


def test_an_exact_truth_is_found_by_the_rank_that_it_names(tmp_path: Path) -> None:
    gang = "[roles.trainer]\nranks = 2\n"
    crash = event("crash", "", "5min", "trainer/0.1")
    truth = '[[truth]]\nwho = "{}"\ncause = "process"\nwithin = "1min"\nexact = true\n'
    assert played(tmp_path, gang + crash + truth.format("trainer/0.1")).outcomes[0].in_time
    assert not played(tmp_path, gang + crash + truth.format("trainer/0")).outcomes[0].in_time


@pytest.mark.parametrize("do", ["crash", "slow"])
def test_truth_that_is_not_required_is_neither_missed_nor_a_false_alarm(tmp_path: Path, do: str) -> None:
    happens = event(do, "factor = 0.9" if do == "slow" else "", who="rollout/1")
    truth = '[[truth]]\nwho = "rollout/1"\ncause = "process"\nrequired = false\n'
    result = played(tmp_path, happens + truth)
    assert (result.outcomes, result.false, result.broken) == ((), (), "")
    assert bool(played(tmp_path, happens).false) == (do == "crash")


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
