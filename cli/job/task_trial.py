"""Try the task of a job: build it, make and tokenise the prompts of 100 items, and score a few answers.

``rrl check`` runs this module in a child process (``python -m rrl.cli.job.task_trial``), because the user's code may
crash, hang, print, or import packages that the command line does not need. The request is read from stdin and the
result is written to stdout, both as JSON; output of the user's code goes to stderr.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ...config.import_paths import ENGINE_ARGUMENTS, LOSS_ARGUMENTS, SLEEPING
from ...core.run_spec import ModelSpec, RunSpec
from ...core.task_spec import TaskSpec
from ...core.text import shortened
from ...roles.agents.user_function import load_agent
from ...roles.launcher.end_report import described, place_of
from ...roles.models.chat import open_chat
from ...roles.models.rewards import InvalidReward, Scored
from ...roles.models.tasks import Task, TaskError, import_row, load_evaluation_task, load_task, score_of, source_of
from ...roles.models.tokenizer import Tokenizer, UnencodableText, open_tokenizer
from ...roles.trajectories.prompts import MAX_ITEMS_WITHOUT_PROMPT, UnfitPrompt, prompt_encoder

ITEMS = 100
"""Number of items whose prompts and answers are made: enough to use each character of a small vocabulary."""
SAMPLES = 2
"""Number of items that are shown, with the rewards of their answers."""
_T = TypeVar("_T")
_PIECES = ("model", "tokenizer", "pieces")


def source_key(task: TaskSpec, table: Sequence[str] = ("task",)) -> tuple[str, ...]:
    """Return the key of job.toml that names the user's code in a task, else the task's source."""
    keys = ("function", "reward", "rewards", "file", "files")
    return *table, next((key for key in keys if getattr(task, key)), "dataset")


class TrialRequest(Struct, frozen=True):
    """The task to try."""

    job: RunSpec
    folder: str
    """Folder of job.toml."""
    deadline_s: float
    """Seconds after which the trial ends and reports its current activity."""


class TaskProblem(Struct, frozen=True):
    """The reason why a run with this task cannot work."""

    key: tuple[str, ...]
    """Key of job.toml to change."""
    text: str
    missing_package: str = ""
    """Package that the task needs and this Python lacks; empty for any other problem."""


class Sample(Struct, frozen=True):
    """One item of the task: prompt, right answer, and rewards of the right answer and of a wrong answer."""

    item: int
    prompt: str
    prompt_tokens: int
    answer: str
    """The right answer according to the task; empty if the task has no right answers."""
    answer_tokens: int
    scored: str
    """The right answer after it was tokenised and converted back to text, as the scorer would get it from the model."""
    rewards: tuple[float, float] | None = None
    """The reported and the trained reward of ``scored``; None if the user's own reward role computes them."""
    wrong: str = ""
    """A wrong answer: the answer of another item, or an empty answer."""
    wrong_rewards: tuple[float, float] | None = None
    """The reported and the trained reward of ``wrong``; None if ``wrong`` was not scored."""
    source: str = ""
    """Name of the prompt file ([[task.files]]); empty for any other task."""
    parts: dict[str, float] = {}
    """The reported rewards of ``scored`` by name, if there are several ([task.rewards])."""
    wrong_parts: dict[str, float] = {}
    """Those of ``wrong``."""


class TaskTrial(Struct, frozen=True):
    """The result of a trial."""

    problem: TaskProblem | None = None
    samples: tuple[Sample, ...] = ()
    warnings: tuple[str, ...] = ()


class _Failed(BaseException):
    """The trial has found a problem. A BaseException, so that it differs from the exceptions of the user's code."""

    def __init__(self, problem: TaskProblem) -> None:
        super().__init__(problem.text)
        self.problem = problem


class _DeadlineExceeded(BaseException):
    """The trial takes too long. A BaseException, so that ``except Exception`` in the user's code does not catch it."""


class _Item(Struct, frozen=True):
    """An item with a prompt, and its right answer."""

    number: int
    prompt: str
    prompt_tokens: int
    answer: str | None
    """The right answer; None if the task has no right answers."""
    answer_tokens: tuple[int, ...] = ()


class _Trial:
    """One trial: its current activity, which is reported if the deadline passes, and the warnings so far."""

    def __init__(self, request: TrialRequest) -> None:
        self._job = request.job
        self._folder = Path(request.folder)
        self._deadline_s = request.deadline_s
        self._source: tuple[str, ...] = source_key(self._job.task)
        self._doing = "importing and building the task"
        self._warnings: list[str] = []

    def run(self) -> TaskTrial:
        """Try the task within the deadline."""
        signal.signal(signal.SIGALRM, _raise_deadline)
        signal.setitimer(signal.ITIMER_REAL, self._deadline_s)
        try:
            samples = self._try()
        except _Failed as failed:
            return TaskTrial(failed.problem)
        except _DeadlineExceeded as error:
            place = place_of(error, self._folder)
            text = (
                f"{self._doing} was not done within {self._deadline_s:g} s ({place}); download and prepare what the"
                " task needs before the run, or check the rest of the job with --no-task"
            )
            return TaskTrial(TaskProblem(self._source, text))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return TaskTrial(None, samples, tuple(self._warnings))

    def _try(self) -> tuple[Sample, ...]:
        self._import("trainer", "loss", self._job.trainer.loss, LOSS_ARGUMENTS)
        for name, settings in self._job.rollouts.items():
            self._import(name, "engine", settings.engine, ENGINE_ARGUMENTS)
        if (agents := self._job.agents) is not None or self._job.endpoint is not None:
            return self._try_agent(agents.function if agents is not None else None)
        tokenizer = self._opened(open_tokenizer)
        task = self._build(tokenizer)
        items = self._make_items(task, tokenizer)
        self._check_lengths(items)
        self._check_repeatable(task, items)
        samples = tuple(self._score(task, tokenizer, items, index) for index in range(min(SAMPLES, len(items))))
        self._check_rewards(samples)
        if self._job.eval is not None:
            evaluated = self._try_evaluation(tokenizer, prompt_encoder(self._job, tokenizer))
            if self._job.kind("reward")[0].built_in:
                self._rewards(evaluated, 0, "")
        return samples

    def _import(self, role: str, key: str, name: str, arguments: Sequence[str]) -> None:
        """Import the code of the user that a key of a built-in role names, if it names any."""
        if ":" not in name or not self._job.role(role).built_in:
            return
        table = self._job.role(role).table
        source, self._source, self._doing = self._source, (*table.split("."), key), f"importing {name}"
        with self._reports("importing it"):
            named = import_row(name, {}, self._folder, key, table, arguments)
        guest = key == "engine" and role == "rollout" and self._job.guests and isinstance(named, type)
        if missing := [method for method in SLEEPING if guest and not hasattr(named, method)]:
            text = f"{name} lacks {' and '.join(missing)}, with which an engine gives GPUs back to the trainer"
            raise _Failed(TaskProblem(self._source, f'{text}; add them, or remove trainer = ["rollout"] from [tags]'))
        self._source = source

    def _try_evaluation(self, tokenizer: Tokenizer, encode: Callable[[int, str], object]) -> Task:
        """Build the task of evaluations, and make and encode its first prompts."""
        own = self._job.eval.task if self._job.eval is not None else None
        self._source = ("eval",) if own is None else source_key(own, ("eval", "task"))
        self._doing = "importing and building the task of [eval]"
        with self._reports("building the task"):
            task, count = load_evaluation_task(self._job, tokenizer, self._folder)
        for number in range(min(count, ITEMS)):
            with self._reports(f"prompt({number}) of [eval]"):
                encode(number, self._text(task.prompt, "prompt", number))
        return task

    def _try_agent(self, function: str | None) -> tuple[Sample, ...]:
        """Import the agent, and make its items, which need not be text of the model's vocabulary.

        ``function`` is None for an agent that is a command. The trial does not start the command.
        """
        tokenizer = self._opened(open_chat).tokenizer
        if function is not None:
            source, self._source = self._source, ("roles", "agents", "function")
            self._doing = f"importing {function}"
            with self._reports("importing it"):
                load_agent(function, self._folder)
            self._source = source
        task = self._build(tokenizer)
        samples: list[Sample] = []
        for number in range(SAMPLES):
            with self._reports(f"prompt({number})"):
                text = self._text(task.prompt, "prompt", number)
                samples.append(Sample(number, text, 0, "", 0, "", source=source_of(task, number)))
        if self._job.eval is not None:
            self._try_evaluation(tokenizer, lambda _, text: text)
        return tuple(samples)

    def _build(self, tokenizer: Tokenizer) -> Task:
        with self._reports("building the task"):
            task = load_task(self._job.task, self._job.seed, tokenizer, self._folder)
        return task

    def _opened(self, open_model: Callable[[ModelSpec], _T]) -> _T:
        try:
            return open_model(self._job.model)
        except ValueError as error:
            raise _Failed(TaskProblem(("model",), str(error))) from error
        except ModuleNotFoundError as error:
            text = f"the tokenizer needs {error.name}, which {sys.prefix} lacks; install it there"
            raise _Failed(TaskProblem(("model", "path"), text, error.name or "")) from error

    @contextmanager
    def _reports(self, call: str) -> Iterator[None]:
        """Return a context manager that reports whatever the user's code raises in ``call`` as a problem."""
        try:
            yield
        except (_Failed, _DeadlineExceeded):
            raise
        except TaskError as error:
            key = (*error.table.split("."), error.key)
            raise _Failed(TaskProblem(key, error.problem, error.missing_package)) from error
        except BaseException as error:
            text = str(error) if isinstance(error, InvalidReward) else f"{call} raised {self._described(error)}"
            raise _Failed(TaskProblem(self._source, text)) from error

    def _make_items(self, task: Task, tokenizer: Tokenizer) -> list[_Item]:
        """Make the prompts and answers of the first items, and report items that the store would drop."""
        encode = prompt_encoder(self._job, tokenizer)
        items: list[_Item] = []
        texts: list[str] = []
        dropped: list[str] = []
        unencodable: UnencodableText | None = None
        in_a_row, has_answers = 0, True
        for number in range(ITEMS):
            try:
                text = self._text(task.prompt, "prompt", number)
                answer = self._answer(task, number) if has_answers else None
                has_answers = answer is not None
                texts += [text] if answer is None else [text, answer]
                prompt = encode(number, text)
                answer_tokens = () if answer is None else tokenizer.encode(answer)
                items.append(_Item(number, text, len(prompt.tokens), answer, answer_tokens))
                in_a_row = 0
            except UnencodableText as error:
                unencodable = unencodable or error
            except (_Failed, _DeadlineExceeded):
                raise
            except BaseException as error:  # user code may raise anything: the store drops the item
                unfit = isinstance(error, UnfitPrompt)
                dropped.append(str(error) if unfit else f"prompt({number}) raised {self._described(error)}")
                in_a_row += 1
                if in_a_row == MAX_ITEMS_WITHOUT_PROMPT:
                    text = f"{dropped[-in_a_row]}; the next {in_a_row - 1} items fail too, which ends a run"
                    raise _Failed(TaskProblem(self._length_key() if unfit else self._source, text)) from error
        if unencodable is not None:
            raise _Failed(TaskProblem(_PIECES, self._missing_pieces(texts, unencodable))) from unencodable
        if dropped:
            self._warnings.append(f"{len(dropped)} of the first {ITEMS} items of [task] are dropped: {dropped[0]}")
        return items

    def _length_key(self) -> tuple[str, ...]:
        return ("model", "max_length") if self._job.model.path is None else ("sampling", "max_new_tokens")

    def _answer(self, task: Task, number: int) -> str | None:
        """Return the right answer of an item, which only a warm start needs; None if the task has no right answers."""
        try:
            return self._text(task.answer, "answer", number)
        except (_Failed, _DeadlineExceeded):
            raise
        except BaseException as error:  # user code may raise anything
            if self._job.trainer.warm_start_steps and self._job.kind("trainer")[0].built_in:
                self._source = ("task", "answer_column") if self._job.task.sources else self._source
                needed = "[roles.trainer] warm_start_steps needs answers"
                text = f"answer({number}) raised {self._described(error)}; {needed}"
                raise _Failed(TaskProblem(self._source, text)) from error
            return None

    def _text(self, method: Callable[[int], Any], name: str, number: int) -> str:
        """Return the text that a method of the task returns for an item."""
        self._doing = call = f"{name}({number})"
        if isinstance(text := method(number), str):
            return text
        raise _Failed(TaskProblem(self._source, f"{call} returned {shortened(text)}; return a string"))

    def _missing_pieces(self, texts: list[str], error: UnencodableText) -> str:
        """Return which characters of the prompts and answers the vocabulary lacks."""
        vocabulary = self._job.model.tokenizer
        known = set("".join((*vocabulary.pieces, vocabulary.ignore))) if vocabulary else set()
        lacking = sorted(set("".join(texts)) - known)
        if not lacking:  # this character occurs only in pieces of several characters
            return str(error)
        named = " ".join(map(repr, lacking))
        return (
            f"prompts and answers of the first {ITEMS} items of [task] contain {named}, which is in no piece: add"
            f" {'it' if len(lacking) == 1 else 'each'} to `pieces` or to `ignore`"
        )

    def _check_lengths(self, items: list[_Item]) -> None:
        limit = self._job.sampling.max_new_tokens
        long = [item for item in items if item.answer is not None and len(item.answer_tokens) > limit]
        if long:
            self._warnings.append(
                f"the right answers of {len(long)} of {len(items)} items of [task] do not fit into [sampling]"
                f" max_new_tokens = {limit}: the right answer of item {long[0].number} has"
                f" {len(long[0].answer_tokens)} tokens"
            )

    def _check_repeatable(self, task: Task, items: list[_Item]) -> None:
        """Warn of an item whose prompt or answer differs between two calls of the task.

        The store and the reward role make an item in different processes, so that they would have different items.
        """
        for item in items[:SAMPLES]:
            for method, name, before in ((task.prompt, "prompt", item.prompt), (task.answer, "answer", item.answer)):
                if before is not None and self._text(method, name, item.number) != before:
                    self._warnings.append(
                        f"{name}({item.number}) of [task] returned another text at its second call: an item must always"
                        " be the same, since the store and the reward role make it in different processes; derive it"
                        " from the seed and the number alone"
                    )
                    return

    def _check_rewards(self, samples: tuple[Sample, ...]) -> None:
        """Warn of a scorer that gives right and wrong answers equal rewards, from which nothing can be learned."""
        pairs = [(one.rewards[0], one.wrong_rewards[0]) for one in samples if one.rewards and one.wrong_rewards]
        if pairs and all(right <= wrong for right, wrong in pairs):
            self._warnings.append(
                f"a right answer of [task] gets no more reward than a wrong one (item {samples[0].item}:"
                f" {samples[0].scored!r} gets {pairs[0][0]:g}, {samples[0].wrong!r} gets {pairs[0][1]:g})"
            )

    def _score(self, task: Task, tokenizer: Tokenizer, items: list[_Item], index: int) -> Sample:
        """Score the right answer of an item, a wrong answer and an empty answer.

        An exception for the wrong answer is a problem, because at first most answers of a model are wrong. An exception
        for an empty answer, which may be rare, is a warning.
        """
        item, other = items[index], items[(index + 1) % len(items)]
        right, wrong = tokenizer.decode(item.answer_tokens), tokenizer.decode(other.answer_tokens)
        sample = Sample(item.number, item.prompt, item.prompt_tokens, item.answer or "", len(item.answer_tokens), right)
        sample = replace(sample, source=source_of(task, item.number))
        if not self._job.kind("reward")[0].built_in:
            return sample
        if item.answer is not None:
            scored = self._rewards(task, item.number, right)
            sample = replace(sample, rewards=scored[:2], parts=scored.parts)
            if wrong and wrong != right:
                scored = self._rewards(task, item.number, wrong)
                sample = replace(sample, wrong=wrong, wrong_rewards=scored[:2], wrong_parts=scored.parts)
        if right == "" and item.answer is not None:
            return sample
        try:
            empty = self._rewards(task, item.number, "")
        except _Failed as failed:
            if index == 0:
                self._warnings.append(f"{failed.problem.text}; the group of such an answer is dropped")
            return sample
        return sample if sample.wrong else replace(sample, wrong_rewards=empty[:2], wrong_parts=empty.parts)

    def _rewards(self, task: Task, number: int, answer: str) -> Scored:
        self._doing = call = f"score({number}, {shortened(answer)})"
        with self._reports(call):
            scored = score_of(task, number, answer)
        return scored

    def _described(self, error: BaseException) -> str:
        """Return type, text, file and line of an exception of the user's code."""
        return str(described(error, self._folder))


def _raise_deadline(*_: object) -> NoReturn:
    raise _DeadlineExceeded


def main() -> None:
    """Try the task of the request on stdin, and write the result to stdout."""
    with os.fdopen(os.dup(1), "wb") as result:
        os.dup2(2, 1)  # output of the user's code and its libraries goes to stderr
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=TrialRequest)
        trial = _Trial(request).run()
        result.write(msgspec.json.encode(trial))
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # SIGKILL also ends all processes that the user's code has started
    os._exit(0)  # threads that the user's code has started do not delay the end


if __name__ == "__main__":
    main()
