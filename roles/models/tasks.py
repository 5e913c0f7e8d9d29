"""The source of prompts and rewards: a reasoning-gym dataset, the rows of a file, or a function of the user."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from ...config.prompt_file import PromptFileError, open_rows
from ...core.role_environment import SAFE_PATH_ENV
from ...core.run_spec import RunSpec
from ...core.task_spec import TaskSpec
from ...core.text import shortened
from .file_task import FileTask, right_share
from .rewards import Scored, two_rewards
from .tokenizer import Tokenizer

_MAX_SHOWN_DATASETS = 5
"""Maximum number of datasets that an error message names, because reasoning-gym has about a hundred."""
EVALUATION_SEED = -1
"""Seed of a dataset for evaluations. No run has this seed, and datasets of different seeds share no item
(DatasetTask)."""
_LIST_DATASETS = "python -c 'from reasoning_gym.factory import DATASETS; print(*sorted(DATASETS))'"
"""Shell command that lists the datasets of reasoning-gym."""


class Task(Protocol):
    """A task: an unlimited number of items. Item i is the same in every process of the run."""

    def prompt(self, i: int) -> str:
        """Return the prompt of item ``i``."""
        ...

    def answer(self, i: int) -> str:
        """Return a right answer, for a supervised warm start."""
        ...

    def score(self, i: int, answer: str) -> tuple[float, float] | Scored:
        """Return the reward that is reported, and the reward that is trained on."""
        ...


def score_of(task: Task, item: int, answer: str) -> Scored:
    """Score an answer, and check the result. Raises InvalidReward, and whatever the user's code raises."""
    returned = task.score(item, answer)
    if isinstance(returned, Scored):
        return returned
    return Scored(*two_rewards(returned, f"score({item}, {shortened(answer)})", task.score), {})


def source_of(task: Task, item: int) -> str:
    """Return the name of the prompt file of an item (``[[task.files]]``); empty for any other task."""
    return task.source(item) if isinstance(task, FileTask) else ""


class TaskError(ValueError):
    """A table that names code of the user, such as ``[task]`` or that of an evaluation, is invalid.

    Args:
        key: The key of the table to change.
        problem: What is wrong with its value, and what would be right.
        missing_package: Package that the code needs and this Python lacks; empty for any other problem.
        table: Name of the invalid table.
    """

    def __init__(self, key: str, problem: str, missing_package: str = "", table: str = "task") -> None:
        super().__init__(f"[{table}] {key}: {problem}")
        self.table = table
        self.key = key
        self.problem = problem
        self.missing_package = missing_package


def load_task(spec: TaskSpec, seed: int | None, tokenizer: Tokenizer | None = None, folder: Path | None = None) -> Task:
    """Return the task that ``[task]`` describes.

    Args:
        spec: The ``[task]`` table.
        seed: Seed of the run; None to keep the rows of files in their order.
        tokenizer: Splits answers into tokens for partial credit. If None, answers are split into words.
        folder: Folder of job.toml, from which a user's function is imported.

    Raises:
        TaskError: The table is invalid.
    """
    split = tokenizer.encode if tokenizer else str.split
    if spec.sources:
        return _open_files(spec, seed, split, folder)
    assert seed is not None
    if spec.function is not None:
        return _call(spec.function, seed, spec.args, folder)
    if spec.dataset is None:
        raise TaskError(
            "dataset",
            'missing; write dataset = "<reasoning-gym name>", file = "prompts.jsonl", [[task.files]] or'
            ' function = "module:function"',
        )
    return DatasetTask(
        spec.dataset,
        spec.args,
        seed,
        prompt=spec.prompt,
        size=spec.size,
        partial_credit=spec.partial_credit,
        split=split,
    )


def load_evaluation_task(
    job: RunSpec, tokenizer: Tokenizer | None = None, folder: Path | None = None
) -> tuple[Task, int]:
    """Return the task of a job's evaluations, and the number of prompts of an evaluation.

    The items of a dataset are in no training step, because the dataset has a seed that no run has. The rows of files
    come in the order of their files. A function of the user gets the seed of the run.

    Raises:
        TaskError: The table is invalid.
    """
    assert job.eval is not None
    spec = job.eval.task or job.task
    seed = None if spec.sources else job.seed if spec.function is not None else EVALUATION_SEED
    try:
        task = load_task(spec, seed, tokenizer, folder)
    except TaskError as error:
        if job.eval.task is None:
            raise
        raise TaskError(error.key, error.problem, error.missing_package, f"eval.{error.table}") from error.__cause__
    size = len(task) if isinstance(task, FileTask) else spec.size if spec.dataset is not None else job.eval.count
    return task, min(job.eval.count, size)


def load_episode_items(job: RunSpec, tokenizer: Tokenizer, folder: Path) -> Callable[[int, bool], str]:
    """Return the function that makes the text of an item for an agent.

    The item is of [task] or, if the second argument is True, of the evaluation's task.

    Raises:
        TaskError: A table is invalid.
    """
    task = load_task(job.task, job.seed, tokenizer, folder)
    evaluated = task if job.eval is None else load_evaluation_task(job, tokenizer, folder)[0]
    return lambda item, evaluation: (evaluated if evaluation else task).prompt(item)


def _open_files(
    spec: TaskSpec, seed: int | None, split: Callable[[str], Sequence[object]], folder: Path | None
) -> FileTask:
    """Return the task that ``[task] file`` or ``files`` describes.

    Raises:
        TaskError: A file, one of its rows, or a reward function is invalid.
    """
    try:
        files = [(file, open_rows(Path(file.path), spec.prompt, spec.required_columns)) for file in spec.sources]
    except PromptFileError as error:
        raise TaskError("files" if spec.files else "file", str(error), error.missing_package) from None
    rewards = {
        name: (import_function(term.function, folder, table=f"task.rewards.{name}"), term.weight)
        for name, term in spec.rewards.items()
    }
    return FileTask(
        files,
        seed,
        prompt=spec.prompt,
        answer_column=spec.answer_column,
        reward=None if spec.reward is None else import_function(spec.reward, folder, "reward"),
        rewards=rewards,
        partial_credit=spec.partial_credit,
        split=split,
    )


def _call(name: str, seed: int, args: Mapping[str, Any], folder: Path | None) -> Task:
    """Call ``module:function`` with ``seed`` and ``args``, and return the task that it returns.

    An exception that the user's module or function raises is not caught.
    """
    function = import_function(name, folder)
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function that is written in C may have no signature
        signature = None
    if signature is not None:
        try:
            signature.bind(seed=seed, **args)
        except TypeError as error:
            problem = f"{json.dumps(name)} cannot be called with `seed` and these arguments: {error}"
            raise TaskError("args", f"{problem}; its signature is {signature}") from None
    returned = function(seed=seed, **args)
    if isinstance(returned, type):
        kind = returned.__name__
        raise TaskError(
            "function", f"{json.dumps(name)} returned the class {kind}; return an object of it: {kind}(...)"
        )
    if missing := [method for method in ("prompt", "answer", "score") if not callable(getattr(returned, method, None))]:
        kind = type(returned).__name__
        raise TaskError("function", f"{json.dumps(name)} returned {kind}, an object without {', '.join(missing)}")
    task: Task = returned
    return task


def import_row(
    name: str, rows: Mapping[str, str], folder: Path, key: str, table: str, arguments: Sequence[str]
) -> Callable[..., Any]:
    """Import what a key of job.toml names: a row of rrl's own table, else ``module:function`` of the user.

    Args:
        name: The value of the key.
        rows: The import path of each name that rrl itself has.
        folder: Folder of job.toml.
        key: The key, for an error.
        table: Name of the key's table, for an error.
        arguments: Names of the arguments with which it will be called.

    Raises:
        TaskError: A module is missing, has no such function, or the function cannot be called in this way.
    """
    if name in rows:
        module, _, attribute = rows[name].partition(":")
        return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
    function = import_function(name, folder, key, table)
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        problem = f"{json.dumps(name)} cannot be called with {', '.join(arguments)}: {error}"
        raise TaskError(key, problem, table=table) from None
    except ValueError:  # a function that is written in C may have no signature
        pass
    return function


def import_function(name: str, folder: Path | None, key: str = "function", table: str = "task") -> Callable[..., Any]:
    """Import the function or class ``module:function``. An exception that the user's module raises is not caught.

    Args:
        name: Module and function.
        folder: Folder of job.toml, from which the module is imported.
        key: The key that names the function, for an error.
        table: Name of the key's table, for an error.

    Raises:
        TaskError: A module is missing, or has no such function.
    """

    def wrong(problem: str, missing_package: str = "") -> TaskError:
        return TaskError(key, problem, missing_package, table)

    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise wrong(f'{json.dumps(name)} must be "module:function"')
    try:
        module = _import_module(module_name, folder)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == module_name or module_name.startswith(f"{missing}."):
            if module_name.endswith(".py"):
                right = json.dumps(f"{module_name.removesuffix('.py')}:{function_name}")
                raise wrong(f"{json.dumps(name)}: name the module without .py: {right}") from None
            place = f"neither in {folder}, the folder of job.toml, nor" if folder is not None else "not"
            problem = f"{json.dumps(name)}: there is no module {missing}, {place} among the installed packages"
            raise wrong(problem) from error
        problem = f"{json.dumps(name)} imports {missing}, which {sys.prefix} lacks; install it there"
        raise wrong(problem, missing) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [known for known in vars(module) if callable(getattr(module, known)) and not known.startswith("_")]
        problem = f"{json.dumps(name)}: {module.__file__} has no function {function_name}"
        raise wrong(problem + _suggestion(function_name, names))
    return function  # type: ignore[no-any-return]  # the type of a user's function is unknown


def _import_module(name: str, folder: Path | None) -> ModuleType:
    """Import a module that job.toml names: that in the folder of job.toml, else an installed one.

    Every other import, also of this module, looks into the folder last, so that a file there cannot replace a package.
    If a package has the name of the module, the module is therefore loaded under another name.
    """
    os.environ.pop(SAFE_PATH_ENV, None)  # this process may now start programs of the user
    if folder is None:
        return importlib.import_module(name)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    top, dot, rest = name.partition(".")
    own, found = PathFinder.find_spec(top, [str(folder)]), find_spec(top)
    if own is None or own.origin is None or found is None or own.origin == found.origin:
        return importlib.import_module(name)
    alias = f"{top}_of_job"
    if alias not in sys.modules:
        spec = spec_from_file_location(alias, own.origin, submodule_search_locations=own.submodule_search_locations)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[alias] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return importlib.import_module(alias + dot + rest)


def _suggestion(name: str, known: Iterable[str]) -> str:
    """Return a hint if ``name`` resembles a known name."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {json.dumps(near[0])}?" if near else ""


def _closest(name: str, datasets: Iterable[str]) -> str:
    """Return a hint: the names of datasets that resemble ``name`` most, and the command that lists all."""
    closest = difflib.get_close_matches(name, list(datasets), _MAX_SHOWN_DATASETS, cutoff=0.0)
    return f"; the closest names are {', '.join(closest)}; to list all: {_LIST_DATASETS}"


class DatasetTask:
    """A reasoning-gym dataset with its own scorer.

    Item i of a dataset depends only on (the dataset's seed + i), so datasets whose seeds differ by less than their size
    overlap (measured). The dataset's seed is therefore (``seed`` + 1) * size. Evaluations use ``seed`` -1
    (:data:`EVALUATION_SEED`) and thus the dataset's seed 0. No run with a ``seed`` of 0 or more trains on these items.

    For a wrong answer of the right length, the training reward is the scorer's reward plus ``partial_credit`` times the
    answer's share of right tokens. The reported reward is always the scorer's.
    """

    def __init__(
        self,
        dataset: str,
        args: Mapping[str, Any],
        seed: int,
        *,
        prompt: str,
        size: int,
        partial_credit: float,
        split: Callable[[str], Sequence[object]],
    ) -> None:
        self._dataset = _create_dataset(dataset, args, seed=(seed + 1) * size, size=size)
        self._prompt = prompt
        self._size = size
        self._partial_credit = partial_credit
        self._split = split
        self._item = lru_cache(maxsize=1024)(self._make)  # an item is used again for each trajectory of its group
        first = self._item(0)
        try:
            prompt.format(**first)
        except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
            problem = f"{json.dumps(prompt)} does not fit an item of {dataset} ({type(error).__name__}: {error})"
            raise TaskError("prompt", f"{problem}; an item has {', '.join(_fields(first))}") from error

    def _make(self, i: int) -> dict[str, Any]:
        item: dict[str, Any] = self._dataset[i]
        return item

    def prompt(self, i: int) -> str:
        """Return the prompt of item ``i``."""
        return self._prompt.format(**self._item(i % self._size))

    def answer(self, i: int) -> str:
        """Return the right answer of item ``i``."""
        return str(self._item(i % self._size)["answer"])

    def score(self, i: int, answer: str) -> tuple[float, float]:
        """Return the reward that is reported, and the reward that is trained on."""
        reward = float(self._dataset.score_answer(answer, self._item(i % self._size)))
        if reward >= 1 or not self._partial_credit:
            return reward, reward
        return reward, reward + self._partial_credit * right_share(answer, self.answer(i), self._split)


def _create_dataset(name: str, args: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """Create a reasoning-gym dataset.

    Raises:
        TaskError: reasoning-gym is not installed, or has no such dataset, or the dataset does not accept ``args``.
    """
    try:
        import reasoning_gym  # imported here: other tasks do not need reasoning-gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        missing = error.name or "reasoning_gym"
        problem = f"{json.dumps(name)} needs {missing}, which {sys.prefix} lacks; run pip install reasoning-gym there"
        raise TaskError("dataset", problem, missing_package=missing) from error
    if name not in DATASETS:
        problem = f"{json.dumps(name)} is not a dataset of reasoning-gym"
        raise TaskError("dataset", problem + (_suggestion(name, DATASETS) or _closest(name, DATASETS)))
    accepted = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    for argument in args:
        if argument not in accepted:
            problem = f"{name} has no argument {json.dumps(argument)}; it has {', '.join(accepted)}"
            raise TaskError("args", problem + _suggestion(argument, accepted))
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **args)
    except (ValueError, TypeError, AssertionError) as error:
        raise TaskError("args", f"{name} does not accept these values: {error}") from error


def _fields(item: Mapping[str, Any]) -> Iterable[str]:
    """Yield the names by which a format string refers to the fields of an item: ``answer``, ``metadata[matrix]``."""
    for name, value in item.items():
        yield from (f"{name}[{inner}]" for inner in value) if isinstance(value, Mapping) else (name,)
