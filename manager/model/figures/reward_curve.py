"""Keep the rewards of a whole run, by training step, in bounded memory. Steps may be reported in any order.

After an outage the manager receives the reward of the newest step first, and the earlier rewards later or never.
"""

from __future__ import annotations

from math import fsum

from msgspec import Struct

MAX_LAST_STEPS = 10
"""Number of last steps whose rewards are kept individually."""
MAX_CURVE_POINTS = 256
"""Maximum number of points of the curve. A long run has at least 128 points, so that the curve looks continuous in a
wide terminal."""
MAX_GAPS = 64
"""Maximum number of remembered ranges of steps without a reported reward. The newest ranges are kept; a reward for a
step in an older range is ignored."""


class Rewards(Struct, frozen=True):
    """Mean rewards of a run: individually for the last steps, and as a curve over all steps."""

    last: dict[int, float] = {}
    """Rewards of the ``MAX_LAST_STEPS`` highest steps, in order."""
    stride: int = 1
    """Number of steps per point of the curve."""
    sums: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    """Number of steps with a reported reward, by point."""
    newest: int = 0
    """Highest step that is known to be committed."""
    unreported: tuple[tuple[int, int], ...] = ()
    """Ranges (first, last) of committed steps whose reward was not reported, in order."""

    @property
    def points(self) -> tuple[float, ...]:
        """Return the curve: for each point the mean of the rewards reported for its steps."""
        return tuple(total / count for total, count in zip(self.sums, self.counts, strict=True) if count)

    @property
    def mean_last(self) -> float | None:
        """Return the mean reward of the last steps; None if none was reported."""
        return fsum(one / len(self.last) for one in self.last.values()) if self.last else None

    @property
    def latest(self) -> float | None:
        """Return the reward of the highest step that has one; None if none was reported."""
        return next(reversed(self.last.values()), None)


def add_step(rewards: Rewards, step: int, reward: float | None) -> Rewards:
    """Return the rewards with one more report of a committed step (1, 2, ...); a repeated report counts once.

    ``reward`` is None if it was not reported (yet).
    """
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
    return Rewards(rewards.last, rewards.stride, rewards.sums, rewards.counts, newest, tuple(joined[-MAX_GAPS:]))


def _without_step(unreported: tuple[tuple[int, int], ...], step: int) -> tuple[tuple[int, int], ...]:
    remaining: list[tuple[int, int]] = []
    for first, last in unreported:
        pieces = ((first, step - 1), (step + 1, last)) if first <= step <= last else ((first, last),)
        remaining += [piece for piece in pieces if piece[0] <= piece[1]]
    return tuple(remaining)


def _with_reward(rewards: Rewards, step: int, reward: float) -> Rewards:
    last = dict(sorted({**rewards.last, step: reward}.items())[-MAX_LAST_STEPS:])
    stride, sums, counts = rewards.stride, list(rewards.sums), list(rewards.counts)
    while (point := (step - 1) // stride) >= MAX_CURVE_POINTS:  # merge neighbouring points
        stride *= 2
        sums = [sum(sums[i : i + 2]) for i in range(0, len(sums), 2)]
        counts = [sum(counts[i : i + 2]) for i in range(0, len(counts), 2)]
    sums += [0.0] * (point + 1 - len(sums))
    counts += [0] * (point + 1 - len(counts))
    sums[point] += reward
    counts[point] += 1
    return Rewards(last, stride, tuple(sums), tuple(counts), rewards.newest, rewards.unreported)
