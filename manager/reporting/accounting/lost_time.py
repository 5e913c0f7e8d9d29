"""The time that a run lost, by cause and by stage. Pure.

The time between two commits consists of the time that counts for the step (``committed_steps``) and of lost time. The
lost time is divided in this order:

1. the interruption of the trainer, by its stages;
2. training that was discarded, as stage ``replay`` of the interruption that ended it;
3. interruptions of other replicas, by their stages, and times without a manager. If these intervals add up to more
   than the remaining lost time, each of them gets a part of this time, in proportion to its length;
4. the remaining lost time as cause ``slow steps``: the step took longer than the median of the undisturbed steps.

The losses add up to the time from the first ``train`` to the newest commit, less the time that counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from msgspec import Struct

from ....core.types import TRAINER
from .committed_steps import CommittedStep, CommittedSteps, StepMedians
from .interruptions import STAGES, Interruption

REPLAY = "replay"
ALL_STAGES = (*STAGES, REPLAY)
OTHER = "other"
"""Stage of losses for which the journal has no stages."""
SLOW_STEPS = "slow steps"
MANAGER = "manager"
"""Cause of losses while no manager ran."""


class Piece(Struct, frozen=True):
    """An interval (s) in which time was lost."""

    since: float
    until: float
    cause: str
    stage: str

    def within(self, since: float, until: float) -> float:
        """Return the seconds of this interval between two times."""
        return max(0.0, min(self.until, until) - max(self.since, since))


Losses = dict[str, dict[str, float]]
"""Lost seconds by cause and stage."""


def lost_time(
    steps: CommittedSteps, interruptions: Iterable[Interruption], away: Sequence[tuple[float, float]]
) -> Losses:
    """Return the lost seconds by cause and stage, largest cause first.

    ``away`` contains the intervals in which no manager ran.
    """
    medians, ended = steps.medians, steps.ended
    if medians is None or ended is None:
        return {}
    own: list[Piece] = []
    others = [Piece(since, until, MANAGER, OTHER) for since, until in away]
    for interruption in interruptions:
        kept = own if interruption.replica == TRAINER else others
        kept += [Piece(since, until, interruption.cause, stage) for stage, since, until in interruption.stages(ended)]
    own.sort(key=lambda piece: piece.since)
    others.sort(key=lambda piece: piece.since)
    losses: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for step, of_trainer, of_others in zip(
        steps.steps, _by_step(steps.steps, own), _by_step(steps.steps, others), strict=True
    ):
        for cause, stage, seconds in _divide(step, medians, of_trainer, of_others):
            losses[cause][stage] += seconds
    in_order = sorted(losses.items(), key=lambda item: -sum(item[1].values()))
    return {
        cause: {stage: stages[stage] for stage in (*ALL_STAGES, OTHER) if stages.get(stage)}
        for cause, stages in in_order
    }


def _by_step(steps: Sequence[CommittedStep], pieces: Sequence[Piece]) -> Iterable[list[Piece]]:
    """Yield for each step the pieces that overlap it. Steps and pieces must be in the order of their times."""
    active: list[Piece] = []
    following = 0
    for step in steps:
        while following < len(pieces) and pieces[following].since < step.at:
            active.append(pieces[following])
            following += 1
        active = [piece for piece in active if piece.until > step.since]
        yield active


def _divide(
    step: CommittedStep, medians: StepMedians, of_trainer: Sequence[Piece], of_others: Sequence[Piece]
) -> Iterable[tuple[str, str, float]]:
    """Yield (cause, stage, seconds) of the time lost between the previous commit and the commit of ``step``."""
    left = step.at - step.since - step.useful_s(medians)
    for piece in of_trainer:
        seconds = min(left, piece.within(step.since, step.at))
        if seconds > 0:
            yield piece.cause, piece.stage, seconds
            left -= seconds
    for attempt in step.discarded:
        seconds = min(left, attempt.until - attempt.since)
        if seconds > 0:
            yield attempt.ended_by.cause, REPLAY, seconds
            left -= seconds
    overlaps = [(piece, seconds) for piece in of_others if (seconds := piece.within(step.since, step.at)) > 0]
    total = sum(seconds for _, seconds in overlaps)
    if overlaps and left > 0:
        share = min(1.0, left / total)
        for piece, seconds in overlaps:
            yield piece.cause, piece.stage, share * seconds
        left -= share * total
    if left > 0:
        yield SLOW_STEPS, OTHER, left
