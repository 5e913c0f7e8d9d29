"""The shipped examples with a user's own trainer, rollout or command run unchanged, each with its planned kills."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from rrl.config.job.load import load_job
from rrl.config.job.resolve import resolve
from rrl.core.run_spec import Limits
from rrl.tests.support.runs import TIMEOUT_S, TestRun, check_records, check_sound, submit_here

EXAMPLES = Path(__file__).parents[3] / "examples"
SHIPPED = sorted(EXAMPLES.rglob("*.toml"))


def _recovered(run: TestRun) -> dict[str, dict[str, Any]]:
    return {one["replica"]: one for one in run.summary()["recoveries"]}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_shipped_job_is_valid(path: Path) -> None:
    assert resolve(load_job(path), "python").roles


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_shipped_job_polls_slurm_no_more_often_than_the_default(path: Path) -> None:
    assert resolve(load_job(path), "python").limits.poll >= Limits().poll, (
        "the example polls Slurm more often than the default, but users copy it to clusters"
    )


@pytest.mark.torch
def test_own_trainer_and_own_rollout_learn_although_each_is_killed(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "bring_your_own", tmp_path, dirs_exist_ok=True)
    toml = (tmp_path / "job.toml").read_text()
    changes = (
        ("steps = 150", "steps = 40"),
        ("step=30", "step=8"),
        ("step=60", "step=16"),
        ("spares = 1", "spares = 0"),
        ("learning_rate = 0.01", "learning_rate = 0.01\nwarm = false"),
    )
    for old, new in changes:
        assert old in toml
        toml = toml.replace(old, new)
    run = submit_here(tmp_path, toml)
    state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", 40), state.why
    run.wait_gone()
    check_sound(run.run)
    recovered = _recovered(run)
    assert recovered.keys() == {"rollout/1", "trainer/0"}
    assert all(one["injected"] for one in recovered.values())
    first, last = (run.summary()[f"reward_{which}"] for which in ("first10", "last10"))
    assert last > first + 0.2, "the reward did not grow by 0.2"
    kept = sorted(folder.name.partition(".")[0] for folder in run.run.checkpoints.iterdir())
    assert kept == ["step-39", "step-40"], "the user's trainer did not keep exactly its newest 2 checkpoints"
    assert state.token_ages.steps, "rrl status has no ages of tokens to show"


@pytest.mark.torch
def test_own_fsdp_ranks_meet_again_after_one_is_killed_and_train_every_group_once(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "fsdp", tmp_path, dirs_exist_ok=True)
    toml = (tmp_path / "job.toml").read_text()
    for old, new in (
        ("steps = 80", "steps = 40"),
        ("step=40", "step=12"),
        ("ranks = 2\n", "ranks = 2\nwarm = false\n"),
    ):
        assert old in toml
        toml = toml.replace(old, new)
    run = submit_here(tmp_path, toml)
    state = run.wait_end(timeout_s=2 * TIMEOUT_S)  # four processes import transformers, two of them twice
    assert (state.outcome, state.step) == ("completed", 40), state.why
    run.wait_gone()
    check_sound(run.run)
    assert _recovered(run).keys() == {"trainer/0.1"}
    steps = json.loads((run.run.store / "audit.json").read_text())["steps"]
    groups = [group for of_step in steps.values() for group in of_step]
    assert (len(steps), len(groups), len(set(groups))) == (40, 40 * 16, 40 * 16)
    assert run.summary()["reward_last10"] > run.summary()["reward_first10"] + 0.2, "the reward did not grow by 0.2"


PUBLISH_PART = """
def publish(me: rrl.Worker, number: int, policy: Policy) -> None:
    mine = {name: tensor for place, (name, tensor) in enumerate(policy.state_dict().items()) if place % 2 == me.rank}
    me.publish_shard(number, rrl.pack(mine), part=me.rank, of=me.world)


def main() -> None:
"""


@pytest.mark.torch
def test_ranks_of_an_own_trainer_publish_parts_of_each_version_although_rank_1_is_killed(tmp_path: Path) -> None:
    """Both ranks train alike, so that they need no group of torch."""
    shutil.copytree(EXAMPLES / "bring_your_own", tmp_path, dirs_exist_ok=True)
    programs = {name: (tmp_path / name).read_text() for name in ("trainer.py", "job.toml")}
    for program, old, new in (
        ("trainer.py", "\ndef main() -> None:\n", PUBLISH_PART),
        (
            "trainer.py",
            "me.publish(me.committed or 0, rrl.pack(policy.state_dict()))",
            "publish(me, me.committed or 0, policy)",
        ),
        ("trainer.py", "me.publish(batch.number, rrl.pack(policy.state_dict()))", "publish(me, batch.number, policy)"),
        ("trainer.py", 'with me.phase("checkpoint"):', "if me.rank == 0:"),
        ("trainer.py", "policy = Policy()", "torch.manual_seed(0)\n    policy = Policy()"),
        ("job.toml", "steps = 150", "steps = 30"),
        ("job.toml", "step=30", "step=6"),
        ("job.toml", "step=60", "step=14"),
        ("job.toml", '"trainer/0"', '"trainer/0.1"'),
        ("job.toml", "learning_rate = 0.01", "learning_rate = 0.01\nwarm = false\nranks = 2"),
    ):
        assert old in programs[program]
        programs[program] = programs[program].replace(old, new)
    (tmp_path / "trainer.py").write_text(programs["trainer.py"])
    run = submit_here(tmp_path, programs["job.toml"])
    state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", 30), state.why
    run.wait_gone()
    check_sound(run.run)
    assert _recovered(run).keys() == {"rollout/1", "trainer/0.1"}
    assert run.summary()["reward_last10"] > run.summary()["reward_first10"] + 0.1


PAGE = Path(__file__).parents[3] / "docs" / "bring-your-own.md"


@pytest.mark.torch
@pytest.mark.long  # takes 20 s; test_docs.py compares the programs with the API, and the shipped example runs above
def test_example_of_the_page_learns_unchanged(tmp_path: Path) -> None:
    files = dict(re.findall(r"^`([\w.]+)`:\n```\w+\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    assert files.keys() == {"job.toml", "task.py", "trainer.py", "rollout.py"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    run = submit_here(tmp_path, files["job.toml"])
    state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", 40), state.why
    run.wait_gone()
    check_sound(run.run)
    assert run.summary()["reward_last10"] > run.summary()["reward_first10"] + 0.2, "the reward did not grow by 0.2"
    assert state.token_ages.steps, "rrl status has no ages of tokens to show"
    assert len(list(run.run.checkpoints.iterdir())) == state.job.trainer.keep_checkpoints


def test_program_without_the_worker_api_is_restarted_when_it_dies(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "any_command", tmp_path / "any_command")
    toml = (EXAMPLES / "any_command.toml").read_text()
    for old, new in (("until = 40", "until = 20"), ("seq 20", "seq 10")):
        assert old in toml
        toml = toml.replace(old, new)
    run = submit_here(tmp_path, toml)
    state = run.wait_end()
    assert state.outcome == "completed", state.why
    run.wait_gone()
    check_records(run.run)
    assert _recovered(run).keys() == {"counter/0", "plain/0"}
    counted = (run.run.path / "counter-0.count").read_text()
    assert counted == "20", "the second incarnation did not continue where the first one died"
