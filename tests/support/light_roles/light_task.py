"""A task for roles without a model: the right answer to prompt i is i mod 10."""

from __future__ import annotations


class LightTask:
    def prompt(self, index: int) -> str:
        return str(index % 10)

    def answer(self, index: int) -> str:
        return str(index % 10) * 4

    def score(self, index: int, text: str) -> tuple[float, float]:
        return (1.0, 1.0) if text == self.answer(index) else (0.0, 0.0)


def make(seed: int) -> LightTask:
    return LightTask()
