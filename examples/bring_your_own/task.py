"""A task: answer with the largest of three digits. Guessing is right in 15 of 100 cases, a trained policy in all."""

from __future__ import annotations

import random


class Largest:
    def __init__(self, seed: int) -> None:
        self._seed = seed

    def prompt(self, i: int) -> str:
        return "".join(random.Random(f"{self._seed}/{i}").choices("0123456789", k=3))

    def answer(self, i: int) -> str:
        return max(self.prompt(i))

    def score(self, i: int, answer: str) -> tuple[float, float]:
        """Return the reward that is reported, and the reward that is learned from."""
        right = float(answer == self.answer(i))
        return right, right


def largest(seed: int) -> Largest:
    return Largest(seed)
