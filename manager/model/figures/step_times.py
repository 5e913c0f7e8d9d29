"""When the newest training steps were committed. Pure."""

from __future__ import annotations

from itertools import pairwise

from msgspec import Struct

MAX_COMMITS = 21
"""Number of newest commits whose times are kept. They give the durations of up to twenty steps, whose median is
:func:`seconds_per_step`."""


class Commit(Struct, frozen=True, array_like=True):
    """A committed training step, and the manager's time (s) at which the manager learned of it."""

    step: int
    at: float


def with_commit(commits: tuple[Commit, ...], step: int, at: float) -> tuple[Commit, ...]:
    """Return the newest commits with one more; a step that is not newer than the newest step is ignored."""
    if commits and step <= commits[-1].step:
        return commits
    return (*commits, Commit(step, at))[-MAX_COMMITS:]


def seconds_per_step(commits: tuple[Commit, ...]) -> float | None:
    """Return the median seconds of the newest steps; None before the second commit.

    For steps that were committed while no manager ran, only the mean time is known.
    """
    times = sorted((after.at - before.at) / (after.step - before.step) for before, after in pairwise(commits))
    return times[len(times) // 2] if times else None
