"""The simulated machines and processes of scenarios.

Detectors observe an event as they would on a real cluster.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.benchmarks.scenarios.format import Scenario
from rrl.benchmarks.scenarios.load import ScenarioError, load
from rrl.benchmarks.scenarios.methods import OURS, judge_of
from rrl.benchmarks.scenarios.play import Played, play

CRASH = '[[event]]\nat = "5min"\ndo = "crash"\nwho = "rollout/1"\nname = "first"\n'
TRUTH = '[[truth]]\nwho = "rollout/1"\ncause = "process"\nwithin = "30s"\nof = "first"\n'


def scenario(tmp_path: Path, text: str) -> Scenario:
    file = tmp_path / "one.toml"
    file.write_text(f'about = "x"\nlasts = "12min"\njitter = "0s"\n{text}')
    return load(file)


def event(do: str, more: str = "", at: str = "5min", who: str = "n4") -> str:
    return f'[[event]]\nat = "{at}"\ndo = "{do}"\nwho = "{who}"\n{more}\n'


def played(tmp_path: Path, text: str) -> Played:
    reported = scenario(tmp_path, text)
    return play("one", reported, 0, judge_of(OURS, reported))


# ── expected findings ────────────────────────────────────────────────────────────────────────────────────────────────
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


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("text", "expected_text"),
    [
        (
            CRASH + CRASH.replace("first", "other") + TRUTH.replace('of = "first"\n', ""),
            "one.toml:14: truth.0.of: is needed if there is not exactly one event",
        ),
        (CRASH + TRUTH.replace("first", "nope"), "truth.0.of: there is no event nope"),
        (CRASH + CRASH + TRUTH, "truth.0.of: several events are called first"),
        (event("gpu", 'gpu = 1\nset = {remap_failed = "yes"}'), 'remap_failed must be true or false, not "yes"'),
        (event("gpu", "gpu = 1.5\nset = {remap_failed = true}"), "event.0.gpu: must be a number of a GPU"),
        (event("gpu", "gpu = [1, 8]\nset = {remap_failed = true}"), "nodes of this scenario have 8 GPUs"),
        (event("gpu", 'set = {clock_reasons = ["hw_powerbrake"]}'), 'did you mean "hw_power_brake"?'),
        (event("gpu", 'set = {recovery_action = "reset"}'), 'did you mean "gpu_reset"?'),
        (event("gpu", 'set = {fabric_state = "done"}'), "fabric_state cannot be done"),
        (event("dcgm", 'incident = "NVLINK_DWN"'), 'did you mean "NVLINK_DOWN"?'),
        (event("mount", "set = {used = 97}"), "used is a share, from 0 to 1, not 97"),
        (event("port", "set = {symbol_error = 200}"), "grow = {symbol_error = 2.0}"),
        (event("hang", "for = 30", "5min", "rollout/1"), 'a duration needs a unit; write for example "30s"'),
        (
            event("stretch", 'for = "3min"', "5min", "trainer/0.1") + "[roles.trainer]\nranks = 2\n",
            "stretch affects a whole gang: write trainer/0",
        ),
        (event("xid", 'xid = 31\nage = "2h"'), "event.0.age: is only for lines that are in the log from the beginning"),
        ('[roles.rollout]\nrhythm = ["generate"]\n', "roles.rollout.rhythm.0: must be a table"),
        ("[expect]\ngpu = 8\n", "what can be expected of a node"),
        ("[roles.store]\nstarts = '9s'\n", 'roles.store: there is no default role store; did you mean "trajectories"?'),
        ("[roles.trainers]\ngpus = 4\n", 'there is no default role trainers; did you mean "trainer"?'),
        ("[roles.sandbox]\ngpus = 4\n", "one of your own needs [[roles.sandbox.rhythm]]"),
        ("[phases.generat]\nlongest = '9s'\n", 'phases.generat: no role has a phase generat; did you mean "generate"?'),
        (event("kernel", 'text = "mlx5_core: the link has gone"'), "event.0.text: rrl's reader of the kernel log"),
        (event("kernel"), "event.0.do: rrl's reader of the kernel log ignores a line without text"),
        (event("kernel", 'text = "NVRM: Xid (PCI:0000:1b:00): 79, x"'), 'do = "xid", xid = 79'),
        (event("port", 'set = {state = "Down"}'), 'state cannot be Down; did you mean "DOWN"?'),
        (event("port", 'set = {physical = "linkup"}'), 'physical cannot be linkup; did you mean "LinkUp"?'),
        (event("gpu", 'set = {fabric_state = "done"}'), "it can be "),
        (CRASH + CRASH + event("cut", 'after = "first"'), "event.2.after: several events are called first"),
        (
            event("cut", 'name = "a"\nafter = "b"') + event("cut", 'name = "b"\nafter = "a"'),
            "event.0.after: a, b wait for each other, so none of them occurs",
        ),
    ],
)
def test_mistake_is_one_line_with_its_place_and_a_correct_form(tmp_path: Path, text: str, expected_text: str) -> None:
    with pytest.raises(ScenarioError) as error:
        scenario(tmp_path, text)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{tmp_path}/one.toml:")
    assert expected_text in line


def test_events_that_would_come_after_the_end_with_every_seed_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    file.write_text('about = "x"\nlasts = "5min"\njitter = "10min"\n')
    with pytest.raises(ScenarioError, match=r"one\.toml:3: jitter: is as long as the scenario"):
        load(file)
