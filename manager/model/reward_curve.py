"""The rewards of a whole run in bounded room, by step number, in whatever order they are told.

After an outage a manager hears of the newest step first and of those before it later, or never.
"""

from __future__ import annotations

from msgspec import Struct

MAX_STEPS_PER_END = 10
"""Steps kept one by one at either end of the run."""
MAX_CURVE_POINTS = 64
"""Points of the curve at most: as many as a terminal shows."""
MAX_GAPS = 64
"""Runs of steps whose reward has not been told yet that are remembered at most, the newest ones; what is told of older
ones is not counted any more."""


class Rewards(Struct, frozen=True):
    first: dict[int, float] = {}
    """of the ``ENDS`` lowest steps, by step in order"""
    last: dict[int, float] = {}
    """of the ``ENDS`` highest"""
    stride: int = 1
    """steps to a point of the curve"""
    sums: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    """told steps in each point"""
    newest: int = 0
    """highest step that is known to be committed"""
    unreported: tuple[tuple[int, int], ...] = ()
    """(first, last) of runs of committed steps whose reward nobody has told, in order"""

    @property
    def points(self) -> tuple[float, ...]:
        """The curve: each point the mean of the told among ``stride`` steps."""
        return tuple(total / count for total, count in zip(self.sums, self.counts, strict=True) if count)

    @property
    def mean_first(self) -> float | None:
        return sum(self.first.values()) / len(self.first) if self.first else None

    @property
    def mean_last(self) -> float | None:
        return sum(self.last.values()) / len(self.last) if self.last else None

    @property
    def latest(self) -> float | None:
        """Of the highest step that was told."""
        return next(reversed(self.last.values()), None)


def add_step(rewards: Rewards, step: int, reward: float | None) -> Rewards:
    """One more word of a committed step (1, 2, ...); a repeated one counts once. ``reward`` None: not told (yet)."""
    newest, unreported = rewards.newest, rewards.unreported
    if step > newest:
        unreported, newest = (*unreported, (newest + 1, step)), step
    known = not any(first <= step <= last for first, last in unreported)
    if known or reward is None:
        return _with_gaps(rewards, newest, unreported)
    return _with_gaps(_with_reward(rewards, step, reward), newest, _without_step(unreported, step))


def _with_gaps(rewards: Rewards, newest: int, unreported: tuple[tuple[int, int], ...]) -> Rewards:
    joined: list[tuple[int, int]] = []
    for first, last in unreported:
        if joined and joined[-1][1] + 1 == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return Rewards(
        rewards.first, rewards.last, rewards.stride, rewards.sums, rewards.counts, newest, tuple(joined[-MAX_GAPS:])
    )


def _without_step(unreported: tuple[tuple[int, int], ...], step: int) -> tuple[tuple[int, int], ...]:
    remaining: list[tuple[int, int]] = []
    for first, last in unreported:
        pieces = ((first, step - 1), (step + 1, last)) if first <= step <= last else ((first, last),)
        remaining += [node_group for node_group in pieces if node_group[0] <= node_group[1]]
    return tuple(remaining)


def _with_reward(rewards: Rewards, step: int, reward: float) -> Rewards:
    first = dict(sorted({**rewards.first, step: reward}.items())[:MAX_STEPS_PER_END])
    last = dict(sorted({**rewards.last, step: reward}.items())[-MAX_STEPS_PER_END:])
    stride, sums, counts = rewards.stride, list(rewards.sums), list(rewards.counts)
    while (point := (step - 1) // stride) >= MAX_CURVE_POINTS:  # two neighbours become one
        stride *= 2
        sums = [sum(sums[i : i + 2]) for i in range(0, len(sums), 2)]
        counts = [sum(counts[i : i + 2]) for i in range(0, len(counts), 2)]
    sums += [0.0] * (point + 1 - len(sums))
    counts += [0] * (point + 1 - len(counts))
    sums[point] += reward
    counts[point] += 1
    return Rewards(first, last, stride, tuple(sums), tuple(counts), rewards.newest, rewards.unreported)
