"""How fast rollouts generate and the trainer trains, over the newest committed steps of a job with an elastic pool.

Times are those at work: the entries of the workers' clocks without an idle cause. Pure.
"""

from __future__ import annotations

from msgspec import Struct

from ....core.run_spec import RunSpec
from ....core.types import TRAINER, role_of
from .idle_times import IdleTimes, RolePoint

STEPS = 5
"""Minimum number of committed steps from which figures are computed."""
MAX_SAMPLES = 16
_NS_PER_S = 1e9


class Sample(Struct, frozen=True, array_like=True):
    """Totals since the run began, at the first record of the clocks after a commit."""

    step: int
    at: float
    trained_tokens: int
    worked_s: float
    """Time at work of the trainer."""
    waited_s: float
    """Idle time of the trainer."""
    rollouts: dict[str, tuple[float, int]]
    """Time (s) at work and tokens of all replicas of each rollout pool."""


class Balance(Struct, frozen=True):
    """The figures between two samples."""

    steps: int
    step_s: float
    """Duration of a step."""
    waited: float
    """Share of its time that the trainer waited."""
    need: float
    """Tokens per second at which the trainer would never wait."""
    paces: dict[str, float]
    """Tokens per second at work of a replica, by rollout pool that has ever worked."""

    def pace(self, pool: str) -> float:
        """Return the pace of a replica of this pool; that of the other rollouts, if the pool has never worked."""
        others = self.paces.values()
        return self.paces.get(pool) or (sum(others) / len(others) if others else 0.0)


def with_sample(samples: tuple[Sample, ...], job: RunSpec, step: int, times: IdleTimes) -> tuple[Sample, ...]:
    """Return the newest samples, with one more if a step was committed and the job has an elastic pool."""
    if step <= (samples[-1].step if samples else 0) or not any(role.is_elastic for role in job.roles):
        return samples
    trainer = job.role(role_of(TRAINER))
    now, nowhere = times.now.roles, RolePoint()
    point = now.get(trainer.name, nowhere)
    worked = point.ns.get("", 0)
    rollouts = {role.name: now.get(role.name, nowhere) for role in job.kind("rollout")}
    generated = sum(point.done for point in rollouts.values())  # a user's trainer may not count its tokens
    sample = Sample(
        step,
        times.now.at,
        times.trained_tokens or generated,
        worked / _NS_PER_S / trainer.ranks,
        (point.total_ns - worked) / _NS_PER_S / trainer.ranks,
        {pool: (point.ns.get("", 0) / _NS_PER_S, point.done) for pool, point in rollouts.items()},
    )
    return (*samples, sample)[-MAX_SAMPLES:]


def balance(samples: tuple[Sample, ...]) -> Balance | None:
    """Return the figures of the newest steps, at least :data:`STEPS`; None if there are too few, or no tokens."""
    new = samples[-1] if samples else None
    old = next((sample for sample in reversed(samples) if new and sample.step <= new.step - STEPS), None)
    if new is None or old is None:
        return None
    steps, worked, waited = new.step - old.step, new.worked_s - old.worked_s, new.waited_s - old.waited_s
    tokens = new.trained_tokens - old.trained_tokens
    if worked <= 0 or tokens <= 0:
        return None
    paces = {pool: _pace(new.rollouts[pool], old.rollouts.get(pool, (0.0, 0))) for pool in new.rollouts}
    known = {pool: pace for pool, pace in paces.items() if pace > 0}
    return Balance(steps, (new.at - old.at) / steps, waited / (worked + waited), tokens / worked, known)


def _pace(new: tuple[float, int], old: tuple[float, int]) -> float:
    """Return tokens per second between two totals; since the beginning, if nothing was generated between the two."""
    seconds, tokens = new[0] - old[0], new[1] - old[1]
    seconds, tokens = (seconds, tokens) if seconds > 0 and tokens > 0 else new
    return tokens / seconds if seconds > 0 else 0.0
