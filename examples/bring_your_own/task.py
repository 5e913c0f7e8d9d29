"""Of three digits, say the largest: 15 of 100 by guessing, 1.0 when learnt."""

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
        """The reward that is reported, and the one that is learnt from."""
        right = float(answer == self.answer(i))
        return right, right


def largest(seed: int) -> Largest:
    return Largest(seed)
