"""A mistake in the user's code ends a run, or the run reports what it loses by the mistake.

In both cases rrl names the exception and its line.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rrl.core.run_dir import RUNS_ENV
from rrl.core.types import ReplicaId
from rrl.tests.support.runs import (
    LIGHT,
    RRL,
    TIMEOUT_S,
    TestRun,
    check_sound,
    light_job,
    submit_here,
    wait_for_run,
    write_job,
)

SCORER = """
class Task:
    def prompt(self, i):
        return str(i % 10)

    def answer(self, i):
        return str(i % 10) * 4

    def score(self, i, text):
        if i in FAILING:
            return MISTAKE, 0.0
        return 1.0, 1.0

def make(seed):
    return Task()
"""


def _submit(folder: Path, failing: str, steps: int, mistake: str = "float(None)") -> TestRun:
    (folder / "scorer.py").write_text(f"FAILING = {failing}\n{SCORER.replace('MISTAKE', mistake)}")
    toml = light_job("local", steps, rollouts=1, spares=0, warm=False, one_node=True)
    return submit_here(folder, toml.replace("light_task:make", "scorer:make"))


def test_scorer_that_raises_for_most_answers_ends_the_run_with_its_line(tmp_path: Path) -> None:
    run = _submit(tmp_path, "range(2, 10_000)", steps=100)
    state = run.wait_end()
    assert state.outcome == "failed"
    mistake = "TypeError: float() argument must be a string or a real number, not 'NoneType' (scorer.py:12)"
    assert state.why.startswith(f"reward/0: {mistake}; scorer exceptions dropped "), state.why
    assert state.replica(ReplicaId("reward/0")).incarnation_number == 1
    run.wait_gone()
    check_sound(run.run)


def test_groups_that_a_scorer_raises_for_now_and_then_are_counted_while_the_run_goes_on(tmp_path: Path) -> None:
    exits_or_interrupts = 'exec("exit()" if i % 2 else "raise KeyboardInterrupt")'
    run = _submit(tmp_path, "range(4, 10_000, 5)", steps=10, mistake=exits_or_interrupts)
    state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", 10), state.why
    summary = run.summary()
    dropped = summary["unscored_groups"]
    assert dropped >= 3  # one group in five fails; a step has two groups
    assert state.metrics["unscored_groups"] == dropped
    assert summary["unscored_share"] == round(dropped / (dropped + 20), 4)
    assert state.replica(ReplicaId("reward/0")).incarnation_number == 1
    run.wait_gone()
    check_sound(run.run)


ROLLOUT_THAT_FORGETS_WHAT_WAS_BEGUN = """
import os
import rrl

with rrl.join() as me:
    for work in me.work(at_most=4):
        if new := me.new_weights():
            version = new.version
        begun = me.launch.incarnation.number == 1
        count = 1 if begun else 4
        work.append([
            rrl.Segment(item.trajectory, 0, item.prompt * count, (0.0,) * count, version) for item in work.items
        ])
        if begun:
            os._exit(1)
"""


@pytest.mark.long  # long, because test_runs.py also has a rollout that ends three times in a row
def test_wrong_offset_ends_the_run_within_three_starts_of_a_rollout_that_has_worked(tmp_path: Path) -> None:
    (tmp_path / "rollout.py").write_text(ROLLOUT_THAT_FORGETS_WHAT_WAS_BEGUN)
    toml = light_job("local", 10, rollouts=1, spares=0, warm=False, one_node=True)
    run = submit_here(tmp_path, toml.replace(f"{LIGHT}/light_rollout.py", "rollout.py"))
    state = run.wait_end()
    assert state.outcome == "failed"
    mistake = (
        "rollout/0: ValueError: segment of trajectory 0 (group 0): its offset is 0, expected 1, the number of tokens"
        " that the trajectory has: those of item.so_far, and those appended since (rollout.py:11)"
    )
    assert state.why.startswith(f"{mistake}; this exception ended 3 starts in a row, each before any work"), state.why
    assert state.replica(ReplicaId("rollout/0")).incarnation_number == 4
    run.wait_gone()
    check_sound(run.run)


ROLLOUT_THAT_RETURNS = """
import rrl
from rrl.roles.worker import api

api.GOODBYE_TIMEOUT_S = 0.5  # instead of 60: no stop request will come, and the test need not wait for it

with rrl.join() as me:
    for number, work in enumerate(me.work(at_most=4)):
        if new := me.new_weights():
            version = new.version
        segments = [
            rrl.Segment(item.trajectory, 0, (item.prompt[0],) * 4 + (1,), (0.0,) * 5, version) for item in work.items
        ]
        work.append(segments, [item.trajectory for item in work.items])
        if number == 2:
            break
"""


@pytest.mark.long
def test_rollout_that_returns_after_three_leases_ends_the_run_at_its_third_exit(tmp_path: Path) -> None:
    (tmp_path / "rollout.py").write_text(ROLLOUT_THAT_RETURNS)
    toml = light_job("local", 400, rollouts=1, spares=0, warm=False, one_node=True)
    run = submit_here(tmp_path, toml.replace(f"{LIGHT}/light_rollout.py", "rollout.py"))
    state = run.wait_end()
    assert state.outcome == "failed"
    assert state.why.startswith(
        "rollout/0 exited with code 0 in 3 starts in a row before the run was complete; its program returned: let it"
        " loop until me.stopping is set"
    ), state.why
    assert state.replica(ReplicaId("rollout/0")).incarnation_number == 3
    assert state.step > 0
    run.wait_gone()
    check_sound(run.run)


def test_syntax_error_before_join_rejects_the_run_with_its_line(tmp_path: Path) -> None:
    """rrl submit refuses such an error in a file, but cannot see it in code that the file makes."""
    made = "import rrl\n\nwith rrl.join() as me"
    (tmp_path / "rollout.py").write_text(f"compile({made!r}, 'rollout.py', 'exec')\n")
    toml = light_job("local", 10, rollouts=1, spares=0, warm=False, one_node=True).replace(
        f"{LIGHT}/light_rollout.py", "rollout.py"
    )
    env = {**os.environ, RUNS_ENV: str(tmp_path / "runs")}
    argv = [RRL, "submit", "--wait", str(write_job(tmp_path, toml))]
    ended = subprocess.run(argv, env=env, text=True, capture_output=True, timeout=TIMEOUT_S)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    run = TestRun(wait_for_run(tmp_path / "runs"), subprocess.Popen[str])
    state = run.state()
    assert state.outcome == "rejected"
    assert state.why.startswith(
        "exited with code 1: SyntaxError: expected ':' (rollout.py:3); 3 starts of rollout/0 failed, and it has never"
        " joined"
    ), state.why
    run.wait_gone()
