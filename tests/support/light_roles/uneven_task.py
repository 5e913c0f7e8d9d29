"""A task that an untrained model solves in part: the rewards of a group differ, so each step changes the weights."""

from __future__ import annotations


class UnevenTask:
    def prompt(self, index: int) -> str:
        return str(index % 10)

    def answer(self, index: int) -> str:
        return str(index % 10) * 4

    def score(self, index: int, text: str) -> tuple[float, float]:
        """Return the share of even digits, so that there is nothing to gain from longer or shorter answers."""
        reward = sum(digit in "02468" for digit in text) / len(text) if text else 0.5
        return reward, reward


def make(seed: int) -> UnevenTask:
    return UnevenTask()
