from __future__ import annotations

import asyncio
import importlib
import signal
import subprocess
import sys
from contextlib import nullcontext
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest

import rrl
from rrl.core.run_spec import RunSpec, TokenizerSpec
from rrl.core.task_spec import EvalSpec, RewardTerm, TaskSpec
from rrl.core.text import shortened
from rrl.roles.models.rewards import finite_number
from rrl.roles.models.tasks import TaskError, load_evaluation_task, load_task
from rrl.roles.models.tokenizer import EOS, PAD, VocabularyTokenizer
from rrl.roles.reward import Scorer
from rrl.roles.trajectories.types import Score, ToScore
from rrl.tests.support.cli.story import job_view

SPIRAL = TaskSpec(
    dataset="spiral_matrix", args={"min_n": 2, "max_n": 2}, prompt="{metadata[matrix]}=", size=1000, partial_credit=0.5
)
DIGITS = VocabularyTokenizer(TokenizerSpec(tuple("0123456789="), join=" ", ignore="[], "))


# ── tokenizer ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_encoded_text_decodes_to_itself() -> None:
    tokens = DIGITS.encode("[[1, 2], [0, 9]]=")
    assert tokens == (3, 4, 2, 11, 12)
    assert DIGITS.decode(tokens) == "1 2 0 9 ="
    assert DIGITS.size == 13


def test_decoding_ends_at_the_end_of_sequence_and_skips_padding() -> None:
    assert DIGITS.decode((3, PAD, 4, EOS, 5, 6)) == "1 2"
    assert DIGITS.decode((EOS,)) == DIGITS.decode(()) == ""


def test_longest_matching_piece_is_encoded() -> None:
    tokenizer = VocabularyTokenizer(TokenizerSpec(("a", "ab", "abc", "c", "b")))
    assert [tokenizer.decode([token]) for token in tokenizer.encode("abcabaca")] == ["abc", "ab", "a", "c", "a"]


def test_text_that_cannot_be_encoded_is_named() -> None:
    with pytest.raises(ValueError, match=r"matches the text at 'x7'.*add 'x' to `pieces` or to `ignore`"):
        DIGITS.encode("1 2 x7")


@pytest.mark.parametrize(
    "spec", [TokenizerSpec(("a", "b", "a")), TokenizerSpec(("a", "")), TokenizerSpec(("a", " "), ignore=" ")]
)
def test_invalid_vocabulary_is_refused(spec: TokenizerSpec) -> None:
    with pytest.raises(ValueError, match=r"\[model.tokenizer\]"):
        VocabularyTokenizer(spec)


# ── tasks ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_item_is_equal_in_every_process_and_its_answer_has_full_score() -> None:
    pytest.importorskip("reasoning_gym")
    one, other = load_task(SPIRAL, 7, DIGITS), load_task(SPIRAL, 7, DIGITS)
    for i in (0, 5, 999, 1005):
        assert one.prompt(i) == other.prompt(i)
        assert one.score(i, one.answer(i)) == (1.0, 1.0)
        assert DIGITS.decode(DIGITS.encode(one.answer(i))) == one.answer(i)
    assert one.prompt(1005) == one.prompt(5)


def test_items_of_different_seeds_do_not_overlap() -> None:
    """Item i of a dataset depends only on its seed + i.

    If the task used neighbouring seeds for these datasets, they would share all items but one.
    """
    pytest.importorskip("reasoning_gym")
    spec = TaskSpec("spiral_matrix", {"min_n": 5, "max_n": 5}, size=50)
    prompts = [{load_task(spec, seed).prompt(i) for i in range(50)} for seed in (0, 1, 2)]
    assert len(prompts[0] | prompts[1] | prompts[2]) == 150


def test_partial_credit_applies_to_wrong_answers_in_training_only() -> None:
    pytest.importorskip("reasoning_gym")
    task = load_task(SPIRAL, 0, DIGITS)
    right = task.answer(3).split()
    wrong = [str((int(right[0]) + 1) % 10), *right[1:]]
    assert task.score(3, " ".join(wrong)) == (0.0, 0.5 * 0.75)
    assert task.score(3, " ".join(wrong[:3])) == (0.0, 0.0)
    assert task.score(3, "") == (0.0, 0.0)
    plain = load_task(msgspec.structs.replace(SPIRAL, partial_credit=0.0), 0, DIGITS)
    assert plain.score(3, " ".join(wrong)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (TaskSpec(), r"\[task\] dataset: missing; write dataset = "),
        (
            TaskSpec("no_such_dataset"),
            r'dataset: "no_such_dataset" is not a dataset of reasoning-gym; the closest names are (\w+, ){4}\w+;'
            r" to list all: python -c '.*DATASETS\)\)'$",
        ),
        (TaskSpec("spiral_matrx"), 'is not a dataset of reasoning-gym; did you mean "spiral_matrix"'),
        (TaskSpec("spiral_matrix", {"n": 2}), 'args: spiral_matrix has no argument "n"; it has min_n, max_n'),
        (TaskSpec("spiral_matrix", {"min_n": -1}), "args: spiral_matrix does not accept these values: min_n must be "),
        (
            TaskSpec("spiral_matrix", prompt="{matrix}"),
            r"KeyError: 'matrix'.*has question, answer, metadata\[source_da",
        ),
        (TaskSpec(function="no_colon"), "module:function"),
        (TaskSpec(function="my_task.py:make"), 'name the module without .py: "my_task:make"'),
        (
            TaskSpec(function="rrl_no_such_module:make"),
            "there is no module rrl_no_such_module, not among the installed",
        ),
    ],
)
def test_unusable_task_is_refused_with_the_reason(spec: TaskSpec, match: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(TaskError, match=match):
        load_task(spec, 0)


@pytest.fixture
def users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_rrl_task.py").write_text(
        "class Doubles:\n"
        "    def __init__(self, seed, offset=0): self.seed, self.offset = seed, offset\n"
        "    def prompt(self, i): return str(i + self.offset)\n"
        "    def answer(self, i): return str(2 * (i + self.offset))\n"
        "    def score(self, i, answer): return 1 / (int(answer) - self.seed), float(answer == self.answer(i))\n"
        "def nothing(seed): return object()\n"
        "def of_class(seed): return Doubles\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))  # so that the entries of load_task are removed after the test
    monkeypatch.delitem(sys.modules, "my_rrl_task", raising=False)
    return tmp_path


def test_function_of_the_user_is_imported_from_the_folder_of_the_job(users_folder: Path) -> None:
    task = load_task(TaskSpec(function="my_rrl_task:Doubles", args={"offset": 3}), 5, folder=users_folder)
    assert (task.prompt(1), task.answer(1), task.score(1, "8")) == ("4", "8", (1 / 3, 1.0))
    for spec, problem in (
        (
            TaskSpec(function="my_rrl_task:of_class"),
            r"returned the class Doubles; return an object of it: Doubles\(...\)",
        ),
        (TaskSpec(function="my_rrl_task:nothing"), "without prompt, answer, score"),
        (TaskSpec(function="my_rrl_task:Double"), 'my_rrl_task.py has no function Double; did you mean "Doubles"'),
        (TaskSpec(function="my_rrl_task:Doubles", args={"x": 1}), r"argument 'x'; its signature is \(seed, offset=0\)"),
    ):
        with pytest.raises(TaskError, match=problem):
            load_task(spec, 0, folder=users_folder)


def test_package_that_the_users_module_lacks_is_named_and_other_exceptions_stay(users_folder: Path) -> None:
    module = users_folder / "my_rrl_task.py"
    module.write_text("import rrl_no_such_package\n")
    with pytest.raises(TaskError, match=r"imports rrl_no_such_package, which .* lacks; install it there") as caught:
        load_task(TaskSpec(function="my_rrl_task:make"), 0, folder=users_folder)
    assert caught.value.missing_package == "rrl_no_such_package"
    importlib.invalidate_caches()
    module.write_text("def make(seed): raise TypeError('mine')\n")
    with pytest.raises(TypeError, match="mine"):
        load_task(TaskSpec(function="my_rrl_task:make"), 0, folder=users_folder)


# ── reward ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_scorer_that_raises_loses_only_the_trajectory(users_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = VocabularyTokenizer(TokenizerSpec(tuple("0123456789x")))
    scorer = Scorer(
        load_task(TaskSpec(function="my_rrl_task:Doubles"), 5, folder=users_folder), tokenizer, users_folder
    )
    texts = {1: "8", 2: "x", 3: "5", 4: "6", 5: "x"}
    judged: list[bool] = []
    items = [ToScore(n, 4, (*tokenizer.encode(text), EOS)) for n, text in texts.items()]
    scored = scorer.score(items, lambda: judged.append(True))
    assert len(judged) == len(items)
    assert scored.scores == [Score(1, 1 / 3, 1.0), Score(4, 1.0, 0.0)]
    assert scored.failed == {
        2: "the scorer raised ValueError (my_rrl_task.py:5)",
        3: "the scorer raised ZeroDivisionError (my_rrl_task.py:5)",
        5: "the scorer raised ValueError (my_rrl_task.py:5)",
    }
    assert scored.faulty == [2, 3, 5]
    assert caplog.text.count("the scorer raised ValueError (") == 1
    mistake = "ZeroDivisionError: division by zero (my_rrl_task.py:5)"
    assert scorer.note == (
        f"at least 2 answers could not be scored, and their groups are dropped; the last error: {mistake}"
    )


class Odd(BaseException):
    """What a user's code may raise."""


@pytest.mark.parametrize(
    "error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), RecursionError(), Odd()]
)
def test_whatever_a_scorer_raises_loses_only_the_trajectory(error: BaseException) -> None:
    class Raising:
        def prompt(self, i: int) -> str:
            return ""

        def answer(self, i: int) -> str:
            return ""

        def score(self, i: int, answer: str) -> tuple[float, float]:
            if i == 1:
                raise error
            return 1.0, 0.5

    scorer = Scorer(Raising(), DIGITS, Path(__file__).parent)
    scored = scorer.score([ToScore(n, n, ()) for n in range(3)])
    assert scored.scores == [Score(0, 1.0, 0.5), Score(2, 1.0, 0.5)]
    assert list(scored.failed) == scored.faulty == [1]
    assert type(error).__name__ in scored.failed[1]
    assert scorer.newest_fault is not None
    assert scorer.newest_fault[0] is error


FORKS = """
import os
from pathlib import Path
from types import SimpleNamespace
from rrl.roles.reward import Scorer
from rrl.roles.trajectories.types import ToScore

def score(i, answer):
    if not (child := os.fork()):
        raise SystemExit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0.0

scorer = Scorer(SimpleNamespace(score=score), SimpleNamespace(decode=str), Path())
print(scorer.score([ToScore(1, 0, ())]).scores[0].reward)
"""


def test_child_that_a_scorer_forks_ends_by_its_own_exception() -> None:
    ended = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("7.0\n", "")


def test_timer_that_a_scorer_leaves_running_interrupts_nothing_afterwards() -> None:
    class Timed:
        def prompt(self, i: int) -> str:
            return ""

        def answer(self, i: int) -> str:
            return ""

        def score(self, i: int, answer: str) -> tuple[float, float]:
            signal.alarm(3600)
            raise ValueError

    before = signal.setitimer(signal.ITIMER_REAL, 0)  # that of pytest-timeout
    try:
        Scorer(Timed(), DIGITS, Path()).score([ToScore(1, 0, ())])
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


class Spoilt(float):
    """A number whose methods raise what ends a process."""

    def __float__(self) -> float:
        raise SystemExit

    def __repr__(self) -> str:
        raise SystemExit


@pytest.mark.parametrize(
    "returned",
    [
        (float("nan"), 0.0),
        0.5,
        None,
        ("one", 1.0),
        (1.0, 0.0, 0.0),
        ("1", "0"),
        "10",
        (10**400, 0),
        (1j, 0.0),
        (numpy.complex64(1), 0),
        numpy.array([1.0, 0.0, 0.0]),
    ],
)
def test_score_other_than_two_finite_numbers_is_a_fault_at_the_definition_of_the_scorer(returned: object) -> None:
    class Bad:
        def prompt(self, i: int) -> str:
            return ""

        def answer(self, i: int) -> str:
            return ""

        def score(self, i: int, answer: str) -> tuple[float, float]:
            return returned  # type: ignore[return-value]

    place = f"{Path(__file__).name}:{Bad.score.__code__.co_firstlineno}"
    scorer = Scorer(Bad(), DIGITS, Path(__file__).parent)
    scored = scorer.score([ToScore(1, 7, DIGITS.encode("12"))])
    assert (scored.scores, scored.faulty) == ([], [1])
    assert scored.failed == {1: f"the scorer raised ValueError ({place})"}
    assert scorer.note == (
        "1 answer could not be scored, and their groups are dropped; the last error: ValueError: score(7, '1 2')"
        f" returned {shortened(returned)}; return two finite numbers: the reward to report, and the reward to train on"
        f" ({place})"
    )


def test_number_whose_methods_raise_is_no_reward() -> None:
    assert finite_number(Spoilt(1.0)) is None
    assert shortened(Spoilt(1.0)).startswith("<")


@pytest.mark.parametrize(
    "returned",
    [
        (1, 0.5),
        [True, Fraction(1, 2)],
        (numpy.float32(1), numpy.array(0.5)),
        numpy.array([1.0, 0.5]),
        (Decimal(1), numpy.float16(0.5)),
    ],
)
def test_any_two_real_numbers_are_rewards(returned: Any) -> None:
    class Counting:
        def prompt(self, i: int) -> str:
            return ""

        def answer(self, i: int) -> str:
            return ""

        def score(self, i: int, answer: str) -> tuple[float, float]:
            return returned  # type: ignore[no-any-return]

    assert Scorer(Counting(), DIGITS, Path()).score([ToScore(1, 0, ())]).scores == [Score(1, 1.0, 0.5)]


@pytest.mark.parametrize(("error", "faulty"), [(ConnectionResetError, []), (TypeError, []), (KeyError, [1])])
def test_exception_that_a_service_may_have_caused_is_no_fault_of_the_scorer(
    error: type[Exception], faulty: list[int]
) -> None:
    class Judged:
        def prompt(self, i: int) -> str:
            return ""

        def answer(self, i: int) -> str:
            return ""

        def score(self, i: int, answer: str) -> tuple[float, float]:
            with rrl.waiting("judge") if error is TypeError else nullcontext():
                raise error

    scored = Scorer(Judged(), DIGITS, Path()).score([ToScore(1, 0, ())])
    assert (list(scored.failed), scored.faulty) == ([1], faulty)


def test_note_on_failed_answers_is_renewed_only_when_their_number_has_doubled(users_folder: Path) -> None:
    scorer = Scorer(load_task(TaskSpec(function="my_rrl_task:Doubles"), 1, folder=users_folder), DIGITS, users_folder)
    notes = []
    for _ in range(9):
        scorer.score([ToScore(1, 0, DIGITS.encode("1"))])
        notes.append(scorer.note.partition(" could")[0])
    once, twice, four = "1 answer", "at least 2 answers", "at least 4 answers"
    assert notes == [once, twice, twice, four, four, four, four, "at least 8 answers", "at least 8 answers"]


# ── evaluations ────────────────────────────────────────────────────────────────────────────────────────────────────
def evaluated_job(task: TaskSpec, held_out: TaskSpec | None = None, count: int = 5) -> RunSpec:
    return msgspec.structs.replace(job_view(), task=task, eval=EvalSpec(10, count=count, task=held_out))


def test_evaluations_of_a_dataset_have_items_that_no_run_trains_on() -> None:
    pytest.importorskip("reasoning_gym")
    spec = TaskSpec("spiral_matrix", {"min_n": 5, "max_n": 5}, size=50)
    task, count = load_evaluation_task(evaluated_job(spec, count=80), DIGITS)
    held_out = {task.prompt(i) for i in range(count)}
    assert len(held_out) == 50, "the evaluation does not have all 50 items of the dataset"
    trained = {load_task(spec, seed).prompt(i) for seed in (0, 1) for i in range(50)}
    assert not held_out & trained


def test_evaluations_of_a_file_have_its_first_rows_in_order(tmp_path: Path) -> None:
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join(f'{{"question": "{i}", "answer": {i}}}\n' for i in range(8)))
    job = evaluated_job(SPIRAL, TaskSpec(file=str(path)))
    task, count = load_evaluation_task(job)
    assert [task.prompt(i) for i in range(count)] == list("01234")
    assert load_evaluation_task(evaluated_job(SPIRAL, TaskSpec(file=str(path)), count=99))[1] == 8
    with pytest.raises(TaskError, match=r"^\[eval.task\] file: .*missing.jsonl: cannot be read"):
        load_evaluation_task(evaluated_job(SPIRAL, TaskSpec(file=str(tmp_path / "missing.jsonl"))))


def test_scores_have_the_parts_of_several_rewards(tmp_path: Path) -> None:
    (tmp_path / "digits.jsonl").write_text('{"question": "1", "answer": "1"}\n')
    (tmp_path / "parts_rewards.py").write_text(
        "def right(answer, row):\n    return float(answer == row['answer'])\n"
        "def short(answer, row):\n    return float(len(answer) < 4), 0.5\n"
    )
    terms = {"right": RewardTerm("parts_rewards:right"), "short": RewardTerm("parts_rewards:short", 0.5)}
    task = load_task(TaskSpec(file=str(tmp_path / "digits.jsonl"), rewards=terms), 0, DIGITS, tmp_path)
    scored = Scorer(task, DIGITS, tmp_path).score(
        [ToScore(1, 0, DIGITS.encode("1")), ToScore(2, 0, DIGITS.encode("22"))]
    )
    assert scored.scores == [
        Score(1, 1.5, 1.25, {"right": 1.0, "short": 1.0}),
        Score(2, 0.5, 0.25, {"right": 0.0, "short": 1.0}),
    ]


def test_answers_of_an_evaluation_are_scored_by_its_own_task(tmp_path: Path) -> None:
    class Always:
        def __init__(self, reward: float) -> None:
            self.reward = reward

        def prompt(self, i: int) -> str:
            return "1"

        def answer(self, i: int) -> str:
            return "1"

        def score(self, i: int, answer: str) -> tuple[float, float]:
            if self.reward < 0:
                raise ValueError("no score")
            return self.reward, self.reward

    items = [ToScore(1, 0, (3,)), ToScore(2, 0, (3,), evaluation=True)]
    scored = Scorer(Always(0.25), DIGITS, tmp_path, Always(0.75)).score(items)
    assert scored.scores == [Score(1, 0.25, 0.25), Score(2, 0.75, 0.75)]
    failed = Scorer(Always(0.25), DIGITS, tmp_path, Always(-1.0)).score(items)
    assert (list(failed.failed), failed.faulty) == ([2], []), (
        "an evaluated answer that cannot be scored counts as a lost group"
    )
