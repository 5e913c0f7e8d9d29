"""Curves over a run: reward, throughput, and the weight versions of trainer and rollouts. Pure.

A curve of many steps is reduced to :data:`MAX_POINTS` means over equal numbers of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TypeVar

from msgspec import Struct

from ....core.run_spec import RunSpec
from ....core.types import TRAINER, ReplicaId, Version
from ...model import events as ev
from ...model.figures.stream_figures import trained_tokens
from .committed_steps import CommittedStep

T = TypeVar("T")

MAX_POINTS = 300
"""Maximum number of points of a curve."""


class CurvePoint(Struct, frozen=True, array_like=True):
    """A value at the manager's time ``at`` (s) and training step ``step``."""

    at: float
    step: int
    value: float


class Curves(Struct, frozen=True):
    """The curves of a run. A curve without values is an empty list."""

    reward: list[CurvePoint] = []
    """Mean reward of the steps."""
    tokens_per_second: list[CurvePoint] = []
    """Trained tokens divided by the time since the previous commit, from the second commit on."""
    trainer_version: list[CurvePoint] = []
    """For each committed step, the step of the newest weights that the trainer had published at the commit."""
    oldest_version: list[CurvePoint] = []
    """For each committed step, the step of the oldest weights that any rollout held at the commit."""


class CurveRecorder:
    """Collects the curves of a run, from its first event on."""

    def __init__(self) -> None:
        self._reward: list[CurvePoint] = []
        self._tokens: dict[int, int] = {}
        """Trained tokens of each committed step."""
        self._trainer: list[CurvePoint] = []
        self._oldest: list[CurvePoint] = []
        self._versions: dict[ReplicaId, int] = {}
        """Step of the newest weights of each rollout that is at work."""
        self._published: Version | None = None
        self._newest = 0

    def on_version(self, event: ev.VersionAvailable, job: RunSpec) -> None:
        """Record that an incarnation holds a weight version."""
        replica = event.incarnation.replica
        if replica == TRAINER:
            self._published = event.version
        elif job.traits_of(replica).gets_weights:
            self._versions[replica] = event.version.step

    def on_replica_down(self, replica: ReplicaId) -> None:
        """Drop the weight version of a replica that is down, so that it no longer counts as the oldest version."""
        self._versions.pop(replica, None)

    def on_committed(self, event: ev.StepCommitted, at: float) -> None:
        """Record the values of a committed step."""
        step, metrics = event.step, event.metrics
        if step <= self._newest:
            return
        if isfinite(reward := metrics.get("reward", float("nan"))):
            self._reward.append(CurvePoint(at, step, reward))
        self._tokens[step] = trained_tokens(metrics) or 0
        if self._published is not None and self._versions:
            self._trainer.append(CurvePoint(at, step, self._published.step))
            self._oldest.append(CurvePoint(at, step, min(self._versions.values())))
        self._newest = step

    def curves(self, commits: Sequence[CommittedStep]) -> Curves:
        """Return the curves; ``commits`` are all commits of the run."""
        throughput = []
        for part in _parts([commit for commit in commits if not commit.first]):
            seconds = sum(commit.at - commit.since for commit in part)
            tokens = sum(self._tokens.get(step, 0) for step in range(part[0].first_step, part[-1].step + 1))
            if tokens and seconds > 0:
                throughput.append(CurvePoint(part[-1].at, part[-1].step, round(tokens / seconds, 3)))
        return Curves(_reduced(self._reward), throughput, _reduced(self._trainer), _reduced(self._oldest))


def _parts(values: Sequence[T]) -> list[Sequence[T]]:
    size = -(-len(values) // MAX_POINTS)
    return [values[index : index + size] for index in range(0, len(values), size)] if values else []


def _reduced(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    return [
        CurvePoint(part[-1].at, part[-1].step, round(sum(one.value for one in part) / len(part), 6))
        for part in _parts(points)
    ]
