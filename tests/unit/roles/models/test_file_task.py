"""A task whose items are the rows of a file: its order, its answers and its rewards."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from rrl.core.task_spec import RewardTerm, TaskFile, TaskSpec
from rrl.roles.models.file_task import FileMix, FileTask
from rrl.roles.models.rewards import InvalidReward, Scored
from rrl.roles.models.tasks import Task, TaskError, load_task, score_of, source_of

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

def huge(answer, row):
    return 1e308
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
    assert task.score(item, " 10\n")[:2] == (1.0, 1.0)
    assert task.score(item, "11")[:2] == (0.0, 0.0)


def test_reward_function_gets_the_answer_and_all_columns(task_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (task_file.parent / "close_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(task_file.parent)
    spec = TaskSpec(file=str(task_file), reward="close_reward:close", prompt="{weight}: {question}")
    task = load_task(spec, seed=0, folder=task_file.parent)
    item = prompts(task, range(20)).index("9: 9+1=")
    assert task.score(item, "10")[:2] == (1.0, 4.5)
    plain = load_task(TaskSpec(file=str(task_file), reward="close_reward:plain"), seed=0, folder=task_file.parent)
    assert plain.score(0, "10")[:2] == (0.25, 0.25)
    scalar = TaskSpec(file=str(task_file), reward="close_reward:of_numpy", partial_credit=0.5)
    assert load_task(scalar, seed=0, folder=task_file.parent).score(item, "11")[:2] == (0.25, 0.25 + 0.5 * 0)
    text = load_task(TaskSpec(file=str(task_file), reward="close_reward:text"), seed=0, folder=task_file.parent)
    with pytest.raises(InvalidReward, match=r"returned '0.25'; return a finite number, or two finite numbers: the rew"):
        text.score(0, "10")
    with pytest.raises(TaskError, match=r"close_reward.py has no function clos; did you mean \"close\""):
        load_task(TaskSpec(file=str(task_file), reward="close_reward:clos"), seed=0, folder=task_file.parent)


# ── several files ──────────────────────────────────────────────────────────────────────────────────────────────────
def files_of(folder: Path, *files: tuple[str, int, float]) -> tuple[TaskFile, ...]:
    """Write a file of rows for each (name, number of rows, weight)."""
    for name, count, _ in files:
        (folder / f"{name}.jsonl").write_text(
            "".join(f'{{"question": "{name} {i}", "answer": {i}}}\n' for i in range(count))
        )
    return tuple(TaskFile(str(folder / f"{name}.jsonl"), name, weight) for name, _, weight in files)


def test_files_are_mixed_by_their_weights_in_each_step_and_shuffled_anew_in_each_pass(tmp_path: Path) -> None:
    spec = TaskSpec(files=files_of(tmp_path, ("math", 9, 3), ("code", 4, 1), ("off", 5, 0)))
    task = load_task(spec, seed=0)
    sources = [source_of(task, item) for item in range(4000)]
    for first in range(0, 4000, 16):
        assert Counter(sources[first : first + 16]) == {"math": 12, "code": 4}
    texts = prompts(task, range(4000))
    assert [text.split()[0] for text in texts] == sources, "a prompt is not from the file that is its source"
    for name, count in (("math", 9), ("code", 4)):
        of_file = [text for text, source in zip(texts, sources, strict=True) if source == name]
        passes = [of_file[at : at + count] for at in range(0, 20 * count, count)]
        assert all(sorted(one) == [f"{name} {i}" for i in range(count)] for one in passes)
        assert len({tuple(one) for one in passes}) > 10


def test_item_of_several_files_is_the_same_in_every_process_and_however_often_it_is_asked_for(tmp_path: Path) -> None:
    spec = TaskSpec(files=files_of(tmp_path, ("math", 7, 0.7), ("code", 7, 0.2), ("chat", 7, 0.1)))
    items = range(123_456, 123_500)  # far from the first block
    expected = prompts(load_task(spec, seed=3), items)
    restarted = load_task(spec, seed=3)
    assert [restarted.prompt(item) for item in reversed(items)] == expected[::-1]
    assert prompts(load_task(spec, seed=4), items) != expected
    texts = prompts(restarted, range(100))
    math, code = ([text.split()[1] for text in texts if text.startswith(name)][:14] for name in ("math", "code"))
    assert math != code, "files with equally many rows have the same order"


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([1, 1, 1], [1 / 3, 1 / 3, 1 / 3]),
        ([0.0, 2.5], [0, 1]),
        ([1e-9, 1], [1e-4, 1]),  # every file with a weight is trained on
        ([1e308, 1e308], [0.5, 0.5]),
        ([5e-324, 5e-324], [0.5, 0.5]),
        ([70, 25, 5], [0.7, 0.25, 0.05]),
    ],
)
def test_shares_of_the_files_are_their_weights_at_every_time(weights: list[float], shares: list[float]) -> None:
    mix = FileMix([TaskFile("", f"f{index}", weight) for index, weight in enumerate(weights)])
    counts = [0] * len(weights)
    for item in range(25_000):
        file, number = mix.place(item)
        assert number == counts[file], "the rows of a file are not used one after another"
        counts[file] += 1
        for count, share in zip(counts, shares, strict=True):
            assert abs(count - share * (item + 1)) <= 4


def test_evaluation_has_the_rows_in_order_and_as_many_of_each_file_as_it_has(tmp_path: Path) -> None:
    task = load_task(TaskSpec(files=files_of(tmp_path, ("a", 4, 1), ("b", 1, 1), ("c", 2, 1))), seed=None)
    assert isinstance(task, FileTask)
    assert len(task) == 7
    assert prompts(task, range(7)) == ["a 0", "b 0", "c 0", "a 1", "c 1", "a 2", "a 3"]
    assert [source_of(task, item) for item in range(4)] == ["a", "b", "c", "a"]


def test_problem_of_one_of_several_files_names_the_file(tmp_path: Path) -> None:
    files = files_of(tmp_path, ("math", 2, 1), ("empty", 0, 0))
    with pytest.raises(TaskError, match=r"^\[task\] files: .*empty.jsonl: has no row"):
        load_task(TaskSpec(files=files), seed=0)
    (tmp_path / "empty.jsonl").write_text('{"query": "1"}\n')
    with pytest.raises(TaskError, match=r'empty.jsonl:1: there is no column "question"; this row has "query"'):
        load_task(TaskSpec(files=files), seed=0)


# ── several rewards ────────────────────────────────────────────────────────────────────────────────────────────────
def test_several_rewards_are_summed_by_weight_and_kept_by_name(task_file: Path) -> None:
    (task_file.parent / "many_rewards.py").write_text(REWARD)
    terms = {"close": RewardTerm("many_rewards:close", 2.0), "plain": RewardTerm("many_rewards:plain", -1.0)}
    task = load_task(TaskSpec(file=str(task_file), rewards=terms), seed=0, folder=task_file.parent)
    item = prompts(task, range(20)).index("9+1=")
    assert score_of(task, item, "10") == Scored(2 * 1.0 - 0.25, 2 * 4.5 - 0.25, {"close": 1.0, "plain": 0.25})
    with pytest.raises(ValueError, match="invalid literal"):  # the whole answer has no score
        score_of(task, item, "ten")


@pytest.mark.parametrize(
    ("name", "weight", "complaint"),
    [
        (
            "text",
            1.0,
            r"the function of `rewards.text`, called with .* returned '0.25'; return a finite number, or two",
        ),
        ("huge", 1e10, r"the weighted sum up to `rewards.huge` returned \(inf, inf\)"),
    ],
)
def test_reward_that_is_no_finite_number_is_named(task_file: Path, name: str, weight: float, complaint: str) -> None:
    (task_file.parent / "wrong_rewards.py").write_text(REWARD)
    terms = {"plain": RewardTerm("wrong_rewards:plain"), name: RewardTerm(f"wrong_rewards:{name}", weight)}
    task = load_task(TaskSpec(file=str(task_file), rewards=terms), seed=0, folder=task_file.parent)
    with pytest.raises(InvalidReward, match=complaint):
        score_of(task, 0, "10")


def test_missing_function_of_one_of_several_rewards_is_named_with_its_table(task_file: Path) -> None:
    (task_file.parent / "few_rewards.py").write_text(REWARD)
    terms = {"plain": RewardTerm("few_rewards:plain"), "other": RewardTerm("few_rewards:plane")}
    with pytest.raises(TaskError, match=r"^\[task.rewards.other\] function: .* has no function plane; did you mean"):
        load_task(TaskSpec(file=str(task_file), rewards=terms), seed=0, folder=task_file.parent)
