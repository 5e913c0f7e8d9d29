"""A task whose items are the rows of one file or of several, in an order that the seed determines for each pass."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ...config.prompt_file import Rows
from ...core.task_spec import TaskFile
from ...core.text import shortened
from .rewards import TWO_NUMBERS, Scored, finite_number, two_rewards

Reward = Callable[[str, dict[str, Any]], Any]
"""A user's reward function: ``reward(answer, row)`` returns a number, or the reported and the trained reward."""
_PASSES_IN_MEMORY = 2
"""Number of passes through a file whose order is in memory, because rollouts may work on the end of one pass and the
beginning of the next."""
_BLOCK = 10_000
"""Approximate number of items after which the files have given their shares, which are rounded to this precision."""


class FileMix:
    """Assigns the items of training to files by their weights.

    The files alternate as evenly as their weights permit, so that each step has nearly its share of each file. The file
    of an item depends only on the weights and the number of the item.

    Args:
        files: The files. At least one has a weight above 0; those with the weight 0 have no items.
    """

    def __init__(self, files: Sequence[TaskFile]) -> None:
        self._files = files
        largest = max(file.weight for file in files)
        shares = [file.weight / largest for file in files]
        unit = _BLOCK / sum(shares)
        self._counts = [
            max(1, round(unit * share)) if file.weight else 0 for file, share in zip(files, shares, strict=True)
        ]
        places = ((index + 0.5) / count for count in self._counts for index in range(count))
        numbers = ((file, index) for file, count in enumerate(self._counts) for index in range(count))
        self._block = [number for _, number in sorted(zip(places, numbers, strict=True))]

    def place(self, item: int) -> tuple[int, int]:
        """Return the file of an item, and the number of the item among those of this file, both from 0."""
        block, place = divmod(item, len(self._block))
        file, index = self._block[place]
        return file, block * self._counts[file] + index

    def source(self, item: int) -> str:
        """Return the name of the file of an item."""
        return self._files[self.place(item)[0]].name


class FileTask:
    """The rows of files. Item i is a row that depends only on the files, the seed and i.

    Args:
        files: The files, with their rows, which were checked.
        seed: Seed of the order. None for an evaluation: the rows come in the order of their files, in turn one of each
            file that has further rows.
        prompt: Format string of a prompt, whose fields are columns of the files.
        answer_column: Column of the right answer.
        reward: The user's function; None to compare the answer with the right answer, ignoring spaces at both ends.
        rewards: Several functions of the user with their weights, by name, instead of ``reward``; or none.
        partial_credit: Factor of the share of right tokens, as in :class:`.tasks.DatasetTask`.
        split: Splits an answer into tokens or words for the partial credit.
    """

    def __init__(
        self,
        files: Sequence[tuple[TaskFile, Rows]],
        seed: int | None,
        *,
        prompt: str,
        answer_column: str,
        reward: Reward | None,
        rewards: Mapping[str, tuple[Reward, float]],
        partial_credit: float,
        split: Callable[[str], Sequence[object]],
    ) -> None:
        self._names = [file.name for file, _ in files]
        self._rows = [rows for _, rows in files]
        self._seed, self._mix = seed, None if seed is None else FileMix([file for file, _ in files])
        self._prompt, self._answer_column = prompt, answer_column
        self._reward, self._rewards = reward, rewards
        self._partial_credit, self._split = partial_credit, split
        self._row = lru_cache(maxsize=1024)(self._read)  # an item is used again for each trajectory of its group
        self._order = lru_cache(maxsize=_PASSES_IN_MEMORY * len(files))(self._shuffled)

    def __len__(self) -> int:
        """Return the number of rows of all files."""
        return sum(map(len, self._rows))

    def source(self, i: int) -> str:
        """Return the name of the file of item ``i``; empty for a file without a name."""
        return self._names[self._place(i)[0]]

    def prompt(self, i: int) -> str:
        """Return the prompt of item ``i``."""
        return self._prompt.format_map(self._row(i))

    def answer(self, i: int) -> str:
        """Return the right answer of item ``i``."""
        row = self._row(i)
        if row.get(self._answer_column) is None:
            raise ValueError(f'the row of item {i} has no column "{self._answer_column}"')
        return str(row[self._answer_column])

    def score(self, i: int, answer: str) -> Scored:
        """Return the rewards of an answer."""
        if self._rewards:
            return self._weighted_sum(i, answer)
        if self._reward is None:
            reward, training = float(answer.strip() == self.answer(i).strip()), None
        else:
            reward, training = self._call("reward", self._reward, i, answer)
        if training is not None:
            return Scored(reward, training, {})
        if reward >= 1 or not self._partial_credit:
            return Scored(reward, reward, {})
        partial = self._partial_credit * right_share(answer, self.answer(i), self._split)
        return Scored(reward, reward + partial, {})

    def _weighted_sum(self, i: int, answer: str) -> Scored:
        reward = training = 0.0
        parts: dict[str, float] = {}
        for name, (function, weight) in self._rewards.items():
            parts[name], trained = self._call(f"rewards.{name}", function, i, answer)
            reward += weight * parts[name]
            training += weight * (parts[name] if trained is None else trained)
            two_rewards((reward, training), f"the weighted sum up to `rewards.{name}`", function)  # it may overflow
        return Scored(reward, training, parts)

    def _call(self, key: str, function: Reward, i: int, answer: str) -> tuple[float, float | None]:
        """Return the reward to report, and the reward to train on; None if the function returned only one number."""
        returned = function(answer, self._row(i))
        if (number := finite_number(returned)) is not None:
            return number, None
        call = f"the function of `{key}`, called with {shortened(answer)} and the row of item {i},"
        return two_rewards(returned, call, function, f"a finite number, or {TWO_NUMBERS}")

    def _read(self, i: int) -> dict[str, Any]:
        file, index = self._place(i)
        rows = self._rows[file]
        if self._seed is None:
            return rows.row(index)
        number, place = divmod(index, len(rows))
        return rows.row(self._order(file, number)[place])

    def _place(self, i: int) -> tuple[int, int]:
        """Return the file of item ``i``, and its number among the items of this file."""
        if self._mix is not None:
            return self._mix.place(i)
        i, first = i % len(self), 0
        while True:  # until the next file has no further row, the others take turns
            left = [file for file, rows in enumerate(self._rows) if len(rows) > first]
            until = min(len(self._rows[file]) for file in left)
            if i < (until - first) * len(left):
                return left[i % len(left)], first + i // len(left)
            i, first = i - (until - first) * len(left), until

    def _shuffled(self, file: int, number: int) -> array[int]:
        """Return the order of the rows of a file in one pass."""
        order = list(range(len(self._rows[file])))
        random.Random(" ".join(filter(None, (str(self._seed), self._names[file], str(number))))).shuffle(order)
        return array("Q", order)


def right_share(answer: str, right: str, split: Callable[[str], Sequence[object]]) -> float:
    """Return the share of right tokens if the answer has as many tokens as the right answer; otherwise return 0."""
    given, wanted = split(answer), split(right)
    if len(given) != len(wanted) or not wanted:
        return 0.0
    return sum(a == b for a, b in zip(given, wanted, strict=True)) / len(wanted)
