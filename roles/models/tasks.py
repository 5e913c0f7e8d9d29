"""The source of prompts and rewards: a reasoning-gym dataset, or a function of the user."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from ...core.run_spec import TaskSpec
from .tokenizer import Tokenizer


class Task(Protocol):
    """An unlimited number of items; item i is the same in every process of the run."""

    def prompt(self, i: int) -> str:
        """Return the prompt of item ``i``."""
        ...

    def answer(self, i: int) -> str:
        """Return a right answer, for a supervised warm start."""
        ...

    def score(self, i: int, answer: str) -> tuple[float, float]:
        """Return the reward that is reported, and the reward that is trained on."""
        ...


class TaskError(ValueError):
    """The ``[task]`` table is invalid."""


def load_task(spec: TaskSpec, seed: int, tokenizer: Tokenizer | None = None, folder: Path | None = None) -> Task:
    """Return the task of ``[task]``.

    Args:
        spec: The ``[task]`` table.
        seed: Seed of the run.
        tokenizer: Splits answers into tokens for partial credit. If None, answers are split into words.
        folder: Folder of job.toml, from which a user's function is imported.

    Raises:
        TaskError: The table is invalid.
    """
    if spec.function is not None:
        return _call(spec.function, seed, spec.args, folder)
    if spec.dataset is None:
        raise TaskError('[task] needs one of: dataset = "<reasoning-gym name>", function = "module:function"')
    return DatasetTask(
        spec.dataset,
        spec.args,
        seed,
        prompt=spec.prompt,
        size=spec.size,
        partial_credit=spec.partial_credit,
        split=tokenizer.encode if tokenizer else str.split,
    )


def _call(name: str, seed: int, args: Mapping[str, Any], folder: Path | None) -> Task:
    """Call ``module:function`` with ``seed`` and ``args``, and return the task that it returns."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise TaskError(f'[task] function = "{name}" must be "module:function"')
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        returned = getattr(importlib.import_module(module), function)(seed=seed, **args)
    except (ImportError, AttributeError, TypeError) as error:
        raise TaskError(f'[task] function = "{name}": {error}') from error
    if missing := [method for method in ("prompt", "answer", "score") if not callable(getattr(returned, method, None))]:
        raise TaskError(f'[task] function = "{name}" returned an object without {", ".join(missing)}')
    task: Task = returned
    return task


class DatasetTask:
    """A reasoning-gym dataset with its own scorer.

    Item i of a dataset depends only on (the dataset's seed + i), so datasets whose seeds differ by less than their size
    overlap (measured). The dataset's seed is therefore a multiple of the size. No run with a seed of 0 or more shares
    items with the dataset of seed 0: held-out items can be taken from that dataset.

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
        import reasoning_gym  # imported here: other tasks do not need it

        try:
            self._dataset = reasoning_gym.create_dataset(dataset, seed=(seed + 1) * size, size=size, **args)
        except (ValueError, TypeError, AssertionError) as error:
            raise TaskError(f'[task] dataset = "{dataset}": {error}') from error
        self._prompt = prompt
        self._size = size
        self._partial_credit = partial_credit
        self._split = split
        self._item = lru_cache(maxsize=1024)(self._make)  # an item is used once per trajectory of its group
        try:
            self.prompt(0)
        except (KeyError, IndexError, AttributeError, ValueError) as error:
            raise TaskError(f'[task] prompt = "{prompt}" does not fit an item of {dataset}: {error!r}') from error

    def _make(self, i: int) -> dict[str, Any]:
        item: dict[str, Any] = self._dataset[i]
        return item

    def prompt(self, i: int) -> str:
        """See :class:`Task`."""
        return self._prompt.format(**self._item(i % self._size))

    def answer(self, i: int) -> str:
        """See :class:`Task`."""
        return str(self._item(i % self._size)["answer"])

    def score(self, i: int, answer: str) -> tuple[float, float]:
        """See :class:`Task`."""
        reward = float(self._dataset.score_answer(answer, self._item(i % self._size)))
        if reward >= 1 or not self._partial_credit:
            return reward, reward
        given, right = self._split(answer), self._split(self.answer(i))
        if len(given) != len(right) or not right:
            return reward, reward
        share = sum(a == b for a, b in zip(given, right, strict=True)) / len(right)
        return reward, reward + self._partial_credit * share
