"""``rrl check`` tries the task of a job in a child process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rrl.api.preflight.job_preflight import Preflight
from rrl.cli import main
from rrl.cli.job import task_check
from rrl.core.processes import processes
from rrl.tests.support.cli.check_output import doubts_in

QUICKSTART = Path(__file__).parents[4] / "examples" / "quickstart.toml"
JOB = """\
[run]
name = "small"
steps = 10

[cluster]
kind = "local"
node = { cpus = 4, mem = "1GiB" }

[model.tokenizer]
pieces = "0123456789"

[task]
function = "doubling:make"

[sampling]
max_new_tokens = 4
"""
TASK = """\
class Doubling:
    def prompt(self, i):
        return str(i)

    def answer(self, i):
        return str(2 * i)

    def score(self, i, answer):
        right = float(answer != "" and int(answer) == 2 * i)
        return right, right / 2

def make(seed):
    return Doubling()
"""


class Checked:
    """A folder with a job and its task, and the output of ``rrl check`` for it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys

    def run(self, task: str = TASK, job: str = JOB, *options: str) -> int:
        (self.folder / "doubling.py").write_text(task)
        (self.folder / "job.toml").write_text(job)
        code = main.run(["check", *options, str(self.folder / "job.toml")])
        self.out, self.err = self._capsys.readouterr()
        return code

    def line(self, task: str = TASK, job: str = JOB) -> str:
        """Return the one line that refuses a job, without the path of job.toml."""
        assert self.run(task, job) == 2, self.out
        assert self.err.count("\n") == 1, self.err
        prefix = f"rrl: {self.folder / 'job.toml'}:"
        assert self.err.startswith(prefix)
        return self.err.removeprefix(prefix).rstrip("\n")


@pytest.fixture
def checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Checked:
    return Checked(tmp_path, capsys)


def changed(text: str, before: str, after: str) -> str:
    assert before in text
    return text.replace(before, after)


# ── a dataset ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_check_of_the_quickstart_shows_two_prompts_with_answers_and_rewards(
    checked: Checked, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("reasoning_gym")
    assert checked.run(job=QUICKSTART.read_text()) == 0
    assert doubts_in(checked.out) == []
    shown = checked.out.partition("the task, tried on this machine")[2]
    assert (
        "prompt        [[1, 5], [0, 9]]=  (5 tokens)\n  right answer  1 5 9 0  (4 tokens)\n  reward        1\n" in shown
    )
    assert "wrong answer  8 8 8 1\n  reward        0, trained on 0.125\n" in shown
    assert shown.endswith("is right; nothing was submitted\n")


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        (
            '"spiral_matrix"',
            '"spiral_matrx"',
            '19: task.dataset: "spiral_matrx" is not a dataset of reasoning-gym; did you mean "spiral_matrix"?',
        ),
        (
            "min_n = 2",
            "min_x = 2",
            '20: task.args: spiral_matrix has no argument "min_x"; it has min_n, max_n; did you mean "min_n"?',
        ),
        (
            "metadata[matrix]",
            "metadata[matrx]",
            '21: task.prompt: "{metadata[matrx]}=" does not fit an item of'
            " spiral_matrix (KeyError: 'matrx'); an item has question, answer, metadata[source_dataset],",
        ),
        (
            "0123456789=",
            "012345679",
            "27: model.tokenizer.pieces: prompts and answers of the first 100 items of [task]"
            " contain '8' '=', which is in no piece: add each to `pieces` or to `ignore`",
        ),
    ],
)
def test_mistake_in_the_task_of_the_quickstart_is_one_line(
    checked: Checked, before: str, after: str, line: str
) -> None:
    pytest.importorskip("reasoning_gym")
    assert checked.line(job=changed(QUICKSTART.read_text(), before, after)).startswith(line)


# ── functions of the user ──────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        (
            "return Doubling()",
            "return [][seed]",
            "building the task raised IndexError: list index out of range (doubling.py:13)",
        ),
        (
            "return str(i)",
            "return str(i // 0)",
            "prompt(0) raised ZeroDivisionError: integer division or modulo by zero"
            " (doubling.py:3); the next 31 items fail too, which ends a run",
        ),
        ("return str(i)", "return i", "prompt(0) returned 0; return a string"),
        ("int(answer)", "int(reply)", "score(0, '0') raised NameError: name 'reply' is not defined (doubling.py:9)"),
        (
            "right, right / 2",
            "right",
            "score(0, '0') returned 1.0; return two finite numbers: the reward to report, and the reward to train on",
        ),
        ("right / 2", "right / 2 right", "building the task raised SyntaxError: invalid syntax (doubling.py:10)"),
        (
            "class Doubling",
            "import sys; sys.exit(3)\nclass Doubling",
            "building the task raised SystemExit: 3 (doubling.py:1)",
        ),
        (
            "class Doubling",
            "import os; os.write(2, b'no licence\\n'); os._exit(3)\nclass Doubling",
            "the process in which the task was tried ended with exit code 3: no licence",
        ),
        (
            "class Doubling",
            "import os; os.kill(os.getpid(), 11)\nclass Doubling",
            "the process in which the task was tried ended with signal SIGSEGV",
        ),
        (
            "class Doubling",
            "import rrl_no_such_package\nclass Doubling",
            '"doubling:make" imports rrl_no_such_package, which ',
        ),
    ],
)
def test_exception_of_the_users_task_is_one_line_with_its_file_and_line(
    checked: Checked, before: str, after: str, line: str
) -> None:
    assert checked.line(changed(TASK, before, after)).startswith(f"13: task.function: {line}")


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ('"doubling:make"', '"doublng:make"', '13: task.function: "doublng:make": there is no module doublng, neither'),
        ('"doubling:make"', '"doubling:mak"', "doubling.py has no function mak; did you mean"),
        (
            '"doubling:make"',
            '"doubling:make"\nargs = { x = 1 }',
            '14: task.args: "doubling:make" cannot be called with'
            " `seed` and these arguments: got an unexpected keyword argument 'x'; its signature is (seed)",
        ),
        (
            "max_new_tokens = 4",
            "max_new_tokens = 4\n[model]\nmax_length = 5",
            "18: model.max_length: the prompt of item"
            " 10 of [task] has 2 tokens; with max_new_tokens = 4 this exceeds max_length = 5 of the model; the",
        ),
    ],
)
def test_mistake_in_the_tables_of_the_users_task_is_one_line(
    checked: Checked, before: str, after: str, line: str
) -> None:
    assert line in checked.line(job=changed(JOB, before, after))


def test_output_and_children_of_the_users_task_neither_hurt_nor_outlive_the_check(checked: Checked) -> None:
    noise = "import os, subprocess\nos.write(1, b'x' * 10)\nprint('hello')\nsubprocess.Popen(['sleep', '3601'])\n"
    assert checked.run(noise + TASK) == 0
    assert "hello" not in checked.out + checked.err
    assert "sleep\0003601" not in {_arguments(process.pid) for process in processes("")}


def _arguments(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0")
    except OSError:
        return ""


def test_task_that_is_not_built_in_time_is_named_with_its_line(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_check, "DEADLINE_S", 0.5)
    assert checked.line(changed(TASK, "return Doubling()", "import time; time.sleep(3600)")) == (
        "13: task.function: importing and building the task was not done within 0.5 s (doubling.py:13); download and"
        " prepare what the task needs before the run, or check the rest of the job with --no-task"
    )


def test_task_that_no_signal_interrupts_is_ended_after_the_deadline(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_check, "DEADLINE_S", 0.5)
    monkeypatch.setattr(task_check, "_KILL_MARGIN_S", 0.0)
    hang = "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\ntime.sleep(3600)\n"
    assert checked.line(hang + TASK) == (
        "13: task.function: the task was not built and tried within 0.5 s; --no-task checks the rest of the job"
    )


def test_items_that_would_be_dropped_and_answers_that_do_not_fit_are_warnings(checked: Checked) -> None:
    task = changed(TASK, "return str(i)", "return (['7'] * 90)[i]")
    assert checked.run(task, changed(JOB, "max_new_tokens = 4", "max_new_tokens = 1")) == 0
    assert doubts_in(checked.out) == [
        "10 of the first 100 items of [task] are dropped: prompt(90) raised IndexError: list index out of"
        " range (doubling.py:3)",
        "the right answers of 85 of 90 items of [task] do not fit into [sampling] max_new_tokens = 1:"
        " the right answer of item 5 has 2 tokens",
    ]


def test_scorer_that_rewards_every_answer_alike_is_a_warning(checked: Checked) -> None:
    assert checked.run(changed(TASK, 'float(answer != "" and int(answer) == 2 * i)', "1.0")) == 0
    warning = "a right answer of [task] gets no more reward than a wrong one (item 0: '0' gets 1, '2' gets 1)"
    assert doubts_in(checked.out) == [warning]


def test_scorer_that_raises_for_a_wrong_answer_is_a_mistake_and_for_an_empty_one_a_warning(checked: Checked) -> None:
    raising = changed(TASK, "answer != ", "1 // (answer == self.answer(i) or answer == '') and answer != ")
    line = (
        "13: task.function: score(0, '2') raised ZeroDivisionError: integer division or modulo by zero (doubling.py:9)"
    )
    assert checked.line(raising).startswith(line)
    assert checked.run(changed(TASK, 'answer != "" and ', "")) == 0
    warning = "score(0, '') raised ValueError: invalid literal for int() with base 10: '' (doubling.py:9); the group"
    assert doubts_in(checked.out) == [f"{warning} of such an answer is dropped"]


def test_item_that_changes_between_two_calls_is_a_warning(checked: Checked) -> None:
    task = changed(TASK, "return str(i)", "self.calls = getattr(self, 'calls', 0) + 1; return str(self.calls)")
    assert checked.run(task) == 0
    (doubt,) = doubts_in(checked.out)
    assert doubt.startswith("prompt(0) of [task] returned another text at its second call: an item must always be")


def test_task_without_right_answers_is_scored_with_an_empty_one(checked: Checked) -> None:
    task = changed(TASK, "return str(2 * i)", "raise NotImplementedError")
    task = changed(task, 'answer != "" and ', "")
    assert checked.run(changed(task, "int(answer)", "len(answer)")) == 0
    assert doubts_in(checked.out) == []
    assert "(1 token)\n  wrong answer  (empty)\n  reward        1, trained on 0.5\n" in checked.out
    assert checked.run(task) == 0
    assert "score(0, '') raised ValueError: invalid literal for int() with base 10: '' (doubling.py:9)" in checked.out
    warm = f"{JOB}[roles.trainer]\nwarm_start_steps = 1\n"
    assert checked.line(task, warm) == (
        "13: task.function: answer(0) raised NotImplementedError (doubling.py:6); [roles.trainer] warm_start_steps"
        " needs answers"
    )


# ── tasks that cannot be tried ─────────────────────────────────────────────────────────────────────────────────────
def test_check_with_no_task_checks_the_rest_and_reports_that_the_task_was_not_tried(checked: Checked) -> None:
    assert checked.run("raise OSError", JOB, "--no-task") == 0
    assert checked.out.endswith(
        "is right as far as it was checked: its task was not tried (--no-task); nothing was submitted\n"
    )


def test_package_that_a_login_node_lacks_leaves_the_task_untried(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rrl.api.preflight.job_preflight._preflight", lambda *_: Preflight([]))
    slurm = changed(JOB, '"local"', '"slurm"')
    assert checked.run(f"import rrl_no_such_package\n{TASK}", slurm) == 0
    reason = "rrl_no_such_package is not installed on this machine"
    assert f"its task was not tried ({reason}); nothing was submitted\n" in checked.out
    model = '[model]\npath = "/no/such/model"'
    own_model = changed(slurm, '[model.tokenizer]\npieces = "0123456789"', model)
    assert checked.run(TASK, own_model) == 0
    assert "not tried (the folder of [model] path does not exist on this machine)" in checked.out
    assert checked.run(TASK, slurm, "--json") == 0
    tried = json.loads(checked.out)["task"]
    assert tried["not_tried"] == ""
    assert [(sample["prompt"], sample["rewards"]) for sample in tried["samples"]] == [("0", [1, 0.5]), ("1", [1, 0.5])]


def test_task_gets_the_environment_of_the_store_and_the_setup_of_a_local_job(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOT_PASSED", "1")
    monkeypatch.setenv("PASSED", "1")
    needs = "import os\nassert os.environ['A'] + os.environ['B'] + os.environ['PASSED'] == '231'\n"
    needs += "assert 'NOT_PASSED' not in os.environ\n"
    env = '[env]\npassed = ["PASSED"]\nsetup = ["echo loading", "export B=3"]\n[roles.trajectories]\nenv.A = "2"\n'
    assert checked.run(needs + TASK, JOB + env) == 0, checked.err
    assert checked.line(needs + TASK, JOB + changed(env, "export B=3", "false")).endswith(
        "setup line 2 failed (exit 1)"
    )


# ── agents ─────────────────────────────────────────────────────────────────────────────────────────────────────────
AGENTS_JOB = changed(JOB, 'pieces = "0123456789"', 'pieces = "01"\nchat = { user = "{content}" }') + (
    '\n[roles.agents]\nfunction = "player:run"\n'
)
PLAYER = "async def run(item, base_url, api_key):\n    return 1.0\n"


def test_agent_program_is_searched_for_and_not_started(checked: Checked) -> None:
    job = AGENTS_JOB.replace('function = "player:run"', 'command = ["python", "player.py"]')
    assert '"player.py" does not exist in' in (missing := checked.line(job=job))
    assert missing.startswith("20: roles.agents.command: ")
    (checked.folder / "player.py").write_text("raise SystemExit('it was started')\n")
    assert checked.run(job=job) == 0, checked.err
    assert "item 0  0\nitem 1  1\n" in checked.out


def test_agents_are_imported_and_shown_two_items_that_need_not_be_text_of_the_vocabulary(checked: Checked) -> None:
    (checked.folder / "player.py").write_text(PLAYER)
    assert checked.run(job=AGENTS_JOB) == 0, checked.err
    assert doubts_in(checked.out) == []
    assert "item 0  0\nitem 1  1\n" in checked.out


def test_items_of_an_evaluation_of_agents_are_made(checked: Checked) -> None:
    (checked.folder / "player.py").write_text(PLAYER)
    held_out = AGENTS_JOB + '[eval]\nevery = 5\n[eval.task]\nfunction = "held_out:make"\n'
    (checked.folder / "held_out.py").write_text(TASK)
    assert checked.run(job=held_out) == 0, checked.err
    (checked.folder / "held_out.py").write_text(TASK.replace("return str(i)", "return str(1 // i)"))
    assert "prompt(0) of [eval] raised ZeroDivisionError" in checked.line(job=held_out)


@pytest.mark.parametrize(
    ("player", "line"),
    [
        (PLAYER.replace("async ", ""), '"player:run" is not async; write async def run(item, base_url, api_key)'),
        (PLAYER.replace("run", "play"), "has no function run"),
        ("import no_such_package\n" + PLAYER, '"player:run" imports no_such_package, which'),
        ("1 / 0\n" + PLAYER, "importing it raised ZeroDivisionError: division by zero (player.py:1)"),
    ],
)
def test_an_agent_that_cannot_run_is_one_line_at_its_key(checked: Checked, player: str, line: str) -> None:
    (checked.folder / "player.py").write_text(player)
    refused = checked.line(job=AGENTS_JOB)
    assert refused.startswith("20: roles.agents.function: ")
    assert line in refused


# ── prompts of a file ──────────────────────────────────────────────────────────────────────────────────────────────
# ── losses and engines of the user ─────────────────────────────────────────────────────────────────────────────────
OWN = "def loss(tokens, settings): ...\nclass Engine:\n    def __init__(self, me, model, tokenizer): ...\n"
OWN_JOB = JOB + '[roles.trainer]\nloss = "mine:loss"\n[roles.rollout]\nengine = "mine:Engine"\n'


def test_own_loss_and_engine_are_imported_and_not_called(checked: Checked) -> None:
    (checked.folder / "mine.py").write_text(OWN)
    assert checked.run(job=OWN_JOB) == 0, checked.err
    assert doubts_in(checked.out) == []


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (OWN.replace("loss", "los"), "roles.trainer.loss: "),
        (OWN.replace("tokens, ", ""), 'roles.trainer.loss: "mine:loss" cannot be called with tokens, settings: too'),
        (OWN.replace("me, ", ""), 'roles.rollout.engine: "mine:Engine" cannot be called with me, model, token'),
        ("import sglng\n" + OWN, 'roles.trainer.loss: "mine:loss" imports sglng, which'),
        (OWN + "1 / 0\n", "roles.trainer.loss: importing it raised ZeroDivisionError: division by zero (mine.py:4)"),
        (OWN + "def f(:\n", "roles.trainer.loss: importing it raised SyntaxError"),
    ],
)
def test_own_loss_or_engine_that_cannot_be_used_is_one_line_at_its_key(checked: Checked, code: str, line: str) -> None:
    (checked.folder / "mine.py").write_text(code)
    assert line in checked.line(job=OWN_JOB)


SLEEPS = f"{OWN}    def sleep(self): ...\n    def wake(self): ...\n"
LENDS = f'{OWN_JOB}[tags]\ntrainer = ["rollout"]\n'.replace("[sampling]", "[sampling]\nstream = true")


@pytest.mark.parametrize(
    ("code", "lacks"),
    [
        (SLEEPS, ""),
        (OWN, "sleep and wake"),
        (SLEEPS.replace("wake", "wakes"), "wake"),
        (f"{OWN}def engine(me, model, tokenizer): ...\n".replace("Engine", "_").replace("engine", "Engine"), ""),
    ],
)
def test_own_engine_that_cannot_give_gpus_back_is_refused_if_the_trainer_lends(
    checked: Checked, code: str, lacks: str
) -> None:
    (checked.folder / "mine.py").write_text(code)
    if not lacks:
        assert checked.run(job=LENDS) == 0, checked.err
        return
    (checked.folder / "mine.py").write_text(code)
    line = checked.line(job=LENDS)
    assert f"roles.rollout.engine: mine:Engine lacks {lacks}, with which an engine gives GPUs back" in line
    assert checked.run(job=OWN_JOB) == 0, "an engine of a job that does not lend needs neither"


FILE_JOB = JOB.replace('function = "doubling:make"', 'file = "prompts.jsonl"')
FILE_LINE = FILE_JOB.splitlines().index('file = "prompts.jsonl"') + 1


def rows_of(folder: Path, *rows: object) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_a_row_of_a_file_is_shown_with_its_rewards(checked: Checked) -> None:
    rows_of(checked.folder, *({"question": str(i), "answer": 2 * i} for i in range(1, 9)))
    assert checked.run(job=FILE_JOB) == 0, checked.err
    assert "right answer" in checked.out


@pytest.mark.parametrize("command", ["check", "submit"])
def test_a_bad_row_is_one_line_with_file_line_and_column(
    checked: Checked, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rows_of(checked.folder, {"question": "1", "answer": 2}, {"question": "2", "reply": 4})
    (checked.folder / "job.toml").write_text(FILE_JOB)
    assert main.run([command, str(checked.folder / "job.toml")]) == 2
    assert capsys.readouterr().err == (
        f'rrl: {checked.folder / "job.toml"}:{FILE_LINE}: task.file: {path}:2: there is no column "answer";'
        ' this row has "question", "reply"\n'
    )


REWARD = "def score(answer, row):\n    return {returned}\n"
REWARD_JOB = FILE_JOB.replace('file = "prompts.jsonl"', 'file = "prompts.jsonl"\nreward = "rewarding:score"')


@pytest.mark.parametrize(
    ("returned", "line"),
    [
        ("'1'", "returned '1'; return a finite number, or two finite numbers: the reward to report, and the reward to"),
        ("1 / 0", "score(0, '4') raised ZeroDivisionError: division by zero (rewarding.py:2)"),
        ("exit(3)", "score(0, '4') raised SystemExit: 3 (rewarding.py:2)"),
        ("1 +", "building the task raised SyntaxError: invalid syntax (rewarding.py:2)"),
    ],
)
def test_mistake_in_the_reward_function_of_a_file_is_one_line_at_its_key(
    checked: Checked, returned: str, line: str
) -> None:
    rows_of(checked.folder, {"question": "2", "answer": 4})
    (checked.folder / "rewarding.py").write_text(REWARD.format(returned=returned))
    refused = checked.line(job=REWARD_JOB)
    assert refused.startswith(f"{FILE_LINE + 1}: task.reward: ")
    assert line in refused


FILES_JOB = FILE_JOB.replace(
    'file = "prompts.jsonl"',
    'files = [{ path = "prompts.jsonl", name = "one" }, { path = "more.jsonl", name = "two", weight = 2 }]\n'
    'rewards.right.function = "rewarding:right"\n'
    'rewards.short = { function = "rewarding:short", weight = 0.5 }',
)
REWARDS = (
    "def right(answer, row):\n    return answer == str(row['answer'])\n\ndef short(answer, row):\n    return {short}\n"
)


@pytest.mark.parametrize(
    ("short", "line"),
    [
        ("len(answer) < 2", ""),
        ("1 / 0", ":{at}: task.rewards: score(0, '4') raised ZeroDivisionError: division by zero (rewarding.py:5)"),
        ("None", ":{at}: task.rewards: the function of `rewards.short`, called with '4' and the row of item 0,"),
    ],
)
def test_prompts_of_several_files_are_shown_with_their_source_and_the_parts_of_their_rewards(
    checked: Checked, short: str, line: str
) -> None:
    rows_of(checked.folder, {"question": "2", "answer": 4}).rename(checked.folder / "more.jsonl")
    rows_of(checked.folder, {"question": "5", "answer": 10})
    (checked.folder / "rewarding.py").write_text(REWARDS.format(short=short))
    code = checked.run(job=FILES_JOB)
    if line:
        assert (code, checked.err.count("\n")) == (2, 1)
        assert line.format(at=FILE_LINE + 1) in checked.err
        return
    assert code == 0, checked.err
    assert "item 0 of two\n  prompt        2  (1 token)" in checked.out
    assert "item 1 of one\n" in checked.out
    assert (
        "  reward        1.5  (right 1, short 1)\n  wrong answer  10\n  reward        0  (right 0, short 0)\n"
        in checked.out
    )


def test_a_bad_row_of_one_of_several_files_is_one_line_at_its_path(checked: Checked) -> None:
    rows_of(checked.folder, {"question": "2", "reply": 4}).rename(checked.folder / "more.jsonl")
    path = rows_of(checked.folder, {"question": "5", "answer": 10})
    (checked.folder / "rewarding.py").write_text(REWARDS.format(short="1"))
    named = FILES_JOB.replace("rewards.right", 'answer_column = "answer"\nrewards.right')
    assert checked.line(job=named) == (
        f'{FILE_LINE}: task.files[1].path: {path.with_name("more.jsonl")}:1: there is no column "answer";'
        ' this row has "question", "reply"'
    )


@pytest.mark.parametrize("column", ["answer", "reply"])
def test_answer_column_that_does_not_exist_is_refused_although_a_function_gives_the_rewards(
    checked: Checked, column: str
) -> None:
    rows_of(checked.folder, {"question": "2", "solution": 4})
    (checked.folder / "rewarding.py").write_text(REWARD.format(returned="numpy.float32(0.5)") + "import numpy\n")
    assert checked.run(job=REWARD_JOB) == 0, checked.err
    named = REWARD_JOB.replace("reward =", f'answer_column = "{column}"\nreward =')
    assert f'there is no column "{column}"; this row has "question", "solution"' in checked.line(job=named)


def test_a_file_that_is_not_here_is_refused_only_where_the_roles_run_here(
    checked: Checked, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = checked.folder / "prompts.jsonl"
    assert (
        checked.line(job=FILE_JOB) == f"{FILE_LINE}: task.file: {str(missing)!r} does not exist; name a file that does"
    )
    slurm = checked.folder / "bin"
    slurm.mkdir()
    for name, script in {"sinfo": "true", "sbatch": "exit 0", "scontrol": "true", "sacctmgr": "exit 1"}.items():
        (slurm / name).write_text(f"#!/bin/sh\n{script}\n")
        (slurm / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(slurm))
    checked.run(job=FILE_JOB.replace('"local"', '"slurm"'))
    assert f"task.file: {str(missing)!r} does not exist on this machine; the nodes need it" in doubts_in(checked.out)


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        ("args = { min = 2 }", "task.args: has no effect with `file`; remove this key"),
        ("size = 5", "task.size: has no effect with `file`; remove this key"),
        ('prompt = "{}"', "task.prompt: '{}' must name a column of the file in braces: \"{question}\""),
        ('prompt = "hello"', "task.prompt: 'hello' must name a column of the file in braces: \"{question}\""),
    ],
)
def test_a_key_without_effect_on_a_file_is_refused(checked: Checked, key: str, complaint: str) -> None:
    job = FILE_JOB.replace('file = "prompts.jsonl"', f'file = "prompts.jsonl"\n{key}')
    assert checked.run(job=job) == 2
    assert checked.err == f"rrl: {checked.folder / 'job.toml'}:{FILE_LINE + 1}: {complaint}\n"
