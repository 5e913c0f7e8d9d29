"""A task whose items are the rows of a file, in an order that the seed determines for each pass through the file."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from ...config.prompt_file import Rows
from ...core.text import shortened
from .rewards import TWO_NUMBERS, finite_number, two_rewards

Reward = Callable[[str, dict[str, Any]], Any]
"""A user's reward function: ``reward(answer, row)`` returns a number, or the reported and the trained reward."""
_PASSES_IN_MEMORY = 2
"""Number of passes whose order is in memory, because rollouts may work on the end of one pass and the beginning of the
next."""


class FileTask:
    """The rows of a file. Item i is a row that depends only on the file, the seed and i.

    Args:
        rows: The rows, which were checked.
        seed: Seed of the order; None for the order of the file.
        prompt: Format string of a prompt, whose fields are columns of the file.
        answer_column: Column of the right answer.
        reward: The user's function; None to compare the answer with the right answer, ignoring spaces at both ends.
        partial_credit: Factor of the share of right tokens, as in :class:`.tasks.DatasetTask`.
        split: Splits an answer into tokens or words for the partial credit.
    """

    def __init__(
        self,
        rows: Rows,
        seed: int | None,
        *,
        prompt: str,
        answer_column: str,
        reward: Reward | None,
        partial_credit: float,
        split: Callable[[str], Sequence[object]],
    ) -> None:
        self._rows, self._seed = rows, seed
        self._prompt, self._answer_column, self._reward = prompt, answer_column, reward
        self._partial_credit, self._split = partial_credit, split
        self._row = lru_cache(maxsize=1024)(self._read)  # an item is used again for each trajectory of its group
        self._order = lru_cache(maxsize=_PASSES_IN_MEMORY)(self._shuffled)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def prompt(self, i: int) -> str:
        """Return the prompt of item ``i``."""
        return self._prompt.format_map(self._row(i))

    def answer(self, i: int) -> str:
        """Return the right answer of item ``i``."""
        row = self._row(i)
        if row.get(self._answer_column) is None:
            raise ValueError(f'the row of item {i} has no column "{self._answer_column}"')
        return str(row[self._answer_column])

    def score(self, i: int, answer: str) -> tuple[float, float]:
        """Return the reward that is reported, and the reward that is trained on."""
        if self._reward is None:
            reward = float(answer.strip() == self.answer(i).strip())
        else:
            returned = self._reward(answer, self._row(i))
            number = finite_number(returned)
            if number is None:
                call = f"the function of `reward`, called with {shortened(answer)} and the row of item {i},"
                return two_rewards(returned, call, self._reward, f"a finite number, or {TWO_NUMBERS}")
            reward = number
        if reward >= 1 or not self._partial_credit:
            return reward, reward
        return reward, reward + self._partial_credit * right_share(answer, self.answer(i), self._split)

    def _read(self, i: int) -> dict[str, Any]:
        number, place = divmod(i, len(self._rows))
        return self._rows.row(place if self._seed is None else self._order(number)[place])

    def _shuffled(self, number: int) -> array[int]:
        """Return the order of the rows in one pass."""
        order = list(range(len(self._rows)))
        random.Random(f"{self._seed} {number}").shuffle(order)
        return array("Q", order)


def right_share(answer: str, right: str, split: Callable[[str], Sequence[object]]) -> float:
    """Return the share of right tokens if the answer has as many tokens as the right answer; otherwise return 0."""
    given, wanted = split(answer), split(right)
    if len(given) != len(wanted) or not wanted:
        return 0.0
    return sum(a == b for a, b in zip(given, wanted, strict=True)) / len(wanted)
