"""A task: answer a digit with the next one. Guessing is right in 1 of 12 cases."""

from __future__ import annotations


class NextDigit:
    def __init__(self, seed: int) -> None:
        self._seed = seed

    def prompt(self, i: int) -> str:
        return str((self._seed + i) % 10)

    def answer(self, i: int) -> str:
        return str((self._seed + i + 1) % 10)

    def score(self, i: int, answer: str) -> tuple[float, float]:
        """Return the reward that is reported, and the reward that is learned from."""
        right = float(answer == self.answer(i))
        return right, right


def make(seed: int) -> NextDigit:
    return NextDigit(seed)
