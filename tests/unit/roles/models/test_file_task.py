"""A task whose items are the rows of a file: its order, its answers and its rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rrl.core.task_spec import TaskSpec
from rrl.roles.models.rewards import InvalidReward
from rrl.roles.models.tasks import Task, TaskError, load_task

REWARD = """\
import numpy

def close(answer, row):
    return float(int(answer) == int(row["answer"])), row["weight"] / 2

def plain(answer, row):
    return 0.25

def of_numpy(answer, row):
    return numpy.float32(0.25)

def text(answer, row):
    return "0.25"
"""


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"question": f"{i}+1=", "answer": i + 1, "weight": i} for i in range(20)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def prompts(task: Task, items: range) -> list[str]:
    return [task.prompt(item) for item in items]


def test_each_pass_has_every_row_once_in_an_order_of_its_own(task_file: Path) -> None:
    task = load_task(TaskSpec(file=str(task_file)), seed=0)
    first, second = prompts(task, range(20)), prompts(task, range(20, 40))
    assert sorted(first) == sorted(second) == sorted(f"{i}+1=" for i in range(20))
    assert first != second
    assert first != sorted(first, key=lambda text: int(text.partition("+")[0]))


def test_item_depends_on_seed_and_number_alone(task_file: Path) -> None:
    spec = TaskSpec(file=str(task_file))
    items = range(10, 50)
    expected = prompts(load_task(spec, seed=3), items)
    restarted = load_task(spec, seed=3)
    assert [restarted.prompt(item) for item in reversed(items)] == expected[::-1]
    assert prompts(load_task(spec, seed=4), items) != expected


def test_answer_that_equals_the_column_gets_the_reward(task_file: Path) -> None:
    task = load_task(TaskSpec(file=str(task_file), partial_credit=0.5), seed=0)
    item = prompts(task, range(20)).index("9+1=")
    assert task.answer(item) == "10"
    assert task.score(item, " 10\n") == (1.0, 1.0)
    assert task.score(item, "11") == (0.0, 0.0)


def test_reward_function_gets_the_answer_and_all_columns(task_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (task_file.parent / "close_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(task_file.parent)
    spec = TaskSpec(file=str(task_file), reward="close_reward:close", prompt="{weight}: {question}")
    task = load_task(spec, seed=0, folder=task_file.parent)
    item = prompts(task, range(20)).index("9: 9+1=")
    assert task.score(item, "10") == (1.0, 4.5)
    plain = load_task(TaskSpec(file=str(task_file), reward="close_reward:plain"), seed=0, folder=task_file.parent)
    assert plain.score(0, "10") == (0.25, 0.25)
    scalar = TaskSpec(file=str(task_file), reward="close_reward:of_numpy", partial_credit=0.5)
    assert load_task(scalar, seed=0, folder=task_file.parent).score(item, "11") == (0.25, 0.25 + 0.5 * 0)
    text = load_task(TaskSpec(file=str(task_file), reward="close_reward:text"), seed=0, folder=task_file.parent)
    with pytest.raises(InvalidReward, match=r"returned '0.25'; return a finite number, or two finite numbers: the rew"):
        text.score(0, "10")
    with pytest.raises(TaskError, match=r"close_reward.py has no function clos; did you mean \"close\""):
        load_task(TaskSpec(file=str(task_file), reward="close_reward:clos"), seed=0, folder=task_file.parent)
