"""The time that a run spent training: effective training time (ETTR) as in RobustRL (docs/sources.md).

This module also keeps the times of the newest steps.

Time in which the trainer works counts fully. While the trainer is restored and rollouts continue, time counts by the
rollouts' share of the GPUs, or of the nodes in a job without GPUs. While everything is down, it counts 0.
:func:`effective_share` has this formula. A replica that failed counts as down from the first symptom of its failure.

:class:`TrainingTime` is part of the state, so that ``rrl status`` knows the figures without reading the whole journal.
``summary.json`` computes its total from the intervals of each member
(:mod:`rrl.manager.reporting.accounting.effective_time`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from ....core.run_spec import RunSpec

RECENT_S = 3600.0
"""Length (s) of the interval before now for which the recent share of effective training is computed."""
POINT_INTERVAL_S = 20.0
"""Minimum time (s) spanned by any three consecutive entries (:class:`Point`) of ``TrainingTime.points``. So at most
about 360 entries lie within :data:`RECENT_S`, even if the share changes all the time."""
MAX_COMMITS = 21
"""Number of newest commits whose times are kept. They give the durations of up to twenty steps, whose median is
``seconds_per_step``."""


class Point(Struct, frozen=True, array_like=True):
    """The seconds of effective training since the run began, up to the manager's time ``at`` (s)."""

    at: float
    seconds: float


class Commit(Struct, frozen=True, array_like=True):
    """A committed training step, and the manager's time (s) at which the manager learned of it."""

    step: int
    at: float


class TrainingTime(Struct, frozen=True):
    """Effective training time of a run, and when its newest steps were committed. Times are the manager's (s)."""

    began: float | None = None
    """Time at which the run began, from which effective training is counted. None if an older rrl wrote the first part
    of the journal, so that this time is unknown."""
    at_work: dict[str, int] = {}
    """Number of members in a useful phase, by role."""
    share: float = 0.0
    """Share of the time that counts as effective training since the last point."""
    points: tuple[Point, ...] = ()
    """Effective training up to each change of the share in the last hour, and up to one earlier change; oldest first.
    Of many changes in a short time, some are left out."""
    commits: tuple[Commit, ...] = ()
    """The newest commits, in the order of their steps."""

    def seconds(self, at: float) -> float:
        """Return the seconds of effective training up to ``at``, which must not be before the oldest point."""
        index = bisect_right(self.points, at, key=lambda point: point.at)
        if not index:
            return 0.0
        point = self.points[index - 1]
        if index == len(self.points):
            return point.seconds + self.share * (at - point.at)
        following = self.points[index]
        part = (at - point.at) / (following.at - point.at)
        return point.seconds + part * (following.seconds - point.seconds)

    def recent_share(self, now: float) -> float | None:
        """Return the effective share of the last hour; None if the run began or resumed within this hour."""
        since = now - RECENT_S
        if not self.points or self.points[0].at > since:
            return None
        return (self.seconds(now) - self.seconds(since)) / RECENT_S

    @property
    def seconds_per_step(self) -> float | None:
        """Return the median seconds of the newest steps; None before the second commit.

        For steps that were committed while no manager ran, only the mean time is known.
        """
        pairs = pairwise(self.commits)
        times = sorted((after.at - before.at) / (after.step - before.step) for before, after in pairs)
        return times[len(times) // 2] if times else None


def member_weights(job: RunSpec) -> tuple[str, dict[str, float]]:
    """Return (unit, weights): the unit of the weights, and for each role the weight of one member.

    The weight of a member is its number of GPUs (unit ``gpu``). In a job whose trainers and rollouts use no GPU, it is
    the member's share of the replica's nodes (unit ``node``).
    """
    roles = [role for role in job.roles if role.traits.has_weights]
    if any(role.per_member.gpus for role in roles):
        return "gpu", {role.name: float(role.per_member.gpus) for role in roles}
    return "node", {role.name: role.nodes / role.ranks for role in roles}


def effective_share(job: RunSpec, at_work: Mapping[str, int], committed: bool) -> float:
    """Return the share of the time that is effective training while ``at_work`` members of each role work.

    The share is 1 while all ranks of the trainer work. Otherwise it is 0 until a first step is ``committed``. After
    this step, it is the weight of the working rollouts divided by the weight of all trainers and rollouts
    (:func:`member_weights`).
    """
    members = {role.name: role.replicas * role.ranks for role in job.roles if role.traits.has_weights}
    trainers = [role.name for role in job.roles if role.traits.trains]
    if trainers and all(at_work.get(name, 0) >= members[name] for name in trainers):
        return 1.0
    if not committed:
        return 0.0
    _, weights = member_weights(job)
    rollouts = [name for name in members if name not in trainers]
    total = sum(count * weights[name] for name, count in members.items())
    working = sum(min(at_work.get(name, 0), members[name]) * weights[name] for name in rollouts)
    return working / total if total else 0.0


def begun(at: float) -> TrainingTime:
    """Return the training time of a run that begins at ``at``."""
    return TrainingTime(began=at, points=(Point(at, 0.0),))


def resumed(time: TrainingTime, at: float) -> TrainingTime:
    """Return the training time of a run that is resumed at ``at``; the pause counts in no recent figure."""
    if time.began is None:
        return TrainingTime()
    return TrainingTime(began=time.began, points=(Point(at, time.seconds(at)),))


def with_work(time: TrainingTime, at_work: dict[str, int], share: float, since: float) -> TrainingTime:
    """Return the training time with this share from the time ``since`` on.

    If ``since`` lies in the past, the time since then is counted again with this share, but only back to the last
    change of the share.
    """
    if time.began is None or not time.points:
        return time
    if share == time.share:
        return replace(time, at_work=at_work)
    since = max(since, time.points[-1].at)
    points = (*time.points, Point(since, time.seconds(since)))
    if len(points) > 2 and points[-1].at - points[-3].at < POINT_INTERVAL_S:
        points = (*points[:-2], points[-1])
    while len(points) > 1 and points[1].at <= since - RECENT_S:
        points = points[1:]
    return replace(time, at_work=at_work, share=share, points=points)


def with_commit(time: TrainingTime, step: int, at: float) -> TrainingTime:
    """Return the time with one more commit; a step that is not newer than the newest step is ignored."""
    if time.commits and step <= time.commits[-1].step:
        return time
    return replace(time, commits=(*time.commits, Commit(step, at))[-MAX_COMMITS:])
